"""What happens to a provider, and what it does about it."""

from __future__ import annotations

from dataclasses import dataclass

from ravnest.schemas.jobs import ResultFile
from ravnest.schemas.providers import Heartbeat, HeartbeatReply, TlsRejections

# Events


@dataclass(frozen=True)
class Began:
    """The server has the offer."""


@dataclass(frozen=True)
class Answered:
    """The server answered the heartbeat with this number."""

    number: int
    orders: HeartbeatReply


@dataclass(frozen=True)
class Unanswered:
    """No answer came; the server may be gone for a while."""

    number: int
    reason: str


@dataclass(frozen=True)
class OfferRefused:
    """The server does not take the heartbeat."""

    number: int
    status: int
    """Of HTTP."""
    reason: str


@dataclass(frozen=True)
class Fetched:
    """All files of an assignment are here; or not, for a reason."""

    assignment: str
    is_root: bool = False
    place: str = ""
    """Which node of which job this is, in words."""
    failure: str = ""
    again: bool = False
    """It failed because the server was away."""


@dataclass(frozen=True)
class Learned:
    """Further losses, and all validations so far, of a worker."""

    assignment: str
    losses: tuple[float | None, ...]
    figures: tuple[float | None, ...]


@dataclass(frozen=True)
class TurnedAway:
    """Strangers that a worker has not let in so far."""

    assignment: str
    strangers: TlsRejections


@dataclass(frozen=True)
class WorkerEnded:
    """A worker has ended; without a failure if it has trained to the end."""

    assignment: str
    failure: str = ""


@dataclass(frozen=True)
class Uploaded:
    """The server has the trained files of a cluster; or not, for a reason."""

    assignment: str
    files: tuple[ResultFile, ...] = ()
    failure: str = ""
    again: bool = False
    """It failed because the server was away."""


@dataclass(frozen=True)
class InterruptReceived:
    """The owner of the machine wants to leave."""


@dataclass(frozen=True)
class DeadlinePassed:
    """It is ``Agent.deadline``."""


@dataclass(frozen=True)
class Left:
    """The server knows that this provider leaves, or did not answer."""


Event = (
    Began
    | Answered
    | Unanswered
    | OfferRefused
    | Fetched
    | Learned
    | TurnedAway
    | WorkerEnded
    | Uploaded
    | InterruptReceived
    | DeadlinePassed
    | Left
)

# Actions


@dataclass(frozen=True)
class SendHeartbeat:
    """Send a heartbeat; its answer is an event."""

    number: int
    heartbeat: Heartbeat


@dataclass(frozen=True)
class SendOffer:
    """Offer this machine to a server that does not know it; ``Began`` if it takes it."""

    number: int


@dataclass(frozen=True)
class Fetch:
    """Make the folder of an assignment."""

    assignment: str


@dataclass(frozen=True)
class StartWorker:
    """Start the worker in the folder of an assignment."""

    assignment: str


@dataclass(frozen=True)
class Upload:
    """Give the trained files of an assignment to the server."""

    assignment: str


@dataclass(frozen=True)
class Stop:
    """End whatever is done for an assignment; it is reported as ended in a bounded time."""

    assignment: str


@dataclass(frozen=True)
class Discard:
    """Remove the folder of an assignment that is over."""

    assignment: str


@dataclass(frozen=True)
class Leave:
    """Tell the server that this provider leaves."""

    reason: str


@dataclass(frozen=True)
class Say:
    """A line for the owner of the machine."""

    line: str


@dataclass(frozen=True)
class Exit:
    """All is over; whatever still runs is killed."""

    code: int


Action = SendHeartbeat | SendOffer | Fetch | StartWorker | Upload | Stop | Discard | Leave | Say | Exit
