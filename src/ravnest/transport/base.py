"""Protocols of the transport: links that carry messages in order, and how they are opened.

Implementations: gRPC, sockets on loopback, and memory; one test suite runs on all of them. Transports
raise only the errors of ``ravnest.errors``, never those of the library below.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ravnest.errors import RavnestError
from ravnest.transport.routes import RouteKind
from ravnest.types import Address
from ravnest.wire.messages import AnyHead, Hello, HelloRefused, Message

logger = logging.getLogger(__name__)

Admit = Callable[[Hello], Hello | HelloRefused]
"""Function that answers a peer's Hello; called in a transport thread."""


@dataclass(frozen=True)
class LinkDelay:
    """Recently measured delays of a link, in seconds; 0 if not measured yet."""

    round_trip: float
    """Round trip of a small probe."""
    message: float
    """Delay from ``send`` to the arrival at the peer, without queueing."""
    busy: float = 0.0
    """Part of that delay during which the link is occupied: the minimum time between two messages."""


class LinkHandler(Protocol):
    """Receiver of a link's events. Called in the link's thread; must return quickly.

    Both methods may be called before the ``dial`` or ``on_link`` that opened the link has returned.
    """

    def on_message(self, link: Link, message: Message) -> None:
        """Handle a message; messages of one link arrive in the order in which they were sent."""

    def on_lost(self, link: Link, reason: str) -> None:
        """Handle the loss of the link. Called once, but not after ``close`` or a received Goodbye."""


class Link(Protocol):
    """Open connection to one peer. All methods may be called from any thread."""

    @property
    def local(self) -> Hello:
        """Hello of this node."""

    @property
    def peer(self) -> Hello:
        """Hello of the peer."""

    @property
    def route(self) -> RouteKind:
        """Kind of the route of the current connection; direct while there is none."""

    @property
    def sent_bytes(self) -> int:
        """Bytes sent so far, including frame headers."""

    @property
    def received_bytes(self) -> int:
        """Bytes received so far, including frame headers."""

    @property
    def clamped(self) -> int:
        """Number of values sent so far that were outside the range of the codec."""

    def send(self, message: Message) -> None:
        """Queue a message; never blocks. ``LinkClosedError`` after ``close`` or a loss.

        The link's writer thread reads the tensors later: the caller must not change them. If a value
        cannot be sent, the link is lost, with the reason.
        """

    def flush(self, timeout: float) -> bool:
        """Wait until the peer has received all queued messages; return False on a timeout.

        Must not be called in a handler, since the handler's thread has to receive the answer.
        """

    def wait_written(self, timeout: float) -> bool:
        """Wait until the writer thread has written all queued messages; return False on a timeout.

        Also return at the end of the link. May be called in a handler of another link: it waits for
        nothing that the peer sends.
        """

    def close(self) -> None:
        """Flush and close, within a few seconds; may be called repeatedly and in a handler.

        The peer loses the link, so send a Goodbye first if nothing is wrong.
        """

    def delay(self) -> LinkDelay:
        """Return the recently measured delays."""


class Transport(Protocol):
    """Factory of links; each node has one."""

    def serve(
        self,
        address: Address,
        admit: Admit,
        handler: LinkHandler,
        on_link: Callable[[Link], None],
        *,
        known_as: Address | None = None,
    ) -> Address:
        """Listen, and return the address with the actual port; a given port of 0 means any.

        ``known_as`` is the address that others dial, if it differs: both sides decide by it whether the
        connection is encrypted.

        Each peer that ``admit`` answers with a Hello becomes a link, which is passed to ``on_link`` in
        a transport thread before its first message. ``AddressInUseError`` if the address is taken.
        """

    def dial(
        self,
        address: Address,
        hello: Hello,
        handler: LinkHandler,
        *,
        deadline: float,
        waiting: Callable[[str], None] | None = None,
        expect: int | None = None,
        others: Sequence[Address] = (),
    ) -> Link:
        """Connect to a peer, with retries until ``deadline`` seconds have passed.

        ``others`` are further addresses of the peer; all are tried at once, and relays if none answers.
        Whether the connection is encrypted depends on ``address`` only.

        ``waiting`` is called with the reason after the first failed attempt and then every ten seconds.
        ``expect`` is the node that should answer; with TLS its certificate must prove it.
        ``UnreachableError`` names the address and the last reason; ``RefusedError`` is raised at once.
        """

    def drop(self, node: int, generation: int, reason: str) -> None:
        """End the links to a node that has this generation, or an earlier one; they count as lost."""

    def close(self) -> None:
        """Close all links and stop listening; may be called repeatedly."""


def try_send(link: Link, head: AnyHead) -> None:
    """Send a message; ignore a closed link, whose loss the link reports itself."""
    try:
        link.send(Message(head))
    except RavnestError:
        logger.debug("the link to node_%d is already closed", link.peer.node)


def send_and_close(link: Link, last: AnyHead | None, patience: float = 0.0) -> None:
    """Send a last message, if there is one, and close the link.

    ``patience``: seconds to wait for a peer whose network is away, so that it gets the message.
    """
    if last is not None:
        try_send(link, last)
        if patience:
            link.flush(patience)
    link.close()
