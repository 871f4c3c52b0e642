"""Circuits: two connections between which bytes are forwarded both ways, in an event loop."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable

from ravnest.deadlines import RELAY_HALF_CLOSED, RELAY_IDLE
from ravnest.relay.limits import TokenBucket
from ravnest.relay.loop import READ, WRITE, EventLoop, OnReady, Timer
from ravnest.relay.pipes import BytePipe, PipePool

_TURN_BYTES = 1 << 20
"""Most bytes that a direction forwards before others get their turn."""
_LITTLE_BYTES = 16 << 10
"""After a read of fewer bytes, the source most likely has no others yet."""
_SWEEP_INTERVAL = 5.0
_RESET = struct.pack("ii", 1, 0)


class Direction:
    """One direction of a circuit."""

    def __init__(self, source: socket.socket, target: socket.socket, first: bytes) -> None:
        self.source = source
        self.target = target
        self.circuit: SplicedCircuit
        self.queued = False
        """It waits for the limited rate."""
        self._first = first
        self._pipe: BytePipe | None = None
        self._ended = False
        self.finished = False
        """The source has ended and the target was told."""

    @property
    def reads(self) -> bool:
        """Return whether it waits for its source."""
        return not (self._ended or self._first or self._pipe or self.queued)

    @property
    def writes(self) -> bool:
        """Return whether it waits for its target."""
        return not self.queued and bool(self._first or self._pipe)

    def turn(self, pool: PipePool, most: int) -> int:
        """Forward at most ``most`` new bytes, return their number; ``OSError`` if a side is lost."""
        moved = 0
        if self._first and not self._send_first():
            return 0
        pipe = self._pipe or pool.take()
        try:
            if pipe.held:
                pipe.drain(self.target)
            count = _LITTLE_BYTES
            while count >= _LITTLE_BYTES and moved < most and not pipe.held:
                count = pipe.fill(self.source, most - moved)
                moved += count
                self._ended = count == 0
                pipe.drain(self.target)
        except BlockingIOError:
            pass
        finally:
            if pipe.held:
                self._pipe = pipe
            else:
                self._pipe = None
                pool.give_back(pipe)
        if self._ended and not self._pipe and not self.finished:
            self.finished = True
            self.target.shutdown(socket.SHUT_WR)
        return moved

    def _send_first(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._first = self._first[self.target.send(self._first) :]
        return not self._first

    def release(self, pool: PipePool) -> None:
        """Give back what it uses."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pool.give_back(pipe)


class SplicedCircuit:
    """Two connections and the bytes between them."""

    def __init__(
        self,
        to_far: Direction,
        to_near: Direction,
        on_bytes: Callable[[int], None],
        on_end: Callable[[], None],
        now: float,
    ) -> None:
        self.near, self.far = to_far.source, to_near.source
        self.to_far, self.to_near = to_far, to_near
        self.on_bytes, self.on_end = on_bytes, on_end
        self.active = now
        """Time of the last byte."""
        self.closed = False
        self.watched = (0, 0)
        """Events for which each socket is watched."""
        self.on_near: OnReady
        self.on_far: OnReady


