"""Trimmed mean without a network: the tests deliver pieces in any order that links allow."""

import random
from collections import deque
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ravnest.averaging.ring import OutgoingChunk, RingReduce, RingShare
from ravnest.averaging.sinks import DeltaSink, Sink
from ravnest.averaging.trimmed_mean import (
    AHEAD,
    CONTRIBUTION_HOP,
    TrimmedReduce,
    TrimmedShare,
)
from ravnest.errors import WireError
from ravnest.store.robust_mean import trim_of, trimmed_mean

Lie = Callable[[Tensor], Tensor]
LIES: dict[str, Lie] = {
    "scaled": lambda values: 1000 * values,
    "sign flipped": lambda values: -values,
    "constant": lambda values: torch.full_like(values, 7.0),
    "zero": torch.zeros_like,
    "NaN": lambda values: torch.full_like(values, float("nan")),
    "infinite": lambda values: torch.full_like(values, float("inf")),
    "largest numbers": lambda values: torch.full_like(values, -3e38),
}


def vectors_of(
    members: int, elements: int, seed: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(elements, generator=generator, dtype=dtype) for _ in range(members)]


def shares_of(
    vectors: list[Tensor], piece: int, contributors: set[int] | None = None, **options: object
) -> list[TrimmedShare]:
    counted = frozenset(range(len(vectors)) if contributors is None else contributors)
    return [
        TrimmedShare(place, len(vectors), vector, counted, piece, **options)  # type: ignore[arg-type]
        for place, vector in enumerate(vectors)
    ]


def run(
    shares: list[TrimmedShare], order: random.Random, transmit: Lie = torch.clone
) -> tuple[list[TrimmedReduce], list[int]]:
    """Run all members to the end; return them and the number of values that each sent."""
    members = [TrimmedReduce(share) for share in shares]
    pairs = [(a, b) for a in range(len(members)) for b in range(len(members)) if a != b]
    links: dict[tuple[int, int], deque[OutgoingChunk]] = {pair: deque() for pair in pairs}
    sent = [0] * len(members)

    def send(member: int, outgoing: list[OutgoingChunk]) -> None:
        for item in outgoing:
            for pair in pairs:
                if pair[0] == member:
                    sent[member] += item.values.numel()
                    values = transmit(item.values)
                    links[pair].append(OutgoingChunk(item.segment, item.piece, item.hop, values))

    for number in order.sample(range(len(members)), len(members)):
        send(number, members[number].start())
    while busy := [pair for pair, link in links.items() if link]:
        pair = order.choice(busy)
        item = links[pair].popleft()
        send(pair[1], members[pair[1]].take(item.segment, item.piece, item.hop, item.values))
        assert len(members[pair[1]]._waiting) <= 2 * AHEAD
    return members, sent


def reference(vectors: list[Tensor]) -> Tensor:
    trim = trim_of(len(vectors))
    kept = torch.stack(vectors).double().sort(0).values[trim : len(vectors) - trim]
    return kept.mean(0)


@pytest.mark.parametrize(("members", "trim"), [(2, 0), (3, 1), (4, 1), (7, 1), (8, 2), (12, 3)])
def test_a_quarter_of_the_values_is_left_out_at_each_end(members: int, trim: int) -> None:
    assert trim_of(members) == trim


