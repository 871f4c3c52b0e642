"""Cluster formation: capture a model, profile it, plan, split, check, and write the stages to disk."""

from __future__ import annotations

import datetime
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import nn

from ravnest.errors import PlanError, SplitError, StageFormatError
from ravnest.plan.explain import clusterize_log, clusterize_notes, explain
from ravnest.plan.infeasible import Infeasible
from ravnest.plan.memory import averaging_copies
from ravnest.plan.node_configs import NodeConfig, read_node_configs
from ravnest.plan.plan import ClusterPlan, Plan
from ravnest.plan.planner import make_plan
from ravnest.plan.profile import ModelProfile
from ravnest.plan.profiler import kept_state, optimizer_state_factor, profile_model, unit_names
from ravnest.plan.row_cuts import row_cut_models, whole_reason
from ravnest.split.precision import Precision
from ravnest.split.self_check import verify
from ravnest.split.splitter import PreparedModel, Split, prepare
from ravnest.split.varying import Varying
from ravnest.store.bundle import save_stage
from ravnest.store.checkpoint import SEED
from ravnest.store.checkpoint_conversion import NewStage, convert_checkpoints
from ravnest.store.checkpoint_progress import EpochStart
from ravnest.store.checkpoint_sets import CheckpointSet, find_checkpoint_sets
from ravnest.store.file_set import Replacement
from ravnest.store.files import convert, has_format, inside, read_json, write_json
from ravnest.store.node_spec import NodeSpec, bundle_path, make_node_spec, plan_digest, write_node
from ravnest.transport.certificates import Authority
from ravnest.types import StateForm

logger = logging.getLogger(__name__)

NODE_DATA = "node_data"
NODE_CONFIGS = "node_configs.json"
PLAN_FILE = "plan.json"
_FORMAT = "ravnest-plan"
_VERSION = 1
_LIMIT = 64 << 20
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Formation:
    """A prepared model with its profile and plan."""

    prepared: PreparedModel
    profile: ModelProfile
    plan: Plan

    def explain(self) -> str:
        """Describe the plan in words."""
        return explain(self.plan, self.profile, unit_names(self.prepared))

    def split(self, cluster: ClusterPlan) -> Split:
        """Cut the model into the stages of one cluster."""
        starts = [stage.start for stage in cluster.stages[1:]]
        return self.prepared.cut([self.prepared.cuts[start - 1] for start in starts])


def clusterize(  # noqa: PLR0913 - the documented signature
    model: nn.Module | None = None,
    example_args: Sequence[Any] | torch.Tensor = (),
    example_kwargs: Mapping[str, Any] = _NOTHING,
    pass_data: bool = False,
    *,
    clusters: int | None = None,
    optimizer: type[torch.optim.Optimizer] | None = None,
    optimizer_params: Mapping[str, Any] = _NOTHING,
    update_frequency: int = 1,
    batch_dim: int = 0,
    folder: str | Path = NODE_DATA,
    resume_from: str | Path | None = None,
    varying: Varying | None = None,
    ema: float | None = None,
    optimizer_state: StateForm = "float32",
    precision: Precision | None = None,
) -> Plan:
    """Group the nodes of ``node_data/node_configs.json`` into clusters and split the model for them.

    Writes ``node_data/nodes/node_<i>.json`` and ``node_data/cluster_<c>/node_<i>/``, replaces the files
    of an earlier call, and prints the cluster and role of each node; schedule and warnings on stderr.

    ``pass_data`` measures costs with a real forward pass instead of computing them. ``clusters`` sets
    the number of clusters. Memory is planned for ``optimizer`` with ``optimizer_params`` (AdamW by
    default), ``update_frequency`` batches per update and, with ``ema``, a moving average of the
    weights; ``ema`` and ``optimizer_state`` are those of ``Node``. ``batch_dim`` is the dimension of the
    inputs that counts samples. ``resume_from`` is a folder with the ``node_<i>`` checkpoint folders of
    an earlier training: every node gets the newest complete checkpoint, cut for its stage, and
    ``Trainer(resume=True)`` continues from it. ``varying`` are dimensions besides the batch whose sizes
    vary between batches, such as ``{"input_ids": [1]}``, up to those of the example inputs, for which
    memory and links are planned. ``precision="bf16"`` is mixed precision: weights stay float32, matrix
    products and convolutions compute in bfloat16, and outputs are float32.

    Raises ``ValueError`` and writes nothing if the model cannot be split or the nodes cannot hold it.
    """
    target = Path(folder)
    earlier = None if resume_from is None else find_checkpoint_sets(Path(resume_from))
    formation = form_clusters(
        model,
        example_args,
        example_kwargs,
        nodes=read_node_configs(target / NODE_CONFIGS),
        pass_data=pass_data,
        clusters=clusters,
        optimizer=optimizer,
        optimizer_params=optimizer_params,
        update_frequency=update_frequency,
        batch_dim=batch_dim,
        varying=varying,
        ema=ema,
        optimizer_state=optimizer_state,
        precision=precision,
    )
    splits = _checked_splits(formation)
    plan = formation.plan
    seeds = None if earlier is None else _Seeds.of(earlier, len(plan.clusters))
    _write(target, plan, splits, seeds)
    sys.stdout.write(clusterize_log(plan))
    sys.stderr.write(f"{clusterize_notes(plan)}\n")
    if seeds is not None:
        sys.stdout.write(f"{seeds}\n")
    return plan


