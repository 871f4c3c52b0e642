"""Checkpoints at the server: orders to upload them, their files, and how long they are kept.

Which checkpoints there are is in the database. Orders are in memory: a restarted server gives new ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ravnest.schemas.checkpoints import CheckpointOrder, UploadedCheckpoint
from ravnest.schemas.providers import AssignmentReport
from ravnest.server.artifacts import ArtifactFolder
from ravnest.server.checkpoint_check import ManifestCheck, misfit_of
from ravnest.server.complete_checkpoints import (
    CompleteCheckpoint,
    complete_checkpoints,
    newest_by_cluster,
    superseded,
)
from ravnest.server.db.database import Transaction
from ravnest.server.db.records import AssignmentRecord, JobRecord, StageCheckpointRecord
from ravnest.server.job_snapshots import JobSnapshot, checkpoint_name
from ravnest.server.job_status import holders
from ravnest.server.settings import ServerSettings
from ravnest.server.unit_of_work import UnitOfWork, UnitOfWorkFactory
from ravnest.store.node_spec import NodeSpec
from ravnest.telemetry import CheckpointRecord
from ravnest.types import BEGINNING, CheckpointId

_ClusterKey = tuple[str, int, int]
"""Job, plan and cluster."""
_MOST_REFUSED = 10_000
"""Refused checkpoints that are remembered, so that each has one event."""


@dataclass(frozen=True)
class _IssuedOrder:
    at_least: int
    issued: float
    """Steady time."""
    phases: int = 0

    @property
    def order(self) -> CheckpointOrder:
        return CheckpointOrder(at_least=self.at_least, phases=self.phases)


@dataclass(frozen=True)
class _Rescue:
    """Order to the remaining nodes of a cluster to upload everything."""

    stages: frozenset[int]
    """Lost stages."""
    at_least: int
    """Updates of the newest checkpoint that a node has reported; it tells two rescues apart."""


class CheckpointService:
    """Uploaded checkpoints; the methods are thread-safe."""

    def __init__(
        self,
        units: UnitOfWorkFactory,
        artifacts: ArtifactFolder,
        settings: ServerSettings,
        check_manifest: ManifestCheck,
    ) -> None:
        self._units = units
        self._artifacts = artifacts
        self._check_manifest = check_manifest
        self._settings = settings
        self._lock = threading.Lock()
        self._orders: dict[_ClusterKey, _IssuedOrder] = {}
        self._rescues: dict[_ClusterKey, _Rescue] = {}
        self._awaited: set[str] = set()
        """Jobs for which somebody waits for the next complete checkpoint."""
        self._done: dict[str, CheckpointOrder] = {}
        """Last order that the provider of an assignment has carried out."""
        self._refused: set[str] = set()
        """Digests of manifests that were refused."""
        self._unused: set[str] = set()
        """Artifacts of checkpoints that were dropped; they are deleted if nobody else needs them."""

    # Orders

    def order_for(
        self, db: Transaction, assignment: AssignmentRecord, job: JobSnapshot
    ) -> CheckpointOrder | None:
        """Return what the provider of an assignment should upload."""
        if assignment.phase not in ("fetched", "training"):
            return None
        key = _key(assignment)
        with self._lock:
            rescue = self._rescues.get(key)
            issued = self._orders.get(key)
        if rescue is not None:
            return self._rescue_order(rescue, db.assignments.body(assignment.id).node_spec)
        if assignment.phase != "training":
            return None
        newest = job.newest_checkpoint(assignment.attempt, assignment.cluster)
        newest_id = BEGINNING if newest is None else newest.id
        if issued is not None and not self._is_over(job.holders, assignment, issued, newest_id):
            return issued.order
        if newest is not None and self._age(newest.time) < self._settings.checkpoint_upload:
            return None
        at_least = self._newest_update(db, assignment) + 1
        with self._lock:
            self._orders[key] = _IssuedOrder(at_least, self._units.clock.steady())
        return CheckpointOrder(at_least=at_least)

    def request(
        self, uow: UnitOfWork, cluster: Sequence[AssignmentRecord], *, at_phase_end: bool
    ) -> None:
        """Have a cluster upload its next checkpoint now, not only from time to time.

        ``at_phase_end``: the next one that is taken after the end of a phase. An upload that is under
        way is not disturbed: call this again later.
        """
        first = cluster[0]
        key = _key(first)
        own = [each for each in uow.db.checkpoints.of_job(first.job) if _is_of(each, first)]
        newest = next(iter(complete_checkpoints(own)), None)
        with self._lock:
            self._awaited.add(first.job)
            issued = self._orders.get(key)
        if issued is not None and not self._is_over(
            holders(uow.db.assignments.of_job(first.job)),
            first,
            issued,
            BEGINNING if newest is None else newest.id,
        ):
            return
        known = [
            record for each in cluster for record in uow.db.telemetry.newest(each.id, CheckpointRecord)
        ]
        update = max((each.update for each in known), default=0)
        phase = max((each.phase for each in known), default=0)
        order = (
            _IssuedOrder(update, self._units.clock.steady(), phase + 1)
            if at_phase_end
            else _IssuedOrder(update + 1, self._units.clock.steady())
        )
        with self._lock:
            self._orders[key] = order
        uow.topics |= {("provider", each.provider) for each in cluster}

    def end_requests(self, job: str) -> None:
        """Nobody waits for a checkpoint of a job any more."""
        with self._lock:
            self._awaited.discard(job)

    def drop_other_checkpoints(
        self, uow: UnitOfWork, job: str, kept: Sequence[CompleteCheckpoint]
    ) -> None:
        """Drop all checkpoints of a job that are newer than those from which it shall start."""
        keep = {stage for each in kept for stage in each.stages}
        oldest = {each.cluster: each.id for each in kept}
        attempt = kept[0].attempt
        self._drop(
            uow,
            [
                each
                for each in uow.db.checkpoints.of_job(job)
                if each not in keep
                and each.attempt >= attempt
                and each.id > oldest.get(each.cluster, BEGINNING)
            ],
        )

    def rescue(self, uow: UnitOfWork, cluster: Sequence[AssignmentRecord], lost: set[int]) -> None:
        """Have the remaining nodes of a cluster upload all checkpoints; ``lost``: the missing stages."""
        live = [each for each in cluster if not each.has_ended]
        if not live:
            return
        key = _key(live[0])
        with self._lock:
            known = self._rescues.get(key)
        at_least = self._newest_update(uow.db, live[0])
        if known is not None and known.stages == lost and known.at_least >= at_least:
            return
        with self._lock:
            self._rescues[key] = _Rescue(frozenset(lost), at_least)
        uow.topics |= {("provider", each.provider) for each in live}

    def gather(self, uow: UnitOfWork, cluster: Sequence[AssignmentRecord]) -> None:
        """Have a cluster that trains upload the checkpoints that it has, once; ``rescue`` for others.

        It takes further ones meanwhile, which are not waited for.
        """
        with self._lock:
            is_known = _key(cluster[0]) in self._rescues
        if not is_known:
            self.rescue(uow, cluster, set())

    def end_rescues(self, job: str) -> None:
        """Return to uploads from time to time: the clusters of a job are complete again, or given up."""
        with self._lock:
            self._rescues = {key: each for key, each in self._rescues.items() if key[0] != job}

    def is_rescued(self, db: Transaction, cluster: Sequence[AssignmentRecord]) -> bool:
        """Return whether all remaining nodes of a cluster have uploaded their checkpoints.

        Those that have returned to their places count too, even if they do not train yet.
        """
        for each in cluster:
            body = db.assignments.body(each.id)
            if each.has_ended or (each.phase != "training" and body.continues is None):
                continue
            with self._lock:
                rescue = self._rescues.get(_key(each))
            if rescue is None or self._done.get(each.id) != self._rescue_order(rescue, body.node_spec):
                return False
        return True

    @staticmethod
    def _rescue_order(rescue: _Rescue, own: NodeSpec) -> CheckpointOrder:
        near = tuple(sorted(rescue.stages & {own.stage - 1, own.stage + 1}))
        return CheckpointOrder(at_least=rescue.at_least, rescue=True, stages=near)

    def _is_over(
        self,
        held: Sequence[AssignmentRecord],
        assignment: AssignmentRecord,
        issued: _IssuedOrder,
        newest: CheckpointId,
    ) -> bool:
        """Return whether an order has led to a complete checkpoint, or cannot any more.

        ``held``: the assignments that stand for the nodes of the job. If a node took the order late, it
        has uploaded another checkpoint than the others.
        """
        if newest.update >= issued.at_least and newest.phase >= issued.phases:
            return True
        order = issued.order
        cluster = [each for each in held if each.cluster == assignment.cluster and not each.has_ended]
        if all(self._done.get(each.id) == order for each in cluster):
            return True
        age = self._units.clock.steady() - issued.issued
        return age > 2 * self._settings.checkpoint_upload + self._settings.rescue_grace

    @staticmethod
    def _newest_update(db: Transaction, assignment: AssignmentRecord) -> int:
        cluster = [
            each for each in db.assignments.of_job(assignment.job) if each.cluster == assignment.cluster
        ]
        return max((each.update for each in db.telemetry.checkpoints(cluster).values()), default=0)

    # Reports

    def knows(self, report: AssignmentReport, job: JobSnapshot) -> bool:
        """Return whether a report tells nothing new about checkpoints."""
        done = report.upload_done
        is_known = done is None or self._done.get(report.assignment) == done
        return is_known and all(checkpoint_name(each) in job.uploaded for each in report.checkpoints)

    def store(self, provider: str, report: AssignmentReport) -> None:
        """Store the checkpoints that a report names; an event tells about those that do not fit."""
        if report.upload_done is None and not report.checkpoints:
            return
        with self._units.db.read() as db:
            assignment = db.assignments.get(report.assignment)
            if assignment is None or assignment.provider != provider or assignment.has_ended:
                return
            known = {checkpoint_name(each) for each in db.checkpoints.of_job(assignment.job)}
            own = db.assignments.body(assignment.id).node_spec
            weights = _weights(db, assignment)
        new = [each for each in report.checkpoints if checkpoint_name(each) not in known]
        usable = [each for each in new if self._is_usable(assignment, each, own, weights)]
        done = report.upload_done
        rescues = done is not None and done.rescue and self._done.get(assignment.id) != done
        if usable:
            with self._units.begin() as uow:
                self._add(uow, assignment, own, usable)
        if done is not None:
            self._done[assignment.id] = done
        if rescues:
            with self._units.begin() as uow:
                uow.needs_matching = True  # the job may be planned anew now

    def _is_usable(
        self,
        assignment: AssignmentRecord,
        uploaded: UploadedCheckpoint,
        own: NodeSpec,
        weights: dict[int, int],
    ) -> bool:
        if uploaded.manifest.sha256 in self._refused:
            return False
        problem = misfit_of(uploaded, own, weights)
        files = (uploaded.tensors, uploaded.manifest)
        if not problem:
            digests = [file.sha256 for file in files]
            with self._units.db.read() as db:
                sizes = db.artifact_grants.sizes(assignment.provider, digests)
                sizes |= db.artifact_grants.sizes(assignment.job, digests)
            if any(sizes.get(file.sha256) != file.size for file in files):
                return False  # dropped meanwhile, or an upload that the provider repeats
            manifest = self._artifacts.path(uploaded.manifest.sha256)
            problem = self._check_manifest(manifest, uploaded, own.stages)
        if not problem:
            return True
        if len(self._refused) < _MOST_REFUSED:
            self._refused.add(uploaded.manifest.sha256)
        with self._units.begin() as uow:
            what = f"node_{assignment.node}: the checkpoint of {uploaded.id} is not used: {problem}"
            uow.db.events.add("warning", assignment.provider, what, job=assignment.job)
        return False

    def _add(
        self,
        uow: UnitOfWork,
        assignment: AssignmentRecord,
        own: NodeSpec,
        uploaded: Iterable[UploadedCheckpoint],
    ) -> None:
        current = uow.db.assignments.get(assignment.id)
        if current is None or current.has_ended:
            return
        for each in uploaded:
            files = (each.tensors, each.manifest)
            uow.db.checkpoints.add(
                StageCheckpointRecord(
                    job=assignment.job,
                    plan=each.plan,
                    run=each.run,
                    taken=each.taken,
                    id=each.id,
                    cluster=each.cluster,
                    stage=each.stage,
                    stages=own.stages,
                    attempt=assignment.attempt,
                    time=uow.db.now,
                    tensors=each.tensors,
                    manifest=each.manifest,
                )
            )
            uow.db.artifact_grants.grant(assignment.job, files)
            uow.db.artifact_grants.revoke_files(assignment.provider, [file.sha256 for file in files])
        self._drop(uow, superseded(uow.db.checkpoints.of_job(assignment.job)))
        uow.db.jobs.touch(assignment.job)
        uow.topics |= {("job", assignment.job), ("clock", "")}
        with self._lock:
            uow.needs_matching |= assignment.job in self._awaited

    # Retention

    def run_due(self) -> float | None:
        """Drop the checkpoints of jobs that ended long ago, and delete files that nobody needs."""
        with self._units.db.read() as db:
            held = [db.jobs.get(job) for job in db.checkpoints.jobs()]
        ended = [job for job in held if job is not None and job.state.is_final]
        ended.sort(key=lambda job: job.changed, reverse=True)
        for number, job in enumerate(ended):
            age = self._age(job.changed)
            too_many = number >= self._settings.ended_jobs_resumable
            forget = too_many or age > self._settings.checkpoints_kept
            self._shrink(job, keep_newest=not forget)
        self._delete_unused()
        return None

    def _shrink(self, job: JobRecord, *, keep_newest: bool) -> None:
        """Keep only complete checkpoints of a job that has ended."""
        with self._units.db.read() as db:
            before = db.checkpoints.of_job(job.id)
        newest = newest_by_cluster(complete_checkpoints(before)) if keep_newest else {}
        keep = {stage for each in newest.values() for stage in each.stages}
        if len(keep) < len(before):
            with self._units.begin() as uow:
                self._drop(uow, [each for each in before if each not in keep])

    def _drop(self, uow: UnitOfWork, unneeded: Sequence[StageCheckpointRecord]) -> None:
        """Remove checkpoints of one job, and the grants of files that no other one of it has."""
        if not unneeded:
            return
        job = unneeded[0].job
        uow.db.checkpoints.remove(unneeded)
        needed = {digest for each in uow.db.checkpoints.of_job(job) for digest in _digests(each)}
        free = {digest for each in unneeded for digest in _digests(each)} - needed
        uow.db.artifact_grants.revoke_files(job, free)
        with self._lock:
            self._unused |= free

    def _age(self, time: float) -> float:
        """Return the seconds since a time in the database; not negative if the clock was set back."""
        return max(self._units.clock.wall() - time, 0.0)

    def _delete_unused(self) -> None:
        """Delete the files of dropped checkpoints; the next start of the server deletes the rest."""
        with self._lock:
            unused = list(self._unused)
        for digest in unused:
            # In a transaction that writes: nobody is granted the file meanwhile.
            with self._units.db.write(self._units.clock.wall()) as db:
                is_over = db.artifact_grants.is_granted(digest) or self._artifacts.remove(
                    digest, self._settings.unused_files_kept
                )
            if is_over:
                with self._lock:
                    self._unused.discard(digest)


def _key(assignment: AssignmentRecord) -> _ClusterKey:
    return assignment.job, assignment.attempt, assignment.cluster


def _is_of(checkpoint: StageCheckpointRecord, assignment: AssignmentRecord) -> bool:
    """Return whether a checkpoint is one of an assignment's cluster."""
    found = (checkpoint.job, checkpoint.attempt, checkpoint.cluster)
    return found == _key(assignment)


def _digests(checkpoint: StageCheckpointRecord) -> tuple[str, str]:
    return checkpoint.tensors.sha256, checkpoint.manifest.sha256


def _weights(db: Transaction, assignment: AssignmentRecord) -> dict[int, int]:
    """Return the bytes of the weights of all stages of an assignment's cluster, by stage."""
    found: dict[int, int] = {}
    for each in db.assignments.of_job(assignment.job):
        if each.cluster == assignment.cluster:
            body = db.assignments.body(each.id)
            found[body.node_spec.stage] = body.weights.size
    return found
