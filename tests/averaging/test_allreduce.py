"""All-reduce over all rings of a node, over both transports."""

from collections.abc import Callable

import pytest
import torch
from averaging_nodes import RINGS, RingMember, ring_of
from fake_link import FakeLink

from ravnest.averaging.allreduce import AllReduce, AllReduceResult, RingPart
from ravnest.transport.base import Transport
from ravnest.transport.memory import MemoryNetwork
from ravnest.wire.messages import Message, RingChunk, RoundId

Opener = Callable[[], Transport]


def check(members: list[RingMember], results: list[AllReduceResult]) -> None:
    """Check that all members hold the mean, bit for bit the same, with the same digest."""
    for ring in RINGS:
        mean = torch.stack([member.vectors()[ring].double() for member in members]).mean(0)
        torch.testing.assert_close(results[0].averages[ring].double(), mean, atol=1e-6, rtol=0)
        assert len({result.digests[ring] for result in results}) == 1
        assert all(torch.equal(result.averages[ring], results[0].averages[ring]) for result in results)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_rings_average_in_every_round(opener: Opener, count: int) -> None:
    members = ring_of(count, opener)
    for number in range(3):
        for member in members:
            member.start(RoundId(number), count)
        results = [member.end() for member in members]
        assert [(result.problem, result.round) for result in results] == count * [("", RoundId(number))]
        check(members, results)
        assert sum(result.sent_bytes for result in results) == 8 * (count - 1) * sum(RINGS.values())


def test_early_chunks_are_buffered(opener: Opener) -> None:
    members = ring_of(3, opener)
    members[0].start(RoundId(1), 3)
    members[1].arrived.get(timeout=20)
    members[2].start(RoundId(1), 3)
    members[0].arrived.get(timeout=20)
    members[1].start(RoundId(1), 3)
    check(members, [member.end() for member in members])


def test_chunks_of_an_earlier_attempt_are_dropped(opener: Opener) -> None:
    members = ring_of(2, opener)
    members[0].start(RoundId(1), 2)
    members[1].arrived.get(timeout=20)
    members[1].allreduce.cancel(RoundId(1), "tried again")
    members[0].allreduce.cancel(RoundId(1), "tried again")
    assert members[0].end().problem == "tried again"
    for member in members:
        member.start(RoundId(1, 1), 2)
    results = [member.end() for member in members]
    assert [result.round for result in results] == 2 * [RoundId(1, 1)]
    check(members, results)


def test_a_cancelled_round_does_not_start(opener: Opener) -> None:
    members = ring_of(2, opener)
    members[0].allreduce.cancel(RoundId(3), "too late")
    members[0].start(RoundId(3), 2)
    members[0].start(RoundId(2), 2)
    assert members[0].ended.empty()
    for member in members:
        member.start(RoundId(4), 2)
    check(members, [member.end() for member in members])


def test_a_lost_neighbour_ends_the_round(network: MemoryNetwork) -> None:
    members = ring_of(3, network.transport)
    members[0].start(RoundId(0), 3)
    members[1].start(RoundId(0), 3)
    network.cut(2, 0)
    result = members[0].end()
    assert (result.averages, result.digests, result.peer) == ({}, {}, 2)
    assert "node_2" in result.problem


def test_a_link_lost_before_the_round_ends_it(network: MemoryNetwork) -> None:
    members = ring_of(2, network.transport)
    network.cut(0, 1)
    members[0].start(RoundId(0), 2)
    result = members[0].end()
    assert result.peer == 1
    assert "node_1" in result.problem


class Alone:
    """The second of three members; the test plays its neighbours."""

    def __init__(self) -> None:
        self.time = 0.0
        self.allreduce = AllReduce({0: 12, 5: 3}, piece_bytes=16, now=lambda: self.time)
        self.before, self.after = FakeLink(0), FakeLink(2)
        self.ended: list[AllReduceResult] = []

    def start(self, number: int = 0) -> None:
        part = RingPart(torch.ones(12), 1.0, 1, 3, 0, self.after)
        self.allreduce.start(RoundId(number), {0: part}, self.ended.append)

    def take(
        self, *place: int, number: int = 0, ring: int = 0, link: FakeLink | None = None, count: int = 4
    ) -> None:
        message = Message(RingChunk(RoundId(number), ring, *place), {"values": torch.ones(count)})
        self.allreduce.take(link or self.before, message)


