"""Providers: what they offer, what they are to do, and what they say about it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from ravnest.schemas.base import Artifact, Name, Reason, Schema
from ravnest.schemas.jobs import GraphLoss, ResultFile, TrainingSpec
from ravnest.store.node_spec import NodeSpec
from ravnest.telemetry import WorkerRecord

Positive = Annotated[float, Field(gt=0)]


class ProviderState(StrEnum):
    """Where a provider is in its life with the server."""

    OFFERED = "offered"
    RESERVED = "reserved"
    TRAINING = "training"
    LOST = "lost"


class ProviderOffer(Schema):
    """A machine as it was measured, within the limits of its owner."""

    name: Name
    address: Annotated[str, Field(max_length=300)]
    """``host:port`` where other providers reach its node."""
    ram: Positive
    """GB (1e9 bytes) for training."""
    vram: Annotated[float, Field(ge=0)] = 0.0
    cores: Annotated[int, Field(ge=1)]
    compute: Positive
    """GFLOP/s of a matrix product."""
    bandwidth: Positive
    """Mbit/s to and from the server."""
    round_trip: Annotated[float, Field(ge=0)]
    """Seconds to the server and back."""
    version: str
    torch: str


class ProviderView(Schema):
    """A provider, as the page and ``ravnest nodes`` see it."""

    id: str
    offer: ProviderOffer
    state: ProviderState
    reason: Reason
    job: str | None
    seen: float


class RowRange(Schema):
    """Rows of a piece of data."""

    artifact: Artifact
    start: Annotated[int, Field(ge=0)]
    stop: Annotated[int, Field(ge=1)]


class DataShare(Schema):
    """What a node gets of the data: inputs at a Root, labels at a Leaf, both where one is both."""

    samples: int
    inputs: tuple[RowRange, ...] = ()
    labels: tuple[RowRange, ...] = ()


class Assignment(Schema):
    """A provider's part in a job: everything its worker needs, by digest."""

    id: str
    job: str
    node: int
    node_spec: NodeSpec
    """Contents of ``node_data/nodes/node_<i>.json``; its certificates are issued when it is fetched."""
    stage: Artifact
    weights: Artifact
    train: DataShare
    validation: DataShare | None = None
    training: TrainingSpec
    tls: bool
    """Nodes of this plan talk over TLS, with certificates that the server signs."""

    @property
    def loss(self) -> GraphLoss | None:
        """The requester's own loss, where there is one."""
        loss = self.training.loss
        return loss if isinstance(loss, GraphLoss) else None


Phase = Literal["fetching", "training", "uploading", "finished", "failed"]


Count = Annotated[int, Field(ge=0)]
Record = Annotated[WorkerRecord, Field(discriminator="kind")]
MOST_RECORDS = 4096
"""Records in one report."""


class TlsRejections(Schema):
    """Connections of a node that TLS did not let through, since its worker began."""

    foreign: Count = 0
    """With a certificate that the job's authority did not sign, or that is no longer good."""
    bare: Count = 0
    """Without a certificate."""
    plain: Count = 0
    """Without TLS."""


class AssignmentReport(Schema):
    """How a provider's part in a job goes."""

    assignment: str
    phase: Phase
    reason: Reason = ""
    """Why it failed."""
    result: tuple[ResultFile, ...] = ()
    """Uploaded files of a trained cluster; of a Root that is finished."""
    tls_rejections: TlsRejections = TlsRejections()
    first_record: Count = 0
    """Position of the first of ``records`` among all records of the assignment."""
    records: Annotated[tuple[Record, ...], Field(max_length=MOST_RECORDS)] = ()
    """Records of the worker; sent again until the server acknowledges them."""


class Heartbeat(Schema):
    """A provider lives; the answer may wait for news for some seconds."""

    report: AssignmentReport | None = None
    known: str | None = None
    """The assignment that the provider has; an answer with another one comes at once."""
    wait: Annotated[float, Field(ge=0, le=60)] = 10.0


class HeartbeatReply(Schema):
    """What a provider should be doing, whatever it does now."""

    assignment: str | None
    """None: nothing; one that is at work on something stops."""
    records_known: int = 0
    """Records of this assignment that the server has."""
    reason: Reason = ""


class CertificateRequest(Schema):
    """A certificate to be signed; the private key stays at the provider."""

    csr: Annotated[str, Field(max_length=10_000)]


class SignedCertificate(Schema):
    """PEM."""

    certificate: str
    authority: str
