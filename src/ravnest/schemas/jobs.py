"""Jobs: specification, state, progress and result."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ravnest.schemas.base import Artifact, Digest, Name, Reason, Schema, TolerantSchema
from ravnest.telemetry import (
    LossRecord,
    PaceRecord,
    PhaseRecord,
    QueueRecord,
    RoundRecord,
    ScheduleRecord,
    TimingRecord,
    ValidationRecord,
)
from ravnest.types import ROBUST_CLUSTERS, RobustMean, StateForm

Count = Annotated[int, Field(ge=1, le=2**31)]
MOST_METRICS = 20
"""Largest number of metrics of a job."""
WholeNumber = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Setting = None | bool | WholeNumber | float | str | list[float] | list[WholeNumber] | list[str]
"""Allowed types for a parameter of an optimizer, a scheduler or a loss. Whole numbers have 64 bits, as
in messages between processes; larger ones are taken as floats."""


class NamedComponent(Schema):
    """An optimizer, scheduler or loss of torch by name, with its parameters."""

    name: Name
    params: dict[str, Setting] = Field(default_factory=dict)


class ParameterGroup(Schema):
    """Settings of the optimizer for the parameters whose names match."""

    match: Annotated[str, Field(min_length=1, max_length=1000)]
    """Patterns with ``*`` and ``?``, separated by ``|``. The first group that matches counts."""
    params: dict[str, Setting]


class GraphLoss(Schema):
    """A custom loss as a graph of allow-listed operators, in the format of a stage."""

    stage: Artifact
    weights: Artifact


class MetricSpec(Schema):
    """A metric of validations: one of the list by name, or the requester's own as a graph."""

    label: Name
    metric: NamedComponent | GraphLoss


class AugmentationSpec(Schema):
    """A function of the inputs of a training batch, as a graph."""

    graph: GraphLoss
    inputs: Annotated[tuple[Name, ...], Field(min_length=1, max_length=1000)]
    """Names of the inputs, in the order in which it takes and returns them."""


class BestRule(Schema):
    """Metric by which the best model is kept."""

    metric: Name
    mode: Literal["min", "max"]
    """``min``: small values are better; ``max``: large ones."""


class StoppingRule(BestRule):
    """Metric by which training stops early."""

    patience: Count = 3
    """Validations in a row without a better value."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0


class DataFile(Schema):
    """Consecutive samples: a safetensors file with one tensor per field, samples in dimension 0."""

    artifact: Artifact
    rows: Count


class DatasetFiles(Schema):
    """Samples in a fixed order; each cluster gets a contiguous run of the training samples."""

    samples: Count
    inputs: tuple[DataFile, ...]
    """Files whose fields are the inputs of the model's ``forward``, by name."""
    labels: tuple[DataFile, ...]
    """Files with one field, ``labels``."""


class ModelFiles(Schema):
    """The model as data."""

    units: Artifact
    """The model's profile, and its graph cut at every legal position."""
    weights: Artifact
    """A safetensors file of all parameters, buffers and constants."""