@pytest.fixture
def alone() -> Alone:
    return Alone()


def test_progress_counts_chunks(alone: Alone) -> None:
    alone.time = 5.0
    alone.start()
    assert alone.allreduce.progress == (0, 5.0)
    alone.time = 6.0
    alone.take(0, 0, 1)
    assert alone.allreduce.progress == (1, 6.0)


def test_a_round_to_the_end(alone: Alone) -> None:
    alone.start()
    for place in ((0, 0, 1), (2, 0, 2), (1, 0, 3), (0, 0, 4)):
        assert not alone.ended
        alone.take(*place)
    (result,) = alone.ended
    assert result.problem == ""
    heads = [message.head for message in alone.after.messages]
    assert [(h.segment, h.hop) for h in heads if isinstance(h, RingChunk)] == [
        (1, 1),
        (0, 2),
        (2, 3),
        (1, 4),
    ]
    assert result.sent_bytes == 4 * 16
    alone.take(0, 0, 4)
    assert len(alone.ended) == 1


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("place", "ring", "node", "count", "words"),
    [
        ((0, 0, 2), 0, 0, 4, "node_0 sent a wrong chunk of ring 0: piece 0 of segment 0 has passed 2"),
        ((0, 0, 1), 0, 0, 3, "node_0 sent a wrong chunk of ring 0"),
        ((0, 0, 1), 0, 0, 0, "node_0 sent a wrong chunk of ring 0"),
        (
            (0, 0, 1),
            0,
            2,
            4,
            "node_2 sent a wrong chunk of ring 0: chunks of this ring must come from node_0",
        ),
        ((0, 0, 1), 5, 0, 3, "ring 5"),
    ],
)
def test_a_wrong_chunk_ends_the_round_and_names_the_peer(
    alone: Alone, early: bool, place: tuple[int, ...], ring: int, node: int, count: int, words: str
) -> None:
    if not early:
        alone.start()
    alone.take(*place, ring=ring, link=FakeLink(node), count=count)
    if early:
        alone.start()
    (result,) = alone.ended
    assert words in result.problem
    assert result.peer == node


def test_a_chunk_without_values_ends_the_round(alone: Alone) -> None:
    alone.start()
    head = RingChunk(RoundId(0), 0, 0, 0, 1)
    alone.allreduce.take(alone.before, Message(head, {"values": 3}))
    assert "node_0" in alone.ended[0].problem


@pytest.mark.parametrize(("ring", "count"), [(0, 4), (0, 0), (7, 1)])
def test_early_chunks_are_limited_to_the_size_of_the_ring(alone: Alone, ring: int, count: int) -> None:
    for _ in range(13):
        alone.take(0, 0, 1, ring=ring, count=count)
    alone.start()
    (result,) = alone.ended
    assert (result.peer, result.problem) == (
        0,
        f"node_0 sent more chunks of ring {ring} than the ring has",
    )


def test_only_chunks_of_the_next_rounds_are_buffered(alone: Alone) -> None:
    for number in range(4):
        alone.take(0, 0, 1, number=number)
    alone.start(1)
    assert alone.allreduce.progress[0] == 0
    alone.start(3)
    assert alone.ended[0].problem == "round 3 has replaced it"
    assert alone.allreduce.progress[0] == 1


def test_a_round_without_rings_ends_at_once(alone: Alone) -> None:
    alone.allreduce.start(RoundId(0), {}, alone.ended.append)
    assert alone.ended == [AllReduceResult(RoundId(0), {}, {}, 0)]


def test_a_ring_of_one_needs_no_peer(alone: Alone) -> None:
    part = RingPart(torch.ones(12), 0.5, 0, 1, 1, None)
    alone.allreduce.start(RoundId(0), {0: part}, alone.ended.append)
    assert alone.ended[0].averages[0].tolist() == 12 * [0.5]
    alone.allreduce.lost(alone.before, "gone")
    assert len(alone.ended) == 1
