"""From a job and the providers that it gets to what each of them is sent: a stage, data, its place."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ravnest.errors import PlanError
from ravnest.jobs.model import UnitModel, write_stage
from ravnest.plan.cost import ModelCosts
from ravnest.plan.explain import explain
from ravnest.plan.infeasible import lightest_stage
from ravnest.plan.memory import averaging_copies, size
from ravnest.plan.node_configs import NodeConfig
from ravnest.plan.plan import ClusterPlan, Plan
from ravnest.plan.planner import make_plan
from ravnest.plan.profile import ModelProfile
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import JobSpec
from ravnest.schemas.providers import Assignment, ProviderOffer
from ravnest.server.scheduling.data_shares import check_data, least_rows, rows_of, share, whole
from ravnest.store.bundle import STAGE_FILE, WEIGHTS_FILE
from ravnest.store.node_spec import NodeSpec, bundle_path, node_file, node_to_json, plan_digest
from ravnest.transport.tls import is_loopback
from ravnest.types import Address


@dataclass(frozen=True)
class Shortage:
    """The providers cannot hold the model, or not as asked."""

    reason: str
    """With the figures: what it needs, and what they offer."""


@dataclass(frozen=True)
class PlannedJob:
    """Who does what in a job."""

    spec: JobSpec
    model: UnitModel
    plan: Plan
    providers: tuple[str, ...]
    """The provider of each node, by the node's number."""
    words: str
    """The plan in words."""


@dataclass(frozen=True)
class _Shipped:
    """A stage among the artifacts."""

    stage: Artifact
    weights: Artifact


