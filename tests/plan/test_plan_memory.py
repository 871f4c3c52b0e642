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
    older_versions,
    size,
    stage_memory,
)
from ravnest.plan.profile import ModelProfile

LOAD: StageLoad[float] = StageLoad(
    state=100, trainable=80, largest=2, activations=10, incoming=5, transfer=7, backward=13
)


def test_each_purpose_is_counted() -> None:
    memory = stage_memory(LOAD, 3, MemorySettings(update_frequency=1, optimizer_factor=2.0))
    assert memory == StageMemory(
        weights=100,
        versions=240,
        gradients=80 + 13 - 10,
        optimizer=160,
        activations=45,
        transfer=7,
        averaging=0,
    )
    assert memory.total == 635


def test_averaging_keeps_copies_of_trained_parameters() -> None:
    assert averaging_copies() == 2
    assert averaging_copies(compressed=True) == 4
    assert averaging_copies(with_optimizer=True, optimizer_factor=2.0) == 6
    memory = stage_memory(LOAD, 3, MemorySettings(1, 2.0, averaging=2.0))
    assert (memory.averaging, memory.total) == (160, 635 + 160)


def test_the_update_can_be_the_peak() -> None:
    one_large = replace(LOAD, largest=50)
    assert stage_memory(one_large, 1, MemorySettings(1, 2.0, 2.0)).gradients == 80 + 2 * 50 - 10


def test_a_leaf_keeps_no_older_version() -> None:
    assert stage_memory(LOAD, 1, MemorySettings(1, 2.0)).versions == 0


@pytest.mark.parametrize(
    ("in_flight", "update_frequency", "versions"),
    [(1, 1, 0), (2, 1, 2), (2, 4, 1), (5, 4, 2), (8, 4, 2)],
)
def test_older_versions(in_flight: int, update_frequency: int, versions: int) -> None:
    assert older_versions(in_flight, update_frequency) == versions


def test_formatted_sizes() -> None:
    assert [size(n) for n in (900, 5e5, 2.4e7, 9.06e9)] == ["1 kB", "500 kB", "24 MB", "9.1 GB"]


def by_hand(profile: ModelProfile, start: int, stop: int, in_flight: int, frequency: int) -> float:
    """Compute the formula directly from the profile."""
    held = [t for t in profile.state if any(start <= u < stop for u in t.units)]
    trainable = sum(t.bytes for t in held if t.trainable)
    units = profile.units[start:stop]
    last = stop == len(profile.units)
    incoming = profile.units[start - 1].held_bytes if start else profile.input_bytes
    activations = [u.activation_bytes for u in units]
    largest = max((t.bytes for t in held if t.trainable), default=0)
    moments = [trainable + profile.update_copies * largest]
    for here, unit in enumerate(units, start):
        to_come = [t.bytes for t in held if t.trainable and start <= t.units[-1] <= here]
        made = trainable - (sum(to_come) if frequency == 1 else 0)
        moments.append(sum(activations[: here - start + 1]) + unit.workspace_bytes + made)
    return (
        sum(t.bytes for t in held)
        + (0 if in_flight == 1 else -(-in_flight // frequency)) * trainable
        + trainable * profile.optimizer_bytes_per_parameter_byte
        + (in_flight - 1) * sum(activations)
        + in_flight * incoming
        + (profile.output_bytes if last else units[-1].crossing_bytes + units[-1].gradient_bytes)
        + (profile.units[start - 1].gradient_bytes if start else 0)
        + max(moments)
    )


@given(profiles(), st.integers(1, 9), st.integers(1, 4))
@steady
def test_one_stage_and_a_grid_of_stages_agree_with_the_formula(
    profile: ModelProfile, in_flight: int, frequency: int
) -> None:
    costs = ModelCosts.of(profile, frequency)
    every = np.arange(costs.units + 1)
    grid = costs.memory_grid(every, every, in_flight)
    for start, stop in combinations(every.tolist(), 2):
        expected = by_hand(profile, start, stop, in_flight, frequency)
        assert costs.memory(start, stop, in_flight).total == expected
        assert grid[start, stop] == expected
    assert np.isinf(grid[np.tril_indices(len(every))]).all()


@given(profiles(), st.integers(1, 5))
@steady
def test_inner_memory_is_a_lower_bound_that_grows(profile: ModelProfile, in_flight: int) -> None:
    costs = ModelCosts.of(profile)
    every = np.arange(costs.units + 1)
    inner = costs.inner_memory_grid(every, every, in_flight)
    whole = costs.memory_grid(every, every, in_flight)
    for start, stop in combinations(every.tolist(), 2):
        assert inner[start, stop] <= whole[start, stop]
        if stop < costs.units:
            assert inner[start, stop] <= inner[start, stop + 1]
        if start:
            assert inner[start, stop] <= inner[start - 1, stop]
