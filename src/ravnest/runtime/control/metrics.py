"""Use of the worker's reports: progress line, loss file and telemetry."""

from __future__ import annotations

from collections.abc import Callable

from ravnest.runtime.control.metric_files import MetricFile
from ravnest.runtime.control.microbatch_tuner import MicrobatchTuner
from ravnest.runtime.control.progress import ProgressLine
from ravnest.runtime.control.telemetry_reporter import TelemetryReporter, Traffic
from ravnest.runtime.stage.observer import MicrobatchReport, UpdateReport
from ravnest.wire.messages import PhaseBegin


class MetricsObserver:
    """Receiver of the worker's reports; implements ``WorkerObserver``."""

    def __init__(
        self,
        progress: ProgressLine,
        telemetry: TelemetryReporter,
        losses: MetricFile | None = None,
        tuner: MicrobatchTuner | None = None,
        traffic: Callable[[], Traffic] = lambda: (0, 0),
    ) -> None:
        """``losses`` and ``tuner`` are given at the Root only; ``traffic`` counts all links."""
        self._progress = progress
        self._telemetry = telemetry
        self._losses = losses
        self._tuner = tuner
        self._traffic = traffic

    def begun(self, begin: PhaseBegin) -> None:
        """Show and report the start of a phase."""
        self._telemetry.phase(begin.kind, begin.epoch)
        if begin.late:
            self._progress.state.schedule = "async"
        if begin.kind == "train":
            self._progress.state.begin(begin.epoch, self._progress.clock(), begin.batches)
        if self._tuner is not None:
            self._tuner.pause()

    def updated(self, update: UpdateReport) -> None:
        """Show, record and report an update."""
        state = self._progress.state
        state.staleness, state.in_flight = update.staleness, update.in_flight
        state.microbatches = update.parts
        state.add(update.batches, self._progress.clock(), update.samples)
        if update.loss is not None:
            state.add_loss(update.loss)
            if self._losses is not None:
                self._losses.append(update.loss)
                self._telemetry.update(update)
                self._telemetry.pace(state, update.number + 1)
        self._telemetry.queues(in_flight=update.in_flight, window=state.window, inbox=update.inbox)
        self._telemetry.work(update, self._traffic)
        self._progress.changed()

    def saving(self) -> None:
        """Report that the trained stage is about to be saved."""
        self._telemetry.phase("save")

    def returned(self, report: MicrobatchReport) -> None:
        """Report the costs of a micro-batch, and choose by them the number of micro-batches."""
        if report.timings:
            self._telemetry.timings(report.timings)
        if self._tuner is not None and (change := self._tuner.add(report, self._progress.clock())):
            self._progress.state.window = change.parts
            self._progress.say(f"{self._progress.state.role}: {change}")
            self._telemetry.schedule("sync", change.parts, change.reason)
