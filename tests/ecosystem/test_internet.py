"""Providers behind NAT, on IPv6 only and without restriction train a job, whatever the network does."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked_command import CommandStarter
from internet import Internet, missing
from internet_world import PATIENCE, InternetWorld
from world import eventually

from ravnest.schemas.jobs import JobState
from ravnest.types import Address

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(600),
]

HOME_MEGABITS = 0.25
"""Rate of the homes: an update takes 0.26 s at least, so that the job outlasts the faults."""
UPDATES = 220
RELAY_PORTS = (7201, 7202)
NODE_PORT = 21_000
LONG = 1_000_000
"""Updates of a job that does not end before the test."""


@pytest.fixture
def world(tmp_path: Path, starter: CommandStarter) -> Iterator[InternetWorld]:
    with Internet() as internet, InternetWorld(tmp_path, internet, starter) as made:
        yield made


@pytest.mark.parametrize("outage", [12.0, pytest.param(30.0, marks=pytest.mark.full)])
def test_a_job_survives_nat_flushes_an_outage_a_new_address_and_a_killed_server(
    world: InternetWorld, outage: float
) -> None:
    """One provider joins only when the job waits for it. ``outage``: seconds without a network."""
    internet = world.internet
    for home in internet.homes:
        home.host.limit(HOME_MEGABITS)
    server = world.serve()
    hosts = {"home1": internet.homes[1].host, "open": internet.open, "six": internet.six}
    for process in [world.provide(name, host) for name, host in hosts.items()]:
        process.said("offers")
    views = world.providers()
    assert {name: view.reachability for name, view in views.items()} == {
        "home1": "relayed",
        "open": "direct",
        "six": "direct",
    }, views

    submit = world.submit(providers=4, updates=UPDATES)
    submit.said("waits for 1 more provider")
    world.provide("home0", internet.homes[0].host).said("relayed")
    world.await_updates(10)
    view = world.job()
    assert view is not None
    assert sorted(place.provider_name for place in view.assignments) == ["home0", *sorted(hosts)]
    for home in internet.homes:
        home.flush()
    world.await_updates(10)

    first, second = (home.host for home in internet.homes)
    with first.offline():
        second.renumber(second.addresses[0], "192.168.1.77")
        time.sleep(outage)  # the duration of the fault
    world.await_updates(10)

    view = world.job()
    assert view is not None
    assert view.progress.updates < UPDATES, "the server must die while the job trains"
    server.end(signal.SIGKILL)
    world.serve()
    assert submit.process.wait(PATIENCE) == 0, submit.lines
    view = world.job()
    assert view is not None
    assert view.state is JobState.DONE, view
    assert view.progress.updates == UPDATES
    trained, expected = world.trained(), world.expected(UPDATES)
    assert list(trained) == list(expected)
    assert all(torch.equal(trained[name], expected[name]) for name in expected), "to the last bit"


def test_links_leave_a_relay_that_dies_and_then_the_last_relay(world: InternetWorld) -> None:
    internet = world.internet
    first, second = internet.homes
    world.serve("--no-relay")
    relays = {port: world.relay(port) for port in RELAY_PORTS}
    world.provide("home0", first.host).said("relayed")
    world.provide("home1", second.host, f"--listen=:{NODE_PORT}").said("relayed")
    world.submit(providers=2, updates=LONG)
    world.await_updates(10)

    used = max(RELAY_PORTS, key=lambda port: _connections(world, port))
    (other,) = set(RELAY_PORTS) - {used}
    registered = _connections(world, other)
    relays[used].end(signal.SIGKILL)
    world.await_updates(10)
    eventually(lambda: _connections(world, other), lambda count: count > registered, PATIENCE)

    assert not _direct(world)
    second.forward(NODE_PORT)
    eventually(lambda: _direct(world), bool, PATIENCE)
    eventually(lambda: _connections(world, other), lambda count: count == registered)
    world.await_updates(10)


def _connections(world: InternetWorld, port: int) -> int:
    """Return the number of connections of a relay."""
    return sum(local.port == port for local, _ in world.internet.relay.connections())


def _direct(world: InternetWorld) -> bool:
    """Return True if the first home is connected to the forwarded port of the second one."""
    first, second = world.internet.homes
    return Address(second.public, NODE_PORT) in (peer for _, peer in first.host.connections())


@pytest.mark.full
def test_a_provider_that_is_a_minute_late_and_slow_is_waited_for(world: InternetWorld) -> None:
    internet = world.internet
    slow = internet.homes[0].host
    slow.limit(1)
    world.serve()
    world.provide("open", internet.open)
    submit = world.submit(providers=2, updates=20)
    submit.said("waits for 1 more provider")
    time.sleep(60)  # how late it is
    world.provide("home0", slow)
    assert submit.process.wait(PATIENCE) == 0, submit.lines
    view = world.job()
    assert view is not None
    assert (view.state, view.progress.updates) == (JobState.DONE, 20)
    assert world.trained()
