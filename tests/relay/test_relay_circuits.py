"""Rules of the circuit table, first one by one, then in thousands of random worlds."""

import functools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from ravnest.deadlines import RELAY_ACCEPT, RELAY_HEAD, RELAY_PING, RELAY_SILENCE
from ravnest.errors import RelayError
from ravnest.relay.circuits import CircuitTable
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
from ravnest.relay.heads import RelayMethod, RequestHead
from ravnest.relay.limits import RelayLimits
from ravnest.relay.tickets import Endpoint, RelayTicket

SMALL = RelayLimits(
    connections_per_address=8,
    pending_heads=8,
    endpoints=6,
    circuits=5,
    circuits_per_endpoint=3,
    circuits_per_job=4,
)


def written(ticket: RelayTicket) -> str:
    """A ticket as the tests write it; signatures have tests of their own."""
    return f"{ticket.job}/{ticket.node}/{','.join(map(str, ticket.peers))}"


@functools.cache
def check(text: str) -> RelayTicket:
    try:
        job, node, peers = text.split("/")
        return RelayTicket(job, int(node), tuple(int(peer) for peer in peers.split(",") if peer), 0.0)
    except ValueError:
        raise RelayError("forged") from None


@dataclass
class World:
    """A relay's table, and the connections that are open according to its actions."""

    limits: RelayLimits = SMALL
    now: float = 0.0
    numbers: int = 0
    ids: int = 0
    open: dict[int, str] = field(default_factory=dict)
    """Address of each open connection."""
    tickets: dict[int, str] = field(default_factory=dict)
    controls: dict[int, RelayTicket] = field(default_factory=dict)
    joined: dict[int, int] = field(default_factory=dict)
    called: list[tuple[int, str]] = field(default_factory=list)
    """Control connection and id of each announced circuit."""
    jobs: frozenset[str] | None = None
    heads: dict[int, float] = field(default_factory=dict)
    unheard: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.table = CircuitTable(self.limits, check, self._new_id)

    def _new_id(self) -> str:
        self.ids += 1
        return f"c{self.ids}"

    def connect(self, address: str = "a") -> int:
        self.numbers += 1
        self.open[self.numbers] = address
        self.heads[self.numbers] = self.now
        self.do(ConnectionOpened(self.numbers, address))
        return self.numbers

    def ask(self, connection: int, method: RelayMethod, target: str, ticket: str) -> list[CircuitAction]:
        self.tickets[connection] = ticket
        return self.do(HeadArrived(connection, RequestHead(method, target, ticket)))

    def request(self, method: RelayMethod, target: str, ticket: RelayTicket) -> list[CircuitAction]:
        return self.ask(self.connect(), method, target, written(ticket))

    def drop(self, connection: int) -> None:
        self._closed(connection)
        self.do(ConnectionEnded(connection))

    def do(self, event: CircuitEvent) -> list[CircuitAction]:
        if isinstance(event, JobsChanged):
            self.jobs = event.jobs
        actions = self.table.handle(event, self.now)
        for action in actions:
            self._apply(action)
        self._check_invariants()
        return actions

    def _closed(self, connection: int) -> None:
        del self.open[connection]
        for known in (self.controls, self.joined, self.heads, self.unheard, self.tickets):
            known.pop(connection, None)

    def _apply(self, action: CircuitAction) -> None:
        match action:
            case SendAnswer(connection, status, _):
                assert connection in self.open
                if status == 200:
                    ticket = check(self.tickets[connection])
                    self.controls[connection] = ticket
                    self.heads.pop(connection)
                    self.unheard[connection] = self.now
            case Refuse(connection, status, reason):
                assert status in (400, 403, 404, 408, 429, 504)
                assert reason
                self._closed(connection)
            case CloseConnection(connection):
                self._closed(connection)
            case SendLine(connection, line):
                assert connection in self.controls
                if line.startswith("INCOMING "):
                    self.called.append((connection, line.removeprefix("INCOMING ")))
            case JoinConnections(caller, callee, job):
                self._check_join(caller, callee, job)
                self.joined |= {caller: callee, callee: caller}
                self.heads.pop(callee)

    def _check_join(self, caller: int, callee: int, job: str) -> None:
        assert caller in self.open
        assert callee in self.open
        near, far = check(self.tickets[caller]), check(self.tickets[callee])
        assert near.job == far.job == job
        assert far.node in near.peers
        assert near.node in far.peers
        assert self.jobs is None or job in self.jobs
        assert caller not in self.joined
        assert callee not in self.joined

    def _check_invariants(self) -> None:
        table, limits = self.table, self.limits
        assert table.connections == len(self.open) <= limits.connections
        assert max(Counter(self.open.values()).values(), default=0) <= limits.connections_per_address
        registered = [ticket.endpoint for ticket in self.controls.values()]
        assert len(registered) == len(set(registered)) <= limits.endpoints
        assert table.endpoints == set(registered)
        assert all(self.joined[other] == one for one, other in self.joined.items())
        circuits = [
            (check(self.tickets[one]), check(self.tickets[other]))
            for one, other in self.joined.items()
            if one < other
        ]
        assert len(circuits) <= table.circuits <= limits.circuits
        per_job = Counter(near.job for near, _ in circuits)
        per_endpoint = Counter(ticket.endpoint for pair in circuits for ticket in pair)
        assert max(per_job.values(), default=0) <= limits.circuits_per_job
        assert max(per_endpoint.values(), default=0) <= limits.circuits_per_endpoint
        if self.jobs is not None:
            assert {ticket.job for ticket in self.controls.values()} <= self.jobs
            assert set(per_job) <= self.jobs

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while (deadline := self.table.deadline) is not None and deadline <= until:
            assert deadline >= self.now - 1e-9
            self.now = max(self.now, deadline)
            self.do(TimePassed())
        self.now = until


