"""The control side of a node: rendezvous, run status, Root controller, metrics and progress."""
