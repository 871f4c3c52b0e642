"""What the server does about what members say, and about the time that passes."""

from __future__ import annotations

import logging
import secrets
import threading

from ravnest.errors import ServerRefusedError
from ravnest.schemas.jobs import JobSpec, JobState, JobView
from ravnest.schemas.providers import (
    AssignmentReport,
    Heartbeat,
    HeartbeatReply,
    ProviderOffer,
    ProviderState,
    ProviderView,
    TlsRejections,
)
from ravnest.server.assignments import FETCHING, fetch_limit, needed_files
from ravnest.server.auth.tokens import AuthService
from ravnest.server.db.records import AssignmentRecord, MemberRecord, ProviderRecord
from ravnest.server.job_status import failed_clusters
from ravnest.server.liveness import Liveness
from ravnest.server.settings import ServerSettings
from ravnest.server.unit_of_work import UnitOfWork, UnitOfWorkFactory
from ravnest.server.views import job_view, provider_view
from ravnest.types import Address

_log = logging.getLogger(__name__)
_DAY = 86400.0
_STRANGERS = {
    "foreign": "with a certificate of another authority, or one that is no longer good",
    "bare": "without a certificate",
    "plain": "without TLS",
}
"""By the fields of ``TlsRejections``."""


class JobService:
    """Keeps the books right; its methods are called from any thread and return soon."""

    def __init__(self, office: UnitOfWorkFactory, trust: AuthService, settings: ServerSettings) -> None:
        self.liveness = Liveness(settings.lost_after)
        self._office = office
        self._trust = trust
        self._settings = settings
        self._endings: dict[tuple[str, int], float] = {}
        """Clusters that failed, and until when their other nodes may take to end."""
        self._endings_lock = threading.Lock()

    # --- from a start to the next -------------------------------------------------------------

    def start(self) -> None:
        """Take up the state that is in the books."""
        with self._office.change() as change:
            for job in change.books.jobs.in_state(JobState.PLANNED):
                change.requeue(job, "the server was stopped while it planned this")
            running = change.books.jobs.in_state(JobState.SHIPPING, JobState.TRAINING)
            for job in running:
                self._note_endings(change, job.id)
            present = change.books.providers.present()
            for provider in present:
                self._see(provider.id)
            change.books.events.add(
                "server",
                "server",
                f"the server started: {len(present)} providers, {len(running)} jobs under way",
            )
            change.matching = True

    def clock(self) -> float:
        """Do what is due; seconds until there may be something again."""
        steady = self._office.clock.steady()
        for provider in self.liveness.overdue(steady):
            self._lose(provider, f"it was not heard of for {self._settings.lost_after:g} seconds")
        with self._endings_lock:
            due = [ending for ending, deadline in self._endings.items() if deadline <= steady]
            for ending in due:
                del self._endings[ending]
        for job, cluster in due:
            self._stop_cluster(job, cluster)
        self._give_up_fetches()
        with self._office.store.change(self._office.clock.wall()) as books:
            books.events.forget_refusals(self._settings.kept_refusals)
            books.members.forget_tokens(books.now - _DAY)
        with self._endings_lock:
            deadlines = [*self._endings.values()]
        deadline = self.liveness.next_deadline()
        deadlines += [] if deadline is None else [deadline]
        now = self._office.clock.steady()
        return max(0.05, min([*deadlines, now + self._settings.lost_after]) - now)

    # --- providers ----------------------------------------------------------------------------

    def offer(self, member: MemberRecord, offer: ProviderOffer) -> ProviderView:
        """A provider is there, for the first time, again, or with another offer."""
        try:
            Address.parse(offer.address)
        except ValueError as error:
            raise ServerRefusedError(f"others cannot reach that address: {error}", 422) from error
        with self._office.change() as change:
            record = change.books.providers.get(member.id)
            if record is None:
                change.books.providers.add(member.id, offer, f"{offer.name} joined: {_summary(offer)}")
                change.matching = True
            else:
                change.books.providers.update(member.id, offer)
                if record.state is ProviderState.LOST:
                    self._return(change, record)
                change.matching = change.matching or offer != record.offer
            self._see(member.id)
            found = change.books.providers.get(member.id)
            assert found is not None
            return provider_view(found, self.liveness)

    def beat(self, provider: str, heartbeat: Heartbeat) -> None:
        """A provider lives, and may have something to say; 404 if it has to offer itself first."""
        with self._office.store.look() as books:
            record = books.providers.get(provider)
        if record is None or record.left:
            raise ServerRefusedError("this provider has not offered itself yet", 404)
        self._see(provider)
        if record.state is ProviderState.LOST:
            with self._office.change() as change:
                record = change.books.providers.get(provider)
                if record is not None and record.state is ProviderState.LOST and not record.left:
                    self._return(change, record)
        if heartbeat.report is not None:
            self._take(provider, heartbeat.report)

    def orders(self, provider: str) -> HeartbeatReply:
        """What a provider should be doing."""
        with self._office.store.look() as books:
            part = books.parts.live_of(provider)
            record = books.providers.get(provider)
        reason = "" if record is None else record.reason
        if part is None:
            return HeartbeatReply(assignment=None, reason=reason)
        return HeartbeatReply(assignment=part.id, losses_known=part.losses, reason=reason)

    def leave(self, provider: str, reason: str) -> None:
        """A provider goes by itself."""
        self._lose(provider, f"it left: {reason}" if reason else "it left", left=True)

    # --- jobs ---------------------------------------------------------------------------------

    def submit(self, member: MemberRecord, spec: JobSpec) -> str:
        """A new job; 422 if files that it names were not uploaded by its owner."""
        job = f"job-{secrets.token_hex(4)}"
        files = needed_files(spec)
        with self._office.change() as change:
            known = change.books.holdings.sizes(member.id)
            missing = [file.sha256 for file in files if known.get(file.sha256) != file.size]
            if missing:
                raise ServerRefusedError(
                    f"{len(missing)} files were not uploaded yet, or have another size: "
                    f"{', '.join(missing[:10])}{', …' if len(missing) > 10 else ''}",
                    422,
                )
            change.books.jobs.add(job, member.id, spec, f"submitted by {member.name}")
            change.matching = True
        return job

    def cancel(self, job: str, member: MemberRecord) -> JobView:
        """End a job; 409 if it has ended otherwise."""
        with self._office.change() as change:
            record = change.books.jobs.get(job)
            if record is None:
                raise ServerRefusedError(f"there is no job {job}", 404)
            if record.state in (JobState.DONE, JobState.FAILED):
                raise ServerRefusedError(f"{job} is {record.state} already", 409)
            if record.state is not JobState.CANCELLED:
                change.end_job(record, JobState.CANCELLED, f"cancelled by {member.name}")
            found = change.books.jobs.get(job)
            assert found is not None
            return job_view(change.books, found)

    # --- inside -------------------------------------------------------------------------------

    def _see(self, provider: str) -> None:
        clock = self._office.clock
        self.liveness.see(provider, steady=clock.steady(), wall=clock.wall())

    def _return(self, change: UnitOfWork, record: ProviderRecord) -> None:
        change.release(record, f"{record.offer.name} is back: {_summary(record.offer)}")

    def _take(self, provider: str, report: AssignmentReport) -> None:
        """Write down what a provider says about its part, and draw the conclusions."""
        with self._office.store.look() as books:
            part = books.parts.get(report.assignment)
        if part is not None and part.provider != provider:
            raise self._trust.refused(provider, f"{provider} reported about another's assignment")
        with self._office.change() as change:
            part = change.books.parts.get(report.assignment)
            if part is None or part.has_ended:
                return  # its orders will tell
            self._keep(change, part, report)
            if report.phase != part.phase:
                self._enter(change, part, report)

    def _keep(self, change: UnitOfWork, part: AssignmentRecord, report: AssignmentReport) -> None:
        """Losses, figures and files of a report."""
        known = change.books.parts.keep_losses(part, report.first_loss, report.losses)
        if change.books.parts.keep_figures(part, report.figures) or known > part.losses:
            change.books.jobs.touch(part.job)
            change.topics.add(("job", part.job))
        if report.strangers != part.strangers:
            self._note_strangers(change, part, report.strangers)
        if report.phase == "finished" and report.result:
            digests = [file.artifact.sha256 for file in report.result]
            if change.books.holdings.missing(part.provider, digests):
                raise ServerRefusedError("the result names files that were not uploaded", 422)
            change.books.parts.keep_result(part, report.result)

    def _note_strangers(
        self, change: UnitOfWork, part: AssignmentRecord, strangers: TlsRejections
    ) -> None:
        """Write down whom a node has turned away since its last report."""
        for kind, words in _STRANGERS.items():
            new = getattr(strangers, kind) - getattr(part.strangers, kind)
            if new > 0:
                what = f"node_{part.node} of {part.job} turned away {_connections(new)} {words}"
                change.books.events.add("refusal", part.provider, what, job=part.job)
        change.books.parts.keep_strangers(part, strangers)

    def _enter(self, change: UnitOfWork, part: AssignmentRecord, report: AssignmentReport) -> None:
        """A part goes on to another phase."""
        record = change.books.providers.get(part.provider)
        assert record is not None
        if report.phase in ("finished", "failed"):
            change.end_part(part, report.phase, report.reason)
            change.release(record, f"its part in {part.job} is {report.phase} {report.reason}".strip())
        else:
            change.books.parts.move(part, report.phase, report.reason)
            if report.phase == "training" and record.state is ProviderState.RESERVED:
                change.books.providers.move(
                    record,
                    ProviderState.TRAINING,
                    f"trains node_{part.node} of {part.job}",
                    job=part.job,
                )
        change.books.jobs.touch(part.job)
        change.judge(part.job)
        self._note_endings(change, part.job)

    def _lose(self, provider: str, reason: str, *, left: bool = False) -> None:
        """A provider is gone, and with it the cluster that it works for."""
        self.liveness.forget(provider)
        with self._office.change() as change:
            record = change.books.providers.get(provider)
            if record is None or record.state is ProviderState.LOST:
                return
            change.books.providers.move(record, ProviderState.LOST, reason, left=left)
            change.topics.add(("provider", provider))
            change.matching = True
            if record.job is None:
                return
            part = change.books.parts.live_of(provider)
            if part is not None:
                change.end_part(part, "failed", f"the provider was lost: {reason}")
                change.judge(part.job)
                self._note_endings(change, part.job)
            else:
                job = change.books.jobs.get(record.job)
                if job is not None and job.state is JobState.PLANNED:
                    change.requeue(
                        job, f"{record.offer.name} was lost before its part was shipped: {reason}"
                    )

    def _note_endings(self, change: UnitOfWork, job: str) -> None:
        """Nodes of a failed cluster end by themselves, and say why; not for ever."""
        parts = change.books.parts.of_job(job)
        failed = failed_clusters(parts)
        live = {part.cluster for part in parts if not part.has_ended}
        deadline = self._office.clock.steady() + self._settings.ending_grace
        with self._endings_lock:
            for cluster in failed & live:
                self._endings.setdefault((job, cluster), deadline)
        if failed & live:
            change.topics.add(("clock", ""))

    def _give_up_fetches(self) -> None:
        """Providers that live but do not get their part hold up a job, and not for ever."""
        now, grace = self._office.clock.wall(), self._settings.fetch_grace
        with self._office.store.look() as books:
            shipping = books.jobs.in_state(JobState.SHIPPING)
            late = [job for job in shipping if now - job.changed > grace]
        for job in late:
            with self._office.change() as change:
                for part in change.books.parts.of_job(job.id):
                    if part.phase in FETCHING:
                        self._give_up_fetch(change, part, now - job.changed)
                change.judge(job.id)
                self._note_endings(change, job.id)

    def _give_up_fetch(self, change: UnitOfWork, part: AssignmentRecord, waited: float) -> None:
        record = change.books.providers.get(part.provider)
        assert record is not None
        limit = fetch_limit(change.books.parts.body(part.id), record.offer, self._settings.fetch_grace)
        if waited > limit:
            reason = f"it has not fetched its part within {limit / 60:.0f} minutes"
            change.end_part(part, "failed", reason)
            change.release(record, f"{part.job} goes on without it: {reason}")

    def _stop_cluster(self, job: str, cluster: int) -> None:
        """What is left of a failed cluster has had its time."""
        with self._office.change() as change:
            for part in change.books.parts.of_job(job):
                if part.cluster != cluster or part.has_ended:
                    continue
                record = change.books.providers.get(part.provider)
                assert record is not None
                change.end_part(part, "stopped", "the rest of its cluster had failed")
                change.release(record, f"what was left of cluster {cluster} of {job} was stopped")
            change.judge(job)


def _connections(count: int) -> str:
    return "a connection" if count == 1 else f"{count} connections"


def _summary(offer: ProviderOffer) -> str:
    return (
        f"{offer.ram:g} GB, {offer.cores} cores, {offer.compute:g} GFLOP/s, {offer.bandwidth:g} Mbit/s"
    )
