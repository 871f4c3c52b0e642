"""Providers: offers, assignments, heartbeats and reports."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ravnest.schemas.base import (
    LARGEST_NUMBER,
    Artifact,
    Name,
    Reason,
    Schema,
    TolerantSchema,
    clipped,
    plain,
    plain_lines,
)
from ravnest.schemas.checkpoints import (
    MOST_UPLOADED,
    CheckpointOrder,
    SeedCheckpoint,
    UploadedCheckpoint,
)
from ravnest.schemas.jobs import MOST_METRICS, BestFiles, GraphLoss, ResultFile, TrainingSpec
from ravnest.schemas.link_tests import LinkTestOrder
from ravnest.schemas.reachability import HostAndPort, ReachabilityKind, RelayTrip
from ravnest.schemas.spot_checks import MOST_CHECKS, CheckEvidence
from ravnest.store.node_spec import NodeSpec
from ravnest.telemetry import RoundRecord, SpansRecord, WarningRecord, WorkerRecord
from ravnest.tracing.spans import FIELDS, unflattened

Gigabytes = Annotated[float, Field(gt=0, le=100_000)]
Cores = Annotated[int, Field(ge=1, le=10_000)]
LARGEST_RATE = 1e7
"""Bound of what a machine may offer in GFLOP/s and in Mbit/s."""
Gflops = Annotated[float, Field(gt=0, le=LARGEST_RATE)]
Mbits = Annotated[float, Field(gt=0, le=LARGEST_RATE)]
VersionText = Annotated[str, Field(max_length=100), AfterValidator(plain)]
AssignmentId = Annotated[str, Field(max_length=200)]
MOST_ADDRESSES = 12
"""Addresses in an offer."""
MOST_RELAYS = 64
"""Relays in an offer."""
MOST_RESULT_FILES = 20_000
"""Files of a trained cluster: two for each node."""
MOST_TRAINED = 100
"""Assignments in an offer whose results the provider keeps."""


class ProviderState(StrEnum):
    """State of a provider; ``server/lifecycle.py`` has the transitions."""

    OFFERED = "offered"
    RESERVED = "reserved"
    TRAINING = "training"
    LOST = "lost"


SandboxKind = Literal["bwrap", "landlock", "off"]
"""Sandbox of workers: bubblewrap with Landlock and seccomp inside, these two alone, or none."""


class ProviderOffer(TolerantSchema):
    """A machine as it was measured, within the limits of its owner."""

    name: Name
    address: HostAndPort
    """``host:port`` at which other providers reach its node, or may reach it."""
    addresses: Annotated[tuple[HostAndPort, ...], Field(max_length=MOST_ADDRESSES)] = ()
    """All such addresses, ``address`` first; empty if there is only that one."""
    relay_trips: Annotated[tuple[RelayTrip, ...], Field(max_length=MOST_RELAYS)] = ()
    """Relays that answer this provider."""
    ram: Gigabytes
    """GB (1e9 bytes) for training."""
    vram: Annotated[float, Field(ge=0, le=100_000)] = 0.0
    cores: Cores
    compute: Gflops
    """GFLOP/s of a matrix product."""
    bandwidth: Mbits
    """Mbit/s to and from the server."""
    round_trip: Annotated[float, Field(ge=0, le=3600)]
    """Seconds to the server and back."""
    version: VersionText
    torch: VersionText
    trained: Annotated[tuple[AssignmentId, ...], Field(max_length=MOST_TRAINED)] = ()
    """Assignments that it has trained to the end, and whose results this server does not have."""
    sandbox: SandboxKind | None = None
    """Sandbox of its workers, ``off`` for none; ``None`` if it does not say."""

    @property
    def all_addresses(self) -> tuple[str, ...]:
        """All addresses at which others may reach it, the first is ``address``."""
        return tuple(dict.fromkeys((self.address, *self.addresses)))

    def having_trained(self, assignments: Iterable[str]) -> ProviderOffer:
        """Return the offer of a provider that keeps the results of these assignments."""
        return self.model_copy(update={"trained": tuple(assignments)[:MOST_TRAINED]})

    def in_sandbox(self, sandbox: SandboxKind) -> ProviderOffer:
        """Return the offer of a provider whose workers run in this sandbox."""
        return self.model_copy(update={"sandbox": sandbox})


class ProviderView(TolerantSchema):
    """A provider, as the web page and ``ravnest nodes`` show it."""

    id: str
    offer: ProviderOffer
    state: ProviderState
    reason: Reason
    job: str | None
    seen: float
    """Time of its last request."""
    reachability: ReachabilityKind
    """How other providers reach it: at its own address, through a relay, or not."""
    reachability_reason: Reason


class RowRange(Schema):
    """Rows ``start`` to ``stop - 1`` of a data file."""

    artifact: Artifact
    start: Annotated[int, Field(ge=0)]
    stop: Annotated[int, Field(ge=1)]


class EpochRemainder(Schema):
    """Rest of an epoch that the clusters of an earlier plan have begun.

    A cluster trains it in this epoch instead of its share.
    """

    epoch: Annotated[int, Field(ge=0)]
    """Number of the epoch, from 0."""
    samples: Annotated[int, Field(ge=1)]
    rows: Artifact
    """Numbers of the samples in ``inputs`` and ``labels``, in their order: int64, little-endian."""
    first: Annotated[int, Field(ge=0)]
    """Number of the first sample of ``inputs`` and ``labels`` in the whole dataset."""
    inputs: tuple[RowRange, ...] = ()
    labels: tuple[RowRange, ...] = ()


class DataShare(Schema):
    """A node's part of the data: inputs for a Root, labels for a Leaf, both for a node that is both."""

    samples: int
    """Samples of the cluster."""
    total: int
    """Samples of the whole dataset."""
    first: Annotated[int, Field(ge=0)] | None = None
    """Number of the first sample in the whole dataset; None: not known."""
    inputs: tuple[RowRange, ...] = ()
    labels: tuple[RowRange, ...] = ()
    remainder: EpochRemainder | None = None
    """Samples of one epoch that is not a whole one, for a Root or Leaf; None: there is none."""

    @property
    def files(self) -> list[Artifact]:
        """All files that it needs."""
        rest = self.remainder
        own = [each.artifact for each in (*self.inputs, *self.labels)]
        if rest is None:
            return own
        return [*own, *(each.artifact for each in (*rest.inputs, *rest.labels)), rest.rows]


