"""Messages between the server and its planner process: MessagePack, each after its length in 8 bytes."""

from __future__ import annotations

from typing import IO, Any

import msgspec
import numpy as np
from pydantic import BaseModel

from ravnest.plan.infeasible import Infeasible
from ravnest.schemas.checkpoints import UploadedCheckpoint
from ravnest.schemas.estimates import JobEstimate
from ravnest.schemas.jobs import JobSpec, ResultFile
from ravnest.schemas.providers import Assignment, ProviderOffer
from ravnest.server.scheduling.link_tests import ProviderLinks
from ravnest.server.scheduling.planning import PlannedJob
from ravnest.types import convert_checked

_LENGTH = 8
_LONGEST = 1 << 30


class PlanRequest(msgspec.Struct, frozen=True, tag="plan"):
    """Request for a plan of a job."""

    artifacts: str
    """Folder of the artifacts."""
    scratch: str
    """Folder for stages while they are written."""
    spec: JobSpec
    providers: tuple[tuple[str, ProviderOffer], ...]
    links: ProviderLinks


class ShipRequest(msgspec.Struct, frozen=True, tag="ship"):
    """Request to write the stages of a planned job."""

    artifacts: str
    scratch: str
    job: str
    planned: PlannedJob


class EstimateQuestion(msgspec.Struct, frozen=True, tag="estimate"):
    """Request for an estimate of a job whose files are not uploaded."""

    spec: JobSpec
    profiles: str
    """Profiles of the model as JSON, as a requester sent them."""
    providers: tuple[tuple[str, ProviderOffer], ...]
    unreachable: dict[str, str]
    """Names of the providers that others cannot reach, by id."""
    links: ProviderLinks


class ResultQuestion(msgspec.Struct, frozen=True, tag="result"):
    """Request to check the files of a trained model."""

    artifacts: str
    files: tuple[ResultFile, ...]
    cluster: tuple[Assignment, ...]
    """Assignments of the nodes of the cluster."""


class ManifestQuestion(msgspec.Struct, frozen=True, tag="manifest"):
    """Request to check the manifest of an uploaded checkpoint."""

    path: str
    uploaded: UploadedCheckpoint
    stages: int


class PlannerReady(msgspec.Struct, frozen=True, tag="ready"):
    """First message of the process: it has started."""


class JobPlanned(msgspec.Struct, frozen=True, tag="planned"):
    """Reply: the job has a plan."""

    planned: PlannedJob


class JobInfeasible(msgspec.Struct, frozen=True, tag="infeasible"):
    """Reply: the job has no plan with these providers."""

    infeasible: Infeasible


class JobShipped(msgspec.Struct, frozen=True, tag="shipped"):
    """Reply: the stages are artifacts."""

    assignments: tuple[Assignment, ...]


class JobEstimated(msgspec.Struct, frozen=True, tag="estimated"):
    """Reply: the estimate, also of a job that has no plan."""

    estimate: JobEstimate


class FilesChecked(msgspec.Struct, frozen=True, tag="checked"):
    """Reply: what is wrong with files; empty if nothing is."""

    problem: str


class PlannerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Reply: an error."""

    kind: str
    """Name of its class."""
    message: str
    errno: int = 0
    """Number of an error of the system, such as that of a full disk."""


FilesQuestion = ResultQuestion | ManifestQuestion
PlannerRequest = PlanRequest | ShipRequest | EstimateQuestion | FilesQuestion
PlannerReply = (
    PlannerReady | JobPlanned | JobInfeasible | JobShipped | JobEstimated | FilesChecked | PlannerFailed
)


def write_message(stream: IO[bytes], message: PlannerRequest | PlannerReply) -> None:
    """Write a message."""
    body = msgspec.msgpack.encode(message, enc_hook=_plain)
    stream.write(len(body).to_bytes(_LENGTH, "big") + body)
    stream.flush()


def read_message(stream: IO[bytes], kind: Any) -> Any:
    """Read a message of a type; raise ``EOFError`` at the end of the stream."""
    length = int.from_bytes(_read(stream, _LENGTH), "big")
    if length > _LONGEST:
        raise EOFError("the message is too long")
    return convert_checked(msgspec.msgpack.decode(_read(stream, length)), kind, dec_hook=_model)


def _read(stream: IO[bytes], count: int) -> bytes:
    found = stream.read(count)
    if len(found) < count:
        raise EOFError
    return found


def _plain(value: Any) -> Any:
    """Return a value that MessagePack has, for one that it does not have."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, range):
        return value.start, value.stop, value.step
    raise TypeError(f"a {type(value).__name__} is not part of a message to the planner")


def _model(kind: type, value: Any) -> Any:
    """Return a message of the API, or numbers of rows, from plain data."""
    if kind is range:
        return range(*value)
    assert issubclass(kind, BaseModel), kind
    return kind.model_validate(value)
