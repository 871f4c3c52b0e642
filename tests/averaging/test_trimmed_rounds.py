"""Rounds with a trimmed mean: over links, at the coordinator, and with whole averaging services."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from averaging_nodes import RINGS, mesh_of
from fake_link import FakeLink
from round_cases import Case, weights
from service_clusters import SECONDS, Outside, Process
from torch import Tensor

from ravnest.averaging.allreduce import AllReduce, AllReduceResult, RingPart, TrimmedPart
from ravnest.averaging.outcome import RoundOutcome
from ravnest.transport.base import Transport
from ravnest.transport.memory import MemoryNetwork
from ravnest.wire.messages import Message, RingChunk, RoundId

Opener = Callable[[], Transport]
ALL = frozenset(range(4))


def trimmed(vectors: list[Tensor]) -> Tensor:
    """Return the mean of the values of each element without the largest and the smallest one."""
    return torch.stack(vectors).sort(0).values[1:-1].mean(0)


@pytest.mark.parametrize("contributors", [ALL, ALL - {1}], ids=["all", "without one"])
def test_all_rings_have_the_trimmed_mean(opener: Opener, contributors: frozenset[int]) -> None:
    members = mesh_of(4, opener)
    for number in range(2):
        for member in members:
            member.start_trimmed(RoundId(number), 4, contributors)
        results = [member.end() for member in members]
        assert [(result.problem, result.round) for result in results] == 4 * [("", RoundId(number))]
        for ring in RINGS:
            expected = trimmed([members[each].vectors()[ring] for each in sorted(contributors)])
            torch.testing.assert_close(results[0].averages[ring], expected, atol=1e-6, rtol=0)
            assert len({result.digests[ring] for result in results}) == 1
        sent = [12 * sum(RINGS.values()) if each in contributors else 0 for each in range(4)]
        assert [result.sent_bytes for result in results] == sent


def test_early_values_are_buffered(opener: Opener) -> None:
    members = mesh_of(3, opener)
    members[0].start_trimmed(RoundId(1), 3)
    members[1].arrived.get(timeout=20)
    members[2].start_trimmed(RoundId(1), 3)
    members[1].start_trimmed(RoundId(1), 3)
    results = [member.end() for member in members]
    assert [result.problem for result in results] == 3 * [""]


def test_a_lost_member_ends_the_round_for_all(network: MemoryNetwork) -> None:
    members = mesh_of(4, network.transport)
    for member in members[:3]:
        member.start_trimmed(RoundId(0), 4)
    for other in range(3):
        network.cut(3, other)
    for member in members[:3]:
        result = member.end()
        assert (result.averages, result.peer) == ({}, 3)


class Alone:
    """The second of three members; the test plays the others."""

    def __init__(self) -> None:
        self.allreduce = AllReduce({0: 12}, piece_bytes=16)
        self.links = FakeLink(10), FakeLink(12)
        self.ended: list[AllReduceResult] = []

    def start(self) -> None:
        part = TrimmedPart(frozenset(range(3)), {10: 0, 12: 2}, self.links)
        whole = RingPart(torch.ones(12), 1.0, 1, 3, 10, None, trimmed=part)
        self.allreduce.start(RoundId(0), {0: whole}, self.ended.append)

    def take(self, link: FakeLink, *place: int, count: int = 4) -> None:
        message = Message(RingChunk(RoundId(0), 0, *place), {"values": torch.full((count,), 5.0)})
        self.allreduce.take(link, message)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("node", "place", "words"),
    [
        (
            10,
            (2, 0, 0),
            "node_10 sent a wrong chunk of ring 0: it sends values of the member at position 2",
        ),
        (11, (0, 0, 0), "chunks of this ring must come from node_10 or node_12"),
        (10, (0, 0, 1), "use the same robust_mean on all nodes"),
        (10, (0, 1, 0), "expected 0 of 3"),
    ],
)
def test_a_member_speaks_for_itself_only(
    early: bool, node: int, place: tuple[int, ...], words: str
) -> None:
    alone = Alone()
    if not early:
        alone.start()
    alone.take(FakeLink(node), *place)
    if early:
        alone.start()
    (result,) = alone.ended
    assert words in result.problem
    assert result.peer == node


def test_early_values_of_each_member_are_limited() -> None:
    alone = Alone()
    for link in alone.links:
        for piece in range(2):
            alone.take(link, 0 if link.peer.node == 10 else 2, piece, 0)
    alone.start()
    assert alone.ended == []
    alone = Alone()
    for piece in range(3):
        alone.take(alone.links[0], 0, piece, 0)
    alone.start()
    assert alone.ended[0].problem == "node_10 sent more chunks of ring 0 than the ring has"


# The coordinator


def test_clusters_that_contribute_count_the_same() -> None:
    case = Case(4, robust=True)
    case.request(1)
    for cluster, samples in enumerate((320, 10**12, 0)):
        case.prepared(cluster, samples=samples)
    assert weights(case.prepared(3, samples=64)) == {0: 1 / 3, 1: 1 / 3, 2: 0.0, 3: 1 / 3}
    case.all_reduce(0, 1, 2, 3)
    words = "averaged clusters 0, 1, 2, 3 (without the 1 largest and smallest of each value)"
    assert words in case.outcome.describe()


def test_of_two_clusters_it_is_the_mean() -> None:
    case = Case(2, robust=True)
    case.request(1)
    case.prepared(0, samples=320)
    assert weights(case.prepared(1, samples=640)) == {0: 0.5, 1: 0.5}
    case.all_reduce(0, 1)
    assert case.outcome.trimmed == 0
    assert "(weights 0.50, 0.50)" in case.outcome.describe()


@pytest.mark.parametrize(
    "third", [{"problem": "its copy has NaN"}, {"samples": 0}, {"scales": {0: 1e30}}, {"behind": True}]
)
def test_a_cluster_cannot_turn_the_robust_mean_into_a_plain_one(third: dict[str, object]) -> None:
    """It said that its copy has NaN, and completed the sums of the other two in a ring."""
    case = Case(3, robust=True)
    case.request(1)
    case.prepared(0, samples=320, scales={0: 1.0})
    case.prepared(1, samples=640, scales={0: 1.0})
    assert weights(case.prepared(2, **third)) == {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}  # type: ignore[arg-type]
    case.all_reduce(0, 1, 2)
    assert case.outcome.trimmed == 1


def test_a_round_of_fewer_clusters_than_a_robust_mean_needs_is_not_held() -> None:
    case = Case(3, robust=True)
    case.request(1)
    case.prepared(0)
    case.prepared(1)
    case.wait(1000)
    assert not case.outcome.committed
    assert "only clusters 0, 1 take part, and a robust mean needs 3" in case.outcome.reason
    case.lost(2)
    case.request(1, updates=16)
    case.all_prepare(0, 1)
    case.all_reduce(0, 1)
    assert case.outcome.committed


# Whole services


class Liar(Process):
    """A cluster whose values are wrong in every round."""

    def lie(self, change: Callable[[Tensor], Tensor]) -> None:
        true = self.weights.copy

        def copy(*, idle: bool, then: Callable[[dict[int, Tensor]], None]) -> None:
            true(idle=idle, then=lambda copied: then({0: change(copied[0])}))

        self.weights.copy = copy  # type: ignore[method-assign]


Opened = Callable[..., list[Process]]


@pytest.fixture
def opened() -> Iterator[Opened]:
    made: list[Process] = []

    def start(clusters: int, codec: str = "raw") -> list[Process]:
        outside = Outside(MemoryNetwork(), clusters, "blocking", codec, robust_mean="trimmed")
        made.extend(Liar(outside, cluster) for cluster in range(clusters))
        threads = [threading.Thread(target=process.open) for process in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        return made

    yield start
    for process in made:
        process.service.close(None)
        process.transport.close()
        assert process.errors == []


def blocking_round(processes: list[Process]) -> RoundOutcome:
    for process in processes:
        process.service.updated(8)
        process.service.pause(final=False)
    outcome = processes[0].outside.outcomes.get(timeout=SECONDS)
    for process in processes:
        process.released.get(timeout=SECONDS)
    return outcome


LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "sign flipped": lambda values: -values,
    "constant": lambda values: torch.full_like(values, 5.0),
    "five times as large": lambda values: 5 * values,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_cluster_moves_nothing_beyond_the_others(opened: Opened, lie: str) -> None:
    processes = opened(4)
    honest = torch.stack([process.weights.values for process in processes if process.cluster != 2])
    processes[2].lie(LIES[lie])  # type: ignore[attr-defined]
    outcome = blocking_round(processes)
    assert outcome.committed, outcome.describe()
    assert outcome.trimmed == 1
    for process in processes:
        assert bool((process.weights.values <= honest.max(0).values).all())
        assert bool((process.weights.values >= honest.min(0).values).all())
        assert torch.equal(process.weights.values, processes[0].weights.values)


def test_compressed_rounds_agree(opened: Opened) -> None:
    processes = opened(3, "fp16")
    for number in range(3):
        expected = trimmed([process.weights.values for process in processes])
        outcome = blocking_round(processes)
        assert outcome.committed, outcome.describe()
        for process in processes:
            assert torch.equal(process.weights.values, processes[0].weights.values)
            torch.testing.assert_close(process.weights.values, expected, atol=1e-2, rtol=0)
        for process in processes:
            noise = torch.Generator().manual_seed(10 * number + process.cluster)
            process.weights.values = process.weights.values + 0.1 * torch.randn(3000, generator=noise)


def test_values_that_differ_between_receivers_are_not_applied(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that tells each other member something else is noticed by the digests."""
    processes = opened(3)
    before = [process.weights.values.clone() for process in processes]
    liar = processes[1].service._reducer.allreduce
    true = type(liar)._send

    def send(self: AllReduce, current: object, ring: object, outgoing: object) -> None:
        if self is liar:
            part = ring.part  # type: ignore[attr-defined]
            for link in part.receivers:
                for item in outgoing:  # type: ignore[attr-defined]
                    head = RingChunk(current.id, 0, item.segment, item.piece, item.hop)  # type: ignore[attr-defined]
                    told = item.values + link.peer.node
                    link.send(Message(head, {"values": told}, frozenset({"values"})))
        else:
            true(self, current, ring, outgoing)  # type: ignore[arg-type]

    monkeypatch.setattr(AllReduce, "_send", send)
    outcome = blocking_round(processes)
    assert not outcome.committed
    assert "the averages of ring 0 differ" in outcome.reason
    assert all(map(torch.equal, before, [process.weights.values for process in processes]))


def test_two_clusters_that_are_left_average_without_the_third(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = opened(3)
    assert blocking_round(processes).trimmed == 1
    processes[2].kill()
    left = processes[:2]
    direct: list[bool] = []
    true = AllReduce.start

    def start(self: AllReduce, of: RoundId, parts: dict[int, RingPart], on_end: object) -> None:
        direct.extend(part.trimmed is not None for part in parts.values())
        true(self, of, parts, on_end)  # type: ignore[arg-type]

    monkeypatch.setattr(AllReduce, "start", start)
    outcome = blocking_round(left)
    for _ in range(5):
        if outcome.committed and 2 not in outcome.weights:
            break  # before, one or both had not noticed the loss
        assert 1 not in outcome.missing, "who has not noticed it yet is not to blame"
        outcome = blocking_round(left)
    assert outcome.committed, outcome.describe()
    assert outcome.trimmed == 0
    assert direct
    assert all(direct), "nobody sums what others sent"
    assert torch.equal(left[0].weights.values, left[1].weights.values)
