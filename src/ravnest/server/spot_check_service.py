"""Spot checks of running jobs: pairs up the files of both sides, has outputs computed again, and acts.

Open checks and their history are in memory: a restarted server gets the newest files reported again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import AssignmentReport
from ravnest.schemas.spot_checks import CheckEvidence
from ravnest.server.artifacts import ArtifactFolder
from ravnest.server.db.database import Transaction
from ravnest.server.db.records import AssignmentRecord
from ravnest.server.job_service import JobService
from ravnest.server.job_status import holders, place_name
from ravnest.server.scheduling.check_process import ForwardChecker
from ravnest.server.scheduling.check_program import CheckRequest
from ravnest.server.scheduling.spot_checks import CheckedPlace, CheckHistory, Side
from ravnest.server.settings import ServerSettings
from ravnest.server.unit_of_work import UnitOfWork, UnitOfWorkFactory

_MOST_REMEMBERED = 10_000
"""Files of checks that are over: providers report the newest ones again and again."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Part:
    """File of one side."""

    assignment: AssignmentRecord
    evidence: CheckEvidence


@dataclass(frozen=True)
class _OpenCheck:
    """Check of a place whose output has been received."""

    place: CheckedPlace
    received: _Part
    sender: AssignmentRecord
    """The provider that has to state what the output was computed from."""
    deadline: float
    """Steady time until which it may do so."""
    stated: _Part | None = None


def in_thread(work: Callable[[], None]) -> None:
    """Carry out ``work`` in a thread of its own."""
    threading.Thread(target=work, name="spot check", daemon=True).start()


