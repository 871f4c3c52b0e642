"""Several jobs in the queue, and providers that join and leave."""

from __future__ import annotations

import signal

import pytest
from torch import nn
from world import DEADLINE, LONG, World, eventually, providers, small_job

from ravnest.errors import JobEndedError
from ravnest.schemas.jobs import JobState


@pytest.mark.slow
def test_two_jobs_queue_and_a_provider_serves_one_at_a_time(world: World) -> None:
    world.serve()
    world.provide("only")
    ann, bob = world.requester("ann"), world.requester("bob")
    first = world.submit(ann, small_job(epochs=LONG))
    eventually(first.state, lambda state: state is JobState.TRAINING)
    second = world.submit(bob, small_job())
    waiting = eventually(second.view, lambda view: "waits" in view.reason)
    assert waiting.state is JobState.SUBMITTED
    assert providers(ann)["only"].job == first.id

    first.cancel()
    second.result(timeout=DEADLINE)
    with pytest.raises(JobEndedError, match="cancelled by ann"):
        first.result(timeout=DEADLINE)
    orders = [event.after for event in second.events() if event.kind == "job"]
    assert list(dict.fromkeys(orders)) == ["submitted", "planned", "shipping", "training", "done"]


@pytest.mark.slow
def test_a_job_that_does_not_fit_says_what_is_missing_and_waits_for_who_can_help(world: World) -> None:
    world.serve()
    world.provide("small", "--ram=0.03")
    api = world.requester()
    wide = nn.Sequential(nn.Linear(6, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.Linear(1500, 3))
    patient = world.submit(api, small_job(model=wide, epochs=1))
    view = eventually(patient.view, lambda view: "needs" in view.reason)
    assert view.state is JobState.SUBMITTED
    assert "needs 54 MB" in view.reason
    assert "1 provider offers 27 MB" in view.reason

    hasty = world.submit(api, small_job(model=wide, on_insufficient="fail"))
    with pytest.raises(JobEndedError, match="needs"):
        hasty.result(timeout=DEADLINE)
    world.provide("large", "--ram=0.5")
    patient.result(timeout=DEADLINE)


@pytest.mark.slow
def test_a_provider_that_leaves_while_idle_is_gone_from_the_list_and_the_plans(world: World) -> None:
    world.serve()
    leaving, staying = world.provide("leaving"), world.provide("staying")
    api = world.requester()
    offered = eventually(lambda: providers(api), lambda found: len(found) == 2)["leaving"].seen
    # After a heartbeat, it waits for jobs; before, an interrupt ends it at once.
    eventually(lambda: providers(api), lambda found: found["leaving"].seen > offered)
    assert leaving.end(signal.SIGINT) == 0
    found = eventually(lambda: providers(api), lambda found: found["leaving"].state == "lost")
    assert "left" in found["leaving"].reason
    handle = world.submit(api, small_job())
    handle.result(timeout=DEADLINE)
    assert [place.provider_name for place in handle.view().assignments] == ["staying"]
    assert staying.process.poll() is None
