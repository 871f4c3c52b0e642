"""Shipping of a planned job: stages as artifacts, and one assignment per node."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ravnest.jobs.model import UnitModel, read_units, write_stage
from ravnest.plan.infeasible import Infeasible
from ravnest.plan.plan import Plan, StagePlan
from ravnest.runtime.stage.forward_check import uncovered
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import JobSpec
from ravnest.schemas.providers import Assignment, ProviderOffer, StageNeeds
from ravnest.server.artifacts import ArtifactFolder
from ravnest.server.assignments import assignment_id
from ravnest.server.reachability.relays import RelayService
from ravnest.server.reachability.routes import with_addresses
from ravnest.server.scheduling.data_shares import rows_of, training_share, whole
from ravnest.server.scheduling.link_tests import ProviderLinks
from ravnest.server.scheduling.planning import Candidates, PlannedJob, plan_variants
from ravnest.server.scheduling.seeds import stage_starts, with_seeds
from ravnest.server.scheduling.spot_checks import least_interval
from ravnest.store.bundle import STAGE_FILE, WEIGHTS_FILE
from ravnest.store.node_spec import NodeSpec, bundle_path, make_node_spec, plan_digest
from ravnest.transport.link_secret import new_secret
from ravnest.transport.tls import is_loopback


class ArtifactPlanner:
    """Job planner that reads models from the server's artifacts and adds stages to them.

    Not thread-safe.
    """

    def __init__(self, artifacts: ArtifactFolder, scratch: Path) -> None:
        self._artifacts = artifacts
        self._scratch = scratch
        self._model: tuple[str, UnitModel] | None = None
        """Last model that was read, by digest: a waiting job is planned again at each change."""

    def plan(
        self, spec: JobSpec, providers: Candidates, links: ProviderLinks
    ) -> PlannedJob | Infeasible:
        """Plan a job for these providers with the measured figures of their links."""
        profiles = [model.profile for model in self._read(spec).variants]
        return plan_variants(spec, profiles, providers, links)

    def ship(self, job: str, planned: PlannedJob) -> tuple[Assignment, ...]:
        """Write the stages as artifacts; return the assignment of each node, by number."""
        shutil.rmtree(self._scratch, ignore_errors=True)  # left by a killed process
        self._scratch.mkdir(parents=True)
        weights = self._artifacts.path(planned.spec.model.weights.sha256)
        model = self._read(planned.spec).variants[planned.variant]
        assignments = ship(job, planned, model, weights, self._artifacts.add, self._scratch)
        if planned.start is None:
            return assignments
        return with_seeds(assignments, planned, model, self._artifacts, self._scratch)

    def _read(self, spec: JobSpec) -> UnitModel:
        sha256 = spec.model.units.sha256
        if self._model is None or self._model[0] != sha256:
            self._model = (sha256, read_units(self._artifacts.path(sha256)))
        return self._model[1]


@dataclass(frozen=True)
class _StageArtifacts:
    stage: Artifact
    weights: Artifact
    is_covered: bool
    """Outputs of the stage can be computed again elsewhere (``runtime/stage/forward_check.py``)."""


def ship(
    job: str,
    planned: PlannedJob,
    model: UnitModel,
    weights: Path,
    add: Callable[[Path], Artifact],
    scratch: Path,
    relays: RelayService | None = None,
) -> tuple[Assignment, ...]:
    """Write the stages of a plan; return the assignment of each node, by number.

    ``weights`` is the model's weights file. Stages are written below ``scratch``, and ``add`` moves
    each file to the artifacts. Clusters with equal cuts share their files. Nodes on other machines get
    all addresses of each other, and access to ``relays``. All nodes get the same new secret.
    """
    plan, spec = planned.plan, planned.spec
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        artifacts = _write_clusters(plan, model, weights, add, Path(folder))
    specs = [
        make_node_spec(plan, s, bundle_path(s), artifacts[s.node.id].stage.sha256) for s in plan.stages
    ]
    digest = plan_digest(specs, job if planned.attempt == 0 else f"{job} plan {planned.attempt}")
    tls = any(not is_loopback(stage.node.address) for stage in plan.stages)
    if tls:
        specs = _with_routes(job, specs, planned.offers, relays)
    secret = new_secret()
    samples = tuple(len(rows_of(spec, plan, each.id)) for each in plan.clusters)
    return tuple(
        Assignment(
            id=assignment_id(job, planned.attempt, stage.node.id),
            job=job,
            node=stage.node.id,
            node_spec=replace(node_spec, plan=digest, secret=secret, samples=samples),
            stage=artifacts[stage.node.id].stage,
            weights=artifacts[stage.node.id].weights,
            train=training_share(spec, plan, stage),
            validation=whole(spec.validation, plan, stage),
            training=spec.training,
            tls=tls,
            needs=stage_needs(plan, stage),
            attempt=planned.attempt,
            spot_checks=_least_check_interval(plan, stage, artifacts),
        )
        for stage, node_spec in zip(plan.stages, specs, strict=True)
    )


def _least_check_interval(
    plan: Plan, stage: StagePlan, artifacts: Mapping[int, _StageArtifacts]
) -> float:
    """Return the least time between two checks of the previous stage's output; 0: none are possible."""
    before = plan.previous(stage.node.id)
    if before is None or not artifacts[before.node.id].is_covered:
        return 0.0
    values = stage_needs(plan, before).traffic * 1e6 / 8
    size = artifacts[before.node.id].weights.size + round(values)
    return least_interval(size, min(before.node.bandwidth, stage.node.bandwidth))


