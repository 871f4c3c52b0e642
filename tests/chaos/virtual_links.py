"""Links of several nodes in virtual time, under a fault plan: one thread, no clock, no sockets.

The links are the real ones. Streams between them behave like TCP: what passes is in order, what cannot
pass waits, and what is under way when a stream ends is lost. The faults that TCP prevents (corrupt,
duplicate, reorder) are applied nevertheless, as a broken machine on the way could cause them.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from fault_plan import Fault, FaultKind, FaultPlan

from ravnest.deadlines import LINK_GONE, LINK_HEARTBEAT, LINK_HELLO, LINK_OUTAGE
from ravnest.transport import chunk_size
from ravnest.transport import link as link_module
from ravnest.transport import session as session_module
from ravnest.transport.base import Link
from ravnest.transport.connection import Connection
from ravnest.transport.link import FrameLink
from ravnest.types import MicrobatchId
from ravnest.wire import frames
from ravnest.wire.control import Closing, encode_control
from ravnest.wire.messages import PROTOCOL, Forward, Hello, Message

LATENCY = 0.02
_FIRST_PAUSE, _FOLLOWER_PAUSE, _LONGEST_PAUSE = 0.1, 1.0, 2.0


class VirtualClock:
    """Time, and calls that are due at some time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (max(time, self.now), next(self._numbers), call))

    def run(self, until: float) -> None:
        while self._calls and self._calls[0][0] <= until:
            self.now, _, call = heapq.heappop(self._calls)
            call()
        self.now = until


@dataclass
class Box:
    """Handler of one end of a link."""

    received: list[tuple[int, float]] = field(default_factory=list)
    lost: list[tuple[float, str]] = field(default_factory=list)
    now: Callable[[], float] = lambda: 0.0

    def on_message(self, link: Link, message: Message) -> None:
        assert isinstance(message.head, Forward)
        values = torch.as_tensor(message.values["x"])
        assert values.eq(values[0]).all()
        self.received.append((message.head.microbatch.index, float(values[0])))

    def on_lost(self, link: Link, reason: str) -> None:
        self.lost.append((self.now(), reason))


class VirtualStream:
    """Connection between the two ends of a link."""

    def __init__(self, pair: VirtualLink) -> None:
        self.pair = pair
        self.ends = [Connection(lambda: self._hang_up(0)), Connection(lambda: self._hang_up(1))]
        self.pipes: list[deque[bytes]] = [deque(), deque()]
        """Batches under way to each end."""
        self.broken = False
        self._swapped: dict[int, bytes] = {}
        self._notified = [False, False]
        for side in (1, 0):
            pair.links[side].attach(self.ends[side])

    def _hang_up(self, side: int) -> None:
        if self.broken:
            return
        self.broken = True
        self.pipes[0].clear()
        self.pipes[1].clear()
        self._notify(side)
        self.pair.passing(1 - side, lambda: self._notify(1 - side))

    def _notify(self, side: int) -> None:
        if not self._notified[side]:
            self._notified[side] = True
            world = self.pair.world  # not within a call of the link, which may hold its lock
            node = self.pair.nodes[side]
            link, end = self.pair.links[side], self.ends[side]
            world.on(node, world.clock.now, lambda: link.disconnected(end, "reset"))

    def pump(self, side: int) -> None:
        """Send what a side has to send."""
        link, end = self.pair.links[side], self.ends[side]
        while not self.broken and (batch := link.next_batch(end)) is not None:
            self._send(side, batch)
        if not self.broken and link.writes_end(end):
            self._send(side, b"".join(encode_control(Closing())))
            self._hang_up_after(side)

    def _hang_up_after(self, side: int) -> None:
        """End the stream after what was sent."""
        end = self.ends[side]
        end.last = False
        self.pair.passing(1 - side, lambda: self._hang_up(side))

    def _send(self, side: int, batch: bytes) -> None:
        sender, receiver = self.pair.nodes[side], self.pair.nodes[1 - side]
        for each in self.pair.world.tampered(sender, receiver, batch, self._swapped):
            self.pipes[1 - side].append(each)
            self.pair.passing(1 - side, lambda: self._deliver(1 - side))

    def _deliver(self, side: int) -> None:
        if not self.broken and self.pipes[side]:
            self.pair.links[side].received(self.ends[side], self.pipes[side].popleft())


