"""``ravnest demo``: all of it on this machine, in one command."""


def demo() -> None:
    """Later."""