class Splicer:
    """All circuits of an event loop; its methods belong to the loop's thread."""

    def __init__(self, loop: EventLoop, pool: PipePool, bucket: TokenBucket | None = None) -> None:
        self._loop = loop
        self._pool = pool
        self._bucket = bucket
        self._circuits: set[SplicedCircuit] = set()
        self._queue: deque[Direction] = deque()
        self._timer: Timer | None = None
        self._sweeping = False

    def join(
        self,
        near: socket.socket,
        far: socket.socket,
        *,
        to_near: bytes = b"",
        to_far: bytes = b"",
        on_bytes: Callable[[int], None] = lambda _: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> SplicedCircuit:
        """Forward bytes between two non-blocking sockets, after the given first bytes.

        The circuit owns the sockets from now on. ``on_end`` is called once they are closed.
        """
        circuit = SplicedCircuit(
            Direction(near, far, to_far), Direction(far, near, to_near), on_bytes, on_end, self._loop.now
        )
        to_both = circuit.to_near, circuit.to_far
        circuit.on_near = self._on_ready_of(circuit, reading=circuit.to_far, writing=circuit.to_near)
        circuit.on_far = self._on_ready_of(circuit, reading=circuit.to_near, writing=circuit.to_far)
        self._circuits.add(circuit)
        self._sweep_later()
        for direction in to_both:
            direction.circuit = circuit
        for direction in to_both:
            self._advance(direction)
        self._watch(circuit)
        return circuit

    def end(self, circuit: SplicedCircuit, *, reset: bool = True) -> None:
        """Close both connections; with ``reset``, what is on its way gets lost and both sides see it."""
        if circuit.closed:
            return
        circuit.closed = True
        self._circuits.discard(circuit)
        for sock in (circuit.near, circuit.far):
            self._loop.unwatch(sock)
            if reset:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sock.close()
        circuit.to_far.release(self._pool)
        circuit.to_near.release(self._pool)
        circuit.on_end()

    @property
    def circuits(self) -> int:
        """Number of circuits."""
        return len(self._circuits)

    def close(self) -> None:
        """End all circuits."""
        for circuit in list(self._circuits):
            self.end(circuit)
        self._pool.close()

    def _advance(self, direction: Direction) -> None:
        """Give a direction that is ready its turn, or queue it if the rate is limited."""
        if self._bucket is None:
            self._turn(direction, _TURN_BYTES)
        elif not direction.queued:
            direction.queued = True
            self._queue.append(direction)
            self._serve(self._bucket)

    def _serve(self, bucket: TokenBucket) -> None:
        """Give queued directions small turns, one after the other, as long as the rate allows it."""
        while self._queue:
            most = min(bucket.available(self._loop.now), bucket.share)
            if most < bucket.share:
                if self._timer is None:
                    self._timer = self._loop.call_at(bucket.ready_at(bucket.share), self._on_rate)
                return
            direction = self._queue.popleft()
            direction.queued = False
            bucket.take(self._turn(direction, most))
            self._watch(direction.circuit)

    def _on_rate(self) -> None:
        self._timer = None
        if self._bucket is not None:
            self._serve(self._bucket)

    def _turn(self, direction: Direction, most: int) -> int:
        """Forward bytes and return the number of new ones; end the circuit if one side is lost."""
        circuit = direction.circuit
        if circuit.closed:
            return 0
        try:
            moved = direction.turn(self._pool, most)
        except OSError:
            self.end(circuit)
            return 0
        if moved:
            circuit.active = self._loop.now
            circuit.on_bytes(moved)
        if circuit.to_far.finished and circuit.to_near.finished:
            self.end(circuit, reset=False)
        return moved

    def _watch(self, circuit: SplicedCircuit) -> None:
        if not circuit.closed:
            to_far, to_near = circuit.to_far, circuit.to_near
            near = READ * to_far.reads | WRITE * to_near.writes
            far = READ * to_near.reads | WRITE * to_far.writes
            if circuit.watched != (near, far):
                circuit.watched = near, far
                self._loop.watch(circuit.near, near, circuit.on_near)
                self._loop.watch(circuit.far, far, circuit.on_far)

    def _on_ready_of(
        self, circuit: SplicedCircuit, *, reading: Direction, writing: Direction
    ) -> OnReady:
        """Return what to call when one socket of a circuit is ready."""

        def on_ready(events: int) -> None:
            if events & WRITE:
                self._advance(writing)
            if events & READ:
                self._advance(reading)
            self._watch(circuit)

        return on_ready

    def _sweep(self) -> None:
        """Close circuits without a byte for long."""
        for circuit in list(self._circuits):
            half = circuit.to_far.finished or circuit.to_near.finished
            if self._loop.now - circuit.active >= (RELAY_HALF_CLOSED if half else RELAY_IDLE):
                self.end(circuit)
        self._sweeping = False
        self._sweep_later()

    def _sweep_later(self) -> None:
        if self._circuits and not self._sweeping:
            self._sweeping = True
            self._loop.call_at(self._loop.now + _SWEEP_INTERVAL, self._sweep)
