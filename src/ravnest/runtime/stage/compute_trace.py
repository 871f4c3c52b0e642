"""Spans of a stage's compute thread: its computations, and the waits between them."""

from __future__ import annotations

from ravnest.runtime.schedule.events import (
    Run,
    RunBackward,
    RunForward,
    RunPhaseEnd,
    RunStep,
    RunWeights,
)
from ravnest.tracing.recorder import Fields, SpanRecorder, now
from ravnest.tracing.spans import SpanKind

_SHORTEST_WAIT = 50_000
"""Nanoseconds between two computations from which on the thread has waited; messages take less."""


class ComputeTrace:
    """Records the computations of a stage; without a recorder, every method returns at once."""

    def __init__(self, recorder: SpanRecorder | None) -> None:
        self._recorder = recorder
        self._free = 0
        """End of the last computation; 0 before the first."""

    def ran(self, run: Run, began: int) -> None:
        """Record a computation that ends now, and the wait before it."""
        if self._recorder is not None:
            end = now()
            self._recorder.note((_computation, run, self._free, began, end))
            self._free = end

    def add(self, kind: SpanKind, began: int, first: int = 0) -> None:
        """Record something else in the compute thread that ends now."""
        if self._recorder is not None:
            self._recorder.add(kind, began, first)


def _computation(run: Run, free: int, began: int, end: int) -> list[Fields]:
    """Return the fields of a computation, and of the wait before it."""
    kind, first, second = _described(run)
    found: list[Fields] = []
    if free and began - free > _SHORTEST_WAIT:
        found.append((SpanKind.WAIT, free, began, kind, 0, 0, 0, 0, 0, 0))
    found.append((kind, began, end, 0, first, second, 0, 0, 0, 0))
    return found


def _described(run: Run) -> tuple[SpanKind, int, int]:
    match run:
        case RunForward(microbatch, trains=trains):
            kind = SpanKind.FORWARD if trains else SpanKind.EVALUATE
            return kind, microbatch.phase, microbatch.index
        case RunBackward(microbatch):
            return SpanKind.BACKWARD, microbatch.phase, microbatch.index
        case RunWeights(microbatch):
            return SpanKind.WEIGHTS, microbatch.phase, microbatch.index
        case RunStep(update):
            return SpanKind.STEP, update, 0
        case RunPhaseEnd(phase):
            return SpanKind.PHASE_END, phase, 0
