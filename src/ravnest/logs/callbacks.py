"""Calls of the user's own code during a run, for instance to Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ravnest.logs.background import BackgroundSink, TimedRecord
from ravnest.telemetry import LossRecord, RoundRecord, ValidationRecord, WorkerRecord


class Callbacks(BackgroundSink):
    """Base class: override what is of interest, and pass an object to the Root as ``record_sink``.

    The methods are called one after the other in a thread of their own, so that a slow one does not slow
    training. An exception is logged once; training continues.
    """

    def on_update(self, record: LossRecord) -> None:
        """Handle the loss of an update."""

    def on_validation(self, record: ValidationRecord) -> None:
        """Handle the result of a validation."""

    def on_round(self, record: RoundRecord) -> None:
        """Handle the outcome of an averaging round."""

    def on_event(self, record: WorkerRecord) -> None:
        """Handle everything else: phases, warnings, checkpoints, recoveries, timings, queue lengths."""

    def handle(self, items: Sequence[TimedRecord]) -> None:
        """Call the methods for some records."""
        for _, record in items:
            self.guard(partial(self._method(record), record))

    def _method(self, record: WorkerRecord) -> Callable[[Any], None]:
        match record:
            case LossRecord():
                return self.on_update
            case ValidationRecord():
                return self.on_validation
            case RoundRecord():
                return self.on_round
        return self.on_event

    def flush(self) -> None:
        """Do nothing; for subclasses that collect."""

    def end(self) -> None:
        """Do nothing; called after the last record."""
