"""Events and actions of the circuit table; a connection is a number that the relay chose."""

from __future__ import annotations

from dataclasses import dataclass

from ravnest.relay.heads import RequestHead


@dataclass(frozen=True)
class ConnectionOpened:
    """A stranger connected from a network address."""

    connection: int
    address: str


@dataclass(frozen=True)
class HeadArrived:
    """The head of a request is complete."""

    connection: int
    head: RequestHead


@dataclass(frozen=True)
class HeadInvalid:
    """The bytes of a connection are no request."""

    connection: int
    reason: str


@dataclass(frozen=True)
class LineArrived:
    """A line arrived on a control connection."""

    connection: int
    line: str


@dataclass(frozen=True)
class ConnectionEnded:
    """A connection was closed, by its other side or by a failure."""

    connection: int


@dataclass(frozen=True)
class JobsChanged:
    """Jobs that run now; ``None`` accepts every job that a valid ticket names."""

    jobs: frozenset[str] | None


@dataclass(frozen=True)
class TimePassed:
    """``CircuitTable.deadline`` has come."""


CircuitEvent = (
    ConnectionOpened
    | HeadArrived
    | HeadInvalid
    | LineArrived
    | ConnectionEnded
    | JobsChanged
    | TimePassed
)


@dataclass(frozen=True)
class SendAnswer:
    """Answer a request; the connection stays open."""

    connection: int
    status: int
    reason: str


@dataclass(frozen=True)
class Refuse:
    """Answer with an error and close the connection."""

    connection: int
    status: int
    reason: str


@dataclass(frozen=True)
class SendLine:
    """Send a line on a control connection."""

    connection: int
    line: str


@dataclass(frozen=True)
class JoinConnections:
    """Answer 200 to both connections and forward bytes between them from now on."""

    caller: int
    callee: int
    job: str


@dataclass(frozen=True)
class CloseConnection:
    """Close a connection without an answer."""

    connection: int


CircuitAction = SendAnswer | Refuse | SendLine | JoinConnections | CloseConnection
