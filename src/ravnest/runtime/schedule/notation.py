"""Schedules as text, such as ``0F 1F 0B 0W s0 e0``."""

from __future__ import annotations

from collections.abc import Iterable

from ravnest.runtime.schedule.events import (
    Action,
    Run,
    RunBackward,
    RunForward,
    RunPhaseEnd,
    RunStep,
    RunWeights,
)


def format_runs(actions: Iterable[Action]) -> str:
    """Return the computations among the actions as text, such as ``0F 1F 0B s0 e0``.

    A number with F is the forward of that micro-batch, with V a forward without gradients
    (validation), with B a backward, with W its deferred weight gradients; ``s`` precedes the number of
    an update, ``e`` that of a phase that ends. If the micro-batches belong to several phases, the phase
    comes first, as in ``1.0F``.
    """
    runs = [
        action
        for action in actions
        if isinstance(action, RunForward | RunBackward | RunWeights | RunStep | RunPhaseEnd)
    ]
    phases = {
        run.microbatch.phase for run in runs if isinstance(run, RunForward | RunBackward | RunWeights)
    }
    return " ".join(_label(run, with_phase=len(phases) > 1) for run in runs)


def _label(run: Run, *, with_phase: bool) -> str:
    match run:
        case RunForward(microbatch, _, trains):
            kind = "F" if trains else "V"
        case RunBackward(microbatch):
            kind = "B"
        case RunWeights(microbatch):
            kind = "W"
        case RunStep(update):
            return f"s{update}"
        case RunPhaseEnd(phase):
            return f"e{phase}"
    number = f"{microbatch.phase}.{microbatch.index}" if with_phase else f"{microbatch.index}"
    return number + kind