class VirtualLink:
    """Link between two nodes: its two ends, its connections and the messages that it carries."""

    def __init__(self, world: VirtualWorld, near: int, far: int) -> None:
        self.world = world
        self.nodes = (near, far)
        self.boxes = (Box(now=lambda: world.clock.now), Box(now=lambda: world.clock.now))
        self.links = tuple(self._end(side) for side in (0, 1))
        self.streams: list[VirtualStream] = []
        self.sent = [0, 0]
        self._reconnecting = [False, False]

    def _end(self, side: int) -> FrameLink:
        near, far = self.nodes[side], self.nodes[1 - side]
        return FrameLink(
            Hello(PROTOCOL, "plan", near, 0, near, codec="raw"),
            Hello(PROTOCOL, "plan", far, 0, far, codec="raw"),
            self.boxes[side],
            session="s",
            leads=side == 0,
            on_down=lambda _link, _detail: self._down(side),
            on_end=lambda _link: None,
        )

    def passing(self, side: int, call: Callable[[], None]) -> None:
        """Call what arrives at a side, when it does."""
        sender, receiver = self.nodes[1 - side], self.nodes[side]

        def arrive() -> None:
            blocked = self.world.blocked_until(sender, receiver)
            if blocked > self.world.clock.now:
                self.world.clock.at(blocked, arrive)
            else:
                self.world.on(receiver, self.world.clock.now, call)

        self.world.clock.at(self.world.clock.now + self.world.latency(sender, receiver), arrive)

    def send(self, side: int) -> None:
        """Send the next message, if the link is still there."""
        if self.links[side].alive:
            number = self.sent[side]
            self.sent[side] += 1
            size = self.world.drawn.choice((1, 10, 200))
            head = Forward("run", MicrobatchId(side, number), 1)
            self.links[side].send(Message(head, {"x": torch.full((size,), float(number))}))

    def pump(self, side: int) -> None:
        """Send what a side has to send."""
        for stream in list(self.streams):
            stream.pump(side)

    def dial(self) -> None:
        self.streams = [stream for stream in self.streams if not stream.broken]
        self.streams.append(VirtualStream(self))

    # As transport/link_keeper.py does it

    def _down(self, side: int) -> None:
        if not self._reconnecting[side]:
            self._reconnecting[side] = True
            pause = _FIRST_PAUSE if side == 0 else _FOLLOWER_PAUSE
            self._later(side, pause, self.world.clock.now + LINK_OUTAGE, None)

    def _later(self, side: int, pause: float, deadline: float, silent: float | None) -> None:
        clock, link = self.world.clock, self.links[side]

        def attempt() -> None:
            if not link.alive or link.connected:
                self._reconnecting[side] = False
                return
            if clock.now >= deadline:
                link.abandon(f"no connection for {LINK_OUTAGE:g} s")
                return
            peer = self.nodes[1 - side]
            later, gone = clock.now, silent
            if peer in self.world.killed:
                gone = clock.now if gone is None else gone
                if clock.now - gone >= LINK_GONE:
                    link.abandon("nothing listens")
                    return
            elif not self.links[1 - side].alive:
                link.abandon("this link has ended")
                return
            else:
                gone, later = None, clock.now + LINK_HELLO
                if self.world.reaches(*self.nodes):
                    self.dial()
            following = min(2 * pause, _LONGEST_PAUSE)
            self.world.on(self.nodes[side], later, lambda: self._later(side, following, deadline, gone))

        self.world.on(self.nodes[side], clock.now + pause * self.world.drawn.uniform(0.7, 1.3), attempt)


