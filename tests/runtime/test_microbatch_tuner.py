"""The number of micro-batches by measured times."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from ravnest.plan.microbatches import StageTimes, choose_microbatches, cycle_seconds
from ravnest.runtime.batch_parts import BatchSplit, part_sizes
from ravnest.runtime.control import microbatch_tuner
from ravnest.runtime.control.microbatch_tuner import (
    CHOICES,
    LEAST_BATCHES,
    Measured,
    MicrobatchTuner,
    stage_times,
)
from ravnest.runtime.stage.observer import MicrobatchReport
from ravnest.wire.messages import StageTiming

SIZE = 96


@dataclass
class World:
    """Pipeline whose batches take what the formula says, times ``factor`` of the number of parts."""

    stages: tuple[StageTimes, ...]
    factor: dict[int, float] = field(default_factory=dict)
    now: float = 0.0
    said: list[str] = field(default_factory=list)
    tuner: MicrobatchTuner = field(default_factory=MicrobatchTuner)
    split: BatchSplit = field(default_factory=lambda: BatchSplit(SIZE, smallest=1))

    def train(self, batches: int = 4 * (CHOICES + 1) * LEAST_BATCHES) -> list[int]:
        """Train batches; return the numbers of micro-batches."""
        return [self.batch() for _ in range(batches)]

    def batch(self, size: int = SIZE, *, timed: bool = True) -> int:
        """Train one batch; return its number of micro-batches."""
        parts = self.tuner.parts(size, self.split)
        seconds = cycle_seconds(self.stages, parts) * self.factor.get(parts, 1.0)
        for part in range(parts):
            self.now += seconds / parts
            timings = self.timings(parts) if timed else ()
            change = self.tuner.add(MicrobatchReport(part, parts, size, timings), self.now)
            self.said += [str(change)] if change else []
        return parts

    def timings(self, parts: int) -> tuple[StageTiming, ...]:
        """Return the times of a micro-batch at all stages."""
        found, before = [], (0.0, 0.0)
        for position, stage in enumerate(self.stages, 1):
            third = (stage.compute / parts + stage.fixed) / 3
            link = (stage.link / parts + stage.latency, stage.link / parts)
            if position == len(self.stages):
                link = (0.0, 0.0)
            found.append(StageTiming(third, third, third, 0.0, *link, *before))
            before = link
        return tuple(found)


def stages(
    count: int, compute: float = 0.2, *, latency: float = 0.001, link: float = 0.0, fixed: float = 0.001
) -> tuple[StageTimes, ...]:
    """Return equal stages."""
    return (StageTimes(compute, link, 0, fixed, latency),) * count


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("latency", [0.0001, 0.02, 0.1])
@pytest.mark.parametrize("fixed", [0.0005, 0.001, 0.01])
@pytest.mark.parametrize("link", [0.0, 0.15])
def test_finds_a_number_that_is_about_as_fast_as_the_best(
    count: int, latency: float, fixed: float, link: float
) -> None:
    world = World(stages(count, latency=latency, fixed=fixed, link=link))
    parts = world.train()
    best = cycle_seconds(world.stages, choose_microbatches(world.stages, SIZE, 1))
    assert parts[0] == 1
    assert cycle_seconds(world.stages, parts[-1]) <= 1.12 * best


def test_says_what_it_has_chosen() -> None:
    world = World(stages(3))
    parts = world.train()
    assert parts[-1] > 1
    assert world.said[0] == (
        f"{parts[LEAST_BATCHES + 1]} micro-batches per batch from now on: faster than 1, by the "
        "measured times of stages and links"
    )


def test_keeps_a_number_that_is_good() -> None:
    world = World(stages(3))
    good = choose_microbatches(world.stages, SIZE, 1)
    world.split = BatchSplit(-(-SIZE // good), smallest=1)
    assert set(world.train()) == {world.split.parts(SIZE)}
    assert world.said == []


def test_goes_back_if_training_did_not_become_faster() -> None:
    world = World(stages(3), factor={1: 0.2})
    parts = world.train()
    assert parts[-1] == 1
    assert len(set(parts)) == 2
    assert world.said[-1] == f"1 micro-batch per batch from now on: {max(parts)} were not faster"


def test_goes_back_from_fewer_that_were_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = iter((12, 6))
    monkeypatch.setattr(microbatch_tuner, "choose_microbatches", lambda *_: next(chosen))
    monkeypatch.setattr(microbatch_tuner, "WORTHWHILE", float("inf"))
    world = World(stages(3), factor={6: 5.0})
    assert world.train()[-1] == 12
    assert world.said[-1] == "12 micro-batches per batch from now on: 6 were not faster"


def test_leaves_very_short_batches_alone() -> None:
    assert set(World(stages(3, 0.002, fixed=0.0001, latency=0.0001)).train()) == {1}


def test_respects_the_smallest_part() -> None:
    world = World(stages(8), split=BatchSplit(SIZE, smallest=40))
    assert max(world.train()) == 2


def test_smaller_batches_have_parts_of_the_same_size_and_are_not_measured() -> None:
    world = World(stages(3))
    world.train()
    parts = world.tuner.current
    rows = max(part_sizes(SIZE, parts))
    assert world.batch(SIZE // 2) == -(-SIZE // 2 // rows)
    assert world.batch(1) == 1
    assert world.tuner.current == parts


@pytest.mark.parametrize("batches", [2, 3, 4])
def test_short_epochs_are_measured_together_and_interruptions_are_not(batches: int) -> None:
    world, whole = World(stages(3)), World(stages(3))
    for _ in range(4 * (CHOICES + 1) * LEAST_BATCHES):
        world.train(batches)
        # An epoch that ends with a long one would not be faster than the one before.
        world.now += 100.0 * (1 + world.tuner.current)
        world.tuner.pause()
    whole.train()
    assert world.said == whole.said
    assert world.tuner.current == whole.tuner.current > 1


def test_needs_no_times_of_every_micro_batch() -> None:
    world = World(stages(3))
    for number in range(40):
        world.batch(timed=number % 3 == 0)
    assert world.tuner.current > 1


def test_two_measurements_tell_the_fixed_part_of_a_stage() -> None:
    true = stages(3, fixed=0.004, latency=0.01, link=0.03)

    def measured(parts: int) -> Measured:
        each = tuple(stage.compute / parts + stage.fixed for stage in true)
        links = tuple((stage.link / parts, stage.latency) for stage in true[:-1])
        return Measured(parts, each, links, 1.0)

    for found, stage in zip(stage_times(measured(8), measured(2)), true, strict=True):
        assert found.fixed == pytest.approx(stage.fixed)
        assert found.compute == pytest.approx(stage.compute)
    assert [found.link for found in stage_times(measured(8))] == pytest.approx([0.03, 0.03, 0.0])