class StageNeeds(Schema):
    """Demands of a stage on its provider, as planned; 0: not known."""

    ram: Annotated[int, Field(ge=0)] = 0
    """Bytes."""
    work: Annotated[float, Field(ge=0)] = 0.0
    """GFLOP per batch."""
    traffic: Annotated[float, Field(ge=0)] = 0.0
    """Mbit per batch on the links to both neighbours."""


class Assignment(Schema):
    """One provider's part of a job: everything that its worker needs, by digest."""

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
    """True if the nodes of this plan talk over TLS, with certificates that the server signs."""
    needs: StageNeeds = StageNeeds()
    resume: bool = False
    """True if the cluster may be training already: the worker joins it, with the newest checkpoint that
    all stages have, or with the initial weights if there is none."""
    continues: str | None = None
    """Earlier assignment of this provider for the same node, whose folder may have checkpoints."""
    attempt: Annotated[int, Field(ge=0)] = 0
    """Number of plans of the job before this one."""
    seed: SeedCheckpoint | None = None
    """Checkpoint to start from, made from those of an earlier plan or job."""
    spot_checks: Annotated[float, Field(ge=0)] = 0.0
    """Mean seconds between two outputs of the previous stage that are checked; 0: none."""

    @property
    def loss(self) -> GraphLoss | None:
        """The requester's custom loss, if there is one."""
        loss = self.training.loss
        return loss if isinstance(loss, GraphLoss) else None

    @property
    def graph_metrics(self) -> dict[int, GraphLoss]:
        """The requester's own metrics, by their numbers among all metrics."""
        return self.training.graph_metrics


Phase = Literal["fetching", "fetched", "training", "uploading", "finished", "failed"]
"""Phase of an assignment at its provider; ``fetched``: it has its files and waits for the others."""


FailureCause = Literal["job", "machine", "passing"]
"""Cause of a failure. ``job``: it would happen on any machine. ``machine``: this machine cannot do the
work, for example for lack of memory. ``passing``: the worker was killed, or lost its neighbours."""

Count = Annotated[int, Field(ge=0, lt=LARGEST_NUMBER)]

_LONGEST = 10_000
"""Characters of a text, and clusters of a round."""


MOST_SPANS = 256
"""Spans in one record."""


def _checked(record: WorkerRecord) -> WorkerRecord:
    """Return ``record`` with texts of a limited length; raise ``ValueError`` if a value is unusable."""
    if isinstance(record, WarningRecord):
        return dataclasses.replace(record, message=clipped(record.message))
    if isinstance(record, SpansRecord):
        return _checked_spans(record)
    if isinstance(record, RoundRecord):
        record = dataclasses.replace(record, reason=clipped(record.reason))
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, int) and not 0 <= value < LARGEST_NUMBER:
            raise ValueError(f"{field.name} is out of range")
        if isinstance(value, str | tuple) and len(value) > _LONGEST:
            raise ValueError(f"{field.name} is too long")
        if isinstance(value, dict) and (
            len(value) > MOST_METRICS or any(len(name) > _LONGEST for name in value)
        ):
            raise ValueError(f"{field.name} is too long")
        shown = plain_lines(value) if field.name == "reason" else _shown(value)
        if shown != value:
            changed[field.name] = shown
    return dataclasses.replace(record, **changed) if changed else record


