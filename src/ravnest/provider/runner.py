"""Carries out the agent's actions: threads for heartbeats, fetches and uploads, and the worker."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ravnest.deadlines import HTTP_ANSWER, LEAVE_ANSWER, POLL_ANSWER
from ravnest.errors import RavnestError, ServerError, ServerRefusedError, StageFormatError
from ravnest.host import explained, lower_thread_priority
from ravnest.http.api import ApiClient, is_temporary
from ravnest.http.transfer import artifact_of, upload
from ravnest.provider.agent import Agent
from ravnest.provider.benchmark import compute
from ravnest.provider.best_upload import upload_best
from ravnest.provider.check_upload import CheckUpload
from ravnest.provider.checkpoint_upload import CheckpointUpload
from ravnest.provider.download import AssignmentDownload
from ravnest.provider.events import (
    Action,
    AgentEvent,
    Announce,
    BestUploaded,
    CheckpointsUploaded,
    CheckUploaded,
    DeadlinePassed,
    Discard,
    Exclude,
    Exit,
    Fetch,
    Fetched,
    HeartbeatAnswered,
    InterruptReceived,
    Keep,
    Leave,
    Left,
    LinkTestEnded,
    MeasureSpeed,
    OfferAccepted,
    RequestTrace,
    SendHeartbeat,
    SendOffer,
    ServerRefused,
    ServerUnreachable,
    ShowProgress,
    SpeedMeasured,
    StartLinkTest,
    StartWorker,
    Stop,
    StopLinkTest,
    UpdateOffer,
    Upload,
    UploadBest,
    UploadCheck,
    UploadCheckpoints,
    Uploaded,
    WorkerEnded,
)
from ravnest.provider.figures import ProviderFigures
from ravnest.provider.job_dir import JobDir, JobsDir, WorkerSettings
from ravnest.provider.limits import WORKER_NICE
from ravnest.provider.link_test import LinkTest
from ravnest.provider.link_test_api import LinkTestApi
from ravnest.provider.outcome import Outcome
from ravnest.provider.sandbox.choice import Sandbox
from ravnest.provider.signals import interrupts
from ravnest.provider.worker_process import WorkerProcess
from ravnest.schemas.checkpoints import CheckpointOrder
from ravnest.schemas.jobs import BestFiles, ResultFile
from ravnest.schemas.link_tests import LinkTestOrder
from ravnest.schemas.providers import (
    LARGEST_RATE,
    ExcludedNode,
    Heartbeat,
    HeartbeatReply,
    PeerAddresses,
    ProviderOffer,
    ProviderView,
)
from ravnest.telemetry import CheckRecord
from ravnest.types import Address

logger = logging.getLogger(__name__)

_IN_PROGRESS = 409
"""HTTP status of an upload while the server still receives an earlier one."""


class _StoppedError(RavnestError):
    """The fetch or upload in progress was stopped."""


@dataclass
class _Task:
    """The current assignment and its worker."""

    assignment: str
    stopped: threading.Event = field(default_factory=threading.Event)
    worker: WorkerProcess | None = None

    def check(self) -> None:
        """Raise if the task was stopped."""
        if self.stopped.is_set():
            raise _StoppedError("it was stopped")


@dataclass
class Provider:
    """A running provider, from its offer until it leaves."""

    api: ApiClient
    offer: ProviderOffer
    agent: Agent
    jobs_dir: JobsDir
    settings: WorkerSettings
    say: Callable[[str], None]
    """Called with lines for the owner of the machine."""
    id: str
    """Id of this provider at the server."""
    sandbox: Sandbox | None
    """Sandbox of workers; ``None``: the owner wants none."""
    check_routes: Callable[[ProviderOffer], ProviderOffer] = lambda offer: offer
    """Returns the offer with the addresses and relays at which others reach this machine now."""
    show_progress: Callable[[str], None] = lambda _line: None
    """Called with what it does now, about once per second."""
    figures: ProviderFigures = field(default_factory=ProviderFigures)
    """Sums over all assignments, for Prometheus."""
    _events: queue.SimpleQueue[AgentEvent] = field(default_factory=queue.SimpleQueue)
    _over: threading.Event = field(default_factory=threading.Event)
    _task: _Task | None = None
    _link_test: LinkTest | None = None

    def run(self) -> None:
        """Work until the agent ends and raise its error; ``KeyboardInterrupt`` if interrupted twice."""
        try:
            with interrupts(self.interrupt):
                self._events.put(OfferAccepted())
                while True:
                    event = self._next()
                    logger.debug("%s", event)
                    for action in self.agent.handle(event, time.monotonic()):
                        if isinstance(action, Exit):
                            return _end(action)
                        self._act(action)
                    self._count()
        finally:
            self._over.set()
            if self._link_test is not None:
                self._link_test.stop()
            if self._task is not None:
                self._task.stopped.set()
                if self._task.worker is not None:
                    self._task.worker.kill()

    def _count(self) -> None:
        task = self._task
        memory = None if task is None or task.worker is None else task.worker.memory
        used = 0 if memory is None else memory.now
        self.figures.note(self.agent.work, used, is_connected=self.agent.is_connected)

    def interrupt(self) -> None:
        """Leave the server; a second call ends the provider at once."""
        self._events.put(InterruptReceived())

    def _next(self) -> AgentEvent:
        deadline = self.agent.deadline
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        try:
            return self._events.get(timeout=left)
        except queue.Empty:
            return DeadlinePassed()

    def _act(self, action: Action) -> None:
        match action:
            case SendHeartbeat(number) | SendOffer(number):
                self._start(lambda: self._send(action), lambda why: ServerUnreachable(number, why))
            case Leave(reason):
                self._leave(reason)
            case Announce(line):
                self.say(line)
            case ShowProgress(line):
                self.show_progress(line)
            case StartLinkTest(order):
                self._start_link_test(order)
            case StopLinkTest():
                if self._link_test is not None:
                    self._link_test.stop()
            case MeasureSpeed() | UpdateOffer():
                self._check_speed(action)
            case Exit():
                raise AssertionError("handled by run")
            case _:
                self._work_on(action)

    def _work_on(
        self,
        action: Fetch
        | StartWorker
        | Keep
        | Exclude
        | RequestTrace
        | Upload
        | UploadBest
        | UploadCheckpoints
        | UploadCheck
        | Stop
        | Discard,
    ) -> None:
        name = action.assignment
        match action:
            case Fetch():
                task = self._task = _Task(name)
                self._start(lambda: self._fetch(task), lambda why: Fetched(name, failure=why))
            case StartWorker():
                self._start_worker(self._current(name))
            case Keep() | Exclude() | RequestTrace():
                self._store(action)
            case Upload():
                task = self._task = self._task or _Task(name)  # no task: an earlier process trained it
                self._start(lambda: self._upload(task), lambda why: Uploaded(name, failure=why))
            case UploadBest() | UploadCheckpoints() | UploadCheck():
                self._upload_while_training(self._current(name), action)
            case Stop(_, hand_over):
                task = self._current(name)
                task.stopped.set()
                if task.worker is not None:
                    task.worker.stop(hand_over=hand_over)
            case Discard():
                if self._task is not None and self._task.assignment == name:
                    self._task = None
                self.jobs_dir.discard(name)

    def _upload_while_training(
        self, task: _Task, action: UploadBest | UploadCheckpoints | UploadCheck
    ) -> None:
        name = task.assignment
        match action:
            case UploadBest():
                self._start(lambda: self._upload_best(task), lambda _: BestUploaded(name))
            case UploadCheckpoints(_, order, is_last):
                if is_last:  # the task before was stopped with its worker
                    task = self._task = _Task(name)
                self._start(
                    lambda: self._upload_checkpoints(task, order),
                    lambda _: CheckpointsUploaded(name, order),
                )
            case UploadCheck(_, record):
                self._start(lambda: self._upload_check(task, record), lambda _: CheckUploaded(name))

    def _start_link_test(self, order: LinkTestOrder) -> None:
        listen = Address.parse(self.settings.listen or self.offer.address)
        requests = LinkTestApi(self.api, order.id)
        test = self._link_test = LinkTest(order, listen, requests.credentials)

        def run() -> AgentEvent:
            result = test.run()
            if result is not None:
                requests.report(result)
            return LinkTestEnded(order.id)

        self._start(run, lambda _: LinkTestEnded(order.id))

    def _store(self, action: Keep | Exclude | RequestTrace) -> None:
        """Write what an assignment's folder should hold from now on."""
        match action:
            case Keep(name, outcome):
                self._keep(name, outcome)
            case Exclude(name, nodes):
                self._exclude(name, nodes)
            case RequestTrace(name, order):
                self._request_trace(name, order)

    def _keep(self, name: str, outcome: Outcome) -> None:
        """Write the marker of a result; without it, only a restart of this provider loses the result."""
        marker = outcome.model_copy(update={"provider": self.id})
        try:
            self.jobs_dir.job_dir(name).write_outcome(marker)
        except OSError as error:
            logger.warning("the result of %s would not survive a restart: %s", name, error)

    def _exclude(self, name: str, nodes: tuple[ExcludedNode, ...]) -> None:
        try:
            self.jobs_dir.job_dir(name).write_excluded(nodes)
        except OSError as error:
            logger.warning("the worker of %s was not told which nodes are excluded: %s", name, error)

    def _request_trace(self, name: str, order: int) -> None:
        try:
            self.jobs_dir.job_dir(name).write_trace_order(order)
        except OSError as error:
            logger.warning("the worker of %s was not asked for its trace: %s", name, error)

    def _current(self, assignment: str) -> _Task:
        assert self._task is not None
        assert self._task.assignment == assignment
        return self._task

    def _start(self, run: Callable[[], AgentEvent], failed: Callable[[str], AgentEvent]) -> None:
        """Run ``run`` in a thread; its result, or ``failed`` after an unexpected error, is the event."""

        def put() -> None:
            try:
                self._events.put(run())
            except Exception as error:
                if not self._over.is_set():  # otherwise the connections were closed meanwhile
                    logger.exception("a task of the provider failed")
                self._events.put(failed(f"{type(error).__name__}: {error}"))

        threading.Thread(target=put, daemon=True).start()

    def _measured(self, heartbeat: Heartbeat) -> Heartbeat:
        """Return a heartbeat whose report has the memory of the worker, if there is one."""
        report, task = heartbeat.report, self._task
        if report is None or task is None or task.worker is None:
            return heartbeat
        if task.assignment != report.assignment:
            return heartbeat
        measured = report.model_copy(update={"memory": task.worker.memory})
        return heartbeat.model_copy(update={"report": measured})

    def _send(self, action: SendHeartbeat | SendOffer) -> AgentEvent:
        try:
            if isinstance(action, SendOffer):
                trained = self.jobs_dir.outcomes(self.id)
                self.offer = self.check_routes(self.offer).having_trained(trained)
                self.id = self.api.post("/api/providers", self.offer, ProviderView).id
                return OfferAccepted()
            beat = self._measured(action.heartbeat)
            path = f"/api/providers/{self.id}/heartbeat"
            within = POLL_ANSWER if beat.report is None else HTTP_ANSWER
            reply = self.api.post(path, beat, HeartbeatReply, wait=beat.wait, within=within)
            return HeartbeatAnswered(action.number, reply)
        except ServerRefusedError as error:
            return ServerRefused(action.number, error.status, str(error), error.retry_after)
        except ServerError as error:
            return ServerUnreachable(action.number, str(error))

    def _check_speed(self, action: MeasureSpeed | UpdateOffer) -> None:
        if isinstance(action, UpdateOffer):
            self.offer = self.offer.model_copy(update={"compute": action.compute})
            self._start(self._update_offer, lambda _: DeadlinePassed())
        else:
            self._start(self._measure, lambda _: SpeedMeasured(None))

    def _measure(self) -> AgentEvent:
        lower_thread_priority(WORKER_NICE)  # as jobs have it; the thread ends with the measurement
        return SpeedMeasured(min(compute(self.offer.cores), LARGEST_RATE))

    def _update_offer(self) -> AgentEvent:
        try:
            self.api.post("/api/providers", self.offer, ProviderView, idempotent=True)
        except ServerError as error:  # the next offer has it
            logger.info("the server was not told the new speed: %s", error)
        return DeadlinePassed()

    def _fetch(self, task: _Task) -> AgentEvent:
        name = task.assignment
        try:
            download = AssignmentDownload(self.api, self.offer.all_addresses)
            assignment, node = download.run(name, self.jobs_dir.job_dir(name), task.check)
        except ServerError as error:
            return Fetched(name, failure=str(error), again=is_temporary(error))
        except (RavnestError, OSError) as error:
            why = explained(error)
            return Fetched(name, failure=f"the files of the assignment cannot be fetched: {why}")
        title = f"{node.name}, {node.role} of cluster {node.cluster} of {assignment.job}"
        return Fetched(name, is_root=node.stage == 0, node_title=title)

    def _start_worker(self, task: _Task) -> None:
        """Start the worker in this thread: the system ends the worker when the thread ends."""
        job_dir = self.jobs_dir.job_dir(task.assignment)
        worker = WorkerProcess(
            task.assignment,
            job_dir,
            self.settings,
            self._events.put,
            self.sandbox,
            lambda: self._peers(task.assignment),
        )
        try:
            worker.start()
        except (OSError, RavnestError) as error:
            failure = f"the worker cannot be started: {error}"
            self._events.put(WorkerEnded(task.assignment, failure, "machine"))
            return
        task.worker = worker

    def _peers(self, assignment: str) -> tuple[str, ...]:
        """Return the addresses of the peers of an assignment's node, as the server knows them now."""
        return self.api.get(f"/api/assignments/{assignment}/peers", PeerAddresses).addresses

    def _upload(self, task: _Task) -> AgentEvent:
        name = task.assignment
        try:
            job_dir = self.jobs_dir.job_dir(name)
            files = job_dir.trained_files(job_dir.read_assignment().node_spec.cluster)
            artifacts = {path: artifact_of(path) for path in files}
            by_digest: dict[str, Path] = {artifact.sha256: path for path, artifact in artifacts.items()}
            upload(self.api, by_digest, lambda _done, _total: task.check())
            best = self._best_of(job_dir, task)
        except ServerError as error:
            return Uploaded(name, failure=str(error), again=_may_succeed_later(error))
        except (RavnestError, OSError) as error:
            return Uploaded(name, failure=f"the trained stages cannot be uploaded: {explained(error)}")
        trained = tuple(ResultFile(name=path.name, artifact=artifacts[path]) for path in files)
        return Uploaded(name, trained, best)

    def _best_of(self, job_dir: JobDir, task: _Task) -> BestFiles | None:
        """Upload the best model beside a trained one, which does not depend on it."""
        try:
            return upload_best(self.api, job_dir, task.check, paced=False)
        except (StageFormatError, OSError) as error:
            logger.warning("the best model cannot be uploaded: %s", error)
            return None

    def _upload_best(self, task: _Task) -> AgentEvent:
        name = task.assignment
        try:
            best = upload_best(self.api, self.jobs_dir.job_dir(name), task.check, paced=True)
        except (RavnestError, OSError) as error:
            logger.info("the best model of %s is not uploaded: %s", name, error)
            again = not task.stopped.is_set() and not (
                isinstance(error, ServerError) and not _may_succeed_later(error)
            )
            return BestUploaded(name, again=again)
        return BestUploaded(name, best)

    def _upload_checkpoints(self, task: _Task, order: CheckpointOrder) -> AgentEvent:
        name = task.assignment
        upload = CheckpointUpload(self.api, self.jobs_dir.job_dir(name), task.check)
        try:
            uploaded = upload.run(order)
        except (RavnestError, OSError) as error:  # the next reply of the server repeats the order
            logger.info("checkpoints of %s are not uploaded: %s", name, error)
            return CheckpointsUploaded(name, order)
        return CheckpointsUploaded(name, order, uploaded, is_done=order.rescue or bool(uploaded))

    def _upload_check(self, task: _Task, record: CheckRecord) -> AgentEvent:
        name = task.assignment
        try:
            upload = CheckUpload(self.api, self.jobs_dir.job_dir(name), task.check)
            return CheckUploaded(name, upload.run(record))
        except (RavnestError, OSError) as error:
            logger.info("a file of a spot check of %s is not uploaded: %s", name, error)
            return CheckUploaded(name)

    def _leave(self, reason: str) -> None:
        def leave() -> AgentEvent:
            try:
                self.api.delete(f"/api/providers/{self.id}", params={"reason": reason[:1000]})
            except ServerError as error:
                logger.info("the server was not told that this provider leaves: %s", error)
            return Left()

        self._start(leave, lambda _: Left())
        timer = threading.Timer(LEAVE_ANSWER, lambda: self._events.put(Left()))
        timer.daemon = True
        timer.start()


def _may_succeed_later(error: ServerError) -> bool:
    """Return ``True`` if an upload that failed with ``error`` is worth another try."""
    in_progress = isinstance(error, ServerRefusedError) and error.status == _IN_PROGRESS
    return in_progress or is_temporary(error)


def _end(action: Exit) -> None:
    if action.interrupted:
        raise KeyboardInterrupt
    if action.error is not None:
        raise action.error
