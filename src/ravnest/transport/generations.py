"""Which process is a node: the newest one of the machine that took its place last."""

from __future__ import annotations

import logging
import threading

from ravnest.types import Address
from ravnest.wire.messages import Hello

logger = logging.getLogger(__name__)


def excluded_reason(node: int) -> str:
    """Return why a machine that the server has excluded is refused."""
    return f"node_{node} was excluded by the server: the credential of its provider was revoked"


class Generations:
    """The newest process seen of each node; all methods may be called from any thread.

    A node that was replaced has a higher ``generation`` on its new machine; a process that was
    restarted has another ``incarnation``. A process that was only slow finds out here that another one
    has its place. Keep one object for as long as the process lives, across its runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[int, Hello] = {}
        self._past: dict[int, set[str]] = {}
        """Incarnations that were followed by another one of the same generation."""
        self._excluded: dict[int, int] = {}
        """Highest generation of each node whose machine may not take part any more."""

    def exclude(self, node: int, generation: int) -> None:
        """Refuse the machine that has this generation of a node, and those before it."""
        with self._lock:
            self._excluded[node] = max(generation, self._excluded.get(node, generation))

    def admit(self, hello: Hello) -> str | None:
        """Take the process that sent ``hello`` as its node; return the reason if it is not any more."""
        with self._lock:
            reason = self._refusal(hello)
            if reason is None:
                known = self._newest.get(hello.node)
                if known is None or hello.generation > known.generation:
                    self._past[hello.node] = set()
                elif hello.incarnation != known.incarnation:
                    self._past[hello.node].add(known.incarnation)
                self._newest[hello.node] = hello
            return reason

    def is_current(self, hello: Hello) -> bool:
        """Return False if another process has taken the place of the one that sent ``hello``."""
        with self._lock:
            return self._refusal(hello) is None

    def newest(self, node: int) -> Hello | None:
        """Return the newest Hello of a node."""
        with self._lock:
            return self._newest.get(node)

    def addresses(self, node: int, planned: tuple[Address, ...]) -> tuple[Address, ...]:
        """Return where a node is dialled: by its Hello if another machine has taken its place.

        ``planned`` are the addresses of its first machine.
        """
        newest = self.newest(node)
        if newest is not None and newest.generation and newest.addresses:
            try:
                return tuple(Address.parse(each) for each in newest.addresses)
            except ValueError:
                logger.warning("node_%d names an address that cannot be dialled", node)
        return planned

    def _refusal(self, hello: Hello) -> str | None:
        if hello.generation <= self._excluded.get(hello.node, -1):
            return excluded_reason(hello.node)
        known = self._newest.get(hello.node)
        if known is None or hello.generation > known.generation:
            return None
        if hello.generation < known.generation:
            return (
                f"node_{hello.node} was replaced by another machine: it has generation "
                f"{known.generation}, this one {hello.generation}"
            )
        if hello.incarnation in self._past[hello.node]:
            return f"node_{hello.node} was restarted: another process has taken its place"
        return None