def stage_needs(plan: Plan, stage: StagePlan) -> StageNeeds:
    """Return what another provider needs to take the place of a stage's node."""
    before = plan.previous(stage.node.id)
    links = stage.link_seconds * _link_rate(stage)
    if before is not None:
        links += before.link_seconds * _link_rate(before)
    return StageNeeds(
        ram=round(stage.memory.total),
        work=stage.compute_seconds * (stage.node.compute or 0.0),
        traffic=links,
    )


def _link_rate(stage: StagePlan) -> float:
    """Return the Mbit/s with which the link to the next stage was planned, roughly."""
    return stage.node.bandwidth if stage.link is None else stage.link.rate


def _with_routes(
    job: str, specs: list[NodeSpec], offers: Sequence[ProviderOffer], relays: RelayService | None
) -> list[NodeSpec]:
    """Add all addresses of the nodes, and access to relays if there are some."""
    by_node = dict(enumerate(offers))
    complete = [with_addresses(spec, by_node) for spec in specs]
    return complete if relays is None else relays.add_tickets(job, complete, offers)


def _write_clusters(
    plan: Plan, model: UnitModel, weights: Path, add: Callable[[Path], Artifact], folder: Path
) -> dict[int, _StageArtifacts]:
    """Write the stages of all clusters; return the files of each node."""
    by_node: dict[int, _StageArtifacts] = {}
    by_cuts: dict[tuple[int, ...], tuple[_StageArtifacts, ...]] = {}
    for cluster in plan.clusters:
        starts = stage_starts(cluster)
        if starts not in by_cuts:
            by_cuts[starts] = tuple(_write_stages(model, starts, weights, add, folder))
        for stage, files in zip(cluster.stages, by_cuts[starts], strict=True):
            by_node[stage.node.id] = files
    return by_node


def _write_stages(
    model: UnitModel,
    starts: Sequence[int],
    weights: Path,
    add: Callable[[Path], Artifact],
    folder: Path,
) -> Iterator[_StageArtifacts]:
    """Write one stage at a time, so that the disk holds only one stage twice."""
    for spec in model.stages(starts):
        write_stage(folder, spec, weights)
        files = add(folder / STAGE_FILE), add(folder / WEIGHTS_FILE)
        yield _StageArtifacts(*files, is_covered=not uncovered(spec))