class SpotCheckService:
    """Checks outputs of stages; the methods are thread-safe and return soon."""

    def __init__(
        self,
        units: UnitOfWorkFactory,
        artifacts: ArtifactFolder,
        jobs: JobService,
        checker: ForwardChecker,
        settings: ServerSettings,
        run: Callable[[Callable[[], None]], None] = in_thread,
    ) -> None:
        """``run`` starts a computation, which takes seconds or minutes."""
        self._units = units
        self._artifacts = artifacts
        self._jobs = jobs
        self._checker = checker
        self._settings = settings
        self._run = run
        self._lock = threading.Lock()
        self._computing = threading.Lock()
        """Held during a computation: one at a time."""
        self._history = CheckHistory()
        self._open: dict[CheckedPlace, _OpenCheck] = {}
        self._stated: dict[CheckedPlace, _Part] = {}
        """Newest files of senders whose receivers have not reported theirs yet."""
        self._known: dict[str, None] = {}
        """Digests of files that were taken, oldest first."""
        self._unused: dict[str, str] = {}
        """Digests of files that nobody needs any more, and their owners."""

    def interval(self, least: float) -> float:
        """Return the mean seconds between two checks of a stage whose cost allows ``least``; 0: none."""
        wanted = self._settings.spot_checks
        return max(least, wanted) if wanted > 0 and least > 0 and self._checker.is_available else 0.0

    def knows(self, report: AssignmentReport) -> bool:
        """Return whether a report tells nothing new about checks."""
        return all(each.file.sha256 in self._known for each in report.checks)

    def store(self, provider: str, report: AssignmentReport) -> None:
        """Take the files of checks that a report names."""
        for evidence in report.checks:
            if evidence.file.sha256 in self._known:
                continue
            with self._units.db.read() as db:
                assignment = db.assignments.get(report.assignment)
                is_own = assignment is not None and assignment.provider == provider
                if assignment is None or not is_own or assignment.phase != "training":
                    return
                if db.artifact_grants.missing(provider, [evidence.file.sha256]):
                    continue
                self._take(db, _Part(assignment, evidence))

    def _take(self, db: Transaction, part: _Part) -> None:
        body = db.assignments.body(part.assignment.id)
        spec = body.node_spec
        is_sender = part.evidence.part == "stated"
        stage = spec.stage if is_sender else spec.stage - 1
        own = part.assignment
        place = CheckedPlace(own.job, own.attempt, own.cluster, stage)
        sender = own if is_sender else self._holder(db, own, spec.pipeline[stage])
        with self._lock:
            self._remember(part)
            found = self._open.get(place)
            if is_sender:
                if place in self._stated:
                    self._discard(self._stated[place])
                self._stated[place] = part
            elif found is None and sender is not None and body.spot_checks > 0:
                wait = max(self._settings.spot_check_answer, body.spot_checks)
                deadline = self._units.clock.steady() + wait
                found = self._open[place] = _OpenCheck(place, part, sender, deadline)
            else:  # a check is open already, or nobody is there to be checked
                self._discard(part)
            stated = self._stated.get(place)
            if found is None or stated is None or not _is_answer(stated, found.received):
                return
            del self._stated[place], self._open[place]
        complete = _OpenCheck(place, found.received, stated.assignment, found.deadline, stated)
        self._run(lambda: self._compute(complete))

    @staticmethod
    def _holder(db: Transaction, own: AssignmentRecord, node: int) -> AssignmentRecord | None:
        """Return the assignment that stands for another node of the cluster, if it trains."""
        held = holders(db.assignments.of_job(own.job))
        return next((each for each in held if each.node == node and each.phase == "training"), None)

    def _remember(self, part: _Part) -> None:
        self._known[part.evidence.file.sha256] = None
        while len(self._known) > _MOST_REMEMBERED:
            del self._known[next(iter(self._known))]

    def _discard(self, part: _Part) -> None:
        """Have a file deleted; the lock is held."""
        self._unused[part.evidence.file.sha256] = part.assignment.provider

    # Results

    def _compute(self, check: _OpenCheck) -> None:
        """Compute an output again and act on the result; top of a thread."""
        try:
            with self._computing:
                self._settle(check)
        except Exception:
            _log.exception("a spot check of %s failed", check.place.job)

    def _settle(self, check: _OpenCheck) -> None:
        assert check.stated is not None
        with self._units.db.read() as db:
            body = db.assignments.body(check.sender.id)
        stated, received = check.stated.evidence, check.received.evidence
        request = CheckRequest(
            stage=str(self._artifacts.path(body.stage.sha256).absolute()),
            stated=str(self._artifacts.path(stated.file.sha256).absolute()),
            received=str(self._artifacts.path(received.file.sha256).absolute()),
            seed=body.node_spec.seed,
            phase=received.phase,
            index=received.index,
            codec=body.training.compression or "raw",
            memory=self._settings.planning.memory,
        )
        result = self._checker.check(request)
        with self._lock:
            self._discard(check.stated)
            self._discard(check.received)
        where = place_name(check.sender)
        if not result.differs:
            outcome = (
                f"{result.deviation:.2g} of what is tolerated" if result.compared else result.detail
            )
            _log.info("spot check of %s in %s: %s", where, check.place.job, outcome)
            with self._lock:
                self._history.agreed(check.place, check.sender.provider)
            return
        receiver = check.received.assignment.provider
        with self._lock:
            side = self._history.differs(check.place, check.sender.provider, receiver)
        self._blame(
            check,
            side,
            f"micro-batch {received.index} of phase {received.phase}: the output is not what the server "
            f"computes from the input and the weights that it states: {result.detail}",
        )

    def _blame(self, check: _OpenCheck, side: Side | None, what: str) -> None:
        """Record the outcome of a check and end the part of the provider that is blamed."""
        blamed = check.received.assignment if side == "receiver" else check.sender
        with self._units.begin() as uow:
            current = uow.db.assignments.get(blamed.id)
            if current is None or current.has_ended:
                return  # another check has ended it meanwhile
            names = uow.db.providers.names([check.sender.provider, check.received.assignment.provider])
            sender = names.get(check.sender.provider, "a provider")
            receiver = names.get(check.received.assignment.provider, "a provider")
            words = (
                f"spot check of {sender} ({place_name(check.sender)}), received by {receiver}: {what}"
            )
            if side == "receiver":
                words += f"; the provider before looked wrong to {receiver} too, which is blamed"
            uow.db.events.add("warning", blamed.provider, words, job=blamed.job)
            if side is not None:
                self._end(uow, current, f"a spot check has failed: {what}")

    def _end(self, uow: UnitOfWork, assignment: AssignmentRecord, reason: str) -> None:
        """End the part of a provider; it does not get a place in this job again."""
        uow.vacate(assignment, reason, "check")
        provider = uow.db.providers.get(assignment.provider)
        if provider is not None and provider.job == assignment.job:
            uow.release(provider, f"its part in {assignment.job} was ended: {reason}")
        uow.db.jobs.touch(assignment.job)
        uow.update_job_status(assignment.job)
        self._jobs.schedule_stops(uow, assignment.job)

    # Deadlines

    def run_due(self) -> float | None:
        """Settle checks that nobody has answered; return the next deadline (steady clock)."""
        self._forget_ended()
        now = self._units.clock.steady()
        with self._lock:
            late = [each for each in self._open.values() if each.deadline <= now]
            for each in late:
                del self._open[each.place]
                self._discard(each.received)
        for each in late:
            with self._units.db.read() as db:
                sender = db.assignments.get(each.sender.id)
                receiver = db.assignments.get(each.received.assignment.id)
            if sender is None or sender.phase != "training" or receiver is None or receiver.has_ended:
                continue  # the run was interrupted meanwhile
            if self._artifacts.is_full:
                continue  # the answer could not be stored
            with self._lock:
                side = self._history.unanswered(each.place, each.sender.provider, receiver.provider)
            self._blame(each, side, "it has not stated what its output was computed from")
        self._delete_unused()
        with self._lock:
            return min((each.deadline for each in self._open.values()), default=None)

    def _forget_ended(self) -> None:
        """Forget the jobs that do not run any more."""
        with self._units.db.read() as db:
            running = {job.id for job in db.jobs.in_state(JobState.SHIPPING, JobState.TRAINING)}
        with self._lock:
            for place in [place for place in self._open if place.job not in running]:
                self._discard(self._open.pop(place).received)
            for place in [place for place in self._stated if place.job not in running]:
                self._discard(self._stated.pop(place))
            self._history.keep(running)

    def _delete_unused(self) -> None:
        with self._lock:
            unused, self._unused = self._unused, {}
        for digest, owner in unused.items():
            # In a transaction that writes: nobody is granted the file meanwhile.
            with self._units.db.write(self._units.clock.wall()) as db:
                db.artifact_grants.revoke_files(owner, [digest])
                is_over = db.artifact_grants.is_granted(digest) or self._artifacts.remove(
                    digest, self._settings.unused_files_kept
                )
            if not is_over:
                with self._lock:
                    self._unused[digest] = owner


def _is_answer(stated: _Part, received: _Part) -> bool:
    """Return whether a statement is about the output that was received."""
    one, other = stated.evidence, received.evidence
    return (one.check, one.microbatch) == (other.check, other.microbatch)
