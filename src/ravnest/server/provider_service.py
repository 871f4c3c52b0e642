"""Providers: offers, heartbeats, reports of assignments, and the loss of a provider."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ravnest.errors import ServerRefusedError
from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import (
    Heartbeat,
    HeartbeatReply,
    ProviderOffer,
    ProviderState,
    ProviderView,
)
from ravnest.server.assignments import FETCHING
from ravnest.server.checkpoint_service import CheckpointService
from ravnest.server.cluster_activity import ClusterActivity
from ravnest.server.db.database import Transaction
from ravnest.server.db.records import AssignmentRecord, LossCause, MemberRecord, ProviderRecord
from ravnest.server.heartbeat_replies import HeartbeatReplies
from ravnest.server.job_service import JobService
from ravnest.server.job_status import (
    is_trained,
    lineage,
    place_name,
    vacant,
)
from ravnest.server.liveness import Liveness
from ravnest.server.reachability.dial_back import DialBackService
from ravnest.server.reachability.relays import RelayService
from ravnest.server.report_service import ReportService
from ravnest.server.settings import ServerSettings
from ravnest.server.takeover_service import TakeoverService
from ravnest.server.unit_of_work import UnitOfWork, UnitOfWorkFactory
from ravnest.server.views import provider_view
from ravnest.telemetry import PhaseRecord
from ravnest.types import Address

_PHASES_READ = 4
"""Newest phases of a worker that say, after a restart of the server, if it waits for a lost node."""
_MISSED = "its neighbours wait for it"
_WITNESSED = "but its neighbours report progress with it"


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
        reports: ReportService,
        takeovers: TakeoverService,
        checkpoints: CheckpointService,
        activity: ClusterActivity,
        jobs: JobService,
        settings: ServerSettings,
        dial_backs: DialBackService,
        relays: RelayService,
        replies: HeartbeatReplies,
    ) -> None:
        self.liveness = Liveness(settings.lost_after)
        self._units = units
        self._reports = reports
        self._takeovers = takeovers
        self._checkpoints = checkpoints
        self._activity = activity
        self._jobs = jobs
        self._settings = settings
        self._dial_backs = dial_backs
        self._relays = relays
        self._replies = replies
        self._told_kept: set[tuple[str, bool]] = set()
        """Silent providers that are kept, and if neighbours report progress; each has an event."""

    def resume(self, uow: UnitOfWork) -> int:
        """Count the silence of all providers from now on; return how many are connected."""
        present = uow.db.providers.present()
        grace = max(self._settings.restart_grace - self._settings.lost_after, 0.0)
        for provider in present:
            self.see(provider.id, grace)
            own = uow.db.assignments.current(provider.id)
            if own is not None:
                phases = uow.db.telemetry.newest(own.id, PhaseRecord, _PHASES_READ)
                self._activity.note(own, phases[::-1], 0.0)
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
                self._resume_work(uow, replace(record, offer=offer))
                before = record.offer.model_copy(update={"compute": record.stated})
                uow.needs_matching = uow.needs_matching or offer != before
            self._store_checks(uow, member.id)
            self.see(member.id)
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
            found = db.providers.presence(provider)
        if found is None or found.left:
            raise ServerRefusedError("this provider has not sent an offer yet", 404)
        self.see(provider)
        if found.state is ProviderState.LOST:
            with self._units.begin() as uow:
                record = uow.db.providers.get(provider)
                if record is not None and record.state is ProviderState.LOST and not record.left:
                    self._return(uow, record)
        if heartbeat.report is not None:
            self._checkpoints.store(provider, heartbeat.report)
            self._reports.store(provider, heartbeat.report)
        if not heartbeat.leaving:
            self._replies.leaving.discard(provider)
        else:
            self._replies.leaving.add(provider)
            self._takeovers.hand_over(provider, heartbeat.leaving)

    def answer(self, provider: str, heartbeat: Heartbeat) -> HeartbeatReply:
        """Process a heartbeat and return the reply as of now."""
        self.heartbeat(provider, heartbeat)
        return self.reply(provider)

    def reply(self, provider: str) -> HeartbeatReply:
        """Return the assignment that a provider should work on."""
        changes = self._replies.snapshots.changes
        with self._units.db.read() as db:
            found, assignment = db.providers.presence(provider), db.assignments.current(provider)
            left = db.assignments.left_by([provider])
            return self._replies.compose(db, found, assignment, changes, left)

    def leave(self, provider: str, reason: str) -> None:
        """Remove a provider at its own request."""
        self._lose(provider, f"it left: {reason}" if reason else "it left", left=True)

    def revoke(self, provider: str, reason: str) -> None:
        """Remove a provider whose credential was revoked; the other nodes of its jobs exclude it."""
        with self._units.begin() as uow:
            for lost in uow.db.assignments.lost(provider):
                uow.db.assignments.set_cause(lost, "revoked")
        self._lose(provider, f"it left: {reason}", left=True, cause="revoked")
        with self._units.db.read() as db:
            jobs = {each.job for each in db.assignments.lost(provider)}
            others = {each.provider for job in jobs for each in db.assignments.of_job(job)}
        self._units.notify_providers(others)

    def run_due(self) -> float | None:
        """Remove overdue providers; return the next deadline (steady clock)."""
        now = self._units.clock.steady()
        self.liveness.limit(self._missed(), self._settings.rejoin_silence)
        for provider in self.liveness.overdue(now):
            silence = self.liveness.silence(provider, now)
            if self.liveness.is_limited(provider):
                self._lose(provider, f"{_MISSED}, and no request for {silence:.0f} seconds")
                continue
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

    def _missed(self) -> set[str]:
        """Return the providers of nodes for which the other nodes of their clusters wait."""
        found: set[str] = set()
        for job in self._activity.waiting_jobs:
            with self._units.db.read() as db:
                live = [each for each in db.assignments.of_job(job) if not each.has_ended]
            found |= {each.provider for each in live if self._activity.is_missed(each)}
        return found

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
        progress = self._activity.last_progress(others, seen)
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

    def see(self, provider: str, grace: float = 0.0) -> None:
        """Store that a provider sent a request now; it may be silent for ``grace`` seconds more."""
        clock = self._units.clock
        self.liveness.see(provider, steady=clock.steady(), wall=clock.wall(), grace=grace)
        self._told_kept -= {(provider, True), (provider, False)}

    def _return(self, uow: UnitOfWork, record: ProviderRecord) -> None:
        words = f"{record.offer.name} is back: {_summary(record.offer)}"
        assignment = uow.db.assignments.current(record.id)
        if assignment is not None:
            uow.db.assignments.move(assignment, assignment.phase)
        elif (assignment := _vacated(uow.db, record)) is not None:
            self._reopen(uow, record, assignment)
        else:
            uow.release(record, words)
            return
        uow.db.providers.move(record, ProviderState.TRAINING, words, job=assignment.job)
        uow.topics.add(("provider", record.id))
        uow.update_job_status(assignment.job)

    def _resume_work(self, uow: UnitOfWork, record: ProviderRecord) -> None:
        """Have a provider that sends an offer go on with its work: its process may be a new one."""
        if record.state is ProviderState.LOST:
            self._return(uow, record)
            return
        own = uow.db.assignments.current(record.id)
        if own is None or is_trained(own) or own.phase in FETCHING or own.id in record.offer.trained:
            return
        if _is_at(uow.db, own, record):
            uow.db.assignments.set_resume(own)
            return
        self._vacate(uow, own, "the provider was started again with another address")
        uow.release(record, f"{record.offer.name} has another address now")
        uow.update_job_status(own.job)

    def _reopen(self, uow: UnitOfWork, record: ProviderRecord, lost: AssignmentRecord) -> None:
        """Give a provider that is back its place again, which nobody has taken."""
        uow.db.assignments.reopen(lost)
        if lost.phase_before not in FETCHING and lost.id not in record.offer.trained:
            uow.db.assignments.set_resume(lost)
        what = f"{record.offer.name} is back in the place of {place_name(lost)}"
        uow.db.events.add("recovery", lost.job, what)

    def _vacate(
        self,
        uow: UnitOfWork,
        assignment: AssignmentRecord,
        reason: str,
        cause: LossCause = "passing",
    ) -> None:
        """End the assignment of a provider that is gone; a spare may fetch its files already."""
        newest = lineage(uow.db.assignments.of_job(assignment.job), assignment.node)[0]
        if newest.id != assignment.id and not newest.has_ended:
            uow.db.assignments.set_cause(assignment, cause)
            uow.end_assignment(assignment, "stopped", reason)
        else:
            uow.vacate(assignment, reason, cause)

    def _lose(
        self, provider: str, reason: str, *, left: bool = False, cause: LossCause = "passing"
    ) -> None:
        """Mark a provider as lost; the place of its node becomes vacant."""
        self.liveness.forget(provider)
        self._replies.leaving.discard(provider)
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
                self._activity.forget(assignment.id)
                self._vacate(uow, assignment, f"the provider was lost: {reason}", cause)
                uow.update_job_status(assignment.job)
                self._jobs.schedule_stops(uow, assignment.job)
                return
            job = uow.db.jobs.get(record.job)
            if job is not None and job.state is JobState.PLANNED:
                name = record.offer.name
                uow.requeue(job, f"{name} was lost before it received its assignment: {reason}")


def _vacated(db: Transaction, record: ProviderRecord) -> AssignmentRecord | None:
    """Return the lost assignment of a provider whose place is still vacant."""
    for lost in db.assignments.lost(record.id):
        still = lost in vacant(db.assignments.of_job(lost.job))
        if still and lost.id in record.offer.trained:
            return lost
        if still and lost.cause == "passing" and _is_at(db, lost, record):
            return lost
    return None


def _is_at(db: Transaction, assignment: AssignmentRecord, record: ProviderRecord) -> bool:
    """Return whether others reach a provider at the address that its node has."""
    return db.assignments.body(assignment.id).node_spec.address in record.offer.all_addresses


def _summary(offer: ProviderOffer) -> str:
    return (
        f"{offer.ram:.3g} GB, {offer.cores} core{'' if offer.cores == 1 else 's'}, {offer.compute:.3g} "
        f"GFLOP/s, {offer.bandwidth:.3g} Mbit/s"
    )
