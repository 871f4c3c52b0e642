"""Events that a provider's agent handles, and the actions that it returns."""

from __future__ import annotations

from dataclasses import dataclass

from ravnest.provider.outcome import Outcome
from ravnest.schemas.checkpoints import CheckpointOrder, UploadedCheckpoint
from ravnest.schemas.jobs import BestFiles, ResultFile
from ravnest.schemas.link_tests import LinkTestOrder
from ravnest.schemas.providers import (
    ExcludedNode,
    FailureCause,
    Heartbeat,
    HeartbeatReply,
    TlsRejections,
)
from ravnest.schemas.spot_checks import CheckEvidence
from ravnest.telemetry import CheckRecord, WorkerRecord

# Events


@dataclass(frozen=True)
class OfferAccepted:
    """The server has the offer."""


@dataclass(frozen=True)
class HeartbeatAnswered:
    """The server answered the heartbeat with this number."""

    number: int
    reply: HeartbeatReply


@dataclass(frozen=True)
class ServerUnreachable:
    """No answer came to the heartbeat or offer with this number; the server may be down."""

    number: int
    reason: str


@dataclass(frozen=True)
class ServerRefused:
    """The server refused the heartbeat or offer with this number."""

    number: int
    status: int
    """HTTP status."""
    reason: str
    retry_after: float | None = None
    """Seconds that the server asks to wait; ``None`` if it does not."""


@dataclass(frozen=True)
class Fetched:
    """The files of an assignment are here, or could not be fetched."""

    assignment: str
    is_root: bool = False
    node_title: str = ""
    """Description of the node and its job."""
    failure: str = ""
    again: bool = False
    """The fetch failed because the server did not answer."""


@dataclass(frozen=True)
class RecordsReceived:
    """A worker has sent telemetry records."""

    assignment: str
    records: tuple[WorkerRecord, ...]


@dataclass(frozen=True)
class ConnectionsRejected:
    """A worker has rejected a connection; the counts include earlier ones."""

    assignment: str
    tls_rejections: TlsRejections


@dataclass(frozen=True)
class WorkerEnded:
    """A worker has ended; ``failure`` is empty if it has trained to the end."""

    assignment: str
    failure: str = ""
    cause: FailureCause = "job"


@dataclass(frozen=True)
class Uploaded:
    """The server has the trained files of a cluster, or the upload failed."""

    assignment: str
    files: tuple[ResultFile, ...] = ()
    best: BestFiles | None = None
    """Best model of the cluster, which was uploaded with them."""
    failure: str = ""
    again: bool = False
    """The upload failed for a reason that passes: no answer, an error of the server, a full disk."""


@dataclass(frozen=True)
class BestUploaded:
    """The server has the best model of a cluster so far, or the upload failed."""

    assignment: str
    best: BestFiles | None = None
    again: bool = False
    """The upload failed for a reason that passes, or the model was replaced meanwhile."""


@dataclass(frozen=True)
class CheckpointsUploaded:
    """The server has checkpoints of an assignment, or the upload failed."""

    assignment: str
    order: CheckpointOrder
    checkpoints: tuple[UploadedCheckpoint, ...] = ()
    is_done: bool = False
    """The order was carried out; otherwise its checkpoint does not exist yet, or the upload failed."""


@dataclass(frozen=True)
class CheckUploaded:
    """The server has a file of a spot check, or the upload failed."""

    assignment: str
    evidence: CheckEvidence | None = None


@dataclass(frozen=True)
class LinkTestEnded:
    """A link test is over, and nothing listens for it any more."""

    test: str


@dataclass(frozen=True)
class SpeedMeasured:
    """The speed of this machine was measured again."""

    rate: float | None
    """GFLOP/s; ``None`` if the measurement failed."""


@dataclass(frozen=True)
class InterruptReceived:
    """The owner of the machine stops the provider."""


@dataclass(frozen=True)
class DeadlinePassed:
    """``Agent.deadline`` has passed."""


@dataclass(frozen=True)
class Left:
    """The server knows that this provider leaves, or did not answer."""


