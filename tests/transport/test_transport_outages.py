"""Links over connections that break at random moments, in one thread and without a clock.

Two real links exchange numbered messages over a simulated network. Connections lose what is under way,
break for one side earlier than for the other, deliver late although another connection is in use, and
are dialled by both sides at the same time. No message may be lost, repeated or out of order.
"""

import random
from collections import deque
from collections.abc import Iterator

import pytest
import torch
from transport_nodes import Inbox, hello

from ravnest.transport import chunk_size
from ravnest.transport.connection import Connection
from ravnest.transport.link import FrameLink
from ravnest.types import MicrobatchId
from ravnest.wire import frames
from ravnest.wire.messages import Forward, Message

MESSAGES = 25
"""Messages in each direction."""
STEPS = 400
"""Steps in which connections break; afterwards none does, and everything must arrive."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let messages of a few hundred bytes consist of many frames."""
    monkeypatch.setattr(frames, "INLINE_BYTES", 64)
    monkeypatch.setattr(chunk_size, "SMALLEST_BYTES", 40)
    monkeypatch.setattr(chunk_size, "_FIRST_BYTES", 200)


class Stream:
    """Simulated connection: two ends, and the batches under way to each."""

    def __init__(self, links: list[FrameLink]) -> None:
        self.links = links
        self.ends = [Connection(self.hang_up), Connection(self.hang_up)]
        self.pipes: list[deque[bytes]] = [deque(), deque()]
        """Batches under way to each end."""
        self.broken = False
        self.notified = [False, False]

    def hang_up(self) -> None:
        self.broken = True

    def write(self, side: int) -> bool:
        batch = None if self.broken else self.links[side].next_batch(self.ends[side])
        if batch is not None:
            self.pipes[1 - side].append(batch)
        return batch is not None

    def deliver(self, side: int) -> bool:
        if not self.pipes[side] or self.notified[side]:
            return False
        self.links[side].received(self.ends[side], self.pipes[side].popleft())
        return True

    def notify(self, side: int) -> bool:
        """Tell a side that the connection has ended; what is still under way to it is lost."""
        if not self.broken or self.notified[side]:
            return False
        self.notified[side] = True
        self.links[side].disconnected(self.ends[side], "reset")
        return True


class World:
    """Two nodes and their connections."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.inboxes = [Inbox(), Inbox()]
        self.links = [self._link(0), self._link(1)]
        self.streams: list[Stream] = []
        self.sent = [0, 0]
        self.breaks = 0

    def _link(self, side: int) -> FrameLink:
        return FrameLink(
            hello(side),
            hello(1 - side),
            self.inboxes[side],
            session="s",
            leads=side == 0,
            on_down=lambda link, detail: None,
            on_end=lambda link: None,
        )

    def dial(self) -> None:
        stream = Stream(self.links)
        self.streams.append(stream)
        for side in self.random.sample((0, 1), 2):
            self.links[side].attach(stream.ends[side])

    def send(self, side: int) -> None:
        if self.sent[side] < MESSAGES:
            size = self.random.choice((1, 10, 200))
            value = torch.full((size,), float(self.sent[side]))
            head = Forward("run", MicrobatchId(side, self.sent[side]), 1)
            self.links[side].send(Message(head, {"x": value}))
            self.sent[side] += 1

    def step(self) -> None:
        """Let one thing happen that can happen."""
        side, roll = self.random.randrange(2), self.random.random()
        if roll < 0.15:
            self.send(side)
        elif roll < 0.19 and sum(not s.broken for s in self.streams) < 3:
            self.dial()
        elif not self.streams:
            return
        else:
            stream = self.random.choice(self.streams[-4:])
            if roll < 0.23:
                self.breaks += not stream.broken
                stream.broken = True
                for pipe in stream.pipes:  # some of what is under way still arrives
                    for _ in range(self.random.randint(0, len(pipe))):
                        pipe.pop()
            elif roll < 0.30:
                stream.notify(side)
            elif roll < 0.65:
                stream.write(side)
            else:
                stream.deliver(side)

    def settle(self) -> None:
        """Send what is left, over a connection that does not break."""
        for side in (0, 1):
            while self.sent[side] < MESSAGES:
                self.send(side)
        for stream in self.streams:
            stream.hang_up()
        while any(stream.notify(side) for stream in self.streams for side in (0, 1)):
            pass
        self.dial()
        last = self.streams[-1]
        while any([last.write(0), last.write(1), last.deliver(0), last.deliver(1)]):
            pass

    def received(self, side: int) -> Iterator[tuple[int, float]]:
        while not self.inboxes[side].messages.empty():
            message = self.inboxes[side].messages.get()
            assert isinstance(message.head, Forward)
            values = torch.as_tensor(message.values["x"])
            assert values.eq(values[0]).all()
            yield message.head.microbatch.index, float(values[0])


def run(seed: int) -> World:
    world = World(seed)
    for _ in range(STEPS):
        world.step()
    world.settle()
    expected = [(index, float(index)) for index in range(MESSAGES)]
    for side in (0, 1):
        assert world.inboxes[side].lost.empty(), (seed, world.inboxes[side].lost.get())
        assert list(world.received(side)) == expected, seed
    return world


@pytest.mark.parametrize("part", range(4))
def test_no_message_is_lost_or_repeated(part: int) -> None:
    worlds = [run(seed) for seed in range(100 * part, 100 * (part + 1))]
    assert sum(world.breaks for world in worlds) > 300
    assert sum(len(world.streams) for world in worlds) > 500
    assert all(world.links[0]._state.outbox.acknowledged >= 1 for world in worlds)


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_no_message_is_lost_or_repeated_in_thousands_of_worlds(part: int) -> None:
    for seed in range(1000 * (part + 1), 1000 * (part + 2)):
        run(seed)
