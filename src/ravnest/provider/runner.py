"""Does what the agent decides: threads for heartbeats, fetches and uploads, and the worker."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ravnest.errors import RavnestError, ServerError, ServerRefusedError
from ravnest.http.api import ApiClient, may_pass
from ravnest.http.transfer import artifact_of, upload
from ravnest.provider.agent import Agent
from ravnest.provider.download import Fetching
from ravnest.provider.events import (
    Action,
    Answered,
    Began,
    DeadlinePassed,
    Discard,
    Event,
    Exit,
    Fetch,
    Fetched,
    InterruptReceived,
    Leave,
    Left,
    OfferRefused,
    Say,
    SendHeartbeat,
    SendOffer,
    StartWorker,
    Stop,
    Unanswered,
    Upload,
    Uploaded,
    WorkerEnded,
)
from ravnest.provider.job_dir import JobsDir, WorkerSettings
from ravnest.provider.signals import interrupts
from ravnest.provider.worker_process import WorkerProcess
from ravnest.schemas.jobs import ResultFile
from ravnest.schemas.providers import HeartbeatReply, ProviderView
from ravnest.schemas.providers import ProviderOffer as OfferMessage

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 5.0
"""That a server may take to hear of a provider that leaves."""


class _StoppedError(RavnestError):
    """What was under way is not wanted any longer."""


@dataclass
class _Task:
    """What is known of the assignment that is worked on."""

    assignment: str
    stopped: threading.Event = field(default_factory=threading.Event)
    cluster: int = 0
    worker: WorkerProcess | None = None

    def check(self) -> None:
        if self.stopped.is_set():
            raise _StoppedError("it was stopped")


@dataclass
class Provider:
    """A provider at work, from its offer to its leaving."""

    api: ApiClient
    offer: OfferMessage
    agent: Agent
    workshop: JobsDir
    settings: WorkerSettings
    say: Callable[[str], None]
    id: str
    """By which the server knows it."""
    _events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    _over: threading.Event = field(default_factory=threading.Event)
    _task: _Task | None = None

    def run(self) -> int:
        """Work until the agent says that it is over; its exit code."""
        try:
            with interrupts(self.interrupt):
                self._events.put(Began())
                while True:
                    event = self._next()
                    logger.debug("%s", event)
                    for action in self.agent.handle(event, time.monotonic()):
                        if isinstance(action, Exit):
                            return action.code
                        self._act(action)
        finally:
            self._over.set()
            if self._task is not None:
                self._task.stopped.set()
                if self._task.worker is not None:
                    self._task.worker.kill()

    def interrupt(self) -> None:
        """Leave; the second time, end at once."""
        self._events.put(InterruptReceived())

    def _next(self) -> Event:
        deadline = self.agent.deadline
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        try:
            return self._events.get(timeout=left)
        except queue.Empty:
            return DeadlinePassed()

    def _act(self, action: Action) -> None:
        match action:
            case SendHeartbeat(number) | SendOffer(number):
                self._start(lambda: self._send(action), lambda why: Unanswered(number, why))
            case Fetch(assignment):
                task = self._task = _Task(assignment)
                self._start(lambda: self._fetch(task), lambda why: Fetched(assignment, failure=why))
            case StartWorker(assignment):
                self._start_worker(self._current(assignment))
            case Upload(assignment):
                task = self._current(assignment)
                self._start(lambda: self._upload(task), lambda why: Uploaded(assignment, failure=why))
            case Stop(assignment):
                task = self._current(assignment)
                task.stopped.set()
                if task.worker is not None:
                    task.worker.stop()
            case Discard(assignment):
                self._task = None
                self.workshop.discard(assignment)
            case Leave(reason):
                self._leave(reason)
            case Say(line):
                self.say(line)

    def _current(self, assignment: str) -> _Task:
        assert self._task is not None
        assert self._task.assignment == assignment
        return self._task

    def _start(self, run: Callable[[], Event], failed: Callable[[str], Event]) -> None:
        """Run something that takes time, whose end is an event, also where we made a mistake."""

        def put() -> None:
            try:
                self._events.put(run())
            except Exception as error:
                if not self._over.is_set():  # then connections are closed under our feet
                    logger.exception("a task of the provider failed")
                self._events.put(failed(f"{type(error).__name__}: {error}"))

        threading.Thread(target=put, daemon=True).start()

    def _send(self, action: SendHeartbeat | SendOffer) -> Event:
        try:
            if isinstance(action, SendOffer):
                self.id = self.api.post("/api/providers", self.offer, ProviderView).id
                return Began()
            beat = action.heartbeat
            path = f"/api/providers/{self.id}/heartbeat"
            return Answered(action.number, self.api.post(path, beat, HeartbeatReply, wait=beat.wait))
        except ServerRefusedError as error:
            return OfferRefused(action.number, error.status, str(error))
        except ServerError as error:
            return Unanswered(action.number, str(error))

    def _fetch(self, task: _Task) -> Event:
        name = task.assignment
        try:
            fetching = Fetching(self.api, self.offer.address)
            assignment, node = fetching.fetch(name, self.workshop.place(name), task.check)
        except ServerError as error:
            return Fetched(name, failure=str(error), again=may_pass(error))
        except (RavnestError, OSError) as error:
            return Fetched(name, failure=f"its part cannot be fetched: {error}")
        task.cluster = node.cluster
        place = f"{node.name}, {node.role} of cluster {node.cluster} of {assignment.job}"
        return Fetched(name, is_root=node.stage == 0, place=place)

    def _start_worker(self, task: _Task) -> None:
        """In this thread, not in one that ends: the worker lives no longer than it."""
        place = self.workshop.place(task.assignment)
        worker = WorkerProcess(task.assignment, place, task.cluster, self.settings, self._events.put)
        try:
            worker.start()
        except OSError as error:
            self._events.put(WorkerEnded(task.assignment, f"the worker cannot be started: {error}"))
            return
        task.worker = worker

    def _upload(self, task: _Task) -> Event:
        name = task.assignment
        try:
            files = self.workshop.place(name).trained_files(task.cluster)
            artifacts = {path: artifact_of(path) for path in files}
            by_digest: dict[str, Path] = {artifact.sha256: path for path, artifact in artifacts.items()}
            upload(self.api, by_digest, lambda _done, _total: task.check())
        except ServerError as error:
            return Uploaded(name, failure=str(error), again=may_pass(error))
        except (RavnestError, OSError) as error:
            return Uploaded(name, failure=f"the trained stages cannot be uploaded: {error}")
        return Uploaded(
            name, tuple(ResultFile(name=path.name, artifact=artifacts[path]) for path in files)
        )

    def _leave(self, reason: str) -> None:
        def leave() -> Event:
            try:
                self.api.delete(f"/api/providers/{self.id}", params={"reason": reason[:1000]})
            except ServerError as error:
                logger.info("the server was not told: %s", error)
            return Left()

        self._start(leave, lambda _: Left())
        late = threading.Timer(_LEAVE_SECONDS, lambda: self._events.put(Left()))
        late.daemon = True
        late.start()
