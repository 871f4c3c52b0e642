"""Memory choices that the stages of a pipeline share: micro-batches in flight, their size, versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ravnest.plan.cost import ModelCosts
from ravnest.plan.profile import ModelProfile
from ravnest.types import ScheduleSetting


@dataclass(frozen=True)
class MemoryStep:
    """Choice that all stages of a plan share; each recomputes as much as its RAM makes necessary."""

    share: float
    """Share of a batch in flight."""
    part: float
    """Part of a batch that a micro-batch has at most."""
    max_delay: int = 0
    """Updates by which gradients may be late."""

    def costs(
        self,
        profile: ModelProfile,
        update_frequency: int = 1,
        averaging: float = 0.0,
        *,
        recompute: bool = True,
    ) -> ModelCosts:
        """Return the costs of a model with this choice."""
        return ModelCosts.of(
            profile,
            update_frequency,
            averaging,
            self.share,
            self.part,
            max_delay=self.max_delay,
            recompute=recompute,
        )


_SPLIT = [
    MemoryStep(share, part)
    for share, part in (
        (1.0, 1.0),
        (1.0, 1 / 4),
        (1.0, 1 / 16),
        (1 / 2, 1 / 8),
        (1 / 4, 1 / 16),
        (1 / 8, 1 / 16),
        (1 / 16, 1 / 16),
    )
]
"""Steps for a batch that can be split. Four micro-batches in flight keep a pipeline of two or three
stages busy; below that stages wait for each other."""
_WHOLE = [MemoryStep(1.0, 1.0, max_delay=1), MemoryStep(1.0, 1.0)]
"""Steps for a batch that cannot be split: two batches in flight and two versions, or one of each."""


def memory_steps(profile: ModelProfile, schedule: ScheduleSetting = "auto") -> list[MemoryStep]:
    """Return what the planner tries in turn until the stages fit the RAM and nothing is lost by it.

    With ``async`` two batches are always in flight, whole or in micro-batches.
    """
    if profile.smallest_rows is None:
        late, exact = _WHOLE[:1], _WHOLE[1:]
        if schedule == "async":
            return late
        return exact if profile.late_reason or schedule == "sync" else _WHOLE
    least = min(profile.smallest_rows / profile.batch_size, 1.0)
    steps = [MemoryStep(max(step.share, least), max(step.part, least)) for step in _SPLIT]
    if schedule == "async":
        steps = [replace(step, max_delay=1) for step in steps if step.share == 1]
    return list(dict.fromkeys(steps))


def loses_nothing(step: MemoryStep) -> bool:
    """Return whether no later step can give a faster plan, if nothing is recomputed."""
    return step == _WHOLE[0] or (step.share == 1 and step.part >= _SPLIT[1].part)


def later_costs(profile: ModelProfile, costs: ModelCosts) -> Iterator[ModelCosts]:
    """Yield the costs of later steps with the same delay."""
    training = costs.training
    now = MemoryStep(training.share, training.part, training.max_delay)
    steps = memory_steps(profile, "async" if training.max_delay else "sync")
    behind = steps[steps.index(now) + 1 :] if now in steps else []
    for step in behind:
        yield replace(costs, training=replace(training, share=step.share, part=step.part))