A, B, STRANGER = (
    RelayTicket("j", 0, (1,), 0.0),
    RelayTicket("j", 1, (0,), 0.0),
    RelayTicket("j", 2, (1,), 0.0),
)


def refused(actions: list[CircuitAction]) -> int:
    (action,) = (action for action in actions if isinstance(action, Refuse))
    return action.status


def joined_world() -> World:
    world = World()
    world.request(RelayMethod.REGISTER, "node-1.j", B)
    world.request(RelayMethod.CONNECT, "node-1.j:1", A)
    ((_, circuit),) = world.called
    (action,) = world.request(RelayMethod.ACCEPT, circuit, B)
    assert action == JoinConnections(2, 3, "j")
    return world


def test_two_peers_are_joined() -> None:
    world = joined_world()
    assert (world.table.circuits, world.table.circuits_opened, world.table.refusals) == (1, 1, {})
    world.drop(3)
    assert 2 not in world.open
    assert world.table.circuits == 0


@pytest.mark.parametrize(
    ("method", "target", "ticket", "status"),
    [
        (RelayMethod.REGISTER, "node-1.j", "forged", 403),
        (RelayMethod.REGISTER, "node-1.j", "", 403),
        (RelayMethod.REGISTER, "node-0.j", written(B), 403),
        (RelayMethod.CONNECT, "node-1.j:1", "forged", 403),
        (RelayMethod.CONNECT, "node-1.j:1", "k/0/1", 403),
        (RelayMethod.CONNECT, "node-1.j:1", "j/0/2", 403),
        (RelayMethod.CONNECT, "node-1.j:1", written(STRANGER), 403),
        (RelayMethod.CONNECT, "node-5.j:1", "j/0/5", 404),
        (RelayMethod.CONNECT, "example.com:80", written(A), 400),
        (RelayMethod.ACCEPT, "c9", written(B), 404),
        (RelayMethod.ACCEPT, "c1", written(A), 403),
        (RelayMethod.ACCEPT, "c1", "j/1/2", 403),
        (RelayMethod.ACCEPT, "c1", "k/1/0", 403),
        (RelayMethod.GET, "/", "", 404),
    ],
)
def test_others_are_refused(method: RelayMethod, target: str, ticket: str, status: int) -> None:
    world = World()
    world.request(RelayMethod.REGISTER, "node-1.j", B)
    world.request(RelayMethod.CONNECT, "node-1.j:1", A)
    assert refused(world.ask(world.connect(), method, target, ticket)) == status
    assert world.table.refusals == {status: 1}


def test_a_registration_replaces_the_former_one_and_hears_of_pending_circuits() -> None:
    world = World()
    world.request(RelayMethod.REGISTER, "node-1.j", B)
    world.request(RelayMethod.CONNECT, "node-1.j", A)
    actions = world.request(RelayMethod.REGISTER, "node-1.j", B)
    assert actions == [CloseConnection(1), SendAnswer(3, 200, "Registered"), SendLine(3, "INCOMING c1")]


def test_a_circuit_that_nobody_accepts_ends() -> None:
    world = World()
    world.request(RelayMethod.REGISTER, "node-1.j", B)
    world.request(RelayMethod.CONNECT, "node-1.j", A)
    world.pass_time(RELAY_ACCEPT)
    assert world.table.refusals == {504: 1}
    assert world.table.circuits == 0
    assert refused(world.request(RelayMethod.ACCEPT, "c1", B)) == 404


def test_a_request_that_does_not_arrive_is_given_up() -> None:
    world = World()
    world.connect()
    world.pass_time(RELAY_HEAD)
    assert world.table.refusals == {408: 1}


def test_strangers_that_send_nothing_keep_nobody_out() -> None:
    world = World()
    first, *others = [world.connect(address) for address in "abcdefgh"]
    last = world.connect("i")
    assert set(world.open) == {*others, last}
    assert first not in world.open
    assert world.table.refusals == {429: 1}


