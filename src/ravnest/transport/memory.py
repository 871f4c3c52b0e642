"""In-memory transport: links between nodes of one process, with optional delay and faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue

from msgspec import structs

from ravnest.deadlines import LINK_OUTAGE
from ravnest.errors import AddressInUseError, LinkClosedError, RefusedError, UnreachableError
from ravnest.tracing.recorder import SpanRecorder
from ravnest.transport.base import Admit, Link, LinkHandler
from ravnest.transport.connection import Connection
from ravnest.transport.handshake import answer, hello_frame, new_session, read_answer
from ravnest.transport.link import FrameLink
from ravnest.transport.link_keeper import LinkKeeper
from ravnest.transport.routes import Unanswered
from ravnest.types import Address
from ravnest.wire.messages import Hello, HelloRefused

_WAITING_SECONDS = 10.0

Passage = Callable[[int, int, bytes], Sequence[tuple[float, bytes]]]
"""Function of a sender, a receiver and a batch of frames: what arrives, and how many seconds later."""


@dataclass(frozen=True)
class _Server:
    admit: Admit
    handler: LinkHandler
    on_link: Callable[[Link], None]
    owner: MemoryTransport


class MemoryNetwork:
    """Listening addresses of the process and the connections between them."""

    def __init__(
        self, delay: float = 0.0, outage: float = LINK_OUTAGE, passage: Passage | None = None
    ) -> None:
        """``delay`` is the one-way delay of each frame; it does not limit the throughput.

        ``outage`` is the time for which a link without a connection is kept, in seconds. ``passage``
        may change, repeat, reorder and delay what nodes send.
        """
        self.delay = delay
        self.outage = outage
        self.passage: Passage = passage or (lambda _sender, _receiver, batch: [(0.0, batch)])
        self._changed = threading.Condition()
        self._servers: dict[Address, _Server] = {}
        self._streams: list[_Stream] = []
        self._parted: set[frozenset[int]] = set()
        self._blocked: set[tuple[int, int]] = set()
        self._next_port = 1

    def transport(self, trace: SpanRecorder | None = None) -> MemoryTransport:
        """Return the transport of one node; ``trace`` records its messages."""
        return MemoryTransport(self, trace)

    def cut(self, a: int, b: int) -> None:
        """Cut the connections between two nodes; both sides notice at once and may connect again."""
        with self._changed:
            streams = [stream for stream in self._streams if stream.joins(a, b)]
        for stream in streams:
            stream.cut(f"the link between node_{a} and node_{b} was cut")

    def part(self, a: int, b: int) -> None:
        """Cut the connections between two nodes, and allow no others until ``heal``."""
        with self._changed:
            self._parted.add(frozenset((a, b)))
        self.cut(a, b)

    def heal(self, a: int, b: int) -> None:
        """Allow connections between two nodes again."""
        with self._changed:
            self._parted.discard(frozenset((a, b)))
            self._changed.notify_all()

    def block(self, sender: int, receiver: int) -> None:
        """Hold back what a node sends to another one until ``unblock``; neither of them is told.

        They cannot connect meanwhile: the answer would not arrive.
        """
        with self._changed:
            self._blocked.add((sender, receiver))

    def unblock(self, sender: int, receiver: int) -> None:
        """Let what a node sends to another one pass again, first what was held back."""
        with self._changed:
            self._blocked.discard((sender, receiver))
            self._changed.notify_all()

    def await_passage(self, sender: int, receiver: int, given_up: threading.Event) -> None:
        """Wait until what a node sends to another one can pass, or its connection has ended."""
        with self._changed:
            self._changed.wait_for(lambda: given_up.is_set() or (sender, receiver) not in self._blocked)

    def stream_ended(self) -> None:
        """Wake those who wait for a stream that has ended."""
        with self._changed:
            self._changed.notify_all()

    def parted(self, a: int, b: int) -> bool:
        """Return whether two nodes cannot connect."""
        with self._changed:
            return self._apart(a, b)

    def _apart(self, a: int, b: int) -> bool:
        return frozenset((a, b)) in self._parted or not self._blocked.isdisjoint(((a, b), (b, a)))

    def register(self, address: Address, server: _Server) -> Address:
        """Register a listener and wake waiting dialers."""
        with self._changed:
            if address.port == 0:
                address = replace(address, port=self._next_port)
                self._next_port += 1
            if address in self._servers:
                raise AddressInUseError(
                    f"{address} is in use: stop the other node, or choose another port"
                )
            self._servers[address] = server
            self._changed.notify_all()
        return address

    def forget(self, owner: MemoryTransport) -> None:
        """Remove the listeners of ``owner``."""
        with self._changed:
            self._servers = {a: s for a, s in self._servers.items() if s.owner is not owner}

    def server_at(
        self, address: Address, timeout: float, nodes: tuple[int, int] | None = None
    ) -> _Server | None:
        """Return the listener at ``address``; wait up to ``timeout`` seconds for it.

        ``nodes``: the two nodes that would be connected, if they are known.
        """

        def found() -> _Server | None:
            if nodes is not None and self._apart(*nodes):
                return None
            return self._servers.get(address)

        with self._changed:
            return self._changed.wait_for(found, timeout)

    def keep(self, stream: _Stream) -> None:
        """Register a stream until it ends."""
        with self._changed:
            self._streams = [other for other in self._streams if not other.gone] + [stream]


class MemoryTransport:
    """In-memory transport of one node; implements ``base.Transport``."""

    def __init__(self, network: MemoryNetwork, trace: SpanRecorder | None = None) -> None:
        self._network = network
        self._links = LinkKeeper(self._redial, network.outage, trace=trace)

    def serve(
        self,
        address: Address,
        admit: Admit,
        handler: LinkHandler,
        on_link: Callable[[Link], None],
        *,
        known_as: Address | None = None,  # noqa: ARG002 - nothing is encrypted here
    ) -> Address:
        """Listen at an address of the network."""
        return self._network.register(address, _Server(admit, handler, on_link, self))

    def dial(
        self,
        address: Address,
        hello: Hello,
        handler: LinkHandler,
        *,
        deadline: float,
        waiting: Callable[[str], None] | None = None,
        expect: int | None = None,
        others: Sequence[Address] = (),  # noqa: ARG002 - a node has one address here
    ) -> Link:
        """Connect to the listener at ``address``; wait for it until the deadline."""
        until = time.monotonic() + deadline
        nodes = None if expect is None else (hello.node, expect)
        session = new_session()

        def open_link(peer: Hello) -> FrameLink:
            return self._links.open(hello, peer, handler, session, (address,))

        greeting = structs.replace(hello, session=session)
        pause = 0.0
        while True:
            server = self._network.server_at(address, pause, nodes)
            if self._links.closed.is_set():
                raise UnreachableError(f"gave up on {address}: this node is closing")
            if server is not None:
                with suppress(LinkClosedError):  # it has stopped to listen meanwhile
                    return self._connect(server, address, greeting, open_link, expect)
            left = until - time.monotonic()
            reason = f"nothing listens at {address}"
            if left <= 0:
                raise UnreachableError(f"no answer from {address} in {deadline:g} s: {reason}")
            if waiting is not None:
                waiting(reason)
            pause = min(left, _WAITING_SECONDS)

    def drop(self, node: int, generation: int, reason: str) -> None:
        """End the links to a node that has this generation, or an earlier one."""
        self._links.drop(node, generation, reason)

    def close(self) -> None:
        """Close all links and stop listening."""
        self._network.forget(self)
        self._links.close()

    def accept(self, hello: Hello, server: _Server) -> tuple[FrameLink, Hello]:
        """Return the link of a node that dials, and the answer to its Hello; called by the dialer."""
        reply = answer(hello_frame(hello), server.admit, self._links.find, None)
        if isinstance(reply, HelloRefused):
            raise RefusedError(f"refused: {reply.reason}")
        if reply.link is not None:
            return reply.link, reply.ours
        theirs = reply.theirs
        link = self._links.open(reply.ours, theirs, server.handler, theirs.session, ())
        link.introduce(server.on_link)
        return link, reply.ours

    def _connect(
        self,
        server: _Server,
        address: Address,
        hello: Hello,
        open_link: Callable[[Hello], FrameLink],
        expect: int | None,
    ) -> FrameLink:
        try:
            far, ours = server.owner.accept(hello, server)
        except RefusedError as error:
            raise RefusedError(f"{address} {error}") from error
        try:
            near = open_link(read_answer(hello_frame(ours), str(address), expect))
        except LinkClosedError as error:  # of this node
            far.abandon(str(error))
            raise
        stream = _Stream(self._network, near, far)
        self._network.keep(stream)
        stream.start()
        return near

    def _redial(
        self,
        link: FrameLink,
        addresses: Sequence[Address],
        seconds: float,  # noqa: ARG002 - memory answers at once
    ) -> Unanswered | None:
        (address,) = addresses[:1] or (None,)
        if self._network.parted(link.local.node, link.peer.node):
            return Unanswered("no route to the peer")
        server = None if address is None else self._network.server_at(address, 0)
        if address is None or server is None:
            return Unanswered(f"nothing listens at {address}", nothing_listens=True)
        hello = structs.replace(link.local, session=link.session, continues=True)
        self._connect(server, address, hello, lambda _: link, link.peer.node)
        return None


class _Stream:
    """Connection between two links, in both directions."""

    def __init__(self, network: MemoryNetwork, near: FrameLink, far: FrameLink) -> None:
        self._network = network
        self._cut = threading.Event()
        self._reason: str | None = None
        self._links = (near, far)
        self._ends = (Connection(lambda: self.cut(None)), Connection(lambda: self.cut(None)))
        self._pipes: tuple[SimpleQueue[tuple[float, bytes | None]], ...] = (SimpleQueue(), SimpleQueue())

    @property
    def gone(self) -> bool:
        return self._cut.is_set()

    def joins(self, a: int, b: int) -> bool:
        return any({link.local.node, link.peer.node} == {a, b} for link in self._links)

    def start(self) -> None:
        for link, end in zip(self._links, self._ends, strict=True):
            link.attach(end)
        for side in (0, 1):
            link, end, outgoing, incoming = (
                self._links[side],
                self._ends[side],
                self._pipes[side],
                self._pipes[1 - side],
            )
            for work, pipe in ((self._write, outgoing), (self._read, incoming)):
                name = f"{work.__name__} {link!r}"
                threading.Thread(target=work, args=(link, end, pipe), name=name, daemon=True).start()

    def cut(self, reason: str | None) -> None:
        self._reason = self._reason or reason
        self._cut.set()
        for pipe in self._pipes:
            pipe.put((0.0, None))
        self._network.stream_ended()

    def _write(
        self, link: FrameLink, end: Connection, pipe: SimpleQueue[tuple[float, bytes | None]]
    ) -> None:
        sender, receiver = link.local.node, link.peer.node
        for batch in link.batches(end):
            due = time.monotonic() + self._network.delay
            for later, arriving in self._network.passage(sender, receiver, batch):
                pipe.put((due + later, arriving))
        pipe.put((time.monotonic() + self._network.delay, None))

    def _read(
        self, link: FrameLink, end: Connection, pipe: SimpleQueue[tuple[float, bytes | None]]
    ) -> None:
        """Deliver frames to a link; each end has its own thread, so a stalled node delays no other."""
        sender, receiver = link.peer.node, link.local.node
        while True:
            due, batch = pipe.get()
            if batch is None or self._cut.wait(max(due - time.monotonic(), 0)):
                break
            self._network.await_passage(sender, receiver, self._cut)
            if self._cut.is_set():
                break
            link.received(end, batch)
            if self._cut.is_set():
                break
        self.cut(None)
        link.disconnected(end, self._reason or "the other end has closed")
