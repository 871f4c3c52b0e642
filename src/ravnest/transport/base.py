"""The seam between nodes: links that carry messages in order, and how they come about.

Two transports implement it, gRPC and an in-memory twin, and one suite of tests runs on both. Errors
that leave a transport are those of ``ravnest.errors``, never those of the library below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ravnest.types import Address
from ravnest.wire.messages import Hello, HelloRefused, Message

Admit = Callable[[Hello], Hello | HelloRefused]
"""Our answer to a peer's Hello; called in a transport thread."""


@dataclass(frozen=True)
class LinkDelay:
    """What a link was measured to cost lately, in seconds; 0 where nothing was measured yet."""

    round_trip: float
    """Of a small probe."""
    message: float
    """From ``send`` to the arrival at the peer, where no other message is in the way."""
    busy: float = 0.0
    """Of that, how long the link is taken: the least time between two messages."""


class LinkHandler(Protocol):
    """What a node does with what arrives; called from the link's own thread, so it must be quick.

    Both methods may be called before the ``dial`` or ``on_link`` that made the link has returned.
    """

    def on_message(self, link: Link, message: Message) -> None:
        """A message has arrived; those of one link come in the order in which they were sent."""

    def on_lost(self, link: Link, reason: str) -> None:
        """The link is gone, said once; not after ``close`` and not after a Goodbye had arrived."""


class Link(Protocol):
    """An open connection to one peer. All methods may be called from any thread."""

    @property
    def local(self) -> Hello:
        """What this node said of itself."""

    @property
    def peer(self) -> Hello:
        """What the peer said of itself."""

    @property
    def sent_bytes(self) -> int:
        """Handed to the network so far, with frames and checksums."""

    @property
    def received_bytes(self) -> int:
        """Taken from the network so far, with frames and checksums."""

    @property
    def clamped(self) -> int:
        """Values sent so far that were beyond the range of the codec that both ends agreed on."""

    def send(self, message: Message) -> None:
        """Queue a message; never blocks, raises ``LinkClosedError`` after ``close`` or a loss.

        The tensors are read later, by the link's writer: the caller must not change them any more.
        A value that cannot travel loses the link, with the reason.
        """

    def flush(self, timeout: float) -> bool:
        """Wait until the peer has got everything queued so far; False if it has not in time.

        Not to be called from a handler, which is where the answer would have to arrive.
        """

    def close(self) -> None:
        """Close after flushing, within a few seconds; may be called again, and from a handler.

        The peer loses the link, so say Goodbye first where nothing is wrong.
        """

    def delay(self) -> LinkDelay:
        """What the link costs, as measured lately."""


class Transport(Protocol):
    """Makes links; one for each node."""

    def serve(
        self,
        address: Address,
        admit: Admit,
        handler: LinkHandler,
        on_link: Callable[[Link], None],
        *,
        known_as: Address | None = None,
    ) -> Address:
        """Listen; returns the address with its port, which may be given as 0.

        ``known_as`` is the address that others dial, where it differs: both sides decide by it
        whether they talk in the clear.

        Each peer that ``admit`` answers with a Hello becomes a link: ``on_link`` gets it, in a
        transport thread, before its first message. ``AddressInUseError`` if another listens there.
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
    ) -> Link:
        """Reach a peer, trying again until ``deadline`` seconds have passed.

        ``waiting`` is told why it takes longer when the first attempt has failed, and every ten
        seconds. ``expect`` is the node that should answer; with TLS its certificate must say so.
        ``UnreachableError`` names the address and the last reason; ``RefusedError`` comes at once.
        """

    def close(self) -> None:
        """Close all links and stop listening; may be called again."""