def test_jobs_that_end_are_cut_and_cannot_return() -> None:
    world = joined_world()
    world.do(JobsChanged(frozenset({"k"})))
    assert world.open == {}
    assert refused(world.request(RelayMethod.REGISTER, "node-1.j", B)) == 403
    world.do(JobsChanged(None))
    world.request(RelayMethod.REGISTER, "node-1.j", B)
    assert world.table.endpoints == {Endpoint("j", 1)}


def test_a_control_connection_that_answers_no_ping_ends() -> None:
    world = World()
    world.request(RelayMethod.REGISTER, "node-1.j", B)
    for _ in range(100):
        world.pass_time(RELAY_PING)
        world.do(LineArrived(1, "PONG"))
    assert 1 in world.open
    world.pass_time(RELAY_SILENCE + 2 * RELAY_PING)
    assert world.open == {}


def test_a_halt_of_the_relay_ends_no_registration() -> None:
    world = World()
    world.request(RelayMethod.REGISTER, "node-1.j", B)
    world.now += 1000 * RELAY_PING
    assert world.do(TimePassed()) == [SendLine(1, "PING")]


def test_pings_are_answered_a_few_times() -> None:
    world = World()
    connection = world.connect()
    for _ in range(8):
        (action,) = world.ask(connection, RelayMethod.GET, "/ping", "")
        assert action == SendAnswer(connection, 204, "No Content")
    assert refused(world.ask(connection, RelayMethod.GET, "/ping", "")) == 429


JOBS, NODES = ("j", "k"), range(4)


def _random_ticket(dice: random.Random, job: str, node: int) -> str:
    peers = ",".join(str(peer) for peer in NODES if peer != node and dice.random() < 0.9)
    return "forged" if dice.random() < 0.05 else f"{job}/{node}/{peers}"


def _ask(world: World, dice: random.Random, method: RelayMethod, target: str, ticket: str) -> None:
    connection = world.connect(dice.choice("abcde"))
    if connection in world.open:
        world.ask(connection, method, target, ticket)


def _request(world: World, dice: random.Random) -> None:
    job, node = dice.choice(JOBS), dice.choice(NODES)
    ticket = _random_ticket(dice, job, node)
    match dice.randrange(9):
        case 0 | 1 | 2:
            _ask(world, dice, RelayMethod.REGISTER, f"node-{node}.{job}", ticket)
        case 3 | 4 | 5 | 6:
            _ask(world, dice, RelayMethod.CONNECT, f"node-{dice.choice(NODES)}.{job}:1", ticket)
        case _ if world.called:
            control, circuit = dice.choice(world.called[-2:])
            right = world.tickets.get(control, ticket)
            _ask(world, dice, RelayMethod.ACCEPT, circuit, right if dice.random() < 0.8 else ticket)


def _pongs_and_time(world: World, dice: random.Random) -> None:
    for control in list(world.controls):
        if dice.random() < 0.9:
            world.do(LineArrived(control, "PONG" if dice.random() < 0.95 else "?"))
    world.pass_time(dice.choice([0.0, 0.5, 0.5, RELAY_PING, RELAY_PING, RELAY_ACCEPT, 30.0]))


def _step(world: World, dice: random.Random) -> None:
    match dice.randrange(14):
        case 0:
            world.connect(dice.choice("abc"))
        case 1 if world.heads:
            world.do(HeadInvalid(dice.choice(list(world.heads)), "no request"))
        case 2 if world.open:
            world.drop(dice.choice(list(world.open)))
        case 3:
            _pongs_and_time(world, dice)
        case 4 if dice.random() < 0.3:
            both = frozenset(JOBS)
            world.do(JobsChanged(dice.choice([None, frozenset("j"), both, both])))
        case _:
            _request(world, dice)


@pytest.mark.parametrize("block", range(10))
def test_rules_hold_in_random_worlds(block: int) -> None:
    joins = 0
    for seed in range(300 * block, 300 * (block + 1)):
        dice = random.Random(seed)
        world = World(now=dice.uniform(0, 1e6))
        for _ in range(dice.randrange(20, 120)):
            _step(world, dice)
        joins += world.table.circuits_opened
        _check_ends(world, dice)
    assert joins > 300


def _check_ends(world: World, dice: random.Random) -> None:
    """With time and without answers, only joined circuits remain; without connections, nothing does."""
    world.pass_time(RELAY_HEAD + RELAY_SILENCE + 2 * RELAY_PING)
    assert set(world.open) == set(world.joined)
    assert world.table.circuits == len(world.joined) // 2
    assert world.table.deadline is None
    while world.open:
        world.drop(dice.choice(list(world.open)))
    fresh = vars(CircuitTable(world.limits, check, str))
    kept = {"_jobs", "_refusals", "_opened", "_check", "_new_id"}
    for name, value in vars(world.table).items():
        assert name in kept or value == fresh[name], name
