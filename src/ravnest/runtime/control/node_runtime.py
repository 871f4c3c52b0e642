"""Runtime of a started node: its worker, links, metrics and averaging."""

from __future__ import annotations

import logging
from collections import Counter, deque
from pathlib import Path

from rich.console import Console

from ravnest.averaging.deadlines import Deadlines
from ravnest.averaging.outcome import RoundOutcome
from ravnest.averaging.ports import AveragingConfig
from ravnest.averaging.service import AveragingService
from ravnest.deadlines import LINK_CLOSE, ROOTS_RETURN
from ravnest.errors import RunError, RunInterruptedError, SettingsError
from ravnest.logs.record_stream import launched_sink
from ravnest.runtime.batch_parts import BatchSplit
from ravnest.runtime.control.checkpoints import Checkpoints
from ravnest.runtime.control.ended_training import EndedTraining
from ravnest.runtime.control.loss_checks import chunk_loss, loss_split
from ravnest.runtime.control.metric_files import ACCURACIES, MetricFile, name_for
from ravnest.runtime.control.metrics import MetricsObserver
from ravnest.runtime.control.microbatch_tuner import MicrobatchTuner
from ravnest.runtime.control.progress import ProgressLine, RunState
from ravnest.runtime.control.recent_records import decoded_records
from ravnest.runtime.control.rendezvous import Links, Rendezvous
from ravnest.runtime.control.resume_exchange import (
    Recovery,
    ResumedState,
    ResumeExchange,
    ResumeWish,
)
from ravnest.runtime.control.root_controller import (
    NOTHING_DONE,
    BlockingAverages,
    ResumePoint,
    RootController,
)
from ravnest.runtime.control.run_status import RunStatus
from ravnest.runtime.control.runtime_config import DELAY_WARNING, RuntimeConfig
from ravnest.runtime.control.telemetry_reporter import TelemetryReporter, Traffic
from ravnest.runtime.control.trained_stages import TrainedStages
from ravnest.runtime.random_state import RandomState
from ravnest.runtime.schedule.machine import ScheduleMachine
from ravnest.runtime.schedule.progress import StageTraits
from ravnest.runtime.stage.averaging_adapter import AveragingAdapter
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.inbox import WorkerInbox
from ravnest.runtime.stage.leaf import Leaf
from ravnest.runtime.stage.microbatches import RootCut
from ravnest.runtime.stage.spot_checks import ForwardChecks
from ravnest.runtime.stage.validation_metrics import LOSS
from ravnest.runtime.stage.worker import Worker
from ravnest.split.module import StageModule
from ravnest.store.checkpoint import SEED
from ravnest.telemetry import RecoveryRecord
from ravnest.transport.base import Link, Transport, send_and_close, try_send
from ravnest.transport.generations import Generations
from ravnest.types import CheckpointId
from ravnest.wire.messages import (
    Abort,
    AnyHead,
    CheckpointWanted,
    Goodbye,
    LossSplit,
    ValidationResult,
)

logger = logging.getLogger(__name__)

_OUTCOMES = 256
_CAUGHT_UP = ", then the other clusters' average if they have averaged since"


