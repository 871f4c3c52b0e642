"""Runtime of a started node: its worker, links, metrics and averaging."""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ravnest.averaging.outcome import RoundOutcome
from ravnest.averaging.root import AveragingConfig
from ravnest.averaging.service import AveragingService
from ravnest.errors import SettingsError
from ravnest.runtime.control.checkpoint import TrainedStages
from ravnest.runtime.control.metric_files import ACCURACIES, MetricFile, name_for
from ravnest.runtime.control.metrics import MetricsObserver, WindowTuner
from ravnest.runtime.control.progress import ProgressLine, RunState
from ravnest.runtime.control.rendezvous import Links, Rendezvous
from ravnest.runtime.control.root_controller import BlockingAverages, RootController
from ravnest.runtime.control.run_status import RunStatus
from ravnest.runtime.control.telemetry_reporter import TelemetryReporter
from ravnest.runtime.data import Criterion
from ravnest.runtime.schedule.machine import ScheduleMachine
from ravnest.runtime.settings import NodeSettings
from ravnest.runtime.stage.averaging_adapter import AveragingAdapter
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.leaf import Leaf
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.runtime.stage.worker import Worker
from ravnest.split.module import StageModule
from ravnest.store.node_spec import NodeSpec
from ravnest.transport.base import Link, Transport
from ravnest.transport.link import send_and_close
from ravnest.types import Address
from ravnest.wire.messages import PROTOCOL, Abort, AnyHead, Call, Goodbye, Hello, ValidationResult

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0
_OUTCOMES = 256


@dataclass(frozen=True)
class RuntimeConfig:
    """Configuration of a node: its spec in the plan and the user's settings."""

    spec: NodeSpec
    rule: UpdateRule
    settings: NodeSettings
    update_frequency: int
    criterion: Criterion | None
    labels: Any
    test_labels: Any
    loss_filename: str | Path
    reduce_factor: int | None = None
    average_optim: bool = False
    codec: str = "raw"

    @property
    def seed(self) -> int:
        """Seed of dropout and similar operations."""
        return self.spec.seed if self.settings.seed is None else self.settings.seed

    @property
    def listen(self) -> Address:
        """Address to listen at."""
        text = self.settings.listen or self.spec.address
        try:
            return Address.parse(text)
        except ValueError as error:
            raise SettingsError(f"listen {error}") from error

    def hello(self) -> Hello:
        """Return the node's introduction, with the settings that its neighbours must share."""
        spec = self.spec
        agreed = {
            "schedule": self.settings.schedule,
            "update_frequency": str(self.update_frequency),
            "clip_grad_norm": str(self.rule.clip),
            "seed": str(self.seed),
            "averaging": self.settings.averaging,
            "average_optim": str(self.average_optim),
        }
        return Hello(
            PROTOCOL,
            spec.plan,
            spec.node,
            spec.cluster,
            spec.stage,
            settings=agreed,
            codec=self.codec,
        )