AgentEvent = (
    OfferAccepted
    | HeartbeatAnswered
    | ServerUnreachable
    | ServerRefused
    | Fetched
    | RecordsReceived
    | ConnectionsRejected
    | WorkerEnded
    | Uploaded
    | CheckpointsUploaded
    | CheckUploaded
    | BestUploaded
    | LinkTestEnded
    | SpeedMeasured
    | InterruptReceived
    | DeadlinePassed
    | Left
)

# Actions


@dataclass(frozen=True)
class SendHeartbeat:
    """Send a heartbeat; its answer becomes an event."""

    number: int
    heartbeat: Heartbeat


@dataclass(frozen=True)
class SendOffer:
    """Send the offer to a server that does not know this provider."""

    number: int


@dataclass(frozen=True)
class Fetch:
    """Download the files of an assignment."""

    assignment: str


@dataclass(frozen=True)
class StartWorker:
    """Start the worker of an assignment."""

    assignment: str


@dataclass(frozen=True)
class Keep:
    """Store that an assignment is trained: a restart of the provider does not lose its result."""

    assignment: str
    outcome: Outcome


@dataclass(frozen=True)
class Exclude:
    """Have the worker of an assignment close its links to these nodes."""

    assignment: str
    nodes: tuple[ExcludedNode, ...]


@dataclass(frozen=True)
class RequestTrace:
    """Have the worker of an assignment report what it did when."""

    assignment: str
    order: int
    """Number of the server's request."""


@dataclass(frozen=True)
class Upload:
    """Upload the trained files of an assignment."""

    assignment: str


@dataclass(frozen=True)
class UploadBest:
    """Upload the best model of a cluster so far, while its worker runs."""

    assignment: str


@dataclass(frozen=True)
class UploadCheckpoints:
    """Upload checkpoints of an assignment, while its worker runs."""

    assignment: str
    order: CheckpointOrder
    is_last: bool = False
    """The worker has ended, because this provider leaves."""


@dataclass(frozen=True)
class UploadCheck:
    """Upload a file of a spot check, while the worker runs."""

    assignment: str
    record: CheckRecord


@dataclass(frozen=True)
class Stop:
    """End the fetch, worker or upload of an assignment; its end is reported in a bounded time."""

    assignment: str
    hand_over: bool = False
    """The worker takes a last checkpoint before it ends, because another provider takes over."""


@dataclass(frozen=True)
class Discard:
    """Remove the folder of an assignment that is over."""

    assignment: str


@dataclass(frozen=True)
class StartLinkTest:
    """Take part in the test of a link, and report its result to the server."""

    order: LinkTestOrder


@dataclass(frozen=True)
class StopLinkTest:
    """End a link test; its end is reported in a bounded time."""

    test: str


@dataclass(frozen=True)
class MeasureSpeed:
    """Measure the speed of this machine, at low priority."""


@dataclass(frozen=True)
class UpdateOffer:
    """Tell the server another speed."""

    compute: float
    """GFLOP/s."""


@dataclass(frozen=True)
class Leave:
    """Tell the server that this provider leaves."""

    reason: str


@dataclass(frozen=True)
class Announce:
    """Show a line to the owner of the machine."""

    line: str


@dataclass(frozen=True)
class ShowProgress:
    """Show the owner of the machine what it does now; the next one replaces it."""

    line: str


@dataclass(frozen=True)
class Exit:
    """End the provider; a worker that still runs is killed."""

    error: Exception | None = None
    """Reason, if the provider does not end normally."""
    interrupted: bool = False
    """The owner interrupted it a second time."""


Action = (
    SendHeartbeat
    | SendOffer
    | Fetch
    | StartWorker
    | Keep
    | Exclude
    | RequestTrace
    | Upload
    | UploadBest
    | UploadCheckpoints
    | UploadCheck
    | Stop
    | Discard
    | StartLinkTest
    | StopLinkTest
    | MeasureSpeed
    | UpdateOffer
    | Leave
    | Announce
    | ShowProgress
    | Exit
)