class NodeRuntime:
    """Parts of a started node. ``controller`` exists at the Root only."""

    def __init__(
        self,
        config: RuntimeConfig,
        module: StageModule,
        transport: Transport,
        generations: Generations,
        wish: ResumeWish,
        timeout: float,
    ) -> None:
        """``wish``: the run to continue. ``timeout``: seconds to wait for the other nodes."""
        spec, settings = config.spec, config.settings
        self._generations = generations
        self._wish = wish
        self._timeout = timeout
        self.status = RunStatus()
        self.progress = ProgressLine(RunState(spec.role), console=Console(), shown=settings.progress)
        self.telemetry = TelemetryReporter(launched_sink(settings.record_sink), trace=config.trace)
        accuracies = Path(config.loss_filename).with_name(ACCURACIES)
        self._accuracies = MetricFile(name_for(accuracies, spec.cluster))
        self._losses = MetricFile(name_for(config.loss_filename, spec.cluster))
        self._config = config
        self._transport = transport
        self._links = Links()
        self._hello = config.hello()
        last = spec.stage == spec.stages - 1
        self.execution = StageExecution(
            module,
            config.rule,
            seed=config.seed,
            stash=config.schedule == "async" and not last,
            kept=config.kept,
            defer=spec.stage > 0 and spec.defers,
            frugal=spec.tight,
        )
        self._tuner = MicrobatchTuner() if spec.stage == 0 and config.tunes_split else None
        window = config.window
        self._machine = ScheduleMachine(
            spec.stage,
            spec.stages,
            schedule=config.schedule,
            window=window,
            traits=StageTraits(
                defers=self.execution.defers,
                may_defer_costly=self.execution.may_defer_costly and config.may_round_otherwise,
                expects_shared=bool(self.execution.shared_from_next),
                sends_shared=self.execution.sends_shared,
                clip=config.rule.clip is not None,
                activation_limit=None if config.tunes_split else window,
                delayed_limit=config.delayed_window,
            ),
        )
        leaf = self._make_leaf() if last else None
        self._leaf = leaf
        self._checkpoints: Checkpoints | None = None
        if settings.checkpoints:
            self._checkpoints = Checkpoints(
                Path(settings.checkpoint_folder),
                Path(settings.folder) / spec.bundle / SEED,
                spec,
                self.execution,
                self.telemetry.checkpoint,
                self._checkpoint_settled,
            )
        self._policy = config.checkpoint_policy
        self._exchange = ResumeExchange(spec, self._checkpoints, timeout)
        rejoins = settings.checkpoints and settings.rejoin_timeout > 0
        inbox = WorkerInbox()
        self._averaging = self._make_averaging(inbox) if len(spec.roots) > 1 else None
        self._worker = Worker(
            self.execution,
            self._machine,
            self.status,
            inbox,
            leaf=leaf,
            keeper=TrainedStages(
                Path(settings.trained_folder),
                spec,
                self.execution,
                changed_only=not settings.save_frozen,
            ),
            observer=self._observer(),
            averaging=self._averaging,
            recovery=Recovery(self._checkpoints, self._exchange, rejoins, settings.hands_over),
            checks=ForwardChecks(
                Path(settings.checkpoint_folder) / spec.name,
                self.execution,
                settings.spot_checks if spec.stage > 0 else 0.0,
                self.telemetry.check,
            ),
            trace=config.trace,
        )
        self.resumed: ResumedState | None = None
        """Point at which training continues; set by ``open``."""
        self.controller: RootController | None = None
        if spec.stage == 0:
            self.controller = RootController(
                self._worker,
                self.status,
                stages=spec.stages,
                stall=settings.stall_timeout,
                update_frequency=config.update_frequency,
                choose_split=self._choose_split,
                tuner=self._tuner,
                averages=self._blocking_averages(),
                policy=self._policy,
            )
        self.rounds: Counter[str] = Counter()
        """Counts of averaging rounds at the coordinator: ``averaged``, ``failed``, ``sent_bytes``."""
        self.outcomes: deque[RoundOutcome] = deque(maxlen=_OUTCOMES)
        """Most recent outcomes, newest last."""
        self._last_problem: tuple[object, ...] = ()
        """Problem of the last round; not logged as a warning again while it persists."""

    def _make_leaf(self) -> Leaf:
        config = self._config
        metrics = config.settings.chosen_metrics
        if config.criterion is None and any(metric.name == LOSS for metric in metrics):
            raise SettingsError("the metric 'loss' is the criterion: Node(criterion=...)")
        return Leaf(config.criterion, config.labels, config.test_labels, metrics)

    def open(self) -> None:
        """Connect to the neighbours and start the threads; close everything if that fails."""
        config = self._config
        self.telemetry.start()
        self.telemetry.phase("connect")
        rendezvous = Rendezvous(
            config.spec,
            self._hello,
            config.listen,
            self._timeout,
            self.progress.say,
            self._generations,
        )
        try:
            self._links = rendezvous.listen_and_dial(self._transport, self._worker, self._averaging)
            if self._checkpoints is not None:
                self._checkpoints.connect(self._links)
            new_run = "" if self.controller is None else self.controller.run
            self.resumed = self._exchange.agree(self._links, self._wish, new_run)
            self._continue(self.resumed)
        except BaseException as error:
            self._leave_early(error)
            raise
        if self._checkpoints is not None:
            self._checkpoints.start()
        self._worker.start(self._links)
        if self._leaf is not None:
            chunk_loss(config.spec, self.execution, self._leaf)
            answer = loss_split(config, self.execution, self._leaf)
            self._worker.post(lambda: self._worker.report_loss_split(answer))
        if self._averaging is not None:
            self._averaging.start(self._links.previous, self._links.next)
        if self.controller is not None and self._averaging is not None:
            # Other clusters may have ended meanwhile; those that have not connect later.
            first = self.resumed.progress is None and not self.resumed.lost
            timeout = config.settings.connect_timeout if first else ROOTS_RETURN
            self._averaging.connect(timeout, self.progress.say)

    def _leave_early(self, error: BaseException) -> None:
        """Close everything after a failed start; the neighbours learn at once if a node was lost."""
        node = self._config.spec.node
        if isinstance(error, RunError):
            abort = Abort(node, str(error), isinstance(error, RunInterruptedError))
            for link in self._neighbours():
                try_send(link, abort)
        self._transport.close()
        self.telemetry.close()

    def _continue(self, resumed: ResumedState) -> None:
        """Set the parts of the node to the point at which training continues."""
        checkpoint, progress, status = resumed.checkpoint, resumed.progress, self.status
        self._machine.continue_from(checkpoint.update)
        status.phases_over = checkpoint.phase
        status.updates = checkpoint.update
        status.calls_ended = resumed.calls
        if progress is not None:
            status.validations = {
                phase: ValidationResult(resumed.run, phase, *stored)
                for phase, stored in progress["validations"].items()
            }
            if self._leaf is not None:
                self._leaf.resume(progress["leaf"])
        if self.controller is None:
            return
        if self._averaging is not None:
            samples = 0 if progress is None else progress["averaging_samples"]
            newest = -1 if progress is None else progress.get("averaging_round", -1)
            # A run that is continued without any checkpoint is not new either: others may be ahead.
            after_loss = progress is not None or bool(resumed.lost) or self._wish.any_run
            self._averaging.continue_from(checkpoint.update, samples, newest, after_loss=after_loss)
        cut = RootCut(**progress["root"]) if progress is not None else NOTHING_DONE
        self.controller.resume(ResumePoint(resumed.run, checkpoint.phase, checkpoint.update, cut))
        if progress is not None or resumed.lost:
            self._losses.resume(checkpoint.update)
            self._accuracies.resume(len(status.validations))
            self.telemetry.resume(len(status.validations))
        if progress is not None:
            done = checkpoint.update, len(status.validations)
            status.recent.extend(decoded_records(progress.get("recent"), *done))

    @property
    def random_state(self) -> RandomState | None:
        """State of the generators for the first iteration of a loader, at a Root that continues."""
        progress = None if self.resumed is None else self.resumed.progress
        return None if progress is None or progress["root"] is None else progress["root"]["random"]

    def repeat_records(self) -> None:
        """Report what the checkpoint has: the process that made it may not have reported all.

        Only for a receiver that replaces what it has of the same update.
        """
        for record in tuple(self.status.recent):
            self.telemetry.repeat(record)

    def report_recovery(self, lost: str, seconds: float) -> None:
        """Show and report that training continues after the loss of a node (Root only)."""
        resumed = self.resumed
        assert resumed is not None
        update = resumed.checkpoint.update
        source = resumed.source if self._averaging is None else f"{resumed.source}{_CAUGHT_UP}"
        record = RecoveryRecord(lost, update, max(resumed.made - update, 0), source, seconds)
        self.progress.say(
            f"{self._config.spec.role}: training continues from {resumed.checkpoint}; "
            f"{record.repeated} updates are repeated; state: {record.source}"
        )
        self.telemetry.recovery(record)

    def _checkpoint_settled(self, checkpoint: CheckpointId, cost: float) -> None:
        if self._policy is not None:
            self._policy.cost = cost
        with self.status.writing():
            self.status.checkpoints_settled += 1
            self.status.phases_settled = max(self.status.phases_settled, checkpoint.phase)

    def _neighbours(self) -> list[Link]:
        return [link for link in (self._links.previous, self._links.next) if link is not None]

    def serve(self, number: int) -> None:
        """Wait until the Root ends the script's call with this number, or the run."""
        status = self.status
        # No deadline: the Root may pause between calls, and a dead Root is detected by its link.
        status.wait(lambda: status.calls_ended >= number or status.run_ended)

    def hand_over(self, timeout: float) -> bool:
        """Ask for a last checkpoint, and wait until all have it and it outlives this node.

        Return False on a timeout.
        """
        checkpoints, worker = self._checkpoints, self._worker
        if checkpoints is None:
            return False
        wanted = CheckpointWanted(self._config.spec.node)
        return checkpoints.wait_for_next(
            lambda: worker.post(lambda: worker.want_checkpoint(wanted)), timeout, self.status.updates
        )

    def abandon(self, reason: str) -> None:
        """Stop after the loss of a node, without an end of the run; the other nodes do the same."""
        self._worker.stop(LINK_CLOSE)
        node = self._config.spec.node
        for link in self._neighbours():
            send_and_close(link, Abort(node, reason, recoverable=True))
        if self._checkpoints is not None:
            self._checkpoints.close()
        if self._averaging is not None:
            self._averaging.close(Abort(node, reason, recoverable=True))
        self._transport.close()
        self._losses.close()
        self._accuracies.close()
        self.telemetry.phase("rejoin")
        self.telemetry.stop_warnings()

    def report_validation(self, result: ValidationResult, epoch: int, title: str) -> None:
        """Show, record and report the result of a validation after ``epoch`` epochs of training."""
        role = self._config.spec.role
        values = result.metrics or {result.name: result.value}
        figures = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        self.progress.say(f"{role}: {title}{figures} on {result.samples} samples")
        self._accuracies.append(result.value)
        record = self.telemetry.validation(result, epoch)
        with self.status.writing():
            self.status.recent.append(record)

    def last_validation(self) -> ValidationResult | None:
        """Return the result of the last validation, if there was one."""
        results = self.status.validations
        return results[max(results)] if results else None

    def close(self, reason: str | None, *, recoverable: bool = False) -> None:
        """Leave the run; with a ``reason``, end it on all nodes.

        ``recoverable``: the other nodes wait for this one to return, or for one that takes its place.
        """
        failed = self.status.failure is not None
        if self.controller is not None and reason is None and not failed:
            self.controller.finish()
        self._worker.stop(LINK_CLOSE)
        node = self._config.spec.node
        last: AnyHead = Goodbye(node) if reason is None else Abort(node, reason, recoverable)
        to_clusters = last if self.status.failure is None or reason is not None else None
        links = self._neighbours()
        if self._checkpoints is not None:
            self._checkpoints.close()
        spec, settings = self._config.spec, self._config.settings
        outage = spec.outage if settings.outage is None else settings.outage
        for link in links:
            send_and_close(link, last, 0.0 if failed or reason is not None else outage)
        if self._averaging is not None:
            self._averaging.close(to_clusters)
        self._log_clamped_values(links)
        self._transport.close()
        self.progress.sum_up()
        for problem in (self._losses.close(), self._accuracies.close()):
            if problem:
                logger.error("%s", problem)
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
        if self._config.spec.stages > 1:
            self.progress.state.schedule = self._config.schedule
        if self._config.spec.stage != 0:
            return MetricsObserver(self.progress, self.telemetry, traffic=self._traffic)
        self.progress.state.window = self._config.window
        return MetricsObserver(self.progress, self.telemetry, self._losses, self._tuner, self._traffic)

    def _traffic(self) -> Traffic:
        """Return the bytes received and sent on links to neighbours and to other clusters."""
        received, sent = (0, 0) if self._averaging is None else self._averaging.traffic
        for link in self._neighbours():
            received, sent = received + link.received_bytes, sent + link.sent_bytes
        return received, sent

    def _choose_split(self, loss: LossSplit) -> BatchSplit:
        """Return the rule by which batches are split, and report it to the user."""
        split = self._config.batch_split(loss)
        config = self._config
        schedule = "async" if split.late else config.schedule
        if split.late:
            self.progress.state.window = config.delayed_window
        if warning := config.memory_warning(split):
            logger.warning("%s", warning)
        if config.spec.stages > 1:
            self.progress.say(f"{config.spec.role}: schedule {schedule}; {split.reason}")
            self.telemetry.schedule(schedule, config.planned_parts(split), split.reason)
            if schedule == "async":
                # Once for a job: not by each cluster, and not again after the loss of a node.
                is_new = config.spec.cluster == 0 and not (self.resumed and self.resumed.lost)
                logger.log(logging.WARNING if is_new else logging.INFO, "%s", DELAY_WARNING)
        return split

    def _make_averaging(self, inbox: WorkerInbox) -> AveragingService:
        config, spec, settings = self._config, self._config.spec, self._config.settings
        weights = AveragingAdapter(
            self.execution, inbox, spec.rings, with_optimizer=config.average_optim
        )
        rounds = None
        if spec.stage == 0:
            callbacks = self._released, self._reported, self.telemetry.averaging
            rounds = AveragingConfig(settings.averaging, config.reduce_factor, *callbacks)
        return AveragingService(
            spec,
            weights,
            self._hello,
            self._transport,
            config=rounds,
            failed=lambda reason: inbox.post(lambda: self._worker.fail(reason)),
            deadlines=Deadlines.outlasting(
                spec.outage if settings.outage is None else settings.outage,
                settings.rejoin_timeout if settings.checkpoints else 0.0,
            ),
            generations=self._generations,
            robust_mean=settings.robust_mean,
            trace=config.trace,
        )

    def _blocking_averages(self) -> BlockingAverages | None:
        if self._averaging is None:
            return None
        config, settings = self._config, self._config.settings
        ended = EndedTraining(Path(settings.checkpoint_folder) / config.spec.name / "ended.json")
        return BlockingAverages(
            settings.averaging == "blocking",
            config.reduce_factor,
            self._averaging.pause,
            ended if settings.checkpoints else None,
        )

    def _released(self, applied: bool) -> None:
        with self.status.writing():
            self.status.rounds += 1
            self.status.last_round_applied = applied

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
