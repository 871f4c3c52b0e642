"""Relay: accepts connections and carries out what the circuit table decides, in one thread."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ravnest.deadlines import LINK_CLOSE, LINK_OUTAGE
from ravnest.errors import RelayError
from ravnest.host import tune_tcp
from ravnest.relay.circuits import CircuitTable
from ravnest.relay.events import (
    CircuitAction,
    CircuitEvent,
    CloseConnection,
    ConnectionEnded,
    ConnectionOpened,
    HeadArrived,
    HeadInvalid,
    JobsChanged,
    JoinConnections,
    LineArrived,
    Refuse,
    SendAnswer,
    SendLine,
    TimePassed,
)
from ravnest.relay.heads import HeadReader, answer, parse_request
from ravnest.relay.limits import RelayLimits, TokenBucket
from ravnest.relay.lines import LineReader
from ravnest.relay.loop import READ, EventLoop
from ravnest.relay.pipes import PipePool
from ravnest.relay.sockets import listen, network_of
from ravnest.relay.splicing import SplicedCircuit, Splicer
from ravnest.relay.tickets import RelayTicket, read_ticket
from ravnest.types import Address

logger = logging.getLogger(__name__)

_ACCEPTS_PER_TURN = 64
_ACCEPT_PAUSE = 0.5
"""Pause after the system had no descriptor for another connection, in seconds."""
_COUNTED_JOBS = 1000


@dataclass(frozen=True)
class RelayCounters:
    """Work of a relay."""

    endpoints: int = 0
    """Endpoints registered now."""
    circuits: int = 0
    """Circuits now, pending ones included."""
    connections: int = 0
    circuits_opened: int = 0
    """Circuits since the start."""
    bytes: int = 0
    """Bytes forwarded since the start, both directions."""
    bytes_by_job: Mapping[str, int] = field(default_factory=dict)
    """The same by job; the most recent jobs only."""
    refusals: Mapping[int, int] = field(default_factory=dict)
    """Refused requests by status."""


@dataclass(eq=False)
class _Peer:
    """Connection that is not, or not yet, part of a circuit."""

    number: int
    socket: socket.socket
    head: HeadReader = field(default_factory=HeadReader)
    lines: LineReader | None = None
    """Set on control connections."""
    rest: bytes = b""
    """Bytes that came after the head, for the other side of the circuit."""


class Relay:
    """Relay that listens at one port; ``start`` and ``close`` it once, from any thread."""

    def __init__(
        self,
        listen: Address,
        key: Ed25519PublicKey,
        limits: RelayLimits,
        now: Callable[[], float] = time.time,
        pipes: PipePool | None = None,
    ) -> None:
        """``key`` verifies tickets, which expire by ``now``; ``pipes`` is for tests."""
        self._wanted = listen
        self._key = key
        self._now = now
        self._limits = limits
        self._pipes = pipes
        self._lock = threading.Lock()
        self._bound: Address | None = None
        self._jobs: frozenset[str] | None = None
        self._shell: _RelayShell | None = None

    @property
    def address(self) -> Address:
        """Address at which it listens, with the actual port; once started."""
        assert self._bound is not None
        return self._bound

    def start(self) -> None:
        """Listen and forward in a thread; ``AddressInUseError`` if the address is taken."""
        with self._lock:
            assert self._shell is None
            listener = listen(self._wanted)
            self._bound = replace(self._wanted, port=listener.getsockname()[1])
            loop = EventLoop(f"relay at {self._bound}")
            table = CircuitTable(self._limits, self._check, lambda: secrets.token_hex(8))
            rate = self._limits.mbit_per_second
            bucket = None if rate is None else TokenBucket(rate * 1e6 / 8, loop.now)
            splicer = Splicer(loop, self._pipes or PipePool(), bucket)
            self._shell = _RelayShell(loop, table, splicer, listener)
            self._shell.handle(JobsChanged(self._jobs))
            loop.start()
            loop.call(self._shell.begin)

    def close(self) -> None:
        """Close all connections and stop listening."""
        with self._lock:
            if self._shell is not None:
                self._shell.loop.call(self._shell.end)
                if not self._shell.loop.close(LINK_CLOSE):
                    logger.warning("the relay at %s did not end in time", self._bound)

    def set_running_jobs(self, jobs: frozenset[str] | None) -> None:
        """Serve only these jobs and cut all others; ``None`` serves every job with a valid ticket."""
        with self._lock:
            self._jobs = jobs
            shell = self._shell
        if shell is not None:
            shell.loop.call(lambda: shell.handle(JobsChanged(jobs)))

    def counters(self) -> RelayCounters:
        """Return the counters of this moment."""
        shell = self._shell
        return RelayCounters() if shell is None else shell.counters

    def _check(self, text: str) -> RelayTicket:
        return read_ticket(text, self._key, self._now())


class _RelayShell:
    """Sockets of a relay; everything but ``counters`` runs in its loop."""

    def __init__(
        self, loop: EventLoop, table: CircuitTable, splicer: Splicer, listener: socket.socket
    ) -> None:
        self.loop = loop
        self._table = table
        self._splicer = splicer
        self._listener = listener
        self._peers: dict[int, _Peer] = {}
        self._circuits: dict[int, SplicedCircuit] = {}
        self._next_number = 0
        self._wakes_at: float | None = None
        self._bytes = 0
        self._bytes_by_job: Counter[str] = Counter()

    @property
    def counters(self) -> RelayCounters:
        table = self._table
        return RelayCounters(
            endpoints=len(table.endpoints),
            circuits=table.circuits,
            connections=table.connections,
            circuits_opened=table.circuits_opened,
            bytes=self._bytes,
            bytes_by_job=self._bytes_by_job.copy(),
            refusals=table.refusals,
        )

    def begin(self) -> None:
        """Accept connections."""
        self.loop.watch(self._listener, READ, self._on_connection)

    def end(self) -> None:
        """Close everything."""
        self.loop.unwatch(self._listener)
        self._listener.close()
        for circuit in list(self._circuits.values()):
            self._splicer.end(circuit)
        self._splicer.close()
        for peer in list(self._peers.values()):
            self._close(peer.number)

    def handle(self, event: CircuitEvent) -> None:
        """Carry out what follows from an event."""
        for action in self._table.handle(event, self.loop.now):
            self._carry_out(action)
        self._set_timer()

    def _carry_out(self, action: CircuitAction) -> None:
        match action:
            case SendAnswer(number, status, reason):
                self._on_answer(number, status, reason)
            case Refuse(number, status, reason):
                logger.debug("refused: %d %s", status, reason)
                peer = self._peers.get(number)
                if peer is not None:
                    with contextlib.suppress(OSError):
                        peer.socket.send(answer(status, reason, stays=False))
                self._close(number)
            case SendLine(number, line):
                self._send(number, f"{line}\n".encode("ascii"))
            case JoinConnections(caller, callee, job):
                self._join(caller, callee, job)
            case CloseConnection(number):
                self._close(number)

    # Connections

    def _on_connection(self, _: int) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                accepted, where = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError as error:
                logger.warning("the relay cannot accept a connection now: %s", error)
                self.loop.unwatch(self._listener)
                self.loop.call_at(self.loop.now + _ACCEPT_PAUSE, self.begin)
                return
            self._open(accepted, where[0])

    def _open(self, accepted: socket.socket, host: str) -> None:
        try:
            accepted.setblocking(False)
            tune_tcp(accepted, LINK_OUTAGE)
        except OSError:  # it is lost already
            accepted.close()
            return
        self._next_number += 1
        peer = _Peer(self._next_number, accepted)
        self._peers[peer.number] = peer
        self.loop.watch(accepted, READ, lambda _: self._on_bytes(peer))
        self.handle(ConnectionOpened(peer.number, network_of(host)))

    def _on_bytes(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(peer.head.room)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(peer.number)
            self.handle(ConnectionEnded(peer.number))
            return
        try:
            if peer.lines is not None:
                for line in peer.lines.feed(data):
                    self.handle(LineArrived(peer.number, line))
                return
            found = peer.head.feed(data)
            if found is None:
                return
            head, peer.rest = found
            request = parse_request(head)
        except RelayError as error:
            self.handle(HeadInvalid(peer.number, str(error)))
            return
        self.handle(HeadArrived(peer.number, request))
        if peer.number in self._peers and self._table.is_calling(peer.number):
            self.loop.unwatch(peer.socket)  # what it sends is for the callee

    def _on_answer(self, number: int, status: int, reason: str) -> None:
        peer = self._peers[number]
        if self._table.is_control(number):
            peer.lines = LineReader()
        self._send(number, answer(status, reason, stays=True))

    def _send(self, number: int, data: bytes) -> None:
        """Send a few bytes; whoever does not read even these is gone."""
        peer = self._peers.get(number)
        if peer is None:
            return
        try:
            complete = peer.socket.send(data) == len(data)
        except OSError:
            complete = False
        if not complete:
            self._close(number)
            self.loop.call(lambda: self.handle(ConnectionEnded(number)))

    def _close(self, number: int) -> None:
        circuit = self._circuits.get(number)
        if circuit is not None:
            self._splicer.end(circuit)
        peer = self._peers.pop(number, None)
        if peer is not None:
            self.loop.unwatch(peer.socket)
            peer.socket.close()

    # Circuits

    def _join(self, caller: int, callee: int, job: str) -> None:
        near, far = self._peers.pop(caller), self._peers.pop(callee)
        self.loop.unwatch(near.socket)
        self.loop.unwatch(far.socket)

        def on_bytes(count: int) -> None:
            self._bytes += count
            self._bytes_by_job[job] += count

        def on_end() -> None:
            for number in (caller, callee):
                self._circuits.pop(number, None)
            self.loop.call(lambda: self.handle(ConnectionEnded(caller)))

        if job not in self._bytes_by_job and len(self._bytes_by_job) >= _COUNTED_JOBS:
            del self._bytes_by_job[next(iter(self._bytes_by_job))]
        greeting = answer(200, "Connected", stays=True)
        circuit = self._splicer.join(
            near.socket,
            far.socket,
            to_near=greeting + far.rest,
            to_far=greeting + near.rest,
            on_bytes=on_bytes,
            on_end=on_end,
        )
        if not circuit.closed:
            self._circuits[caller] = self._circuits[callee] = circuit

    def _set_timer(self) -> None:
        """Have the next deadline noticed; a timer that is too early only looks again."""
        deadline = self._table.deadline
        if deadline is not None and (self._wakes_at is None or deadline < self._wakes_at):
            self._wakes_at = deadline
            self.loop.call_at(deadline, self._on_time)

    def _on_time(self) -> None:
        self._wakes_at = None
        self.handle(TimePassed())