def _shown(value: object) -> object:
    """Return a text, or those of a tuple or a mapping, without control characters."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, tuple):
        return tuple(map(_shown, value))
    return {plain(name): each for name, each in value.items()} if isinstance(value, dict) else value


def _checked_spans(record: SpansRecord) -> SpansRecord:
    if not 0 <= record.order < LARGEST_NUMBER or len(record.spans) > MOST_SPANS * FIELDS:
        raise ValueError("order or spans are out of range")
    deque(unflattened(record.spans), maxlen=0)
    return record


Record = Annotated[WorkerRecord, Field(discriminator="kind"), AfterValidator(_checked)]
MOST_RECORDS = 4096
"""Largest number of records in one report."""


class TlsRejections(TolerantSchema):
    """Connections that a node refused because of TLS, since its worker started."""

    foreign: Count = 0
    """Connections with a certificate of another authority, or an expired one."""
    bare: Count = 0
    """Connections without a certificate."""
    plain: Count = 0
    """Connections without TLS."""


class UsedMemory(TolerantSchema):
    """Bytes that the worker of an assignment takes, as its provider measures them."""

    now: Count
    """Newest figure; after the end of the worker, its last one."""
    peak: Count
    """Largest figure since the worker started."""


class AssignmentReport(TolerantSchema):
    """Progress of an assignment, as its provider reports it."""

    assignment: AssignmentId
    phase: Phase
    reason: Reason = ""
    """Why the assignment failed, or what it waits for."""
    cause: FailureCause = "job"
    """Cause of a failure; only in the report of an assignment that failed."""
    result: Annotated[tuple[ResultFile, ...], Field(max_length=MOST_RESULT_FILES)] = ()
    """Uploaded files of a trained cluster; only in the report of a Root that is finished."""
    tls_rejections: TlsRejections = TlsRejections()
    first_record: Count = 0
    """Position of the first of ``records`` among all records of the assignment."""
    records: Annotated[tuple[Record, ...], Field(max_length=MOST_RECORDS)] = ()
    """Records of the worker; sent again until the server acknowledges them."""
    checkpoints: Annotated[tuple[UploadedCheckpoint, ...], Field(max_length=MOST_UPLOADED)] = ()
    """Newest checkpoints of this assignment that the provider has uploaded."""
    best: BestFiles | None = None
    """Best model of the cluster so far that the provider has uploaded; only in reports of a Root."""
    upload_done: CheckpointOrder | None = None
    """Last order of the server that was carried out."""
    checks: Annotated[tuple[CheckEvidence, ...], Field(max_length=MOST_CHECKS)] = ()
    """Newest files of spot checks that the provider has uploaded."""
    memory: UsedMemory | None = None
    """Memory of the worker; ``None``: not measured yet, or the provider does not report it."""


class Heartbeat(TolerantSchema):
    """Sign of life of a provider; the server may delay its reply until there is news."""

    report: AssignmentReport | None = None
    known: AssignmentId | None = None
    """The assignment that the provider works on; a reply that names another is sent at once."""
    may_train: bool = False
    """``may_train`` of the last reply; a reply with another value is sent at once."""
    link_test: AssignmentId | None = None
    """Id of the link test of the last reply; a reply with another one is sent at once."""
    upload: CheckpointOrder | None = None
    """``upload`` of the last reply; a reply with another one is sent at once."""
    leaving: Reason = ""
    """Why the provider wants to leave; empty: it stays."""
    wait: Annotated[float, Field(ge=0, le=60)] = 10.0
    """Seconds that the server may delay the reply."""


class ExcludedNode(TolerantSchema):
    """Machine that may not take part in a job any more: its provider's credential was revoked."""

    node: Annotated[int, Field(ge=0)]
    generation: Annotated[int, Field(ge=0)]
    """Generation of the node on this machine; machines that have its place later are not meant."""


class HeartbeatReply(TolerantSchema):
    """The assignment that a provider should work on, whatever it does now."""

    assignment: str | None
    """``None``: no assignment; a provider that works on one stops."""
    may_train: bool = False
    """All providers of the job have fetched their assignments, so that the workers start."""
    records_known: int = 0
    """Number of records of this assignment that the server has; the next report starts there."""
    link_test: LinkTestOrder | None = None
    """Link to measure while there is no assignment; a provider that measures another one stops."""
    excluded: tuple[ExcludedNode, ...] = ()
    """Nodes of the job to whose machines the worker closes its links; left out if there are none."""
    upload: CheckpointOrder | None = None
    """Checkpoints of this assignment to upload; an order that was carried out is not repeated. One to
    rescue them is carried out after the last checkpoint of the worker if the provider leaves."""
    trace: Count = 0
    """Number of the newest request for spans of the job's nodes; 0: there is none."""
    may_leave: bool = False
    """Nobody is about to take the place of this provider, which wants to leave."""
    keep: tuple[str, ...] = ()
    """Earlier assignments whose folders may be needed again; those of others are removed."""
    reason: Reason = ""


class CertificateRequest(Schema):
    """A certificate signing request; the private key stays at the provider."""

    csr: Annotated[str, Field(max_length=10_000)]


class PeerAddresses(Schema):
    """Addresses of the nodes that a node talks to."""

    addresses: tuple[str, ...]


class SignedCertificate(Schema):
    """A node's certificate and its authority, in PEM."""

    certificate: str
    authority: str
