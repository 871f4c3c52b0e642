"""Providers behind NAT, on IPv6 only and without restriction train a job, whatever the network does."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from internet import Internet, missing
from internet_world import InternetWorld

from ravnest.schemas.jobs import JobState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(600),
]

HOME_MEGABITS = 2
"""Rate of the homes: slow enough that the job outlasts the faults."""
UPDATES = 100
OUTAGE = 30.0
"""Seconds for which a host is offline."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[InternetWorld]:
    with Internet() as internet, InternetWorld(tmp_path, internet) as made:
        yield made


def test_a_job_survives_nat_flushes_an_outage_and_a_killed_server(world: InternetWorld) -> None:
    internet = world.internet
    for home in internet.homes:
        home.host.limit(HOME_MEGABITS)
    server = world.serve()
    crew = world.provide_everywhere()
    for process in crew.values():
        process.said("offers")
    views = world.providers()
    assert {name: view.reachability for name, view in views.items()} == {
        "home0": "relayed",
        "home1": "relayed",
        "open": "direct",
        "six": "direct",
    }, views

    submit = world.submit(providers=4, updates=UPDATES)
    world.await_updates(10)
    view = world.job()
    assert view is not None
    assert sorted(place.provider_name for place in view.assignments) == sorted(crew)
    for home in internet.homes:
        home.flush()
    world.await_updates(10)

    with internet.homes[0].host.offline():
        time.sleep(OUTAGE)  # the duration of the fault
    world.await_updates(10)

    server.end(signal.SIGKILL)
    world.serve()
    assert submit.process.wait(300) == 0, submit.lines
    view = world.job()
    assert view is not None
    assert view.state is JobState.DONE, view
    assert view.progress.updates == UPDATES
    assert world.trained()