class VirtualWorld:
    """Nodes in a chain, a link between neighbours, and a fault plan."""

    def __init__(self, plan: FaultPlan, nodes: int, messages: int, spread: float) -> None:
        self.plan = plan
        self.clock = VirtualClock()
        self.drawn = random.Random(plan.seed)
        self.killed: set[int] = set()
        self.tamperings = 0
        self._stopped: dict[int, float] = defaultdict(float)
        self._blocked: dict[tuple[int, int], float] = defaultdict(float)
        self._late: dict[tuple[int, int], tuple[float, float]] = {}
        self._tampering: dict[tuple[int, int], list[FaultKind]] = defaultdict(list)
        self.links = [VirtualLink(self, node, node + 1) for node in range(nodes - 1)]
        for link in self.links:
            link.dial()
            for side, _ in itertools.product((0, 1), range(messages)):
                at = self.drawn.uniform(0, spread)
                self.on(link.nodes[side], at, lambda link=link, side=side: link.send(side))
        for fault in plan.faults:
            self.clock.at(fault.moment.at, lambda fault=fault: self._happen(fault))
        self._beat()

    def run(self, until: float) -> None:
        """Let time pass."""
        self.clock.run(until)

    def settled(self, messages: int) -> bool:
        """Return whether each link has delivered everything, or has ended where a node is left."""
        return all(
            all(
                box.lost or end in self.killed or (len(box.received) == messages and link.connected)
                for box, end, link in zip(pair.boxes, pair.nodes, pair.links, strict=True)
            )
            for pair in self.links
        )

    def on(self, node: int, at: float, call: Callable[[], None]) -> None:
        """Let a node do something at some time, or when it continues, unless it is killed."""

        def act() -> None:
            if node in self.killed:
                return
            if self._stopped[node] > self.clock.now:
                self.clock.at(self._stopped[node], act)
                return
            call()
            for link in self.links:
                if node in link.nodes:
                    link.pump(link.nodes.index(node))

        self.clock.at(at, act)

    def runs(self, node: int) -> bool:
        """Return whether a node is neither killed nor stopped."""
        return node not in self.killed and self._stopped[node] <= self.clock.now

    def reaches(self, a: int, b: int) -> bool:
        """Return whether two nodes can connect."""
        open_ways = all(self.blocked_until(*way) <= self.clock.now for way in ((a, b), (b, a)))
        return open_ways and self.runs(a) and self.runs(b)

    def blocked_until(self, sender: int, receiver: int) -> float:
        return self._blocked[sender, receiver]

    def latency(self, sender: int, receiver: int) -> float:
        until, more = self._late.get((sender, receiver), (0.0, 0.0))
        return LATENCY + (more if until > self.clock.now else 0.0)

    def tampered(
        self, sender: int, receiver: int, batch: bytes, swapped: dict[int, bytes]
    ) -> Iterator[bytes]:
        """Yield what arrives instead of a batch."""
        if (kept := swapped.pop(sender, None)) is not None:
            yield batch
            yield kept
            return
        waiting = self._tampering[sender, receiver]
        kind = waiting.pop(0) if waiting else None
        self.tamperings += kind is not None
        if kind is FaultKind.CORRUPT:
            changed = bytearray(batch)
            changed[self.drawn.randrange(len(changed))] ^= 1 << self.drawn.randrange(8)
            yield bytes(changed)
        elif kind is FaultKind.REORDER:
            swapped[sender] = batch
        else:
            yield batch
            if kind is FaultKind.DUPLICATE:
                yield batch

    def _happen(self, fault: Fault) -> None:
        until = self.clock.now + (fault.seconds or 0.0)
        match fault.kind:
            case FaultKind.KILL:
                self.killed.add(fault.node)
                for link in self.links:
                    if fault.node in link.nodes:
                        for stream in link.streams:
                            stream._hang_up(link.nodes.index(fault.node))
            case FaultKind.STOP:
                self._stopped[fault.node] = max(self._stopped[fault.node], until)
            case FaultKind.PARTITION | FaultKind.ONE_WAY:
                assert fault.peer is not None
                ways = [(fault.node, fault.peer), (fault.peer, fault.node)]
                for way in ways[: 1 if fault.kind is FaultKind.ONE_WAY else 2]:
                    self._blocked[way] = max(self._blocked[way], until)
            case FaultKind.DELAY:
                assert fault.peer is not None
                assert fault.size is not None
                self._late[fault.node, fault.peer] = until, fault.size
            case FaultKind.CORRUPT | FaultKind.DUPLICATE | FaultKind.REORDER:
                assert fault.peer is not None
                self._tampering[fault.node, fault.peer].append(fault.kind)
            case _:
                raise AssertionError(f"links know no {fault.kind}")

    def _beat(self) -> None:
        for link in self.links:
            for side in (0, 1):
                end, node = link.links[side], link.nodes[side]
                if self.runs(node):
                    self.on(node, self.clock.now, lambda end=end: end.tick(self.clock.now))
        self.clock.at(self.clock.now + LINK_HEARTBEAT / 2, self._beat)


class VirtualTimer:
    """``threading.Timer`` in the time of a world."""

    clock: VirtualClock

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self._seconds, self._call = seconds, call
        self.daemon = False

    def start(self) -> None:
        self.clock.at(self.clock.now + self._seconds, self._call)


def virtual_world(
    monkeypatch: pytest.MonkeyPatch, plan: FaultPlan, nodes: int, messages: int, spread: float
) -> VirtualWorld:
    """Return a world whose links look at its clock; messages consist of many small frames."""
    monkeypatch.setattr(frames, "INLINE_BYTES", 64)
    monkeypatch.setattr(chunk_size, "SMALLEST_BYTES", 40)
    monkeypatch.setattr(chunk_size, "_FIRST_BYTES", 200)
    clocks: list[VirtualClock] = []
    time = SimpleNamespace(
        monotonic=lambda: clocks[0].now if clocks else 0.0,
        perf_counter=lambda: clocks[0].now if clocks else 0.0,
    )
    names = {name: getattr(threading, name) for name in ("Lock", "Condition", "Event", "get_ident")}
    timer = type("WorldTimer", (VirtualTimer,), {})
    monkeypatch.setattr(link_module, "time", time)
    monkeypatch.setattr(session_module, "time", time)
    monkeypatch.setattr(link_module, "threading", SimpleNamespace(**names, Timer=timer))
    world = VirtualWorld(plan, nodes, messages, spread)
    clocks.append(world.clock)
    timer.clock = world.clock
    return world
