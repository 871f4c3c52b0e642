"""One ring without a network: the tests deliver pieces in any order that links allow."""

import random
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ravnest.averaging.ring import AHEAD, OutgoingChunk, RingReduce, RingShare
from ravnest.averaging.sinks import DeltaSink, Sink
from ravnest.errors import WireError


def run(
    shares: list[RingShare], order: random.Random, transmit: object = None
) -> tuple[list[RingReduce], list[int]]:
    """Run all members to the end; return them and the number of values that each sent."""
    members = [RingReduce(share) for share in shares]
    links: list[deque[OutgoingChunk]] = [deque() for _ in members]
    sent = [0] * len(members)

    def send(member: int, outgoing: list[OutgoingChunk]) -> None:
        for item in outgoing:
            sent[member] += item.values.numel()
            values = transmit(item.values) if callable(transmit) else item.values.clone()
            links[member].append(OutgoingChunk(item.segment, item.piece, item.hop, values))

    for number in order.sample(range(len(members)), len(members)):
        send(number, members[number].start())
    while busy := [number for number, link in enumerate(links) if link]:
        source = order.choice(busy)
        target = (source + 1) % len(members)
        item = links[source].popleft()
        send(target, members[target].take(item.segment, item.piece, item.hop, item.values))
    return members, sent


def shares_of(
    vectors: list[Tensor], weights: list[float], piece: int, **options: object
) -> list[RingShare]:
    return [
        RingShare(place, len(vectors), vector, weight, piece, **options)  # type: ignore[arg-type]
        for place, (vector, weight) in enumerate(zip(vectors, weights, strict=True))
    ]


