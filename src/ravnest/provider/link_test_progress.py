"""Progress of link tests at a provider: which one runs, and which one the server wants. Pure."""

from __future__ import annotations

from ravnest.provider.events import Action, Announce, StartLinkTest, StopLinkTest
from ravnest.schemas.link_tests import LinkTestOrder


class LinkTestProgress:
    """The link test that runs, one at a time, and the one that the server wants."""

    def __init__(self) -> None:
        self._wanted: LinkTestOrder | None = None
        self._running: str | None = None
        self._stopping = False
        self._last: str | None = None
        """Last test that was started; it is not started again."""

    @property
    def is_running(self) -> bool:
        """True from the start of a test until its end, which frees the port of the node."""
        return self._running is not None

    @property
    def known(self) -> str | None:
        """Id of the test that the server wants."""
        return None if self._wanted is None else self._wanted.id

    def want(self, order: LinkTestOrder | None) -> None:
        """Store the test of a reply."""
        self._wanted = order

    def ended(self, test: str) -> None:
        """Store that a test is over."""
        if test == self._running:
            self._running = None

    def actions(self, *, is_idle: bool) -> list[Action]:
        """Start the wanted test if the provider is idle; stop one that is not wanted."""
        wanted = self._wanted if is_idle else None
        if self._running is not None:
            if self._stopping or (wanted is not None and wanted.id == self._running):
                return []
            self._stopping = True
            return [StopLinkTest(self._running)]
        if wanted is None or wanted.id == self._last:
            return []
        self._running = self._last = wanted.id
        self._stopping = False
        return [Announce(f"measures the link to {wanted.peer_name}"), StartLinkTest(wanted)]
