"""A node at work: its thread, its links and what it shows, from the start to the end."""

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
from ravnest.transport.link import part
from ravnest.types import Address
from ravnest.wire.messages import PROTOCOL, Abort, AnyHead, Call, Goodbye, Hello, ValidationResult

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0
_OUTCOMES = 256


@dataclass(frozen=True)
class RuntimeConfig:
    """Everything that a node was told: by the plan, and by its user."""

    place: NodeSpec
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
        """Of dropout and the like."""
        return self.place.seed if self.settings.seed is None else self.settings.seed

    @property
    def listen(self) -> Address:
        """Where this node listens."""
        text = self.settings.listen or self.place.address
        try:
            return Address.parse(text)
        except ValueError as error:
            raise SettingsError(f"listen {error}") from error

    def hello(self) -> Hello:
        """What this node says of itself, and what its neighbours must agree with."""
        place = self.place
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
            place.plan,
            place.node,
            place.cluster,
            place.stage,
            settings=agreed,
            codec=self.codec,
        )


class NodeRuntime:
    """A started node. ``conductor`` is there at the Root only."""

    def __init__(self, assignment: RuntimeConfig, module: StageModule, transport: Transport) -> None:
        place, settings = assignment.place, assignment.settings
        self.board = RunStatus()
        self.line = ProgressLine(RunState(place.role), console=Console(), shown=settings.progress)
        self.telemetry = TelemetryReporter(settings.record_sink)
        beside = Path(assignment.loss_filename).with_name(ACCURACIES)
        self.accuracies = MetricFile(name_for(beside, place.cluster))
        self._losses = MetricFile(name_for(assignment.loss_filename, place.cluster))
        self._assignment = assignment
        self._transport = transport
        self._links = Links()
        last = place.stage == place.stages - 1
        self.execution = StageExecution(
            module,
            assignment.rule,
            seed=assignment.seed,
            stash=settings.schedule == "async" and not last,
            recompute=settings.recompute,
        )
        machine = ScheduleMachine(
            place.stage,
            place.stages,
            schedule=settings.schedule,
            window=settings.in_flight or place.in_flight,
            update_frequency=assignment.update_frequency,
            clip=assignment.rule.clip is not None,
        )
        leaf = Leaf(assignment.criterion, assignment.labels, assignment.test_labels) if last else None
        self._worker = Worker(
            self.execution,
            machine,
            self.board,
            node=place.node,
            leaf=leaf,
            keeper=TrainedStages(Path(settings.trained_folder), place, self.execution),
            observer=self._observer(),
        )
        self.conductor: RootController | None = None
        if place.stage == 0:
            self.conductor = RootController(
                self._worker,
                self.board,
                stages=place.stages,
                stall=settings.stall_timeout,
                update_frequency=assignment.update_frequency,
            )
        self.rounds: Counter[str] = Counter()
        """Of averaging, at the coordinator: ``averaged``, ``failed``, and their ``sent_bytes``."""
        self.outcomes: deque[RoundOutcome] = deque(maxlen=_OUTCOMES)
        """The last of them, newest last."""
        self._trouble: tuple[object, ...] = ()
        """Of the last round: what is no news is no warning."""
        self._averaging = self._make_averaging() if len(place.roots) > 1 else None

    def open(self) -> None:
        """Meet the neighbours and start to work; closes everything if that fails."""
        assignment = self._assignment
        self.telemetry.start()
        self.telemetry.phase("connect")
        meeting = Rendezvous(
            assignment.place,
            assignment.hello(),
            assignment.listen,
            assignment.settings.connect_timeout,
            self.line.say,
        )
        try:
            self._links = meeting.listen_and_dial(self._transport, self._worker, self._averaging)
        except BaseException:
            self._transport.close()
            self.telemetry.close()
            raise
        self._worker.start(self._links)
        if self._averaging is not None:
            self._averaging.start(self._links.previous, self._links.next)
        if self.conductor is not None:
            self._set_window(self.line.state.window)
            if self._averaging is not None:
                self._averaging.meet(assignment.settings.connect_timeout, self.line.say)

    def serve(self, call: Call) -> None:
        """Work until the Root ends this call of the user's, or the run."""
        board = self.board
        # No deadline: a Root may take its time between calls, and a dead one is lost by its link.
        board.wait(lambda: board.returned[call] > 0 or board.finish)
        with board.writing():
            board.returned[call] = max(board.returned[call] - 1, 0)

    def report_validation(self, result: ValidationResult, epoch: int, title: str) -> None:
        """Show, record and report the result of a validation after ``epoch`` epochs of training."""
        role = self._assignment.place.role
        self.line.say(f"{role}: {title}{result.name} {result.value:.4f} on {result.samples} samples")
        self.accuracies.append(result.value)
        self.telemetry.validation(result, epoch)

    def last_figure(self) -> ValidationResult | None:
        """The result of the last validation."""
        figures = self.board.figures
        return figures[max(figures)] if figures else None

    def close(self, reason: str | None) -> None:
        """End: with a goodbye, or, if there is a reason, for all nodes."""
        failed = self.board.failure is not None
        if self.conductor is not None and reason is None and not failed:
            self.conductor.finish()
        self._worker.stop(_CLOSE_SECONDS)
        node = self._assignment.place.node
        last: AnyHead = Goodbye(node) if reason is None else Abort(node, reason)
        links = [link for link in (self._links.previous, self._links.next) if link is not None]
        for link in links:
            part(link, last)
        if self._averaging is not None:
            self._averaging.close(Goodbye(node) if reason is None and not failed else None)
        self._say_what_was_clamped(links)
        self._transport.close()
        self.line.sum_up()
        self._losses.close()
        self.accuracies.close()
        self.telemetry.close()

    def _say_what_was_clamped(self, links: list[Link]) -> None:
        place, codec = self._assignment.place, self._assignment.codec
        if codec == "raw":
            return
        others = self._averaging.clamped if self._averaging is not None else 0
        count = others + sum(link.clamped for link in links)
        level = logging.WARNING if count else logging.INFO
        logger.log(level, "node_%d: %d values were beyond %s and clamped", place.node, count, codec)

    def _observer(self) -> MetricsObserver:
        assignment, place, settings = self._assignment, self._assignment.place, self._assignment.settings
        if place.stage != 0:
            return MetricsObserver(self.line, self.telemetry)
        self.line.state.window = settings.in_flight or place.in_flight
        keeper = None
        if settings.in_flight is None and place.stages > 1:
            keeper = WindowTuner(
                self._set_window,
                place.in_flight,
                schedule=settings.schedule,
                update_frequency=assignment.update_frequency,
                cap=place.in_flight_limit,
            )
        return MetricsObserver(self.line, self.telemetry, self._losses, keeper)

    def _make_averaging(self) -> AveragingService:
        assignment, place, settings = self._assignment, self._assignment.place, self._assignment.settings
        state = AveragingAdapter(self._worker, place.rings, with_optimizer=assignment.average_optim)
        rounds = None
        if self.conductor is not None:
            rounds = AveragingConfig(
                settings.averaging, assignment.reduce_factor, self._released, self._reported
            )
        worker = self._worker
        averaging = AveragingService(
            place,
            state,
            assignment.hello(),
            self._transport,
            rounds=rounds,
            failed=lambda reason: worker.post(lambda: worker.fail(reason)),
        )
        self._worker.averaging = averaging
        if self.conductor is not None:
            self.conductor.standing_still = BlockingAverages(
                settings.averaging == "blocking", assignment.reduce_factor, averaging.ask
            )
        return averaging

    def _released(self) -> None:
        with self.board.writing():
            self.board.rounds += 1

    def _reported(self, outcome: RoundOutcome) -> None:
        """At the coordinator, in the thread of averaging."""
        self.rounds["averaged" if outcome.committed else "failed"] += 1
        self.rounds["sent_bytes"] += outcome.sent_bytes
        self.outcomes.append(outcome)
        self.telemetry.round(outcome)
        trouble = outcome.reason, frozenset(outcome.missing), frozenset(outcome.problems)
        new = any(trouble) and trouble != self._trouble
        self._trouble = trouble
        logger.log(logging.WARNING if new else logging.INFO, "%s", outcome.describe())
        if outcome.kind == "final":
            self.line.say(f"{self._assignment.place.role}: {outcome.describe()}")

    def _set_window(self, size: int) -> None:
        self.line.state.window = size
        self._worker.post(lambda: self._worker.set_window(size))