@settings(deadline=None, max_examples=30)
@given(
    members=st.integers(3, 9),
    elements=st.integers(0, 70),
    piece=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_result_is_the_trimmed_mean_and_the_same_everywhere(
    members: int, elements: int, piece: int, seed: int, dtype: torch.dtype
) -> None:
    vectors = vectors_of(members, elements, seed, dtype)
    before = [vector.clone() for vector in vectors]
    done, sent = run(shares_of(vectors, piece), random.Random(seed))
    assert all(member.done for member in done)
    torch.testing.assert_close(done[0].result.double(), reference(vectors), atol=1e-6, rtol=0)
    assert all(torch.equal(member.result, done[0].result) for member in done)
    assert len({member.digest for member in done}) == 1
    assert all(map(torch.equal, vectors, before))
    assert sent == [(members - 1) * elements] * members


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("members", [3, 4, 8])
@pytest.mark.parametrize("liar", [0, 2])
def test_a_liar_moves_no_value_beyond_those_of_the_honest_members(
    members: int, liar: int, lie: str
) -> None:
    vectors = vectors_of(members, 200, members)
    honest = torch.stack([vector for place, vector in enumerate(vectors) if place != liar])
    vectors[liar] = LIES[lie](vectors[liar])
    done, _ = run(shares_of(vectors, 32), random.Random(0))
    for member in done:
        assert bool((member.result <= honest.max(0).values).all())
        assert bool((member.result >= honest.min(0).values).all())
    # A ring's mean of the same vectors is as far away as the liar wants.
    mean = torch.stack(vectors).mean(0)
    if lie in ("scaled", "infinite", "NaN", "largest numbers"):
        assert not bool((mean <= honest.max(0).values).all() and (mean >= honest.min(0).values).all())


def test_two_liars_of_eight_are_left_out_too() -> None:
    vectors = vectors_of(8, 100, 1)
    honest = torch.stack(vectors[2:])
    vectors[0], vectors[1] = 1000 * vectors[0], torch.full((100,), float("nan"))
    done, _ = run(shares_of(vectors, 32), random.Random(0))
    assert bool((done[0].result <= honest.max(0).values).all())
    assert bool((done[0].result >= honest.min(0).values).all())


@given(st.integers(3, 12), st.integers(0, 2**32 - 1))
def test_the_mean_of_equal_values_is_exactly_this_value(members: int, seed: int) -> None:
    (value,) = vectors_of(1, 50, seed)
    found = trimmed_mean([value.numpy()] * members, trim_of(members))
    assert found.tobytes() == (value + 0.0).numpy().tobytes()


def test_without_trimming_it_is_the_mean() -> None:
    values = [np.float32([1, 2, 3]), np.float32([3, 2, 1]), np.float32([5, 5, 5])]
    assert trimmed_mean(values, 0).tolist() == [3, 3, 3]


@given(st.integers(3, 8), st.integers(0, 2**32 - 1))
def test_the_order_of_the_members_does_not_change_a_bit(members: int, seed: int) -> None:
    vectors = [vector.numpy() for vector in vectors_of(members, 40, seed)]
    vectors[0][:5], vectors[1][:5] = 0.0, -0.0
    trim = trim_of(members)
    mixed = random.Random(seed).sample(vectors, members)
    assert trimmed_mean(vectors, trim).tobytes() == trimmed_mean(mixed, trim).tobytes()


def test_members_that_do_not_contribute_receive_the_result() -> None:
    vectors = vectors_of(5, 30, 0)
    vectors[1] = torch.full((30,), float("nan"))
    done, sent = run(shares_of(vectors, 4, {0, 2, 3, 4}), random.Random(3))
    counted = [vector for place, vector in enumerate(vectors) if place != 1]
    torch.testing.assert_close(done[1].result.double(), reference(counted), atol=1e-6, rtol=0)
    assert len({member.digest for member in done}) == 1
    assert sent == [120, 0, 120, 120, 120]


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32 - 1))
def test_with_a_lossy_codec_all_members_hold_the_same(seed: int) -> None:
    def half(values: Tensor) -> Tensor:
        return values.half().float()

    vectors = vectors_of(4, 50, seed)
    shares = shares_of(vectors, 7, roundtrip=lambda _, values: half(values))
    done, _ = run(shares, random.Random(seed), half)
    assert all(torch.equal(member.result, done[0].result) for member in done)
    torch.testing.assert_close(done[0].result.double(), reference(vectors), atol=1e-2, rtol=0)


def test_the_result_may_overwrite_the_vector() -> None:
    vectors = [torch.full((11,), float(number)) for number in range(3)]
    run([TrimmedShare(p, 3, v, frozenset(range(3)), 2, sink=Sink(v)) for p, v in enumerate(vectors)],
        random.Random(1))  # fmt: skip
    assert [vector.tolist() for vector in vectors] == 3 * [11 * [1.0]]


def test_the_change_of_the_weights_overwrites_the_copy() -> None:
    copies = vectors_of(4, 60, 5)
    vectors = [vector.clone() for vector in copies]
    shares = [
        TrimmedShare(p, 4, v, frozenset(range(4)), 8, sink=DeltaSink(v, 40))
        for p, v in enumerate(vectors)
    ]
    run(shares, random.Random(2))
    mean = reference(copies).float()
    for vector, copy in zip(vectors, copies, strict=True):
        torch.testing.assert_close(vector[:40], (mean - copy)[:40], atol=1e-5, rtol=0)
        torch.testing.assert_close(vector[40:], mean[40:])


