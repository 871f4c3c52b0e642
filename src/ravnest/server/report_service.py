"""Reports of assignments: records, phases, results, and the loss of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ravnest.errors import ServerRefusedError
from ravnest.schemas.base import clipped
from ravnest.schemas.jobs import BestFiles, JobState
from ravnest.schemas.providers import Assignment, AssignmentReport, ProviderState, TlsRejections
from ravnest.server.assignments import FETCHING
from ravnest.server.auth.tokens import AuthService
from ravnest.server.cluster_activity import ClusterActivity
from ravnest.server.db.database import Transaction
from ravnest.server.db.new_records import NewRecords
from ravnest.server.db.records import AssignmentRecord, ProviderRecord
from ravnest.server.job_service import JobService
from ravnest.server.job_status import can_continue, holders, is_confirmed, is_hearsay, lineage
from ravnest.server.result_check import ResultCheck
from ravnest.server.spot_check_service import SpotCheckService
from ravnest.server.unit_of_work import UnitOfWork, UnitOfWorkFactory
from ravnest.telemetry import RecoveryRecord, RoundRecord, WarningRecord, WorkerRecord
from ravnest.types import Role

_REJECTIONS = {
    "foreign": "with a certificate of another authority, or an expired one",
    "bare": "without a certificate",
    "plain": "without TLS",
}
"""Descriptions of the fields of ``TlsRejections``."""
_MOST_EVENTS = 20
"""Warnings, rounds and recoveries of one report that become events."""


_BEGINNING = ("fetching", "fetched", "training")
"""Phases of an assignment that many providers enter at the same time when a job starts."""
_BEST_PAUSE = 60.0
"""Seconds between two checks of best models of one Root; the newest one is reported again until then."""
_MOST_BEST_CHECKED = 10_000
"""Assignments whose last check is remembered."""


@dataclass(frozen=True)
class _BestCheck:
    """Check of a best model."""

    time: float
    """Steady time."""
    was_last: bool
    """True if it was in the report of the end."""


class ReportService:
    """Stores the reports of providers about their assignments; thread-safe."""

    def __init__(
        self,
        units: UnitOfWorkFactory,
        auth: AuthService,
        jobs: JobService,
        activity: ClusterActivity,
        check_result: ResultCheck,
        spot_checks: SpotCheckService,
    ) -> None:
        self._check_result = check_result
        self._spot_checks = spot_checks
        self._units = units
        self._auth = auth
        self._jobs = jobs
        self._activity = activity
        self._gaps: dict[str, int] = {}
        """Assignments whose last report left a gap, and the position at which it started."""
        self._best_checked: dict[str, _BestCheck] = {}
        """Newest checks of best models, by assignment."""

    def store(self, provider: str, report: AssignmentReport) -> None:
        """Store a report and update the states that follow from it, in one transaction.

        The files of spot checks that it names are taken first.
        """
        self._spot_checks.store(provider, report)
        if report.phase == "finished" and report.result:
            with self._units.db.read() as db:
                assignment = db.assignments.get(report.assignment)
            if assignment is not None and assignment.provider == provider and not assignment.has_ended:
                report = self._checked_result(assignment, report)
        if report.best is not None:
            self._store_best(provider, report, report.best)
        if not self._store(provider, report):
            raise self._auth.refused(provider, f"{provider} reported on another provider's assignment")

    def adds_records_only(
        self, uow: UnitOfWork, assignment: AssignmentRecord, report: AssignmentReport
    ) -> bool:
        """Return whether a report only adds records; ``store`` takes one that tells more."""
        explains = report.phase == "uploading" and report.reason != assignment.reason
        same = report.phase == assignment.phase and not explains
        return same and self._has_no_other_news(uow, assignment, report)

    def begins_phase(
        self, uow: UnitOfWork, assignment: AssignmentRecord, report: AssignmentReport
    ) -> bool:
        """Return whether a report only adds records and enters a phase of the beginning."""
        begins = report.phase in _BEGINNING and assignment.phase in ("waiting", *_BEGINNING)
        begins = begins and report.phase != assignment.phase
        return begins and self._has_no_other_news(uow, assignment, report)

    def _has_no_other_news(
        self, uow: UnitOfWork, assignment: AssignmentRecord, report: AssignmentReport
    ) -> bool:
        if report.tls_rejections != assignment.tls_rejections or report.result:
            return False
        has_gap = bool(report.records) and report.first_record > assignment.records
        return not (has_gap or self._has_new_best(uow, report)) and self._spot_checks.knows(report)

    def store_records(
        self, uow: UnitOfWork, reports: Sequence[tuple[AssignmentRecord, AssignmentReport]]
    ) -> list[AssignmentRecord]:
        """Store reports about different assignments that only add records.

        Return the assignments with them. The memory of a worker is stored with its records.
        """
        measured = [(each.with_memory(report.memory), report) for each, report in reports]
        self._store_records(uow, measured)
        return [
            replace(each, records=max(each.records, report.first_record + len(report.records)))
            if report.records
            else each
            for each, report in measured
        ]

    def begin_phases(
        self, uow: UnitOfWork, reports: Sequence[tuple[AssignmentRecord, AssignmentReport]]
    ) -> None:
        """Store reports of ``begins_phase`` about different assignments.

        None of them is one of two live assignments of the same node.
        """
        found = self.store_records(uow, reports)
        providers = {each.id: each for each in uow.db.providers.chosen(a.provider for a in found)}
        for assignment, (_, report) in zip(found, reports, strict=True):
            self._begin_phase(uow, providers[assignment.provider], assignment, report)
        jobs = sorted({each.job for each in found})
        uow.db.jobs.touch(*jobs)
        for job in jobs:
            uow.update_job_status(job)

    @staticmethod
    def _has_new_best(uow: UnitOfWork, report: AssignmentReport) -> bool:
        if report.best is None:
            return False
        assignment = uow.db.assignments.get(report.assignment)
        if assignment is None:
            return False
        return uow.db.best_models.of_job(assignment.job).get(assignment.cluster) != report.best

    def _store(self, provider: str, report: AssignmentReport) -> bool:
        """Store a report; return ``False`` if it is about the assignment of another provider."""
        with self._units.begin() as uow:
            assignment = uow.db.assignments.get(report.assignment)
            if assignment is not None and assignment.provider != provider:
                return False
            if assignment is None or assignment.has_ended:
                self._store_late(uow, assignment, report)
                return True  # the reply names the right one
            before, assignment = assignment, assignment.with_memory(report.memory)
            self._store_records(uow, [(assignment, report)])
            if assignment != before:
                uow.db.assignments.set_memory(assignment)
            if report.tls_rejections != assignment.tls_rejections:
                self._store_rejections(uow, assignment, report.tls_rejections)
            if report.phase == "finished" and report.result:
                digests = [file.artifact.sha256 for file in report.result]
                if uow.db.artifact_grants.missing(assignment.provider, digests):
                    raise ServerRefusedError("the result names files that were not uploaded", 422)
                uow.db.assignments.set_result(assignment, report.result)
            elif report.phase == "finished" and _has_evaluated(uow.db, assignment):
                uow.db.assignments.set_result(assignment, ())
            if report.phase != assignment.phase:
                self._enter_phase(uow, assignment, report)
            elif report.phase == "uploading" and report.reason != assignment.reason:
                self._explain_upload(uow, assignment, report.reason)
            return True

    def _store_late(
        self, uow: UnitOfWork, ended: AssignmentRecord | None, report: AssignmentReport
    ) -> None:
        """Store the last records of a node that was handed over; nothing else of an ended assignment."""
        if ended is not None and _is_handed_over(uow.db, ended):
            self._store_records(uow, [(ended, report)])
        self._gaps.pop(report.assignment, None)
        self._activity.forget(report.assignment)

    def _may_check_best(self, report: AssignmentReport) -> bool:
        """Return whether a best model is checked now: once a minute, and once more at the end."""
        now, is_last = self._units.clock.steady(), report.phase in ("finished", "failed")
        before = self._best_checked.get(report.assignment)
        if before is not None and now < before.time + _BEST_PAUSE and (before.was_last or not is_last):
            return False
        while len(self._best_checked) >= _MOST_BEST_CHECKED:
            del self._best_checked[next(iter(self._best_checked))]
        self._best_checked[report.assignment] = _BestCheck(now, is_last)
        return True

    def _store_best(self, provider: str, report: AssignmentReport, best: BestFiles) -> None:
        """Store the best model that a Root has uploaded, if it is new and one of its cluster."""
        digests = [file.artifact.sha256 for file in best.files]
        with self._units.db.read() as db:
            assignment = db.assignments.get(report.assignment)
            if assignment is None or assignment.provider != provider or assignment.has_ended:
                return
            if assignment.role != Role.ROOT:
                return
            known = db.best_models.of_job(assignment.job).get(assignment.cluster)
            uploaded = not db.artifact_grants.missing(provider, digests)
            bodies = _bodies(db, assignment)
        if known == best or not uploaded or not self._may_check_best(report):
            return
        if problem := self._check_result(best.files, bodies):
            reason = f"its best model is not one of this job: {problem}"
            self._auth.refused(provider, f"node_{assignment.node} of {assignment.job}: {reason}")
            return
        with self._units.begin() as uow:
            uow.keep_best(assignment, known, best)

    def _checked_result(
        self, assignment: AssignmentRecord, report: AssignmentReport
    ) -> AssignmentReport:
        """Return the report, or that of a failure if its result is not the trained model.

        Only the Root of a cluster has a result. A provider whose result is wrong has failed: another one
        takes its place and repeats the end.
        """
        if assignment.role != Role.ROOT:
            what = f"node_{assignment.node} of {assignment.job} sent a result, which only a Root has"
            raise self._auth.refused(assignment.provider, what)
        with self._units.db.read() as db:
            digests = [file.artifact.sha256 for file in report.result]
            if db.artifact_grants.missing(assignment.provider, digests):
                return report  # refused below
            bodies = _bodies(db, assignment)
        problem = self._check_result(report.result, bodies)
        if not problem:
            return report
        reason = f"its result is not the trained model: {problem}"
        self._auth.refused(assignment.provider, f"node_{assignment.node} of {assignment.job}: {reason}")
        failed = {"phase": "failed", "cause": "machine", "reason": clipped(reason), "result": ()}
        return report.model_copy(update=failed)

    def _store_records(
        self, uow: UnitOfWork, reports: Sequence[tuple[AssignmentRecord, AssignmentReport]]
    ) -> None:
        """Store the new records of reports about different assignments."""
        taken = [
            NewRecords(assignment, report.first_record, report.records)
            for assignment, report in reports
            if self._is_taken(uow, assignment, report)
        ]
        new = zip(taken, uow.db.telemetry.add_all(taken), strict=True)
        found = [(each.assignment, records) for each, records in new if records]
        for assignment, records in found:
            self._tell(uow, assignment, records)
        if found:
            uow.db.jobs.touch(*{assignment.job for assignment, _ in found})

    def _is_taken(self, uow: UnitOfWork, assignment: AssignmentRecord, report: AssignmentReport) -> bool:
        """Return whether the records of a report are stored.

        A report that starts after the known records leaves a gap. The reply tells the provider where
        to start; if its next report leaves the same gap, the provider no longer has these records.
        """
        missing = report.first_record - assignment.records if report.records else 0
        if missing > 0 and self._gaps.get(assignment.id) != report.first_record:
            self._gaps[assignment.id] = report.first_record
            return False
        self._gaps.pop(assignment.id, None)
        if missing > 0:
            what = f"node_{assignment.node}: {missing} records were lost before they reached the server"
            uow.db.events.add("warning", assignment.provider, what, job=assignment.job)
        return True

    def _tell(self, uow: UnitOfWork, assignment: AssignmentRecord, new: Sequence[WorkerRecord]) -> None:
        """Tell the others what the new records of an assignment say."""
        if self._activity.note(assignment, new, self._units.clock.steady()):
            uow.topics.add(("clock", ""))  # less silence of the missing provider is tolerated now
        uow.topics.add(("job", assignment.job))
        notable = [(kind, words) for kind, words in map(_event, new) if words]
        for kind, words in notable[-_MOST_EVENTS:]:
            reason = f"node_{assignment.node}: {words}"
            uow.db.events.add(kind, assignment.provider, reason, job=assignment.job)

    def _store_rejections(
        self, uow: UnitOfWork, assignment: AssignmentRecord, rejections: TlsRejections
    ) -> None:
        """Add events for the connections that a node rejected since its last report."""
        for kind, words in _REJECTIONS.items():
            new = getattr(rejections, kind) - getattr(assignment.tls_rejections, kind)
            if new > 0:
                count = "a connection" if new == 1 else f"{new} connections"
                what = f"node_{assignment.node} of {assignment.job} rejected {count} {words}"
                uow.db.events.add("refusal", assignment.provider, what, job=assignment.job)
        uow.db.assignments.set_tls_rejections(assignment, rejections)

    def _explain_upload(self, uow: UnitOfWork, assignment: AssignmentRecord, reason: str) -> None:
        """Store why a trained result is not here yet, or that nothing holds it up any more."""
        uow.db.assignments.move(assignment, assignment.phase, reason)
        if reason:
            what = f"node_{assignment.node}: its trained stages are not here yet: {reason}"
            uow.db.events.add("warning", assignment.provider, what, job=assignment.job)
        uow.db.jobs.touch(assignment.job)
        uow.update_job_status(assignment.job)

    def _enter_phase(
        self, uow: UnitOfWork, assignment: AssignmentRecord, report: AssignmentReport
    ) -> None:
        provider = uow.db.providers.get(assignment.provider)
        assert provider is not None
        if report.phase in ("finished", "failed"):
            self._activity.forget(assignment.id)
            if report.phase == "finished":
                uow.finish_assignment(assignment, report.reason)
            elif report.cause != "job":
                uow.vacate(assignment, report.reason, report.cause)
            else:
                self._fail(uow, assignment, report.reason)
            outcome = f"its assignment in {assignment.job} is {report.phase}"
            reason = f"{outcome}: {report.reason}" if report.reason else outcome
            uow.release(provider, reason)
        else:
            self._begin_phase(uow, provider, assignment, report)
        self._settle_handover(uow, assignment, report.phase)
        if assignment.role == Role.ROOT and report.phase in ("uploading", "finished"):
            self._settle_repeats(uow, assignment)
        uow.db.jobs.touch(assignment.job)
        uow.update_job_status(assignment.job)
        self._jobs.schedule_stops(uow, assignment.job)

    @staticmethod
    def _begin_phase(
        uow: UnitOfWork,
        provider: ProviderRecord,
        assignment: AssignmentRecord,
        report: AssignmentReport,
    ) -> None:
        uow.db.assignments.move(assignment, report.phase, report.reason)
        if report.phase == "training" and provider.state is ProviderState.RESERVED:
            reason = f"trains node_{assignment.node} of {assignment.job}"
            uow.db.providers.move(provider, ProviderState.TRAINING, reason, job=assignment.job)

    def _fail(self, uow: UnitOfWork, assignment: AssignmentRecord, reason: str) -> None:
        """Store that a provider says that the job fails on any machine.

        That is one provider's word. While another one is idle, it takes the place; the cluster fails if
        that one says the same of the node.
        """
        assignments = uow.db.assignments.of_job(assignment.job)
        if not can_continue(assignments, assignment):
            uow.end_assignment(assignment, "failed", reason)
        elif is_confirmed(assignments, assignment):
            uow.db.assignments.confirm_failure(assignment.job)
            uow.end_assignment(assignment, "failed", reason)
        elif uow.db.providers.has_idle():
            hearsay = is_hearsay(assignment, reason)
            uow.vacate(assignment, reason, "passing" if hearsay else "unconfirmed")
        else:
            uow.db.assignments.set_cause(assignment, "unconfirmed")
            uow.end_assignment(assignment, "failed", reason)

    def _settle_handover(self, uow: UnitOfWork, assignment: AssignmentRecord, phase: str) -> None:
        """End the other assignments of a node that two providers have while one of them leaves.

        The later one takes over once it has its files; it is not needed if the earlier one has trained
        to the end by then.
        """
        chain = lineage(uow.db.assignments.of_job(assignment.job), assignment.node)
        others = [each for each in chain if each.id != assignment.id and not each.has_ended]
        for other in others:
            if other.generation < assignment.generation and phase not in (*FETCHING, "failed"):
                uow.end_assignment(other, "stopped", "another provider took its place")
            elif other.generation > assignment.generation and phase in ("uploading", "finished"):
                uow.end_assignment(other, "stopped", "the node has trained to the end")
                provider = uow.db.providers.get(other.provider)
                assert provider is not None
                uow.release(provider, f"is not needed any more for {assignment.job}")

    def _settle_repeats(self, uow: UnitOfWork, root: AssignmentRecord) -> None:
        """Release nodes that were about to repeat their end for a Root that is back with the result."""
        assignments = uow.db.assignments.of_job(root.job)
        for each in holders(assignments):
            ends = [other.phase_before for other in lineage(assignments, each.node)]
            waits = each.phase in (*FETCHING, "fetched") and each.cluster == root.cluster
            if waits and "finished" in ends:
                uow.end_assignment(each, "stopped", "the node has trained to the end")
                provider = uow.db.providers.get(each.provider)
                assert provider is not None
                uow.release(provider, f"is not needed any more for {root.job}")


def _has_evaluated(db: Transaction, assignment: AssignmentRecord) -> bool:
    """Return whether a Root of a job that only evaluates has reported the figures."""
    job = db.jobs.get(assignment.job)
    is_asked = job is not None and job.epochs == 0 and assignment.role == Role.ROOT
    return is_asked and bool(db.telemetry.validations(assignment.id))


def _is_handed_over(db: Transaction, ended: AssignmentRecord) -> bool:
    """Return whether another provider has taken over from one that leaves, and trained until then."""
    job = db.jobs.get(ended.job)
    is_running = job is not None and job.state in (JobState.SHIPPING, JobState.TRAINING)
    if ended.phase != "stopped" or not is_running:
        return False
    newest = lineage(db.assignments.of_job(ended.job), ended.node)[:1]
    return any(each.generation > ended.generation for each in newest)


def _bodies(db: Transaction, assignment: AssignmentRecord) -> dict[int, Assignment]:
    """Return what was shipped to the nodes of an assignment's cluster, by node."""
    held = holders(db.assignments.of_job(assignment.job))
    own = (each for each in held if each.cluster == assignment.cluster)
    return {each.node: db.assignments.body(each.id) for each in own}


def _event(record: WorkerRecord) -> tuple[Literal["warning", "round", "recovery"], str]:
    """Return the kind and the text of the event for a record; the text is empty if there is none."""
    match record:
        case WarningRecord(message=message):
            return "warning", message
        case RoundRecord(committed=False):
            ending = "; the clusters end without it" if record.mode == "final" else ""
            return "round", f"round {record.round} was not committed: {record.reason}{ending}"
        case RoundRecord(mode="final") if record.reason:
            return "round", f"the final round {record.round} left clusters out: {record.reason}"
        case RecoveryRecord():
            return "recovery", (
                f"training continues from update {record.update} after a loss ({record.lost}); "
                f"{record.repeated} updates are repeated; state: {record.source}; "
                f"{record.seconds:.1f} s"
            )
        case _:
            return "warning", ""
