"""Decides what a provider does next; does no input or output itself.

A heartbeat reply names the assignment that the provider should work on, whatever it does now. The agent
compares the two and acts on the difference: it fetches files, starts the worker once all providers of
the job have theirs, uploads the trained stages of a Root, or stops. One heartbeat, the poll, waits at
the server for a change; reports travel in other heartbeats, which do not wait.

Folders of assignments that are not over stay until the server says that they are not needed: they hold
checkpoints. A provider that leaves while it trains gives the server some time to find another one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from ravnest.deadlines import (
    FIRST_PAUSE,
    HANDOVER,
    JITTER,
    LAST_UPLOAD,
    LEAVE_ANSWER,
    LONGEST_PAUSE,
    POLL_GAP,
    POLL_WAIT,
    REPORT_INTERVAL,
    ROOT_REPORT_INTERVAL,
)
from ravnest.errors import JobEndedError, RavnestError, ServerRefusedError
from ravnest.http.api import is_passing
from ravnest.provider.assignment_folders import AssignmentFolders
from ravnest.provider.assignment_progress import AssignmentProgress, RecordLog
from ravnest.provider.events import (
    Action,
    AgentEvent,
    Announce,
    BestUploaded,
    CheckpointsUploaded,
    CheckUploaded,
    ConnectionsRejected,
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
    OfferAccepted,
    RecordsReceived,
    RequestTrace,
    SendHeartbeat,
    SendOffer,
    ServerRefused,
    ServerUnreachable,
    StartWorker,
    Stop,
    Upload,
    UploadBest,
    UploadCheckpoints,
    Uploaded,
    WorkerEnded,
)
from ravnest.provider.last_upload import LastUpload
from ravnest.provider.leave_wish import LeaveWish
from ravnest.provider.link_test_progress import LinkTestProgress
from ravnest.provider.outcome import Outcome
from ravnest.provider.speed_check import SpeedCheck
from ravnest.schemas.providers import AssignmentReport, Heartbeat, HeartbeatReply, TlsRejections

_KEPT = "the server does not have the result yet; it is kept, and sent when the provider starts again"
_REJECTED = "connections without a valid certificate were rejected; the server gets their number"
_CONTINUES = "continues the assignment of an earlier run of this provider"
_HANDS_OVER = (
    f"waits up to {HANDOVER:.0f} s for another provider to take over its training; Ctrl-C again leaves "
    "at once"
)
_UPLOADS_LAST = (
    f"uploads its last checkpoint to the server for up to {LAST_UPLOAD:.0f} s, because no other node "
    "has it; Ctrl-C again leaves at once"
)
_NOT_UPLOADED = "leaves, although the server does not have its last checkpoint"
_FINAL = (401, 403)
"""HTTP statuses after which trying again is useless."""
_UNKNOWN = 404
_INCOMPLETE = 422
"""HTTP status of a report whose result names files that the server does not have."""


class Agent:
    """State machine of a provider: maps events and time to actions."""

    def __init__(
        self,
        *,
        ends: float | None = None,
        once: bool = False,
        begun: Iterable[str] = (),
        kept: Mapping[str, Outcome] | None = None,
        jitter: random.Random | None = None,
        speed: SpeedCheck | None = None,
    ) -> None:
        """``ends``: time at which the offered hours are over. ``once``: leave after one assignment.

        ``begun``: assignments that an earlier process of this provider worked on, which it continues.
        ``kept``: assignments that it has trained to the end, and whose results the server has not
        acknowledged. ``speed``: repeats the measurement of the speed.
        """
        self._speed = speed
        self._ends = ends
        self._once = once
        self._folders = AssignmentFolders(begun, kept or {})
        self._jitter = random.Random() if jitter is None else jitter  # noqa: S311 - no secret
        self._work: AssignmentProgress | None = None
        self._wanted: str | None = None
        self._records_known = 0
        """Records that the server has of the wanted assignment, maybe of an earlier process."""
        self._may_train = False
        """All providers of the wanted assignment's job have fetched their files."""
        self._link_test = LinkTestProgress()
        self._number = 0
        self._newest = 0
        """Number of the newest heartbeat that was answered."""
        self._poll: int | None = None
        self._report: int | None = None
        """Number of the heartbeat in flight that carries a report."""
        self._reported = 0
        """Position after the last record in that report."""
        self._has_news = False
        """There is something to report."""
        self._away = False
        """The server does not answer."""
        self._pause = FIRST_PAUSE
        self._poll_at: float | None = None
        self._report_at = 0.0
        self._report_pause = FIRST_PAUSE
        self._offering: int | None = None
        self._interrupted = False
        self._wish: LeaveWish | None = None
        """Wish to leave; this provider works until another one can take over."""
        self._leaving: str | None = None
        self._last_upload: LastUpload | None = None
        self._report_until: float | None = None
        """Time at which the provider leaves although the server does not have its last records."""
        self._left = False
        self._error: RavnestError | None = None

    @property
    def deadline(self) -> float | None:
        """Time at which ``DeadlinePassed`` is due; ``None`` if it is not."""
        if self._left:
            return None
        times = [self._ends, self._poll_at, None if self._work is None else self._work.again_at]
        times.append(None if self._wish is None or self._leaving else self._wish.deadline)
        last = self._last_upload
        times += [None if last is None or last.is_over else last.deadline, self._report_until]
        times.append(None if self._speed is None else self._speed.deadline)
        if self._has_news and self._report is None and not self._away:
            times.append(self._report_at)
        return min((time for time in times if time is not None), default=None)

    @property
    def work(self) -> AssignmentProgress | None:
        """Progress of the current assignment; ``None`` without one. For reading only."""
        return self._work

    @property
    def is_connected(self) -> bool:
        """``True`` while the server answers."""
        return not self._away

    def handle(self, event: AgentEvent, now: float) -> list[Action]:
        """Return the actions that follow from an event."""
        match event:
            case InterruptReceived() if self._interrupted:
                return [Exit(interrupted=True)]
            case InterruptReceived():
                self._interrupted = True
            case LinkTestEnded(test):
                self._link_test.ended(test)
            case CheckpointsUploaded() | CheckUploaded():
                self._end_upload(event, now)
            case BestUploaded():
                self._end_best(event, now)
            case Left():
                return [Exit(self._error)]
        if self._left:
            return []
        actions = [*self._react(event, now), *self._reconcile(now)]
        idle = self._work is None and self._wanted is None and self._leaving is None
        actions += self._link_test.actions(is_idle=idle)
        if self._speed is not None:
            actions += self._speed.handle(event, now, is_idle=idle and not self._link_test.is_running)
        return [*actions, *self._due_heartbeats(now)]

    def _react(self, event: AgentEvent, now: float) -> list[Action]:
        match event:
            case OfferAccepted():
                self._poll, self._poll_at = None, now
                return self._server_is_back()
            case HeartbeatAnswered(number, reply):
                return self._answered(number, reply, now)
            case ServerUnreachable(number, reason):
                return self._unanswered(number, reason, now)
            case ServerRefused(number, status, reason, retry_after):
                return self._refused(number, status, reason, now, retry_after or 0.0)
            case InterruptReceived() if self._leaving is None and self._wish is None:
                return self._want_to_leave("its owner stopped it", now)
            case DeadlinePassed() if self._ends is not None and now >= self._ends:
                self._ends = None
                return [] if self._wish else self._want_to_leave("the offered hours are over", now)
            case Fetched() | RecordsReceived() | ConnectionsRejected() | WorkerEnded() | Uploaded():
                work = self._work
                if work is None or work.assignment != event.assignment:
                    return []
                return self._progress(work, event, now)
            case _:
                return []

    # Answers of the server

    def _answered(self, number: int, reply: HeartbeatReply, now: float) -> list[Action]:
        is_poll = number == self._poll
        actions = self._server_is_back() if is_poll else []
        if self._last_upload is not None:
            self._last_upload.answered(number)
        if number == self._report and self._leaving is not None and self._work is not None:
            # The reply names no assignment any more if another provider has taken over.
            self._work.records.acknowledge(self._reported)
            self._has_news |= self._work.records.waiting > 0
        overtaken = number < self._newest
        self._heartbeat_ended(number, now if overtaken else now + POLL_GAP)
        if overtaken:  # a later heartbeat was answered first: this reply may be outdated, so poll again
            return actions
        self._newest = number
        self._may_train = reply.may_train
        self._records_known = reply.records_known
        self._folders.need(reply.keep)
        if self._wish is not None:
            self._wish.answered(number, may_leave=reply.may_leave, now=now)
        self._link_test.want(reply.link_test)
        if reply.assignment != self._wanted:
            self._wanted = reply.assignment
            if self._work is not None and not self._work.is_over and reply.reason:
                actions.append(Announce(f"message of the server: {reply.reason}"))
        work = self._work
        if work is not None and work.assignment == reply.assignment:
            work.records.acknowledge(reply.records_known)
            work.checkpoints.want(reply.upload)
            work.best.retry()
            self._has_news |= work.records.waiting > 0 or (is_poll and work.is_over)
            if work.phase == "training" and reply.excluded != work.excluded:
                work.excluded = reply.excluded
                actions.append(Exclude(work.assignment, reply.excluded))
            if work.phase == "training" and reply.trace > work.trace:
                work.trace = reply.trace
                actions.append(RequestTrace(work.assignment, reply.trace))
        return [*actions, *self._discard_unwanted()]

    def _unanswered(
        self, number: int, reason: str, now: float, least_pause: float = 0.0
    ) -> list[Action]:
        if number == self._report:
            self._report, self._has_news = None, True
            self._report_at = now + max(self._jittered(self._report_pause), least_pause)
            self._report_pause = min(2 * self._report_pause, LONGEST_PAUSE)
            return []
        if number != self._poll:
            return []
        self._heartbeat_ended(number, now + max(self._jittered(self._pause), least_pause))
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        if self._away:
            return []
        self._away = True
        busy = self._work is not None and self._work.busy
        then = "training continues, and the provider tries again" if busy else "the provider tries again"
        return [Announce(f"the server does not answer: {reason}; {then}")]

    def _refused(
        self, number: int, status: int, reason: str, now: float, least_pause: float
    ) -> list[Action]:
        if number == self._report and is_passing(status):
            return self._unanswered(number, reason, now, least_pause)
        if number == self._report:  # the answer to the poll says what to do instead
            self._report = None
            if status == _INCOMPLETE and self._work is not None:
                self._upload_again(self._work, now)
            return []
        if number != self._poll:
            return []
        if status in _FINAL:
            self._error = ServerRefusedError(f"the server refuses this provider: {reason}", status)
            return self._leave(reason)
        if status == _UNKNOWN and number != self._offering:
            again = self._unanswered(number, f"it does not know this provider ({reason})", now)
            self._poll_at, self._poll = None, self._next_number()
            self._offering = self._poll
            return [*again, SendOffer(self._poll)]
        return self._unanswered(number, reason, now, least_pause)

    def _heartbeat_ended(self, number: int, next_poll: float) -> None:
        """Note that a heartbeat is over, with or without an answer."""
        if number == self._poll:
            self._poll, self._poll_at = None, next_poll
        elif number == self._report:
            self._report, self._report_pause = None, FIRST_PAUSE

    def _server_is_back(self) -> list[Action]:
        away, self._away = self._away, False
        self._pause = FIRST_PAUSE
        return [Announce("the server answers again")] if away else []

    def _jittered(self, pause: float) -> float:
        return pause * self._jitter.uniform(1 - JITTER, 1 + JITTER)

    # The assignment

    def _progress(
        self,
        work: AssignmentProgress,
        event: Fetched | RecordsReceived | ConnectionsRejected | WorkerEnded | Uploaded,
        now: float,
    ) -> list[Action]:
        if isinstance(event, RecordsReceived):
            self._has_news = True
            return work.take(event.records, now)
        if isinstance(event, ConnectionsRejected):
            known, work.tls_rejections = work.tls_rejections, event.tls_rejections
            self._has_news = True
            return [] if known != TlsRejections() else [Announce(f"{work.title}: {_REJECTED}")]
        work.busy = False
        if work.stopping:
            return []
        if isinstance(event, Fetched | Uploaded) and event.again:
            self._try_later(work, now)
            return self._explain_wait(work, event.failure, now) if isinstance(event, Uploaded) else []
        if event.failure:
            return self._fail(work, event, now)
        match event:
            case Fetched():
                work.is_root, work.node_title, work.phase = event.is_root, event.node_title, "fetched"
                self._report_soon(now)
                return [Announce(f"{event.node_title}: has its files, waits for the other providers")]
            case WorkerEnded():
                work.phase = "uploading" if work.is_root else "finished"
                self._report_soon(now)
                keep = Keep(work.assignment, work.outcome)
                if not work.is_root:
                    return [keep, Announce(work.finished)]
                work.busy, work.pause = True, FIRST_PAUSE
                return [keep, Upload(work.assignment)]
            case Uploaded():
                work.result, work.waiting, work.phase = event.files, "", "finished"
                work.best.end(event.best)
                self._report_soon(now)
                return [Announce(work.finished)]

    def _try_later(self, work: AssignmentProgress, now: float) -> None:
        """Have the last step tried again after a pause."""
        work.again_at = now + self._jittered(work.pause)
        work.pause = min(2 * work.pause, LONGEST_PAUSE)

    def _explain_wait(self, work: AssignmentProgress, reason: str, now: float) -> list[Action]:
        """Tell the owner and the server why the trained files are not uploaded yet."""
        if reason == work.waiting:
            return []
        work.waiting = reason
        self._report_soon(now)
        return [Announce(f"{work.title}: the trained stages are kept here and sent again: {reason}")]

    def _upload_again(self, work: AssignmentProgress, now: float) -> None:
        """Upload a result that the server has lost before it was acknowledged."""
        if work.is_root and work.phase == "finished":
            work.phase, work.result = "uploading", ()
            self._try_later(work, now)

    def _discard_unwanted(self) -> list[Action]:
        """Remove the folders of earlier assignments that the server does not need any more."""
        current = None if self._work is None else self._work.assignment
        return [Discard(each) for each in self._folders.drop_unneeded(self._wanted, current)]

    def _fail(
        self, work: AssignmentProgress, event: Fetched | WorkerEnded | Uploaded, now: float
    ) -> list[Action]:
        work.phase, work.failure = "failed", event.failure
        match event:
            case WorkerEnded():
                work.cause = event.cause
            case Fetched() | Uploaded():
                work.cause = "machine"
        self._report_soon(now)
        return [Announce(f"{work.title}: failed: {event.failure}")]

    def _end_upload(self, event: CheckpointsUploaded | CheckUploaded, now: float) -> None:
        """Store which checkpoints or files of checks the server has, and report it."""
        work = self._work
        if work is None or work.assignment != event.assignment:
            return
        if isinstance(event, CheckUploaded):
            work.checks.end(event.evidence)
        else:
            work.checkpoints.end(event.order, event.checkpoints, is_done=event.is_done)
        self._report_soon(now)

    def _end_best(self, event: BestUploaded, now: float) -> None:
        """Store which best model the server has, and report it."""
        work = self._work
        if work is not None and work.assignment == event.assignment:
            work.best.end(event.best, again=event.again)
            self._report_soon(now)

    def _report_soon(self, now: float) -> None:
        self._has_news, self._report_at = True, now

    def _reconcile(self, now: float) -> list[Action]:
        """Return the actions that bring the current assignment in line with the wanted one."""
        if self._left:
            return []
        self._decide_leave(now)
        wanted = None if self._leaving is not None else self._wanted
        actions: list[Action] = []
        work = self._work
        if work is not None and (work.assignment != wanted or work.stopping):
            if work.busy:
                stops, work.stopping = work.stopping, True
                leaves = self._leaving is not None or self._wish is not None
                stop = Stop(work.assignment, hand_over=leaves and work.phase == "training")
                return [] if stops else [Announce(f"{work.title}: stops"), stop]
            actions += self._upload_last(work, now)
            if self._last_upload is not None and not self._last_upload.is_over:
                return actions
            if self._is_reporting_last(work, now):
                return actions
            actions += self._end_work(work, wanted)
            work = None
        if self._leaving is not None:
            self._left = True
            discards = [Discard(assignment) for assignment in self._folders.finished]
            return [*actions, *discards, Leave(self._leaving)]
        if work is None and wanted is not None:
            actions += self._begin(wanted, now)
        elif work is not None:
            actions += self._continue(work, now)
        return actions

    def _decide_leave(self, now: float) -> None:
        """Leave if this provider wants to, and does not have to wait for another one any more."""
        work = self._work
        if self._wish is not None and self._leaving is None:
            works = work is not None and work.phase == "training" and work.assignment == self._wanted
            if not works or now >= self._wish.deadline:
                self._leaving = self._wish.reason

    def _upload_last(self, work: AssignmentProgress, now: float) -> list[Action]:
        """Upload checkpoints that no other node has; wait until ``_last_upload`` is over.

        The server says in its reply to the wish to leave that nobody else has them.
        """
        last, order = self._last_upload, work.checkpoints.wanted
        is_asked = order is not None and order.rescue and work.assignment == self._wanted
        actions: list[Action] = []
        if last is None:
            if self._leaving is None or work.phase != "training" or not is_asked or self._away:
                return []
            last = self._last_upload = LastUpload.begin(now)
            work.checkpoints.repeat()  # the worker has just taken a newer one
            actions.append(Announce(f"{work.title}: {_UPLOADS_LAST}"))
        if not last.is_over and (now >= last.deadline or not is_asked):
            last.is_over = True
            actions.append(Announce(f"{work.title}: {_NOT_UPLOADED}"))
        upload = None if last.is_over else work.checkpoints.begin()
        if upload is not None:
            actions.append(UploadCheckpoints(work.assignment, upload, is_last=True))
        return actions

    def _is_reporting_last(self, work: AssignmentProgress, now: float) -> bool:
        """Return whether the last records of a provider that leaves are on their way to the server."""
        waits = work.phase == "training" and work.records.waiting > 0 and not self._away
        if self._leaving is None or not waits:
            return False
        if self._report_until is None:
            self._report_until = now + LEAVE_ANSWER
            self._report_soon(now)
        return now < self._report_until

    def _end_work(self, work: AssignmentProgress, wanted: str | None) -> list[Action]:
        """Leave an assignment that is not wanted any more; keep its folder if it may be needed again."""
        actions: list[Action] = []
        is_needed = self._folders.is_needed(work.assignment)
        if work.is_trained and work.assignment == self._wanted:
            actions.append(Announce(f"{work.title}: {_KEPT}"))
        elif is_needed or work.assignment == self._wanted:
            self._folders.keep(work.assignment, is_trained=work.is_trained)
        else:
            actions.append(Discard(work.assignment))
        goes_on = is_needed and wanted is not None  # in the same place, after a failure
        if self._once and self._leaving is None and not goes_on:
            if work.phase == "failed":
                self._error = JobEndedError(f"{work.title}: {work.failure}")
            self._leaving = "it was started for one job"
        self._work, self._has_news = None, False
        return actions

    def _continue(self, work: AssignmentProgress, now: float) -> list[Action]:
        """Return the next step of the wanted assignment, if it is due."""
        if work.again_at is not None and now >= work.again_at:
            work.again_at, work.busy = None, True
            return [Upload(work.assignment) if work.phase == "uploading" else Fetch(work.assignment)]
        if work.phase == "fetched" and self._may_train and not self._link_test.is_running:
            work.phase, work.busy = "training", True
            self._report_soon(now)
            return [Announce(f"{work.node_title}: starts training"), StartWorker(work.assignment)]
        if work.phase == "training" and work.best.begin():
            return [UploadBest(work.assignment)]
        return work.uploads()

    def _begin(self, assignment: str, now: float) -> list[Action]:
        self._report_soon(now)
        if (outcome := self._folders.take_result(assignment)) is not None:
            work = self._work = AssignmentProgress.kept(assignment, outcome)
            line = Announce(f"{work.title}: sends the result of an earlier run of this provider")
            return [line, Upload(assignment)] if outcome.is_root else [line]
        self._work = AssignmentProgress(assignment, records=RecordLog(self._records_known))
        words = (
            _CONTINUES
            if self._folders.take(assignment)
            else "got an assignment from the server; fetching its files"
        )
        return [Announce(words), Fetch(assignment)]

    def _want_to_leave(self, reason: str, now: float) -> list[Action]:
        """Leave at once, or ask the server for another provider that takes over a training."""
        if self._work is None or self._work.phase != "training" or self._away:
            return self._leave(reason)
        self._wish = LeaveWish.begin(reason, now)
        self._report_soon(now)
        return [Announce(f"leaving the server: {reason}; {_HANDS_OVER}")]

    def _leave(self, reason: str) -> list[Action]:
        self._leaving = reason
        return [Announce(f"leaving the server: {reason}")]

    # Heartbeats

    def _due_heartbeats(self, now: float) -> list[Action]:
        if self._left:
            return []
        actions: list[Action] = []
        if self._has_news and self._report is None and not self._away and now >= self._report_at:
            if self._work is not None:
                self._report = self._next_number()
                if self._wish is not None:
                    self._wish.sent(self._report)
                if self._last_upload is not None and self._work.checkpoints.is_done:
                    self._last_upload.sent(self._report)
                report = self._work.report()
                self._reported = report.first_record + len(report.records)
                heartbeat = self._heartbeat(report, wait=0)
                actions.append(SendHeartbeat(self._report, heartbeat))
            self._has_news = False
            is_root = self._work is not None and self._work.is_root
            self._report_at = now + (ROOT_REPORT_INTERVAL if is_root else REPORT_INTERVAL)
        if self._poll is None and self._poll_at is not None and now >= self._poll_at:
            self._poll, self._poll_at = self._next_number(), None
            wait = 0 if self._away else POLL_WAIT  # notice at once that the server is back
            actions.append(SendHeartbeat(self._poll, self._heartbeat(None, wait=wait)))
        return actions

    def _heartbeat(self, report: AssignmentReport | None, *, wait: float) -> Heartbeat:
        return Heartbeat(
            report=report,
            known=self._wanted,
            may_train=self._may_train,
            link_test=self._link_test.known,
            upload=None if self._work is None else self._work.checkpoints.wanted,
            leaving="" if self._wish is None else self._wish.reason,
            wait=wait,
        )

    def _next_number(self) -> int:
        self._number += 1
        return self._number
