"""Jobs: specification, state, progress and result."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from ravnest.schemas.base import Artifact, Digest, Name, Reason, Schema
from ravnest.telemetry import (
    LossRecord,
    PhaseRecord,
    QueueRecord,
    RoundRecord,
    ScheduleRecord,
    TimingRecord,
    ValidationRecord,
)

Count = Annotated[int, Field(ge=1, le=2**31)]
Setting = None | bool | int | float | str | list[float] | list[int] | list[str]
"""Allowed types for a parameter of an optimizer, a scheduler or a loss."""


class NamedComponent(Schema):
    """An optimizer, scheduler or loss of torch by name, with its parameters."""

    name: Name
    params: dict[str, Setting] = Field(default_factory=dict)


class GraphLoss(Schema):
    """A custom loss as a graph of allow-listed operators, in the format of a stage."""

    stage: Artifact
    weights: Artifact


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

    epochs: Count = 1
    batch_size: Count = 64
    optimizer: NamedComponent
    scheduler: NamedComponent | None = None
    lr_step_on_epoch_change: bool = True
    loss: NamedComponent | GraphLoss
    update_frequency: Count = 1
    schedule: Literal["auto", "async", "sync"] = "auto"
    micro_batches: Count | Literal["auto"] = "auto"
    compression: Literal["fp16", "bf16", "int8"] | None = None
    reduce_factor: Count | None = None
    average_optim: bool = False
    val_freq: Count = 1
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = None
    look_ahead: bool = True
    recompute: bool | Literal["auto"] = "auto"
    shuffle: bool = True
    drop_last: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42

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
    validation: DatasetFiles | None = None
    training: TrainingSpec
    clusters: Count | None = None
    min_providers: Count = 1
    max_providers: Count | None = None
    on_insufficient: WaitLimit = "wait"
    """Reaction if all connected providers together cannot hold the model, or if a node has lost its
    provider and no other one can take its place."""
    resume_from: Annotated[str, Field(pattern=r"^job-[0-9a-f]{1,32}$")] | None = None
    """Ended job of the same owner, whose newest checkpoint training starts from."""


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


class AssignmentView(Schema):
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


class JobProgress(Schema):
    """Progress of a job, as the Root of its leading cluster reports it."""

    updates: int = 0
    """Number of updates so far."""
    epochs: int
    """Number of epochs that the job asks for."""
    loss: float | None = None
    """Loss of the last update."""
    diverged: bool = False
    """True if the last loss is infinite or not a number."""
    validation: float | None = None
    """Result of the last validation: the accuracy, or the loss if the model has no accuracy."""
    schedule: ScheduleRecord | None = None
    """Schedule and micro-batches with the reason; ``None`` before training begins."""
    staleness: int = 0
    """Updates by which the gradients of the last update were late at the Root."""


class ClusterProgress(Schema):
    """Newest records of one cluster, as its Root reported them."""

    cluster: int
    loss: LossRecord | None = None
    validation: ValidationRecord | None = None
    round: RoundRecord | None = None
    """Last averaging round that this cluster coordinated."""
    timings: tuple[TimingRecord, ...] = ()
    """Newest timing of each stage, by stage."""


class NodeWarning(Schema):
    """A warning that a worker process logged."""

    time: float
    """Time at which the server received it."""
    node: int
    provider: str
    message: Reason


class CheckpointView(Schema):
    """Newest checkpoint that all stages of a cluster have."""

    cluster: int
    update: int
    """Updates that it contains."""
    time: float
    """Time at which the server learned that it is complete."""


class JobView(Schema):
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


class LossHistory(Schema):
    """Losses and validation results of a job, from its leading cluster."""

    first: int
    """The first update that was asked for."""
    updates: tuple[int, ...]
    """Numbers of the updates, ascending; of very long trainings, older ones are thinned out."""
    losses: tuple[float | None, ...]
    """Loss of each of ``updates``; ``None`` if it is infinite or not a number."""
    validations: tuple[ValidationRecord, ...]
    """All validations so far."""


class ResultFile(Schema):
    """A file of the trained model, by its name below ``trained/cluster_<c>/``."""

    name: Annotated[str, Field(pattern=r"^node_[0-9]{1,9}\.(json|safetensors)$")]
    artifact: Artifact


class JobResult(Schema):
    """The trained stages of one cluster; ``model_fusion`` merges them into a state_dict."""

    job: str
    cluster: int
    files: tuple[ResultFile, ...]


EventKind = Literal["provider", "job", "server", "refusal", "warning", "round", "recovery"]
"""``warning``: a worker's warning; ``round``: an averaging round that was not committed; ``recovery``: a
node lost its provider, got another one, or continues to train."""


class EventView(Schema):
    """A change of state, a refusal or a report of a worker, with its reason."""

    sequence: int
    time: float
    kind: EventKind
    subject: str
    before: str
    after: str
    reason: Reason


class JobCreated(Schema):
    """Reply to a submission."""

    id: str


class MissingArtifacts(Schema):
    """Digests of artifacts that the server does not have from this member."""

    digests: tuple[Digest, ...]


class UploadStatus(Schema):
    """Number of bytes that the server has of a member's upload."""

    received: int
