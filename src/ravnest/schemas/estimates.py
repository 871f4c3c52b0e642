"""Estimate of a job before it is submitted: whether it fits, and what it takes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ravnest.schemas.base import Name, Reason, Schema
from ravnest.schemas.jobs import JobSpec

PROFILES_LIMIT = 3 << 20
"""Characters of the profiles of a model, as JSON."""


class EstimateRequest(Schema):
    """A job whose files are not uploaded: only their sizes count, and the profile of the model."""

    spec: JobSpec
    profiles: Annotated[str, Field(max_length=PROFILES_LIMIT)]
    """JSON list of the profiles of the model: with whole tensors, then with ever smaller blocks of rows.
    The planner process reads it."""


class StageEstimate(Schema):
    """One stage on its provider; bytes are those of the whole training."""

    node: int
    provider: Name
    role: Literal["Root", "Stem", "Leaf"]
    memory_bytes: float
    """Predicted memory of the worker."""
    ram_bytes: float
    """Memory that the provider offers."""
    compute_seconds: float
    """Predicted time of one batch."""
    download_bytes: float
    """Weights and data that the provider fetches before training."""
    sent_bytes: float
    """Activations, gradients and averages that it sends to other providers."""


class ClusterEstimate(Schema):
    """One pipeline that holds the whole model."""

    cluster: int
    stages: tuple[StageEstimate, ...]
    """In pipeline order, Root first."""
    samples: int
    """Training samples of each epoch that it gets."""
    updates: int
    """Updates of the whole training."""
    samples_per_second: float
    microbatches: int
    """Micro-batches per batch."""
    bottleneck: str
    """Description of the slowest stage or link."""


class ProviderRam(Schema):
    """Memory that a connected provider offers."""

    name: Name
    ram_bytes: float
    idle: bool


class JobEstimate(Schema):
    """Estimate of a job for the providers that are connected now; nothing is reserved."""

    fits: bool
    """True if a plan exists, with the idle providers or with all that are connected."""
    starts_now: bool
    """True if the idle providers are enough. Jobs that wait may get them first."""
    reason: Reason
    """Why the job does not fit, or does not start now, and what helps; empty if it starts now."""
    needed_bytes: float | None = None
    """Memory that is needed where it does not fit: of the whole model, a stage or a unit."""
    offered_bytes: float | None = None
    """Memory that the providers offer for it."""
    providers: tuple[ProviderRam, ...] = ()
    """All connected providers, strongest first."""
    clusters: tuple[ClusterEstimate, ...] = ()
    schedule: str = ""
    """Schedule for ``schedule="auto"``, or that of the job."""
    epochs: int = 0
    updates: int = 0
    """Updates of the cluster that makes the most."""
    samples_per_second: float = 0.0
    """Rate of all clusters together."""
    start_seconds: float = 0.0
    """Predicted time in which the providers fetch weights and data."""
    training_seconds: float = 0.0
    """Predicted time of training and validation."""
    upload_bytes: float = 0.0
    """Weights and data that the requester uploads, if the server has none of them yet."""
    result_bytes: float = 0.0
    """Trained weights that the requester downloads."""
    plan: str = ""
    """The plan in words."""