@pytest.fixture
def member() -> TrimmedReduce:
    """Return the second of four members; the last one does not contribute. Pieces have four values."""
    made = TrimmedReduce(TrimmedShare(1, 4, torch.ones(40), frozenset({0, 1, 2}), 4))
    assert len(made.start()) == AHEAD
    return made


@pytest.mark.parametrize(
    ("segment", "piece", "hop", "values", "words"),
    [
        (4, 0, 0, torch.ones(4), "position 4"),
        (-1, 0, 0, torch.ones(4), "position -1"),
        (1, 0, 0, torch.ones(4), "position 1"),
        (0, 1, 0, torch.ones(4), "expected 0 of 10"),
        (0, -1, 0, torch.ones(4), "expected 0 of 10"),
        (0, 0, 1, torch.ones(4), "same robust_mean on all nodes"),
        (0, 0, 0, torch.ones(3), "expected"),
        (0, 0, 0, torch.ones(0), "expected"),
        (3, 0, 0, torch.ones(4), "expected"),
        (0, 0, 0, torch.ones(4, 1), "expected"),
        (0, 0, 0, torch.ones(4, dtype=torch.float64), "expected"),
    ],
)
def test_a_wrong_piece_is_refused(
    member: TrimmedReduce, segment: int, piece: int, hop: int, values: Tensor, words: str
) -> None:
    with pytest.raises(WireError, match=words):
        member.take(segment, piece, hop, values)


def test_a_member_that_does_not_wait_for_the_others_is_refused(member: TrimmedReduce) -> None:
    for piece in range(2 * AHEAD):
        member.take(0, piece, CONTRIBUTION_HOP, torch.ones(4))
    with pytest.raises(WireError, match="has sent 2 pieces"):
        member.take(0, 2 * AHEAD, CONTRIBUTION_HOP, torch.ones(4))


def test_further_pieces_are_sent_when_all_keep_up(member: TrimmedReduce) -> None:
    for segment, count in ((0, 4), (2, 4)):
        assert member.take(segment, 0, CONTRIBUTION_HOP, torch.ones(count)) == []
    (following,) = member.take(3, 0, CONTRIBUTION_HOP, torch.ones(0))
    assert (following.segment, following.piece, following.hop) == (1, AHEAD, CONTRIBUTION_HOP)


def test_a_ring_refuses_pieces_for_a_robust_mean() -> None:
    ring = RingReduce(RingShare(1, 3, torch.ones(12), 1.0, 3))
    ring.start()
    with pytest.raises(WireError, match="same robust_mean on all nodes"):
        ring.take(0, 0, CONTRIBUTION_HOP, torch.ones(3))


# Training


@cache
def trained_loss(mean: Callable[[list[Tensor]], Tensor], lie: Lie | None = None) -> float:
    """Return the loss of four clusters that train in this process and average every five updates."""
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(512, 10, generator=draw)
    labels = (inputs @ torch.randn(10, 4, generator=draw)).argmax(1)
    models = [torch.nn.Linear(10, 4) for _ in range(4)]
    for model in models:
        model.load_state_dict({"weight": torch.zeros(4, 10), "bias": torch.zeros(4)})
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for update in range(1, 41):
        for cluster, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            rows = torch.arange(cluster, 512, 4).roll(-32 * update)[:32]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimizer.step()
        if update % 5 == 0:
            copies = [torch.nn.utils.parameters_to_vector(m.parameters()).detach() for m in models]
            copies[3] = copies[3] if lie is None else lie(copies[3])
            average = mean(copies)
            for model in models:
                torch.nn.utils.vector_to_parameters(average.clone(), model.parameters())
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(models[0](inputs), labels))


def plain(copies: list[Tensor]) -> Tensor:
    return torch.stack(copies).mean(0)


def robust(copies: list[Tensor]) -> Tensor:
    done, _ = run(shares_of(copies, 16), random.Random(0))
    return done[0].result


@pytest.mark.parametrize("lie", ["scaled", "sign flipped", "constant", "NaN"])
def test_training_with_a_liar_ends_near_the_honest_loss(lie: str) -> None:
    honest, spoilt = trained_loss(plain), trained_loss(plain, LIES[lie])
    assert honest < 0.4
    assert trained_loss(robust) < 1.1 * honest, "without a liar it costs little"
    assert trained_loss(robust, LIES[lie]) < 1.3 * honest
    assert not spoilt < 1.5 * honest, "the mean is spoilt"