def form_clusters(  # noqa: PLR0913 - the options of clusterize
    model: nn.Module | None,
    example_args: Sequence[Any] | torch.Tensor,
    example_kwargs: Mapping[str, Any],
    *,
    nodes: Sequence[NodeConfig],
    pass_data: bool = False,
    clusters: int | None = None,
    optimizer: type[torch.optim.Optimizer] | None = None,
    optimizer_params: Mapping[str, Any] = _NOTHING,
    update_frequency: int = 1,
    batch_dim: int = 0,
    varying: Varying | None = None,
    ema: float | None = None,
    optimizer_state: StateForm = "float32",
    precision: Precision | None = None,
) -> Formation:
    """Capture, profile and plan a model without writing anything; ``PlanError`` if no plan exists.

    If no plan exists with whole tensors, the largest are cut along their rows.
    """
    if model is None:
        raise SplitError("clusterize needs the model to split: clusterize(model=..., example_args=...)")
    prepared = prepare(
        model,
        example_args,
        example_kwargs,
        batch_dim=batch_dim,
        pass_data=pass_data,
        varying=varying,
        precision=precision,
    )
    factor = optimizer_state_factor(optimizer, optimizer_params)
    kept = kept_state(factor, model.parameters(), optimizer_state, ema=ema is not None)
    averaging = averaging_copies(ema=ema is not None)
    profile = replace(kept.applied(profile_model(prepared)), whole_reason=whole_reason(optimizer))
    seed = torch.initial_seed() % 2**32

    def planned(of: ModelProfile) -> Plan | Infeasible:
        return make_plan(
            of,
            nodes,
            clusters=clusters,
            seed=seed,
            update_frequency=update_frequency,
            averaging=averaging,
        )

    plan = planned(profile)
    if not isinstance(plan, Infeasible):
        return Formation(prepared, profile, plan)
    if not profile.whole_reason:
        for cut in row_cut_models(prepared, profile, [node.ram * 1e9 for node in nodes]):
            found = planned(cut.profile)
            if isinstance(found, Plan):
                return Formation(cut.prepared, cut.profile, found)
    raise PlanError(plan.reason)


def _checked_splits(formation: Formation) -> dict[int, Split]:
    """Split the model for each cluster and check that the stages compute what the model computes."""
    splits = {cluster.id: formation.split(cluster) for cluster in formation.plan.clusters}
    units = formation.profile.units
    memory = sum(u.activation_bytes for u in units) + max(u.workspace_bytes for u in units)
    verify(
        formation.prepared.capture,
        [split.stages for split in splits.values()],
        activation_bytes=memory,
        operation_bytes=formation.prepared.operation_bytes,
    )
    return splits


