"""Sandbox of worker processes: Landlock for files, seccomp for system calls, a broker for sockets."""