def plan_job(
    spec: JobSpec, model: UnitModel, providers: Sequence[tuple[str, ProviderOffer]]
) -> PlannedJob | Shortage:
    """Plan a job for providers, strongest first; node ``i`` is the ``i``-th of those that are used.

    All are used if that is possible. Otherwise those with the least RAM are left out, as far as
    ``min_providers`` allows: one that is too small for any stage must not keep a job from the others.
    ``JobError`` if the job's data does not add up.
    """
    check_data(spec)
    costs = ModelCosts.of(model.profile, spec.training.update_frequency)
    least = max(spec.min_providers, spec.clusters or 1)
    chosen = _useful(costs, _with_own_address(providers), spec.clusters, least)
    shortage: Shortage | None = None
    while len(chosen) >= least:
        if shortage and sum(offer.ram for _, offer in chosen) * 1e9 < costs.smallest_total:
            break
        plan = _plan(spec, model.profile, chosen)
        if isinstance(plan, Plan):
            words = explain(plan, model.profile, _unit_names(model.profile))
            return PlannedJob(spec, model, plan, tuple(name for name, _ in chosen), words)
        shortage = shortage or plan
        chosen = _without_smallest(chosen, max(len(chosen) // 8, 1))
    return shortage or Shortage(
        f"the model needs {size(costs.smallest_total)} to train at batch {costs.batch_size}, on at least"
        f" {least} providers at addresses of their own; idle ones of these: {len(chosen)}"
    )


def ship(
    job: str,
    planned: PlannedJob,
    weights: Path,
    add: Callable[[Path], Artifact],
    scratch: Path,
) -> tuple[Assignment, ...]:
    """Write the stages of a plan, and what each node gets, by the nodes' numbers.

    ``weights`` is the model's file. Stages are written below ``scratch``, and ``add`` moves each
    file to the artifacts. Clusters that are cut alike share theirs.
    """
    plan, spec = planned.plan, planned.spec
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        shipped = _ship_stages(planned, weights, add, Path(folder))
    files = [node_file(plan, s, bundle_path(s), shipped[s.node.id].stage.sha256) for s in plan.stages]
    digest = plan_digest(files, job)
    tls = any(not is_loopback(stage.node.address) for stage in plan.stages)
    return tuple(
        Assignment(
            id=f"{job}-{stage.node.id}",
            job=job,
            node=stage.node.id,
            node_file=_as_json(replace(file, plan=digest)),
            stage=shipped[stage.node.id].stage,
            weights=shipped[stage.node.id].weights,
            train=share(spec.train, plan, stage, rows_of(spec, plan, stage.cluster)),
            validation=whole(spec.validation, plan, stage),
            training=spec.training,
            tls=tls,
        )
        for stage, file in zip(plan.stages, files, strict=True)
    )


# --- planning ------------------------------------------------------------------------------------


def _with_own_address(providers: Sequence[tuple[str, ProviderOffer]]) -> list[tuple[str, ProviderOffer]]:
    """Of providers at one address the first: two cannot listen there at once."""
    first: dict[Address, tuple[str, ProviderOffer]] = {}
    for name, offer in providers:
        first.setdefault(Address.parse(offer.address), (name, offer))
    return list(first.values())


def _useful(
    costs: ModelCosts, providers: list[tuple[str, ProviderOffer]], clusters: int | None, least: int
) -> list[tuple[str, ProviderOffer]]:
    """Those that can hold a stage at all; everybody where they are too few, to hear who is too small."""
    need = lightest_stage(costs, len(providers), clusters)
    useful = [provider for provider in providers if provider[1].ram * 1e9 >= need]
    return useful if len(useful) >= least else providers


def _without_smallest(
    providers: Sequence[tuple[str, ProviderOffer]], count: int
) -> list[tuple[str, ProviderOffer]]:
    """Without those of the least RAM; of equal ones the last go."""
    largest = sorted(range(len(providers)), key=lambda i: (-providers[i][1].ram, i))
    return [providers[i] for i in sorted(largest[: len(providers) - count])]


def _plan(
    spec: JobSpec, profile: ModelProfile, providers: Sequence[tuple[str, ProviderOffer]]
) -> Plan | Shortage:
    nodes = [
        NodeConfig(number, Address.parse(offer.address), offer.ram, offer.bandwidth, offer.compute)
        for number, (_, offer) in enumerate(providers)
    ]
    training, most = spec.training, _most_clusters(spec)
    if spec.clusters is not None and spec.clusters > most:
        return Shortage(
            f"clusters={spec.clusters} is too many: {spec.train.samples} samples are enough for {most}"
        )

    def planned(clusters: int | None) -> Plan:
        return make_plan(
            profile,
            nodes,
            clusters=clusters,
            seed=training.seed,
            update_frequency=training.update_frequency,
            averaging=averaging_copies(
                compressed=training.compression is not None,
                with_optimizer=training.average_optim,
                optimizer_factor=profile.optimizer_bytes_per_parameter_byte,
            ),
            source="",
        )

    try:
        plan = planned(spec.clusters)
        return plan if len(plan.clusters) <= most else planned(most)
    except PlanError as error:
        return Shortage(str(error))


def _most_clusters(spec: JobSpec) -> int:
    """So many that each has a batch to train on."""
    return max(spec.train.samples // least_rows(spec), 1)


def _unit_names(profile: ModelProfile) -> list[str]:
    """The module whose tensors each unit uses first; one without goes with the unit before it."""
    names = [""] * len(profile.units)
    for tensor in reversed(profile.state):
        names[tensor.units[0]] = tensor.name.rpartition(".")[0] or tensor.name
    current = next((name for name in names if name), "forward")
    for unit, name in enumerate(names):
        current = names[unit] = name or current
    return names


# --- stages --------------------------------------------------------------------------------------


def _ship_stages(
    planned: PlannedJob, weights: Path, add: Callable[[Path], Artifact], folder: Path
) -> dict[int, _Shipped]:
    """The files of each node's stage."""
    shipped: dict[int, _Shipped] = {}
    alike: dict[tuple[int, ...], tuple[_Shipped, ...]] = {}
    for cluster in planned.plan.clusters:
        starts = _starts(cluster)
        if starts not in alike:
            alike[starts] = tuple(_write_stages(planned.model, starts, weights, add, folder))
        for stage, files in zip(cluster.stages, alike[starts], strict=True):
            shipped[stage.node.id] = files
    return shipped


def _starts(cluster: ClusterPlan) -> tuple[int, ...]:
    return tuple(stage.start for stage in cluster.stages[1:])


def _write_stages(
    model: UnitModel,
    starts: Sequence[int],
    weights: Path,
    add: Callable[[Path], Artifact],
    folder: Path,
) -> Iterator[_Shipped]:
    """One stage after another, so that the disk holds one twice and not all of them."""
    for spec in model.stages(starts):
        write_stage(folder, spec, weights)
        yield _Shipped(add(folder / STAGE_FILE), add(folder / WEIGHTS_FILE))


def _as_json(node: NodeSpec) -> dict[str, Any]:
    """What a reader of the file will see."""
    data: dict[str, Any] = json.loads(json.dumps(node_to_json(node)))
    return data
