"""In-memory transport: links between nodes of one process, with optional delay and cuts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import SimpleQueue

from ravnest.errors import AddressInUseError, RefusedError, UnreachableError
from ravnest.transport.base import Admit, Link, LinkHandler
from ravnest.transport.handshake import answer, hello_frame, read_answer
from ravnest.transport.link import FrameLink
from ravnest.types import Address
from ravnest.wire.messages import Hello, HelloRefused

_WAITING_SECONDS = 10.0


@dataclass(frozen=True)
class _Server:
    admit: Admit
    handler: LinkHandler
    on_link: Callable[[Link], None]
    owner: MemoryTransport


class MemoryNetwork:
    """Listening addresses of the process and the connections between them."""

    def __init__(self, delay: float = 0.0) -> None:
        """``delay`` is the one-way delay of each frame; it does not limit the throughput."""
        self.delay = delay
        self._changed = threading.Condition()
        self._servers: dict[Address, _Server] = {}
        self._connections: list[_Connection] = []
        self._next_port = 1

    def transport(self) -> MemoryTransport:
        """Return the transport of one node."""
        return MemoryTransport(self)

    def cut(self, a: int, b: int) -> None:
        """Cut the links between two nodes; both sides notice at once."""
        with self._changed:
            connections = [connection for connection in self._connections if connection.joins(a, b)]
        for connection in connections:
            connection.cut(f"the link between node_{a} and node_{b} was cut")

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

    def forget(self, owner: MemoryTransport) -> list[_Connection]:
        """Remove the listeners of ``owner`` and return its connections."""
        with self._changed:
            self._servers = {a: s for a, s in self._servers.items() if s.owner is not owner}
            return [connection for connection in self._connections if owner in connection.owners]

    def server_at(self, address: Address, timeout: float) -> _Server | None:
        """Return the listener at ``address``; wait up to ``timeout`` seconds for it."""
        with self._changed:
            self._changed.wait_for(lambda: address in self._servers, timeout)
            return self._servers.get(address)

    def keep(self, connection: _Connection) -> None:
        """Register a connection until it ends."""
        with self._changed:
            self._connections = [other for other in self._connections if not other.gone] + [connection]


class MemoryTransport:
    """In-memory transport of one node; implements ``base.Transport``."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network

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
    ) -> Link:
        """Connect to the listener at ``address``; wait for it until the deadline."""
        until = time.monotonic() + deadline
        server = self._network.server_at(address, 0)
        while server is None:
            left = until - time.monotonic()
            reason = f"nothing listens at {address}"
            if left <= 0:
                raise UnreachableError(f"no answer from {address} in {deadline:g} s: {reason}")
            if waiting is not None:
                waiting(reason)
            server = self._network.server_at(address, min(left, _WAITING_SECONDS))
        reply = answer(hello_frame(hello), server.admit, None)
        if isinstance(reply, HelloRefused):
            raise RefusedError(f"{address} refused: {reply.reason}")
        theirs, ours = reply
        peer = read_answer(hello_frame(ours), address, expect)
        connection = _Connection(self._network.delay, (self, server.owner))
        near = FrameLink(hello, peer, handler, lambda: connection.cut(None))
        far = FrameLink(ours, theirs, server.handler, lambda: connection.cut(None))
        self._network.keep(connection)
        connection.start(near, far, server.on_link)
        return near

    def close(self) -> None:
        """Close all links and stop listening."""
        for connection in self._network.forget(self):
            connection.close(self)


class _Connection:
    """Connection between two links, in both directions."""

    def __init__(self, delay: float, owners: tuple[MemoryTransport, MemoryTransport]) -> None:
        self.owners = owners
        self._delay = delay
        self._cut = threading.Event()
        self._reason: str | None = None
        self._links: tuple[FrameLink, ...] = ()
        self._pipes: tuple[SimpleQueue[tuple[float, bytes | None]], ...] = (SimpleQueue(), SimpleQueue())

    @property
    def gone(self) -> bool:
        return self._cut.is_set()

    def joins(self, a: int, b: int) -> bool:
        return any({link.local.node, link.peer.node} == {a, b} for link in self._links)

    def start(self, near: FrameLink, far: FrameLink, on_link: Callable[[Link], None]) -> None:
        self._links = (near, far)
        far.introduce(on_link)
        for source, target, pipe in ((near, far, self._pipes[0]), (far, near, self._pipes[1])):
            for work in (self._write, self._read):
                link = source if work == self._write else target
                name = f"{work.__name__} {link!r}"
                threading.Thread(target=work, args=(link, pipe), name=name, daemon=True).start()

    def close(self, owner: MemoryTransport) -> None:
        for link, whose in zip(self._links, self.owners, strict=True):
            if whose is owner:
                link.close()

    def cut(self, reason: str | None) -> None:
        self._reason = self._reason or reason
        self._cut.set()
        for pipe in self._pipes:
            pipe.put((0.0, None))

    def _write(self, link: FrameLink, pipe: SimpleQueue[tuple[float, bytes | None]]) -> None:
        for frame in link.batches():
            pipe.put((time.monotonic() + self._delay, frame))
        pipe.put((time.monotonic() + self._delay, None))

    def _read(self, link: FrameLink, pipe: SimpleQueue[tuple[float, bytes | None]]) -> None:
        """Deliver frames to a link; each end has its own thread, so a stalled node delays no other."""
        while True:
            due, frame = pipe.get()
            if frame is None or self._cut.wait(max(due - time.monotonic(), 0)):
                break
            link.received(frame)
            if self._cut.is_set():
                break
        self.cut(None)
        link.ended(self._reason or "the other end has closed")