class TrainingSpec(Schema):
    """Training settings; they have the names of the parameters of ``Node`` and ``Trainer``."""

    epochs: Annotated[int, Field(ge=0, le=2**31)] = 1
    batch_size: Count = 64
    optimizer: NamedComponent
    optimizer_state: StateForm = "float32"
    parameter_groups: Annotated[tuple[ParameterGroup, ...], Field(max_length=100)] = ()
    scheduler: NamedComponent | None = None
    lr_step_on_epoch_change: bool = True
    loss: NamedComponent | GraphLoss
    update_frequency: Count = 1
    schedule: Literal["auto", "async", "sync"] = "auto"
    micro_batches: Count | Literal["auto"] = "auto"
    compression: Literal["fp16", "bf16", "int8"] | None = None
    reduce_factor: Count | None = None
    average_optim: bool = False
    robust_mean: RobustMean | None = None
    val_freq: Count = 1
    augmentation: AugmentationSpec | None = None
    early_stopping: StoppingRule | None = None
    keep_best: BestRule | None = None
    metrics: Annotated[tuple[MetricSpec, ...], Field(max_length=MOST_METRICS)] = ()
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = None
    clip_grad_value: Annotated[float, Field(gt=0)] | None = None
    plateau_metric: Annotated[str, Field(max_length=100)] = ""
    ema: Annotated[float, Field(ge=0, lt=1)] | None = None
    stop_on_nan: Count | None = 1
    look_ahead: bool = True
    recompute: bool | Literal["auto"] = "auto"
    shuffle: bool = True
    drop_last: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42

    @property
    def graph_metrics(self) -> dict[int, GraphLoss]:
        """The requester's own metrics, by their numbers among all metrics."""
        found = enumerate(each.metric for each in self.metrics)
        return {number: metric for number, metric in found if isinstance(metric, GraphLoss)}

    def updates_per_epoch(self, samples: int) -> int:
        """Return the number of updates that a cluster makes in an epoch of this many samples."""
        size = self.batch_size
        batches = samples // size if self.drop_last else -(-samples // size)
        return -(-batches // self.update_frequency)


WaitLimit = Literal["wait", "fail"] | Annotated[float, Field(gt=0, le=1e9)]
"""``wait`` without a limit, ``fail`` at once, or wait for so many seconds."""


class JobSpec(Schema):
    """A job as it is submitted; its artifacts are uploaded first."""

    name: Name
    model: ModelFiles
    train: DatasetFiles
    """Training samples; of a job that only evaluates, the same as ``validation``."""
    validation: DatasetFiles | None = None
    training: TrainingSpec
    adapter: Artifact | None = None
    """Description of the adapter that the model trains, for the requester who fetches it."""
    clusters: Count | None = None
    min_providers: Count = 1
    max_providers: Count | None = None
    on_insufficient: WaitLimit = "wait"
    """Reaction if all connected providers together cannot hold the model, or if a node has lost its
    provider and no other one can take its place."""
    resume_from: Annotated[str, Field(pattern=r"^job-[0-9a-f]{1,32}$")] | None = None
    """Ended job of the same owner, whose newest checkpoint training starts from."""

    @model_validator(mode="after")
    def _can_be_evaluated(self) -> Self:
        if self.training.epochs == 0 and (self.validation is None or self.clusters != 1):
            raise ValueError("epochs=0 only evaluates: it needs validation data and clusters=1")
        return self

    @model_validator(mode="after")
    def _has_enough_clusters(self) -> Self:
        if self.training.robust_mean is not None and (self.clusters or 0) < ROBUST_CLUSTERS:
            raise ValueError(
                f"robust_mean needs clusters={ROBUST_CLUSTERS} or more: of two, nobody can tell which "
                "one is wrong"
            )
        return self


class JobState(StrEnum):
    """State of a job; ``server/lifecycle.py`` has the transitions."""

    SUBMITTED = "submitted"
    PLANNED = "planned"
    SHIPPING = "shipping"
    TRAINING = "training"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Return whether the job has ended."""
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


class MemoryView(TolerantSchema):
    """Memory of a stage in bytes; ``None``: not known."""

    planned: int | None = None
    """Bytes that the plan needs."""
    offered: int | None = None
    """Bytes that the provider offers."""
    used: int | None = None
    """Bytes that the worker takes, as its provider measured them last."""
    peak: int | None = None
    """Largest of these figures."""


class AssignmentView(TolerantSchema):
    """One provider's assignment, as its requester sees it."""

    provider: str
    provider_name: str
    node: int
    cluster: int
    role: str
    phase: str
    """Phase of the assignment, such as ``fetching`` or ``training``; ``lost``: nobody has the node."""
    generation: int = 0
    """Number of providers that had this node before."""
    worker_phase: PhaseRecord | None = None
    """Newest phase that the worker process reported; not in lists of jobs."""
    queue: QueueRecord | None = None
    """Newest queue lengths of the node; not in lists of jobs."""
    memory: MemoryView | None = None
    """Memory of the stage; not in lists of jobs."""
    stage: int | None = None
    """Position in the pipeline of the cluster, from 0; not in lists of jobs."""


class JobProgress(TolerantSchema):
    """Progress of a job, as the Root of its leading cluster reports it."""

    updates: int = 0
    """Number of updates so far."""
    total_updates: int | None = None
    """Number of updates of the whole training, as far as it can be predicted."""
    epoch: int = 0
    """Number of the epoch in progress, from 1; 0 before training begins."""
    epochs: int
    """Number of epochs that the job asks for."""
    loss: float | None = None
    """Loss of the last update."""
    diverged: bool = False
    """True if the last loss is infinite or not a number."""
    validation: float | None = None
    """Result of the last validation: the accuracy, or the loss if the model has no accuracy."""
    metric: str = ""
    """Name of this result: that of the first of the job's metrics, or ``accuracy`` or ``loss``; empty
    before the first validation."""
    metrics: dict[str, float | None] = Field(default_factory=dict)
    """Results of the last validation by the names of the job's metrics; empty if it has none."""
    samples_per_second: float | None = None
    """Training rate of all clusters together, each since it began."""
    seconds_left: float | None = None
    """Predicted time until the end of training; ``None`` if it is not known, or the job has ended."""
    schedule: ScheduleRecord | None = None
    """Schedule and micro-batches with the reason; ``None`` before training begins."""
    staleness: int = 0
    """Updates by which the gradients of the last update were late at the Root."""


class ClusterProgress(TolerantSchema):
    """Newest records of one cluster, as its Root reported them."""

    cluster: int
    loss: LossRecord | None = None
    validation: ValidationRecord | None = None
    round: RoundRecord | None = None
    """Last averaging round that this cluster coordinated."""
    timings: tuple[TimingRecord, ...] = ()
    """Newest timing of each stage, by stage."""
    pace: PaceRecord | None = None
    """Newest pace."""


class NodeWarning(TolerantSchema):
    """A warning that a worker process logged."""

    time: float
    """Time at which the server received it."""
    node: int
    provider: str
    message: Reason


class CheckpointView(TolerantSchema):
    """Newest checkpoint that all stages of a cluster have."""

    cluster: int
    update: int
    """Updates that it contains."""
    time: float
    """Time at which the server learned that it is complete."""


class JobView(TolerantSchema):
    """A job, as its requester and the web page see it."""

    id: str
    name: str
    owner: str
    state: JobState
    reason: Reason
    """Why the job is in this state, or what it waits for."""
    created: float
    """Seconds since 1970, as all times of the API."""
    changed: float
    progress: JobProgress
    assignments: tuple[AssignmentView, ...] = ()
    clusters: tuple[ClusterProgress, ...] = ()
    """Newest records of each cluster; empty in lists of jobs."""
    warnings: tuple[NodeWarning, ...] = ()
    """Newest warnings of the nodes, newest first; empty in lists of jobs."""
    plan: str = ""
    """The plan in words."""
    recoveries: int = 0
    """Number of times that training continued after the loss of a node."""
    checkpoint: CheckpointView | None = None
    """Newest checkpoint of the leading cluster; not in lists of jobs."""
    saved_update: int | None = None
    """Updates of the newest complete checkpoint at the server, from which the job can be resumed; not in
    lists of jobs."""
    degraded: str = ""
    """Why the model of a job that is done lacks the training of some clusters; empty if all finished."""
    best: BestView | None = None
    """Best model at the server, by the metric of ``keep_best``; not in lists of jobs."""


class LossHistory(TolerantSchema):
    """Losses and validation results of a job, from its leading cluster."""

    first: int
    """The first update that was asked for."""
    updates: tuple[int, ...]
    """Numbers of the updates, ascending; of very long trainings, older ones are thinned out."""
    losses: tuple[float | None, ...]
    """Loss of each of ``updates``; ``None`` if it is infinite or not a number."""
    validations: tuple[ValidationRecord, ...]
    """All validations so far, or those since the time that was asked for."""
    learning_rates: tuple[float | None, ...] = ()
    """Learning rate of each of ``updates``; ``None`` or nothing if it is not known."""
    epochs: tuple[int, ...] = ()
    """Epoch of each of ``updates``, from 0; nothing of an older server."""
    staleness: tuple[int, ...] = ()
    """Staleness of each of ``updates``; nothing of an older server."""
    times: tuple[float | None, ...] = ()
    """Time at which the server learned of each of ``updates``; ``None`` or nothing: not known."""
    validation_times: tuple[float, ...] = ()
    """Time at which the server learned of each of ``validations``; nothing of an older server."""
    rounds: tuple[RoundRecord, ...] = ()
    """Averaging rounds of all clusters, oldest first, as ``validations``."""
    round_times: tuple[float, ...] = ()
    """Time at which the server learned of each of ``rounds``."""


class ResultFile(Schema):
    """A file of the trained model, by its name below ``trained/cluster_<c>/``."""

    name: Annotated[str, Field(pattern=r"^node_[0-9]{1,9}\.(json|safetensors)$")]
    artifact: Artifact


class BestFiles(Schema):
    """Uploaded stages of the best model of a cluster so far."""

    epoch: Annotated[int, Field(ge=0, le=2**31)]
    """Epochs of training that it contains."""
    metric: Name
    value: Annotated[float, Field(allow_inf_nan=False)]
    files: Annotated[tuple[ResultFile, ...], Field(max_length=20_000)]


class BestView(Schema):
    """Best model of a job so far."""

    cluster: int
    epoch: int
    """Epochs of training that it contains."""
    metric: str
    value: float


class JobResult(Schema):
    """The trained stages of one cluster; ``model_fusion`` merges them into a state_dict."""

    job: str
    cluster: int
    files: tuple[ResultFile, ...]
    weights: Artifact | None = None
    """All weights before training; the stages may have been saved without those that are frozen."""
    adapter: Artifact | None = None
    """Description of the adapter that the job trains; see ``JobSpec.adapter``."""


EventKind = Literal["provider", "job", "server", "refusal", "warning", "round", "recovery"]
"""``warning``: a worker's warning; ``round``: an averaging round that was not committed; ``recovery``: a
node lost its provider, got another one, or continues to train."""


class EventView(TolerantSchema):
    """A change of state, a refusal or a report of a worker, with its reason."""

    sequence: int
    time: float
    kind: EventKind
    subject: str
    before: str
    after: str
    reason: Reason


class JobCreated(TolerantSchema):
    """Reply to a submission."""

    id: str


class MissingArtifacts(Schema):
    """Digests of artifacts that the server does not have from this member."""

    digests: tuple[Digest, ...]


class UploadStatus(TolerantSchema):
    """Number of bytes that the server has of a member's upload."""

    received: int