class NodeRuntime:
    """Parts of a started node. ``controller`` exists at the Root only."""

    def __init__(self, config: RuntimeConfig, module: StageModule, transport: Transport) -> None:
        spec, settings = config.spec, config.settings
        self.status = RunStatus()
        self.progress = ProgressLine(RunState(spec.role), console=Console(), shown=settings.progress)
        self.telemetry = TelemetryReporter(settings.record_sink)
        accuracies = Path(config.loss_filename).with_name(ACCURACIES)
        self._accuracies = MetricFile(name_for(accuracies, spec.cluster))
        self._losses = MetricFile(name_for(config.loss_filename, spec.cluster))
        self._config = config
        self._transport = transport
        self._links = Links()
        last = spec.stage == spec.stages - 1
        self.execution = StageExecution(
            module,
            config.rule,
            seed=config.seed,
            stash=settings.schedule == "async" and not last,
            recompute=settings.recompute,
        )
        machine = ScheduleMachine(
            spec.stage,
            spec.stages,
            schedule=settings.schedule,
            window=settings.in_flight or spec.in_flight,
            update_frequency=config.update_frequency,
            clip=config.rule.clip is not None,
        )
        leaf = Leaf(config.criterion, config.labels, config.test_labels) if last else None
        self._worker = Worker(
            self.execution,
            machine,
            self.status,
            node=spec.node,
            leaf=leaf,
            keeper=TrainedStages(Path(settings.trained_folder), spec, self.execution),
            observer=self._observer(),
        )
        self.controller: RootController | None = None
        if spec.stage == 0:
            self.controller = RootController(
                self._worker,
                self.status,
                stages=spec.stages,
                stall=settings.stall_timeout,
                update_frequency=config.update_frequency,
            )
        self.rounds: Counter[str] = Counter()
        """Counts of averaging rounds at the coordinator: ``averaged``, ``failed``, ``sent_bytes``."""
        self.outcomes: deque[RoundOutcome] = deque(maxlen=_OUTCOMES)
        """Most recent outcomes, newest last."""
        self._last_problem: tuple[object, ...] = ()
        """Problem of the last round; not logged as a warning again while it persists."""
        self._averaging = self._make_averaging() if len(spec.roots) > 1 else None

    def open(self) -> None:
        """Connect to the neighbours and start the threads; close everything if that fails."""
        config = self._config
        self.telemetry.start()
        self.telemetry.phase("connect")
        rendezvous = Rendezvous(
            config.spec,
            config.hello(),
            config.listen,
            config.settings.connect_timeout,
            self.progress.say,
        )
        try:
            self._links = rendezvous.listen_and_dial(self._transport, self._worker, self._averaging)
        except BaseException:
            self._transport.close()
            self.telemetry.close()
            raise
        self._worker.start(self._links)
        if self._averaging is not None:
            self._averaging.start(self._links.previous, self._links.next)
        if self.controller is not None:
            self._set_window(self.progress.state.window)
            if self._averaging is not None:
                self._averaging.meet(config.settings.connect_timeout, self.progress.say)

    def serve(self, call: Call) -> None:
        """Wait until the Root ends this call of the user, or the run."""
        status = self.status
        # No deadline: the Root may pause between calls, and a dead Root is detected by its link.
        status.wait(lambda: status.ended_calls[call] > 0 or status.run_ended)
        with status.writing():
            status.ended_calls[call] = max(status.ended_calls[call] - 1, 0)

    def report_validation(self, result: ValidationResult, epoch: int, title: str) -> None:
        """Show, record and report the result of a validation after ``epoch`` epochs of training."""
        role = self._config.spec.role
        self.progress.say(f"{role}: {title}{result.name} {result.value:.4f} on {result.samples} samples")
        self._accuracies.append(result.value)
        self.telemetry.validation(result, epoch)

    def last_validation(self) -> ValidationResult | None:
        """Return the result of the last validation, if there was one."""
        results = self.status.validations
        return results[max(results)] if results else None

    def close(self, reason: str | None) -> None:
        """Leave the run; with a ``reason``, end it on all nodes."""
        failed = self.status.failure is not None
        if self.controller is not None and reason is None and not failed:
            self.controller.finish()
        self._worker.stop(_CLOSE_SECONDS)
        node = self._config.spec.node
        last: AnyHead = Goodbye(node) if reason is None else Abort(node, reason)
        links = [link for link in (self._links.previous, self._links.next) if link is not None]
        for link in links:
            send_and_close(link, last)
        if self._averaging is not None:
            self._averaging.close(Goodbye(node) if reason is None and not failed else None)
        self._log_clamped_values(links)
        self._transport.close()
        self.progress.sum_up()
        self._losses.close()
        self._accuracies.close()
        self.telemetry.close()

    def _log_clamped_values(self, links: list[Link]) -> None:
        spec, codec = self._config.spec, self._config.codec
        if codec == "raw":
            return
        others = self._averaging.clamped if self._averaging is not None else 0
        count = others + sum(link.clamped for link in links)
        level = logging.WARNING if count else logging.INFO
        logger.log(
            level,
            "node_%d: %d values were outside the range of %s and were clamped",
            spec.node,
            count,
            codec,
        )

    def _observer(self) -> MetricsObserver:
        config, spec, settings = self._config, self._config.spec, self._config.settings
        if spec.stage != 0:
            return MetricsObserver(self.progress, self.telemetry)
        self.progress.state.window = settings.in_flight or spec.in_flight
        tuner = None
        if settings.in_flight is None and spec.stages > 1:
            tuner = WindowTuner(
                self._set_window,
                spec.in_flight,
                schedule=settings.schedule,
                update_frequency=config.update_frequency,
                max_window=spec.in_flight_limit,
            )
        return MetricsObserver(self.progress, self.telemetry, self._losses, tuner)

    def _make_averaging(self) -> AveragingService:
        config, spec, settings = self._config, self._config.spec, self._config.settings
        state = AveragingAdapter(self._worker, spec.rings, with_optimizer=config.average_optim)
        rounds = None
        if self.controller is not None:
            rounds = AveragingConfig(
                settings.averaging, config.reduce_factor, self._released, self._reported
            )
        worker = self._worker
        averaging = AveragingService(
            spec,
            state,
            config.hello(),
            self._transport,
            rounds=rounds,
            failed=lambda reason: worker.post(lambda: worker.fail(reason)),
        )
        self._worker.averaging = averaging
        if self.controller is not None:
            self.controller.standing_still = BlockingAverages(
                settings.averaging == "blocking", config.reduce_factor, averaging.ask
            )
        return averaging

    def _released(self) -> None:
        with self.status.writing():
            self.status.rounds += 1

    def _reported(self, outcome: RoundOutcome) -> None:
        """Record and log a round's outcome. Called at the coordinator, in the averaging thread."""
        self.rounds["averaged" if outcome.committed else "failed"] += 1
        self.rounds["sent_bytes"] += outcome.sent_bytes
        self.outcomes.append(outcome)
        self.telemetry.round(outcome)
        problem = outcome.reason, frozenset(outcome.missing), frozenset(outcome.problems)
        new = any(problem) and problem != self._last_problem
        self._last_problem = problem
        logger.log(logging.WARNING if new else logging.INFO, "%s", outcome.describe())
        if outcome.kind == "final":
            self.progress.say(f"{self._config.spec.role}: {outcome.describe()}")

    def _set_window(self, size: int) -> None:
        self.progress.state.window = size
        self._worker.post(lambda: self._worker.set_window(size))
