"""Sandbox of worker processes: Landlock, seccomp and a broker for sockets, within bubblewrap or not."""
