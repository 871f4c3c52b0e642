"""Registrations and circuits of a relay: pure bookkeeping.

``CircuitTable.handle(event, now)`` returns what the shell must do. Nothing here knows sockets; a
connection is a number that the shell chose. ``now`` is a monotonic time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ravnest.deadlines import RELAY_ACCEPT, RELAY_HEAD, RELAY_PING, RELAY_SILENCE
from ravnest.errors import RelayError
from ravnest.relay.events import (
    CircuitAction,
    CircuitEvent,
    CloseConnection,
    ConnectionEnded,
    ConnectionOpened,
    HeadArrived,
    HeadInvalid,
    JobsChanged,
    JoinConnections,
    LineArrived,
    Refuse,
    SendAnswer,
    SendLine,
    TimePassed,
)
from ravnest.relay.heads import PING_PATH, RelayMethod, RequestHead
from ravnest.relay.limits import RelayLimits
from ravnest.relay.tickets import Endpoint, RelayTicket

Key = TypeVar("Key")
Value = TypeVar("Value")
CheckTicket = Callable[[str], RelayTicket]
"""Returns a valid ticket; raises ``RelayError`` for any other."""

PING_LINE = "PING"
PONG_LINE = "PONG"
INCOMING_LINE = "INCOMING"

_UNANSWERED_PINGS = int(RELAY_SILENCE / RELAY_PING)
_PINGS_PER_CONNECTION = 8


@dataclass
class _Head:
    """Connection whose request is awaited."""

    deadline: float
    pings: int = 0


@dataclass
class _Control:
    """Control connection of a registered endpoint."""

    ticket: RelayTicket
    next_ping: float
    unanswered: int = 0


@dataclass
class _Circuit:
    """Circuit, pending until a callee has accepted it."""

    id: str
    job: str
    caller: Endpoint
    called: Endpoint
    caller_connection: int
    deadline: float
    callee_connection: int | None = None


class CircuitTable:
    """All connections of a relay, and the rules for who may be connected to whom."""

    def __init__(
        self, limits: RelayLimits, check_ticket: CheckTicket, new_id: Callable[[], str]
    ) -> None:
        self._limits = limits
        self._check = check_ticket
        self._new_id = new_id
        self._jobs: frozenset[str] | None = None
        self._addresses: dict[int, str] = {}
        self._per_address: Counter[str] = Counter()
        # Deadlines of each dictionary are in order of insertion, as their durations are constant.
        self._heads: dict[int, _Head] = {}
        self._controls: dict[int, _Control] = {}
        self._registered: dict[Endpoint, int] = {}
        self._circuits: dict[int, _Circuit] = {}  # by each of their connections
        self._pending: dict[str, _Circuit] = {}
        self._per_job: Counter[str] = Counter()
        self._per_endpoint: Counter[Endpoint] = Counter()
        self._refusals: Counter[int] = Counter()
        self._total = 0
        self._opened = 0

    # What it knows

    @property
    def deadline(self) -> float | None:
        """Time of the next ``TimePassed``; ``None`` if nothing is awaited."""
        return min(
            [
                *(head.deadline for head in _first(self._heads)),
                *(control.next_ping for control in _first(self._controls)),
                *(circuit.deadline for circuit in _first(self._pending)),
            ],
            default=None,
        )

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._addresses)

    @property
    def endpoints(self) -> frozenset[Endpoint]:
        """Endpoints that are registered."""
        return frozenset(self._registered)

    @property
    def circuits(self) -> int:
        """Number of circuits, pending ones included."""
        return self._total

    @property
    def circuits_opened(self) -> int:
        """Number of circuits joined since the start."""
        return self._opened

    @property
    def refusals(self) -> dict[int, int]:
        """Number of refusals by status."""
        return dict(self._refusals)

    def is_control(self, connection: int) -> bool:
        """Return whether a connection is a control connection."""
        return connection in self._controls

    def is_calling(self, connection: int) -> bool:
        """Return whether a connection is part of a circuit, pending or not."""
        return connection in self._circuits

    # Events

    def handle(self, event: CircuitEvent, now: float) -> list[CircuitAction]:
        """Return the actions that follow from ``event``, in order."""
        match event:
            case ConnectionOpened(connection, address):
                return list(self._on_opened(connection, address, now))
            case HeadArrived(connection, head):
                return list(self._on_request(connection, head, now))
            case HeadInvalid(connection, reason):
                return list(self._on_invalid(connection, reason))
            case LineArrived(connection, line):
                return list(self._on_line(connection, line))
            case ConnectionEnded(connection):
                return list(self._forget(connection))
            case JobsChanged(jobs):
                return list(self._on_jobs(jobs))
            case TimePassed():
                return list(self._on_time(now))

    def _on_opened(self, connection: int, address: str, now: float) -> Iterator[CircuitAction]:
        assert connection not in self._addresses
        self._addresses[connection] = address
        self._per_address[address] += 1
        self._heads[connection] = _Head(now + RELAY_HEAD)
        if self._per_address[address] > self._limits.connections_per_address:
            yield from self._refuse(connection, 429, "too many connections from this address")
        elif len(self._heads) > self._limits.pending_heads:
            # The oldest one: strangers that send nothing must not keep others out.
            yield from self._refuse(next(iter(self._heads)), 429, "too many requests")

    def _on_invalid(self, connection: int, reason: str) -> Iterator[CircuitAction]:
        if connection in self._heads:
            yield from self._refuse(connection, 400, reason)
        else:
            yield from self._close(connection)

    def _on_request(self, connection: int, head: RequestHead, now: float) -> Iterator[CircuitAction]:
        waiting = self._heads.get(connection)
        if waiting is None:  # closed meanwhile
            return
        if head.method is RelayMethod.GET:
            yield from self._on_ping(connection, waiting, head.target)
            return
        try:
            ticket = self._check(head.ticket)
        except RelayError as error:
            yield from self._refuse(connection, 403, str(error))
            return
        if self._jobs is not None and ticket.job not in self._jobs:
            yield from self._refuse(connection, 403, "the job of the ticket does not run")
            return
        match head.method:
            case RelayMethod.REGISTER:
                yield from self._on_register(connection, head.target, ticket, now)
            case RelayMethod.CONNECT:
                yield from self._on_connect(connection, head.target, ticket, now)
            case RelayMethod.ACCEPT:
                yield from self._on_accept(connection, head.target, ticket)

    def _on_ping(self, connection: int, waiting: _Head, path: str) -> Iterator[CircuitAction]:
        waiting.pings += 1
        if path != PING_PATH:
            yield from self._refuse(connection, 404, f"a relay has only {PING_PATH}")
        elif waiting.pings > _PINGS_PER_CONNECTION:
            yield from self._refuse(connection, 429, "too many pings on one connection")
        else:
            yield SendAnswer(connection, 204, "No Content")

    def _on_register(
        self, connection: int, target: str, ticket: RelayTicket, now: float
    ) -> Iterator[CircuitAction]:
        if target != str(ticket.endpoint):
            yield from self._refuse(connection, 403, "the ticket is for another endpoint")
            return
        former = self._registered.get(ticket.endpoint)
        if former is None and len(self._registered) >= self._limits.endpoints:
            yield from self._refuse(connection, 429, "too many endpoints are registered")
            return
        if former is not None:
            yield from self._close(former)
        del self._heads[connection]
        self._controls[connection] = _Control(ticket, now + RELAY_PING)
        self._registered[ticket.endpoint] = connection
        yield SendAnswer(connection, 200, "Registered")
        for circuit in self._pending.values():  # the former connection may have been dead
            if circuit.called == ticket.endpoint:
                yield SendLine(connection, f"{INCOMING_LINE} {circuit.id}")

    def _on_connect(
        self, connection: int, target: str, ticket: RelayTicket, now: float
    ) -> Iterator[CircuitAction]:
        try:
            called = Endpoint.parse(target.partition(":")[0])
        except ValueError as error:
            yield from self._refuse(connection, 400, f"the endpoint {error}")
            return
        if called.job != ticket.job or called.node not in ticket.peers:
            yield from self._refuse(connection, 403, "the ticket does not name this endpoint as a peer")
            return
        control = self._registered.get(called)
        if control is None:
            yield from self._refuse(connection, 404, "the endpoint is not registered here")
            return
        if ticket.node not in self._controls[control].ticket.peers:
            yield from self._refuse(connection, 403, "the endpoint does not name this node as a peer")
            return
        if reason := self._exhausted(ticket.endpoint, called):
            yield from self._refuse(connection, 429, reason)
            return
        circuit = _Circuit(
            self._new_id(), ticket.job, ticket.endpoint, called, connection, now + RELAY_ACCEPT
        )
        assert circuit.id not in self._pending
        del self._heads[connection]
        self._circuits[connection] = self._pending[circuit.id] = circuit
        self._count(circuit, 1)
        yield SendLine(control, f"{INCOMING_LINE} {circuit.id}")

    def _on_accept(self, connection: int, target: str, ticket: RelayTicket) -> Iterator[CircuitAction]:
        circuit = self._pending.get(target)
        if circuit is None:
            yield from self._refuse(connection, 404, "no such circuit is pending")
            return
        if ticket.endpoint != circuit.called or circuit.caller.node not in ticket.peers:
            yield from self._refuse(connection, 403, "the circuit is for another endpoint")
            return
        del self._pending[circuit.id]
        del self._heads[connection]
        circuit.callee_connection = connection
        self._circuits[connection] = circuit
        self._opened += 1
        yield JoinConnections(circuit.caller_connection, connection, circuit.job)

    def _on_line(self, connection: int, line: str) -> Iterator[CircuitAction]:
        control = self._controls.get(connection)
        if control is None:  # closed meanwhile
            return
        if line == PONG_LINE:
            control.unanswered = 0
        else:
            yield from self._close(connection)

    def _on_jobs(self, jobs: frozenset[str] | None) -> Iterator[CircuitAction]:
        self._jobs = jobs
        if jobs is None:
            return
        ended = [
            *(number for number, control in self._controls.items() if control.ticket.job not in jobs),
            *(number for number, circuit in self._circuits.items() if circuit.job not in jobs),
        ]
        for connection in ended:
            yield from self._close(connection)

    def _on_time(self, now: float) -> Iterator[CircuitAction]:
        for connection in _due(self._heads, now, lambda head: head.deadline):
            yield from self._refuse(connection, 408, "the request did not arrive in time")
        for name in _due(self._pending, now, lambda circuit: circuit.deadline):
            connection = self._pending[name].caller_connection
            yield from self._refuse(connection, 504, "the endpoint did not accept in time")
        for connection in _due(self._controls, now, lambda control: control.next_ping):
            control = self._controls[connection]
            if control.unanswered >= _UNANSWERED_PINGS:
                yield from self._close(connection)
                continue
            # Counted instead of timed: after a halt of the relay itself, the answers are still to come.
            control.unanswered += 1
            control.next_ping = now + RELAY_PING
            self._controls[connection] = self._controls.pop(connection)
            yield SendLine(connection, PING_LINE)

    # Ends

    def _refuse(self, connection: int, status: int, reason: str) -> Iterator[CircuitAction]:
        self._refusals[status] += 1
        yield Refuse(connection, status, reason)
        yield from self._forget(connection)

    def _close(self, connection: int) -> Iterator[CircuitAction]:
        if connection in self._addresses:
            yield CloseConnection(connection)
            yield from self._forget(connection)

    def _forget(self, connection: int) -> Iterator[CircuitAction]:
        """Remove a connection that is closed, and close the other one of its circuit."""
        address = self._addresses.pop(connection, None)
        if address is None:
            return
        _change(self._per_address, address, -1)
        self._heads.pop(connection, None)
        control = self._controls.pop(connection, None)
        if control is not None:
            del self._registered[control.ticket.endpoint]
            return
        circuit = self._circuits.pop(connection, None)
        if circuit is None:
            return
        callee = circuit.callee_connection
        other = circuit.caller_connection if connection == callee else callee
        if other is None or other not in self._circuits:  # the last of its connections
            self._pending.pop(circuit.id, None)
            self._count(circuit, -1)
        else:
            yield from self._close(other)

    # Limits

    def _exhausted(self, caller: Endpoint, called: Endpoint) -> str | None:
        """Return the limit that another circuit would exceed, if any."""
        limits = self._limits
        if self.circuits >= limits.circuits:
            return "the relay has too many circuits"
        if self._per_job[caller.job] >= limits.circuits_per_job:
            return "the job has too many circuits"
        if max(self._per_endpoint[caller], self._per_endpoint[called]) >= limits.circuits_per_endpoint:
            return "an endpoint has too many circuits"
        return None

    def _count(self, circuit: _Circuit, change: int) -> None:
        self._total += change
        _change(self._per_job, circuit.job, change)
        _change(self._per_endpoint, circuit.caller, change)
        _change(self._per_endpoint, circuit.called, change)


def _change(counter: Counter[Key], key: Key, change: int) -> None:
    """Change a count, and keep no zeros: keys come from strangers."""
    counter[key] += change
    if not counter[key]:
        del counter[key]


def _first(values: dict[Key, Value]) -> Iterator[Value]:
    return itertools.islice(values.values(), 1)


def _due(values: dict[Key, Value], now: float, deadline: Callable[[Value], float]) -> list[Key]:
    """Return the keys whose deadline has passed; deadlines are in order."""
    return [key for key, _ in itertools.takewhile(lambda item: deadline(item[1]) <= now, values.items())]
