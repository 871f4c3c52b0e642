"""The memory formula, for one stage and for a grid of stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import profiles, steady

from ravnest.plan.cost import ModelCosts
from ravnest.plan.memory import (
    MemorySettings,
    StageLoad,
    StageMemory,
    averaging_copies,
    memory_range,
    size,
    stage_memory,
)
from ravnest.plan.profile import ModelProfile
from ravnest.transport.acknowledgements import ACK_BYTES

LOAD: StageLoad[float] = StageLoad(
    state=100,
    trainable=80,
    owned=80,
    largest=2,
    largest_owned=2,
    activations=10,
    deferred=0,
    incoming=5,
    inputs=6,
    leaving=3,
    outputs=7,
    returning=4,
    sent_back=2,
    shared=0,
    backward=13,
    undeferred=12,
)
DELAYED = MemorySettings(optimizer_factor=2.0, max_delay=1)
SPLIT = MemorySettings(optimizer_factor=2.0, share=1 / 2, part=1 / 8, accumulates=True)


def test_each_purpose_is_counted() -> None:
    memory = stage_memory(LOAD, 3, DELAYED)
    assert memory == StageMemory(
        weights=100,
        versions=80,
        gradients=80 + 13 - 10,
        optimizer=160,
        activations=30,
        transfer=14,
        averaging=0,
        unacknowledged=2 * (7 + 2),
    )
    assert memory.total == 485


def test_links_keep_what_is_in_flight_until_it_is_acknowledged() -> None:
    assert stage_memory(LOAD, 3, SPLIT).unacknowledged == (7 + 2) / 2
    root, leaf = replace(LOAD, sent_back=0), replace(LOAD, outputs=0)
    assert stage_memory(root, 3, SPLIT).unacknowledged == 7 / 2
    assert stage_memory(leaf, 1, SPLIT).unacknowledged == 2 / 2
    averaged = stage_memory(LOAD, 3, replace(SPLIT, averaging=2.0))
    assert averaged.unacknowledged == (7 + 2) / 2 + 80


def test_a_link_keeps_no_more_than_what_makes_the_peer_acknowledge() -> None:
    large = replace(LOAD, outputs=1e9, sent_back=1e9, owned=1e9)
    assert stage_memory(large, 3, SPLIT).unacknowledged == 2 * ACK_BYTES
    averaged = stage_memory(large, 3, replace(SPLIT, averaging=2.0))
    assert averaged.unacknowledged == 3 * ACK_BYTES


def test_a_batch_that_is_split_keeps_a_share_and_works_on_a_part() -> None:
    """Three eighths wait, one runs backward, and a gradient is added to the others."""
    memory = stage_memory(LOAD, 3, SPLIT)
    assert memory.versions == 0
    assert memory.activations == (10 + 5) / 2
    assert memory.transfer == 3 / 2 + 2 * 4 / 8
    assert memory.gradients + memory.activations == 80 + 3 * (10 + 5) / 8 + (13 + 5) / 8 + 2


def test_deferred_weight_gradients_can_need_more_than_activations() -> None:
    more = stage_memory(replace(LOAD, deferred=40), 3, SPLIT)
    assert more.gradients + more.activations == 80 + 40 / 2 + 2


def test_a_single_micro_batch_that_is_not_deferred_needs_less() -> None:
    load = replace(LOAD, deferred=40, backward=45)
    alone = MemorySettings(optimizer_factor=2.0)
    assert stage_memory(load, 3, alone).gradients == 80 + 45 - 10
    assert stage_memory(load, 3, alone, defers=False).gradients == 80 + 12 - 10
    needs = memory_range(load, 3, alone)
    assert needs.most - needs.least == 45 - 12
    several = memory_range(load, 3, replace(SPLIT, recompute=False))
    assert several.least == several.most


def test_averaging_keeps_copies_of_trained_parameters() -> None:
    assert averaging_copies() == 2
    assert averaging_copies(compressed=True) == 4
    assert averaging_copies(with_optimizer=True, optimizer_factor=2.0) == 6
    memory = stage_memory(LOAD, 3, replace(DELAYED, averaging=2.0))
    assert (memory.averaging, memory.total) == (160, 485 + 160 + 80)


def test_the_update_can_be_the_peak() -> None:
    one_large = replace(LOAD, largest=50, largest_owned=50)
    memory = stage_memory(one_large, 1, MemorySettings(2.0, update_copies=2.0))
    assert memory.gradients + memory.activations == 80 + 2 * 50


def test_a_leaf_keeps_no_older_version() -> None:
    memory = stage_memory(LOAD, 1, DELAYED)
    assert (memory.versions, memory.activations) == (0, 15)


def test_weights_that_an_earlier_stage_updates_need_no_optimizer_state() -> None:
    memory = stage_memory(replace(LOAD, owned=30, largest_owned=0), 1, replace(DELAYED, averaging=2.0))
    assert (memory.weights, memory.optimizer, memory.averaging) == (100, 60, 60)


def test_what_is_not_kept_needs_its_inputs() -> None:
    """Two eighths are kept, one of them runs backward; two of four eighths in flight are recomputed."""
    memory = stage_memory(LOAD, 3, SPLIT, 2 / 8)
    assert memory.activations == 2 * (10 + 5) / 8 + 2 * 6 / 8
    assert memory.transfer == pytest.approx(2 * 3 / 8 + 2 / 3 * 7 / 8 + 2 * 4 / 8)
    assert memory.gradients == 80 + (10 + 5) / 8 + (13 + 5) / 8 + 2 - 2 * (10 + 5) / 8
    delayed = stage_memory(LOAD, 3, DELAYED, 1)
    assert (delayed.versions, delayed.activations) == (80, 15 + 6)


@given(profiles(), st.integers(1, 4), st.floats(0, 1))
@steady
def test_what_a_stage_keeps_fits_its_ram(profile: ModelProfile, behind: int, where: float) -> None:
    costs = ModelCosts.of(profile, part=1.0 if profile.smallest_rows is None else 1 / 8)
    for start, stop in combinations(range(costs.units + 1), 2):
        least, most = costs.least_memory(start, stop, behind), costs.memory(start, stop, behind).total
        assert least <= most
        ram = least + where * (most - least)
        kept = costs.kept_batches(start, stop, behind, ram)
        assert costs.training.part <= kept * (1 + 1e-9)
        defers = costs.defers(start, stop, behind, ram)
        assert costs.memory(start, stop, behind, kept, defers=defers).total <= ram * (1 + 1e-9) + 1e-6


def test_formatted_sizes() -> None:
    assert [size(n) for n in (900, 5e5, 2.4e7, 9.06e9)] == ["1 kB", "500 kB", "24 MB", "9.1 GB"]


def by_hand(
    profile: ModelProfile,
    start: int,
    stop: int,
    in_flight: int,
    frequency: int,
    share: float,
    *,
    defers: bool = True,
) -> float:
    """Compute the formula directly from the profile; a micro-batch is a quarter of the share."""
    held = [t for t in profile.state if any(start <= u < stop for u in t.units)]
    trainable = sum(t.bytes for t in held if t.trainable)
    largest = max((t.bytes for t in held if t.trainable), default=0)
    owned = [t.bytes for t in held if t.trainable and start <= t.units[0]]
    units = profile.units[start:stop]
    last = stop == len(profile.units)
    splits = profile.smallest_rows is not None
    part = share / 4 if splits else 1.0
    share = share if splits else 1.0
    delay = 1 if not splits and in_flight > 1 else 0
    accumulates = splits or frequency > 1
    incoming = profile.units[start - 1].held_bytes if start else profile.input_bytes
    activations = [u.activation_bytes for u in units]
    deferred = [u.deferred_bytes if start and defers else 0 for u in units]
    passes = [sum(deferred)]
    for here, unit in enumerate(units, start):
        to_come = [t.bytes for t in held if t.trainable and start <= t.units[-1] <= here]
        made = 0 if accumulates else -sum(to_come)
        workspace = unit.passing_bytes if accumulates else unit.workspace_bytes
        if here == len(profile.units) - 1:
            workspace = max(workspace, profile.loss_bytes)
        upto = here - start + 1
        passes.append(sum(activations[:upto]) + sum(deferred[upto:]) + workspace + made + incoming)
    kept = max(sum(activations) + incoming, sum(deferred))
    backward = (share - part) * kept + part * max(passes)
    if accumulates:
        backward = max(backward, share * kept) + largest
    leaving = 0 if last else units[-1].sent_bytes
    returning = 0 if last else units[-1].gradient_bytes
    tied = [t for t in profile.state if t.trainable and t.units[0] < stop <= t.units[-1]]
    back = profile.units[start - 1].gradient_bytes if start else 0
    returning += back
    onward = 0 if last else units[-1].crossing_bytes
    flying = share * (1 + delay)
    passing = sorted(t.bytes for t in tied if t not in held)[-2:]
    return (
        sum(t.bytes for t in held)
        + delay * (sum(owned) + sum(activations) + incoming)
        + trainable
        + sum(owned) * profile.optimizer_bytes_per_parameter_byte
        + (share * leaving + min(share, 2 * part) * returning) * (1 + delay)
        + max(
            backward + sum(t.bytes for t in tied if t in held) + sum(passing),
            profile.update_copies * max(owned, default=0),
        )
        + min(flying * onward, ACK_BYTES)
        + min(flying * back, ACK_BYTES)
    )


@given(profiles(), st.integers(1, 9), st.integers(1, 4), st.sampled_from((1.0, 0.5, 0.125)))
@steady
def test_one_stage_and_a_grid_of_stages_agree_with_the_formula(
    profile: ModelProfile, in_flight: int, frequency: int, share: float
) -> None:
    splits = profile.smallest_rows is not None
    shares = {"share": share, "part": share / 4} if splits else {}
    costs = ModelCosts.of(profile, frequency, **shares)
    every = np.arange(costs.units + 1)
    grid = costs.memory_grid(every, every, in_flight)
    for start, stop in combinations(every.tolist(), 2):
        expected = by_hand(profile, start, stop, in_flight, frequency, share)
        assert costs.memory(start, stop, in_flight).total == expected
        assert grid.most[start, stop] == expected
        whole = by_hand(profile, start, stop, in_flight, frequency, share, defers=False)
        assert costs.memory(start, stop, in_flight, defers=False).total == whole
        if not splits and in_flight == 1:
            assert grid.least[start, stop] == min(whole, expected)
    assert np.isinf(grid.most[np.tril_indices(len(every))]).all()


@given(profiles(), st.integers(1, 5))
@steady
def test_inner_memory_is_a_lower_bound_that_grows(profile: ModelProfile, in_flight: int) -> None:
    costs = ModelCosts.of(profile)
    every = np.arange(costs.units + 1)
    inner = costs.inner_memory_grid(every, every, in_flight)
    whole = costs.memory_grid(every, every, in_flight).least
    for start, stop in combinations(every.tolist(), 2):
        assert inner[start, stop] <= whole[start, stop]
        if stop < costs.units:
            assert inner[start, stop] <= inner[start, stop + 1]
        if start:
            assert inner[start, stop] <= inner[start - 1, stop]
