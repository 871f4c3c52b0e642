"""Estimate of a job for some providers: memory, time and bytes of its plan. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ravnest.jobs.model import read_profiles
from ravnest.plan.infeasible import Infeasible
from ravnest.plan.plan import ClusterPlan, Plan, StagePlan
from ravnest.plan.profile import ModelProfile
from ravnest.schemas.base import clipped
from ravnest.schemas.estimates import ClusterEstimate, JobEstimate, ProviderRam, StageEstimate
from ravnest.schemas.jobs import DataFile, DatasetFiles, JobSpec
from ravnest.server.scheduling.data_shares import rows_of
from ravnest.server.scheduling.planner_messages import EstimateQuestion
from ravnest.server.scheduling.planning import PlannedJob, plan_reachable, plan_variants

_SENT = {None: 1.0, "fp16": 0.5, "bf16": 0.5, "int8": 1 / 3.76}
"""Bytes on the wire per byte of a tensor, by compression."""
_FORWARD = 1 / 3
"""Part of a batch's time that a validation takes, which has no backward pass."""


def estimate_job(question: EstimateQuestion) -> JobEstimate:
    """Plan the job of a question for its providers and return what the plan takes.

    Raise ``StageFormatError`` if the profiles are not those of a model, and ``JobError`` if the sizes of
    the data contradict each other.
    """
    profiles, spec = read_profiles(question.profiles), question.spec
    planned = plan_reachable(
        lambda some: plan_variants(spec, profiles, some, question.links),
        question.providers,
        question.unreachable,
        spec.min_providers,
    )
    providers = tuple(
        ProviderRam(name=offer.name, ram_bytes=offer.ram * 1e9, idle=True)
        for _, offer in question.providers
    )
    if isinstance(planned, Infeasible):
        return JobEstimate(
            fits=False,
            starts_now=False,
            reason=clipped(planned.reason),
            needed_bytes=planned.needed_bytes,
            offered_bytes=planned.offered_bytes,
            providers=providers,
        )
    return _estimate(planned, profiles[planned.variant]).model_copy(update={"providers": providers})


def _estimate(planned: PlannedJob, profile: ModelProfile) -> JobEstimate:
    spec, plan = planned.spec, planned.plan
    clusters = tuple(_cluster(planned, profile, each) for each in plan.clusters)
    weights = float(sum(tensor.bytes for tensor in profile.state))
    rates = [stage.node.bandwidth for stage in plan.stages]
    stages = sorted((s for each in clusters for s in each.stages), key=lambda stage: stage.node)
    fetches = [s.download_bytes * 8e-6 / rate for s, rate in zip(stages, rates, strict=True)]
    return JobEstimate(
        fits=True,
        starts_now=True,
        reason="",
        clusters=clusters,
        schedule=plan.schedule if spec.training.schedule == "auto" else spec.training.schedule,
        epochs=spec.training.epochs,
        updates=max(each.updates for each in clusters),
        samples_per_second=plan.samples_per_second,
        start_seconds=max(fetches),
        training_seconds=_seconds(spec, plan),
        upload_bytes=weights
        + (_bytes(spec.train) if spec.training.epochs else 0)
        + _bytes(spec.validation),
        result_bytes=weights if spec.training.epochs else 0.0,
        plan=planned.explanation,
    )


def _seconds(spec: JobSpec, plan: Plan) -> float:
    """Return the predicted time of training and validation; clusters finish an epoch together."""
    seconds = spec.training.epochs * spec.train.samples / plan.samples_per_second
    if spec.validation is None:
        return seconds
    slowest = min(cluster.samples_per_second for cluster in plan.clusters)
    times = spec.training.epochs // spec.training.val_freq or int(spec.training.epochs == 0)
    return seconds + times * spec.validation.samples * _FORWARD / slowest


def _cluster(planned: PlannedJob, profile: ModelProfile, cluster: ClusterPlan) -> ClusterEstimate:
    training = planned.spec.training
    samples = len(rows_of(planned.spec, planned.plan, cluster.id))
    return ClusterEstimate(
        cluster=cluster.id,
        stages=tuple(_stage(planned, profile, cluster, each, samples) for each in cluster.stages),
        samples=samples,
        updates=training.epochs * training.updates_per_epoch(samples),
        samples_per_second=cluster.samples_per_second,
        microbatches=cluster.microbatches,
        bottleneck=cluster.bottleneck,
    )


def _stage(
    planned: PlannedJob, profile: ModelProfile, cluster: ClusterPlan, stage: StagePlan, samples: int
) -> StageEstimate:
    offer = planned.offers[stage.node.id]
    held = [t for t in profile.state if any(stage.start <= unit < stage.stop for unit in t.units)]
    sent = _link_bytes(planned.spec, profile, cluster, stage, samples)
    sent += _averaging_bytes(planned.spec, planned.plan, profile, stage, samples)
    return StageEstimate(
        node=stage.node.id,
        provider=offer.name,
        role=stage.role.value,
        memory_bytes=stage.memory.total,
        ram_bytes=offer.ram * 1e9,
        compute_seconds=stage.compute_seconds,
        download_bytes=sum(t.bytes for t in held) + _data_bytes(planned.spec, cluster, stage, samples),
        sent_bytes=sent * _SENT.get(planned.spec.training.compression, 1.0),
    )


def _link_bytes(
    spec: JobSpec, profile: ModelProfile, cluster: ClusterPlan, stage: StagePlan, samples: int
) -> float:
    """Return the activations to the next stage and the gradients to the previous one."""
    per_batch = 0
    if stage.index + 1 < len(cluster.stages):
        per_batch += profile.units[stage.stop - 1].crossing_bytes
    if stage.index and spec.training.epochs:
        per_batch += profile.units[stage.start - 1].gradient_bytes
    return per_batch * (spec.training.epochs or 1) * samples / profile.batch_size


def _averaging_bytes(
    spec: JobSpec, plan: Plan, profile: ModelProfile, stage: StagePlan, samples: int
) -> float:
    """Return the bytes of averaging; a round sends each tensor of a ring of n almost twice."""
    sizes = {tensor.name: tensor.bytes for tensor in profile.state}
    updates = spec.training.epochs * spec.training.updates_per_epoch(samples)
    every = spec.training.reduce_factor
    rounds = spec.training.epochs if every is None else max(updates // every, 1)
    factor = 1.0
    if spec.training.average_optim:
        factor += profile.optimizer_bytes_per_parameter_byte  # which counts a moving average too
    elif spec.training.ema is not None:
        factor += 1
    return sum(
        rounds * factor * 2 * (1 - 1 / len(ring.members)) * sum(sizes[name] for name in ring.names)
        for ring in plan.rings_of(stage.node.id)
    )


def _data_bytes(spec: JobSpec, cluster: ClusterPlan, stage: StagePlan, samples: int) -> float:
    """Return the bytes of the data that a stage fetches: inputs at the Root, labels at the Leaf."""
    is_first, is_last = stage.index == 0, stage.index == len(cluster.stages) - 1
    shared = samples / spec.train.samples if spec.training.epochs else 0.0
    found = 0.0
    for data, share in ((spec.train, shared), (spec.validation, 1.0)):
        if data is not None:
            found += share * (is_first * _size(data.inputs) + is_last * _size(data.labels))
    return found


def _bytes(data: DatasetFiles | None) -> int:
    return 0 if data is None else _size(data.inputs) + _size(data.labels)


def _size(files: Sequence[DataFile]) -> int:
    return sum(file.artifact.size for file in files)
