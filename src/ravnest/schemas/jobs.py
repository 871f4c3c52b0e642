"""Jobs: what a requester asks for, and what becomes of it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from ravnest.schemas.base import Artifact, Digest, Name, Reason, Schema

Count = Annotated[int, Field(ge=1, le=2**31)]
Setting = None | bool | int | float | str | list[float] | list[int] | list[str]
"""What a parameter of an optimizer, a scheduler or a loss may be."""


class NamedComponent(Schema):
    """An optimizer, scheduler or loss of torch by its name, with its parameters."""

    name: Name
    params: dict[str, Setting] = Field(default_factory=dict)


class GraphLoss(Schema):
    """A loss of the requester's own: a graph of allow-listed operators, as stages are."""

    stage: Artifact
    weights: Artifact


class DataFile(Schema):
    """Consecutive samples: a safetensors file with one tensor a field, samples first."""

    artifact: Artifact
    rows: Count


class DatasetFiles(Schema):
    """Samples in the order in which clusters share them: each gets a run of them."""

    samples: Count
    inputs: tuple[DataFile, ...]
    """Fields are the inputs of the model's forward by name."""
    labels: tuple[DataFile, ...]
    """One field, ``labels``; cut at the same rows as the inputs."""


class ModelFiles(Schema):
    """The model as data."""

    units: Artifact
    """Its profile, and its graph in the smallest pieces that it can be cut into."""
    weights: Artifact
    """A safetensors file of all its parameters, buffers and constants."""


class TrainingSpec(Schema):
    """How to train; parameters of ``Node`` and ``Trainer`` by the same names."""

    epochs: Count = 1
    batch_size: Count = 64
    optimizer: NamedComponent
    scheduler: NamedComponent | None = None
    lr_step_on_epoch_change: bool = True
    loss: NamedComponent | GraphLoss
    update_frequency: Count = 1
    schedule: Literal["async", "sync"] = "async"
    compression: Literal["fp16", "bf16", "int8"] | None = None
    reduce_factor: Count | None = None
    average_optim: bool = False
    val_freq: Count = 1
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = None
    look_ahead: bool = False
    recompute: bool = False
    shuffle: bool = True
    drop_last: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42


class JobSpec(Schema):
    """A training as it is submitted; the artifacts are uploaded before."""

    name: Name
    model: ModelFiles
    train: DatasetFiles
    validation: DatasetFiles | None = None
    training: TrainingSpec
    clusters: Count | None = None
    min_providers: Count = 1
    max_providers: Count | None = None
    on_insufficient: Literal["wait", "fail"] = "wait"
    """What to do while the providers that are there cannot hold the model."""


class JobState(StrEnum):
    """Where a job is in its life."""

    SUBMITTED = "submitted"
    PLANNED = "planned"
    SHIPPING = "shipping"
    TRAINING = "training"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing more can happen."""
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


class AssignmentView(Schema):
    """A provider's part in a job."""

    provider: str
    provider_name: str
    node: int
    cluster: int
    role: str
    phase: str


class JobProgress(Schema):
    """How far a training is, by the Root of its first cluster."""

    updates: int = 0
    epochs: int
    loss: float | None = None
    """Of the last update."""
    diverged: bool = False
    """The last loss was infinite, or no number."""
    figure: float | None = None
    """The last validation: accuracy, or loss where that makes no sense."""


class JobView(Schema):
    """A job, as its requester and the page see it."""

    id: str
    name: str
    owner: str
    state: JobState
    reason: Reason
    """Why it is in this state, or what it waits for."""
    created: float
    changed: float
    """Seconds since 1970, like all times here."""
    progress: JobProgress
    places: tuple[AssignmentView, ...] = ()
    plan: str = ""
    """The plan in words."""


class LossHistory(Schema):
    """Losses of a job from one update on."""

    first: int
    losses: tuple[float | None, ...]
    """None: it was infinite, or no number."""
    figures: tuple[float | None, ...]
    """All validations so far."""


class ResultFile(Schema):
    """A file of the trained model, by its name below ``trained/cluster_<c>/``."""

    name: Annotated[str, Field(pattern=r"^node_[0-9]{1,9}\.(json|safetensors)$")]
    artifact: Artifact


class JobResult(Schema):
    """The trained stages of one cluster; ``model_fusion`` makes a state_dict of them."""

    job: str
    cluster: int
    files: tuple[ResultFile, ...]


class EventView(Schema):
    """A transition, or a refusal, with its reason."""

    sequence: int
    time: float
    kind: Literal["provider", "job", "server", "refusal"]
    subject: str
    before: str
    after: str
    reason: Reason


class JobCreated(Schema):
    """The answer to a submission."""

    id: str


class MissingArtifacts(Schema):
    """Artifacts that a submission names and the server does not have."""

    digests: tuple[Digest, ...]