@settings(deadline=None)
@given(
    members=st.integers(1, 8),
    elements=st.integers(0, 70),
    piece=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_result_is_the_weighted_mean_and_the_same_everywhere(
    members: int, elements: int, piece: int, seed: int, dtype: torch.dtype
) -> None:
    order = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(elements, generator=generator, dtype=dtype) for _ in range(members)]
    weights = [order.choice([0.0, order.random()]) for _ in range(members)]
    before = [vector.clone() for vector in vectors]
    done, sent = run(shares_of(vectors, weights, piece), order)
    assert all(member.done for member in done)
    exact = sum(
        (v.double() * w for v, w in zip(vectors, weights, strict=True)), torch.zeros(()).double()
    )
    tolerance = 1e-6 if dtype is torch.float32 else 1e-14
    torch.testing.assert_close(
        done[0].result.double(), exact.expand(elements), atol=tolerance * members, rtol=0
    )
    assert all(torch.equal(member.result, done[0].result) for member in done)
    assert len({member.digest for member in done}) == 1
    assert all(map(torch.equal, vectors, before))
    assert sum(sent) == 2 * (members - 1) * elements
    if members <= elements:
        assert max(sent) <= 2 * (members - 1) * -(-elements // members)


def test_a_member_with_weight_zero_may_hold_any_values() -> None:
    vectors = [torch.full((10,), float("nan")), torch.ones(10), torch.full((10,), 3.0)]
    done, _ = run(shares_of(vectors, [0.0, 0.5, 0.5], 2), random.Random(0))
    assert all(member.result.tolist() == [2.0] * 10 for member in done)


def test_a_single_member_with_weight_zero_gives_zeros() -> None:
    alone = RingReduce(RingShare(0, 1, torch.full((3,), float("nan")), 0.0, 2))
    assert alone.start() == []
    assert alone.result.tolist() == [0, 0, 0]


@given(st.integers(2, 5), st.integers(0, 2**32 - 1))
def test_with_a_lossy_codec_all_members_hold_the_same(members: int, seed: int) -> None:
    def half(values: Tensor) -> Tensor:
        return values.half().float()

    def roundtrip(name: str, values: Tensor) -> Tensor:
        return half(values)

    vectors = [torch.randn(50) for _ in range(members)]
    done, _ = run(
        shares_of(vectors, [1 / members] * members, 7, roundtrip=roundtrip), random.Random(seed), half
    )
    assert all(torch.equal(member.result, done[0].result) for member in done)
    torch.testing.assert_close(done[0].result, sum(vectors) / members, atol=1e-2, rtol=0)


def test_the_result_may_overwrite_the_vector() -> None:
    vectors = [torch.full((11,), float(number)) for number in range(3)]
    shares = [
        RingShare(place, 3, vector, 1 / 3, 2, sink=Sink(vector)) for place, vector in enumerate(vectors)
    ]
    run(shares, random.Random(1))
    assert all(torch.equal(vector, vectors[0]) for vector in vectors)
    torch.testing.assert_close(vectors[0], torch.ones(11))


@given(st.integers(1, 4), st.integers(0, 60), st.booleans(), st.integers(0, 2**32 - 1))
def test_the_change_of_the_weights_overwrites_the_copy(
    members: int, moving: int, relative: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    last = torch.randn(60, generator=generator)
    copies = [torch.randn(60, generator=generator) for _ in range(members)]
    vectors = [vector - last if relative else vector.clone() for vector in copies]
    kept = [last.clone() for _ in copies]
    shares = [
        RingShare(
            place, members, vector, 1 / members, 4, sink=DeltaSink(vector, moving, average, relative)
        )
        for place, (vector, average) in enumerate(zip(vectors, kept, strict=True))
    ]
    done, _ = run(shares, random.Random(seed))
    mean = torch.stack(copies).mean(0)
    torch.testing.assert_close(kept[0], mean)
    assert all(torch.equal(average, kept[0]) for average in kept)
    assert len({member.digest for member in done}) == 1
    for vector, before in zip(vectors, copies, strict=True):
        torch.testing.assert_close(vector[:moving], mean[:moving] - before[:moving], atol=1e-5, rtol=0)
        assert torch.equal(vector[moving:], kept[0][moving:])


def test_the_number_of_own_pieces_in_flight_is_limited() -> None:
    pieces = 3 * AHEAD
    first, second = (
        RingReduce(share) for share in shares_of([torch.ones(2 * pieces)] * 2, [0.5, 0.5], 1)
    )
    sent = first.start()
    assert len(sent) == AHEAD
    second.start()
    back = [second.take(item.segment, item.piece, item.hop, item.values) for item in sent]
    (final,) = back[0]
    (following,) = first.take(final.segment, final.piece, final.hop, final.values)
    assert (following.segment, following.piece, following.hop) == (0, AHEAD, 1)


@pytest.fixture
def member() -> RingReduce:
    """Return the second of three members, with segments of four values in pieces of three and one."""
    made = RingReduce(RingShare(1, 3, torch.ones(12), 1.0, 3))
    made.start()
    return made


@pytest.mark.parametrize(
    ("segment", "piece", "hop", "values", "words"),
    [
        (3, 0, 1, torch.ones(3), "does not exist"),
        (-1, 0, 1, torch.ones(3), "does not exist"),
        (0, 2, 1, torch.ones(3), "does not exist"),
        (0, -1, 1, torch.ones(3), "does not exist"),
        (0, 0, 2, torch.ones(3), "expected 1"),
        (0, 0, 4, torch.ones(3), "expected 1"),
        (1, 0, 1, torch.ones(3), "expected 3"),
        (0, 0, 1, torch.ones(4), "expected"),
        (0, 1, 1, torch.ones(3), "expected"),
        (0, 0, 1, torch.ones(3, 1), "expected"),
        (0, 0, 1, torch.ones(3, dtype=torch.float64), "expected"),
        (0, 0, 1, torch.ones(3, dtype=torch.int32), "expected"),
    ],
)
def test_a_wrong_piece_is_refused(
    member: RingReduce, segment: int, piece: int, hop: int, values: Tensor, words: str
) -> None:
    with pytest.raises(WireError, match=words):
        member.take(segment, piece, hop, values)


def test_a_repeated_piece_is_refused(member: RingReduce) -> None:
    member.take(0, 0, 1, torch.ones(3))
    with pytest.raises(WireError, match="expected 4"):
        member.take(0, 0, 1, torch.ones(3))
    member.take(0, 0, 4, torch.ones(3))
    with pytest.raises(WireError, match="complete already"):
        member.take(0, 0, 4, torch.ones(3))


def test_a_piece_moves_on_independently_of_others(member: RingReduce) -> None:
    (sent,) = member.take(0, 1, 1, torch.ones(1))
    assert (sent.segment, sent.piece, sent.hop, sent.values.tolist()) == (0, 1, 2, [2.0])