@dataclass(frozen=True)
class _Seeds:
    """Checkpoints of an earlier training that the clusters of a plan continue from."""

    sets: tuple[CheckpointSet, ...]
    """By cluster of the new plan."""
    restart_epoch: bool
    """Clusters have other shares of the data than before."""

    @classmethod
    def of(cls, found: Mapping[int, CheckpointSet], clusters: int) -> _Seeds:
        """Give each cluster its own checkpoints; if there are others than before, all the newest."""
        if list(found) == list(range(clusters)):
            return cls(tuple(found.values()), restart_epoch=False)
        newest = max(found.values(), key=lambda each: each.id)
        return cls((newest,) * clusters, restart_epoch=True)

    @property
    def name(self) -> str:
        """Name of the state, which the plan's digest covers: it is not the plan without it."""
        return "".join(f"{each.run} {each.id.update} {each.id.phase}\n" for each in self.sets)

    def __str__(self) -> str:
        text = f"Trainer(resume=True) continues from {', '.join(str(each.id) for each in self.sets)}"
        if not self.restart_epoch:
            return text
        return f"{text}; the epoch begins anew, because its clusters are not those of the new plan"

    def write(self, folder: Path, nodes: Sequence[NodeSpec], splits: Mapping[int, Split]) -> None:
        """Write a checkpoint for each node beside its stage."""
        for cluster, old in enumerate(self.sets):
            members = sorted((n for n in nodes if n.cluster == cluster), key=lambda n: n.stage)
            stages = [
                NewStage(n.plan, n.node, cluster, stage.spec, folder / n.bundle / SEED)
                for n, stage in zip(members, splits[cluster].stages, strict=True)
            ]
            convert_checkpoints(old, stages, start=EpochStart() if self.restart_epoch else None)


def _write(target: Path, plan: Plan, splits: Mapping[int, Split], seeds: _Seeds | None) -> None:
    replacement = Replacement(target)
    try:
        nodes = []
        for stage in plan.stages:
            bundle = bundle_path(stage)
            digest = save_stage(replacement.staging / bundle, splits[stage.cluster].stages[stage.index])
            nodes.append(make_node_spec(plan, stage, bundle, digest.sha256))
        digest_of_plan = plan_digest(nodes, "" if seeds is None else seeds.name)
        nodes = [replace(node, plan=digest_of_plan) for node in nodes]
        for node in nodes:
            write_node(replacement.staging, node)
        if seeds is not None:
            seeds.write(replacement.staging, nodes, splits)
        _write_certificates(replacement.staging, plan, digest_of_plan)
        files = [p.relative_to(replacement.staging) for p in replacement.staging.rglob("*")]
        listing = sorted(f.as_posix() for f in files if (replacement.staging / f).is_file())
        write_json(
            replacement.staging / PLAN_FILE,
            {"format": _FORMAT, "version": _VERSION, "plan": digest_of_plan, "files": listing},
        )
        replacement.commit(_earlier_files(target))
    except BaseException:
        replacement.discard()
        raise


class _PlanFile(msgspec.Struct, frozen=True):
    """Contents of ``plan.json``: the files that a call of ``clusterize`` wrote."""

    files: tuple[str, ...]


def _earlier_files(target: Path) -> list[str]:
    """Return the files that the last call wrote; other files in the folder belong to the user."""
    path = target / PLAN_FILE
    if not path.exists():
        return []
    data = read_json(path, _LIMIT)
    if not has_format(data, _FORMAT, _VERSION):
        raise StageFormatError(f"{path} is not a file of Ravnest, and would be replaced: move it away")
    return [inside(name) for name in convert(data, _PlanFile, path).files]


def _write_certificates(staging: Path, plan: Plan, digest: str) -> None:
    authority = Authority(f"Ravnest plan {digest[:12]}", datetime.datetime.now(datetime.UTC))
    folder = staging / "certificates"
    folder.mkdir()
    (folder / "authority.pem").write_bytes(authority.certificate)
    for stage in plan.stages:
        name = f"node_{stage.node.id}"
        identity = authority.issue(name, [stage.node.address.host])
        (folder / f"{name}.pem").write_bytes(identity.certificate)
        key = folder / f"{name}.key"
        key.touch(mode=0o600)
        key.write_bytes(identity.key)
