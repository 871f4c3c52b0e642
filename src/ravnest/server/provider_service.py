"""Providers: offers, heartbeats, reports of assignments, and the loss of a provider."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ravnest.errors import ServerRefusedError
from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import (
    AssignmentReport,
    Heartbeat,
    HeartbeatReply,
    ProviderOffer,
    ProviderState,
    ProviderView,
    TlsRejections,
)
from ravnest.server.auth.tokens import AuthService
from ravnest.server.db.records import AssignmentRecord, MemberRecord, ProviderRecord
from ravnest.server.job_service import JobService
from ravnest.server.job_status import is_trained, may_train
from ravnest.server.link_test_service import LinkTestService
from ravnest.server.liveness import Liveness
from ravnest.server.reachability.dial_back import DialBackService
from ravnest.server.reachability.relays import RelayService
from ravnest.server.settings import ServerSettings
from ravnest.server.unit_of_work import UnitOfWork, UnitOfWorkFactory
from ravnest.server.views import provider_view
from ravnest.telemetry import (
    LossRecord,
    QueueRecord,
    RoundRecord,
    TimingRecord,
    ValidationRecord,
    WarningRecord,
    WorkerRecord,
)
from ravnest.types import Address

_WITNESSED = "but its neighbours report progress with it"
_REJECTIONS = {
    "foreign": "with a certificate of another authority, or an expired one",
    "bare": "without a certificate",
    "plain": "without TLS",
}
"""Descriptions of the fields of ``TlsRejections``."""
_PROGRESS = LossRecord | QueueRecord | TimingRecord | ValidationRecord
"""Records that a node reports only when the whole pipeline advances."""
_MOST_EVENTS = 20
"""Warnings and rounds of one report that become events."""


@dataclass(frozen=True)
class _Witness:
    """Last sign that a silent provider works."""

    time: float
    neighbours: bool
    """Neighbours reported progress with it after its own last request."""


class ProviderService:
    """Operations on providers; the methods are thread-safe and return soon."""

    def __init__(
        self,
        units: UnitOfWorkFactory,
        auth: AuthService,
        jobs: JobService,
        settings: ServerSettings,
        dial_backs: DialBackService,
        relays: RelayService,
        link_tests: LinkTestService,
    ) -> None:
        self.liveness = Liveness(settings.lost_after)
        self._units = units
        self._auth = auth
        self._jobs = jobs
        self._settings = settings
        self._dial_backs = dial_backs
        self._relays = relays
        self._link_tests = link_tests
        self._gaps: dict[str, int] = {}
        """Assignments whose last report left a gap, and the position at which it started."""
        self._progress: dict[str, float] = {}
        """Assignments that reported progress of their pipeline, and when (steady clock)."""
        self._told_kept: set[tuple[str, bool]] = set()
        """Silent providers that are kept, and if neighbours report progress; each has an event."""

    def resume(self, uow: UnitOfWork) -> int:
        """Count the silence of all providers from now on; return how many are connected."""
        present = uow.db.providers.present()
        grace = max(self._settings.restart_grace - self._settings.lost_after, 0.0)
        for provider in present:
            self._see(provider.id, grace)
        return len(present)

    def offer(self, member: MemberRecord, offer: ProviderOffer) -> ProviderView:
        """Add a provider, or replace its offer."""
        try:
            for address in offer.all_addresses:
                Address.parse(address)
        except ValueError as error:
            raise ServerRefusedError(f"other nodes cannot use this address: {error}", 422) from error
        with self._units.begin() as uow:
            record = uow.db.providers.get(member.id)
            if record is None:
                uow.db.providers.add(member.id, offer, f"{offer.name} joined: {_summary(offer)}")
                uow.needs_matching = True
            else:
                uow.db.providers.update(member.id, offer)
                uow.needs_matching |= uow.db.links.forget_failures(member.id)
                if record.state is ProviderState.LOST:
                    self._return(uow, record)
                uow.needs_matching = uow.needs_matching or offer != record.offer
            self._store_checks(uow, member.id)
            self._see(member.id)
            found = uow.db.providers.get(member.id)
            assert found is not None
            return provider_view(found, self.liveness, self._relays.live())

    def _store_checks(self, uow: UnitOfWork, provider: str) -> None:
        """Store the results of the dial-back before this offer; without one the earlier ones stay."""
        checks = self._dial_backs.take(provider)
        if checks is not None:
            uow.db.providers.set_checks(provider, checks)
            uow.needs_matching = True

    def heartbeat(self, provider: str, heartbeat: Heartbeat) -> None:
        """Process a heartbeat and its report; refuse (404) if the provider must send an offer first."""
        with self._units.db.read() as db:
            record = db.providers.get(provider)
        if record is None or record.left:
            raise ServerRefusedError("this provider has not sent an offer yet", 404)
        self._see(provider)
        if record.state is ProviderState.LOST:
            with self._units.begin() as uow:
                record = uow.db.providers.get(provider)
                if record is not None and record.state is ProviderState.LOST and not record.left:
                    self._return(uow, record)
        if heartbeat.report is not None:
            self._report(provider, heartbeat.report)

    def reply(self, provider: str) -> HeartbeatReply:
        """Return the assignment that a provider should work on."""
        with self._units.db.read() as db:
            assignment = db.assignments.current(provider)
            record = db.providers.get(provider)
            starts = set() if assignment is None else may_train(db.assignments.of_job(assignment.job))
        reason = "" if record is None else record.reason
        if assignment is None:
            test = self._link_tests.order_for(record)
            return HeartbeatReply(assignment=None, link_test=test, reason=reason)
        return HeartbeatReply(
            assignment=assignment.id,
            may_train=assignment.id in starts,
            records_known=assignment.records,
            reason=reason,
        )

    def leave(self, provider: str, reason: str) -> None:
        """Remove a provider at its own request."""
        self._lose(provider, f"it left: {reason}" if reason else "it left", left=True)

    def run_due(self) -> float | None:
        """Remove overdue providers; return the next deadline (steady clock)."""
        now = self._units.clock.steady()
        for provider in self.liveness.overdue(now):
            silence = self.liveness.silence(provider, now)
            witness = self._witness(provider, now - silence)
            reason = f"no heartbeat for {silence:.0f} seconds"
            if witness is None or witness.time + self._settings.training_silence <= now:
                self._lose(provider, reason)
            elif silence >= self._settings.witnessed_limit:
                self._lose(provider, f"{reason}, {_WITNESSED}")
            else:
                kept = witness.time + self._settings.training_silence
                until = min(kept, now - silence + self._settings.witnessed_limit)
                self.liveness.extend(provider, until - self._settings.lost_after)
                self._tell_kept(provider, reason, witness)
        return self.liveness.next_deadline()

    def excuse_silence(self) -> None:
        """Count the silence of all providers from now on, because this server was halted."""
        self.liveness.excuse(self._units.clock.steady())

    def _witness(self, provider: str, seen: float) -> _Witness | None:
        """Return the last sign that a provider works; ``None`` if it does not train with others.

        Progress of another node of its pipeline needs this provider. ``seen`` is the time of its last
        request.
        """
        with self._units.db.read() as db:
            own = db.assignments.current(provider)
            if own is None or own.phase != "training":
                return None
            cluster = [each for each in db.assignments.of_job(own.job) if each.cluster == own.cluster]
        others = [each.id for each in cluster if each.id != own.id]
        if not others:
            return None
        progress = max((self._progress.get(each, seen) for each in others), default=seen)
        return _Witness(max(progress, seen), progress > seen)

    def _tell_kept(self, provider: str, reason: str, witness: _Witness) -> None:
        """Add an event about a provider that is silent and kept, once per silence and reason."""
        if (provider, witness.neighbours) in self._told_kept:
            return
        self._told_kept.add((provider, witness.neighbours))
        with self._units.begin() as uow:
            record, own = uow.db.providers.get(provider), uow.db.assignments.current(provider)
            if record is None or own is None:
                return
            what = f"node_{own.node}: {reason} from {record.offer.name}"
            if witness.neighbours:
                minutes = f"{self._settings.witnessed_limit / 60:.0f} minutes"
                what = f"{what}, {_WITNESSED}: the server waits up to {minutes}"
            else:
                seconds = f"{self._settings.training_silence:.0f} seconds"
                what = f"{what}: the server waits up to {seconds}, because its links may connect again"
            uow.db.events.add("warning", provider, what, job=own.job)

    def _see(self, provider: str, grace: float = 0.0) -> None:
        clock = self._units.clock
        self.liveness.see(provider, steady=clock.steady(), wall=clock.wall(), grace=grace)
        self._told_kept -= {(provider, True), (provider, False)}

    def _return(self, uow: UnitOfWork, record: ProviderRecord) -> None:
        words = f"{record.offer.name} is back: {_summary(record.offer)}"
        assignment = uow.db.assignments.current(record.id)
        if assignment is None:
            uow.release(record, words)
            return
        uow.db.providers.move(record, ProviderState.TRAINING, words, job=assignment.job)
        uow.db.assignments.move(assignment, assignment.phase)
        uow.topics.add(("provider", record.id))
        uow.update_job_status(assignment.job)

    def _lose(self, provider: str, reason: str, *, left: bool = False) -> None:
        """Mark a provider as lost and fail its assignment, and with it its cluster."""
        self.liveness.forget(provider)
        with self._units.begin() as uow:
            record = uow.db.providers.get(provider)
            if record is None or record.state is ProviderState.LOST:
                return
            uow.db.providers.move(record, ProviderState.LOST, reason, left=left)
            uow.topics.add(("provider", provider))
            uow.needs_matching = True
            if record.job is None:
                return
            assignment = uow.db.assignments.current(provider)
            if assignment is not None and is_trained(assignment):
                minutes = f"{self._settings.result_wait / 60:.0f} minutes"
                words = f"the provider was lost: {reason}; the job waits {minutes} for its return"
                uow.db.assignments.move(assignment, assignment.phase, words)
                uow.update_job_status(assignment.job)
                self._jobs.await_result(uow, assignment)
                return
            if assignment is not None:
                uow.end_assignment(assignment, "failed", f"the provider was lost: {reason}")
                uow.update_job_status(assignment.job)
                self._jobs.schedule_stops(uow, assignment.job)
                return
            job = uow.db.jobs.get(record.job)
            if job is not None and job.state is JobState.PLANNED:
                name = record.offer.name
                uow.requeue(job, f"{name} was lost before it received its assignment: {reason}")

    # --- reports ------------------------------------------------------------------------------

    def _report(self, provider: str, report: AssignmentReport) -> None:
        """Store a report and update the states that follow from it, in one transaction."""
        with self._units.db.read() as db:
            assignment = db.assignments.get(report.assignment)
        if assignment is not None and assignment.provider != provider:
            raise self._auth.refused(provider, f"{provider} reported on another provider's assignment")
        with self._units.begin() as uow:
            assignment = uow.db.assignments.get(report.assignment)
            if assignment is None or assignment.has_ended:
                self._gaps.pop(report.assignment, None)
                self._progress.pop(report.assignment, None)
                return  # the reply names the right one
            self._store_records(uow, assignment, report)
            if report.tls_rejections != assignment.tls_rejections:
                self._store_rejections(uow, assignment, report.tls_rejections)
            if report.phase == "finished" and report.result:
                digests = [file.artifact.sha256 for file in report.result]
                if uow.db.artifact_grants.missing(assignment.provider, digests):
                    raise ServerRefusedError("the result names files that were not uploaded", 422)
                uow.db.assignments.set_result(assignment, report.result)
            if report.phase != assignment.phase:
                self._enter_phase(uow, assignment, report)
            elif report.phase == "uploading" and report.reason != assignment.reason:
                self._explain_upload(uow, assignment, report.reason)

    def _store_records(
        self, uow: UnitOfWork, assignment: AssignmentRecord, report: AssignmentReport
    ) -> None:
        """Store the new records of a report.

        A report that starts after the known records leaves a gap. The reply tells the provider where
        to start; if its next report leaves the same gap, the provider no longer has these records.
        """
        missing = report.first_record - assignment.records if report.records else 0
        if missing > 0 and self._gaps.get(assignment.id) != report.first_record:
            self._gaps[assignment.id] = report.first_record
            return
        self._gaps.pop(assignment.id, None)
        if missing > 0:
            what = f"node_{assignment.node}: {missing} records were lost before they reached the server"
            uow.db.events.add("warning", assignment.provider, what, job=assignment.job)
        new = uow.db.telemetry.add(assignment, report.first_record, report.records)
        if not new:
            return
        if any(isinstance(record, _PROGRESS) for record in new):
            self._progress[assignment.id] = self._units.clock.steady()
        uow.db.jobs.touch(assignment.job)
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
            self._progress.pop(assignment.id, None)
            uow.end_assignment(assignment, report.phase, report.reason)
            reason = f"its assignment in {assignment.job} is {report.phase} {report.reason}".strip()
            uow.release(provider, reason)
        else:
            uow.db.assignments.move(assignment, report.phase, report.reason)
            if report.phase == "training" and provider.state is ProviderState.RESERVED:
                reason = f"trains node_{assignment.node} of {assignment.job}"
                uow.db.providers.move(provider, ProviderState.TRAINING, reason, job=assignment.job)
        uow.db.jobs.touch(assignment.job)
        uow.update_job_status(assignment.job)
        self._jobs.schedule_stops(uow, assignment.job)


def _event(record: WorkerRecord) -> tuple[Literal["warning", "round"], str]:
    """Return the kind and the text of the event for a record; the text is empty if there is none."""
    match record:
        case WarningRecord(message=message):
            return "warning", message
        case RoundRecord(committed=False):
            ending = "; the clusters end without it" if record.mode == "final" else ""
            return "round", f"round {record.round} was not committed: {record.reason}{ending}"
        case RoundRecord(mode="final") if record.reason:
            return "round", f"the final round {record.round} left clusters out: {record.reason}"
        case _:
            return "warning", ""


def _summary(offer: ProviderOffer) -> str:
    return (
        f"{offer.ram:g} GB, {offer.cores} cores, {offer.compute:g} GFLOP/s, {offer.bandwidth:g} Mbit/s"
    )
