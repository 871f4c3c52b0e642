"""The server dies, and nothing is lost."""

from __future__ import annotations

import signal

import pytest
from world import World, eventually, providers, small_job, small_model

from ravnest.errors import ServerUnreachableError
from ravnest.schemas.jobs import JobState, JobView

EPOCHS = 120
"""Enough to train on while the server is away."""


def _crew(job: JobView) -> list[tuple[str, int, str]]:
    return [(place.provider, place.node, place.role) for place in job.places]


@pytest.mark.slow
def test_training_goes_on_without_the_server_and_its_state_is_what_it_was(world: World) -> None:
    world.serve()
    for name in ("a", "b"):
        world.provide(name)
    api = world.requester()
    done = world.submit(api, small_job(min_providers=2))
    done.result(timeout=120)
    handle = world.submit(api, small_job(min_providers=2, epochs=EPOCHS))
    eventually(handle.progress, lambda progress: progress.updates > 30)
    before = {view.id: view for view in api.get("/api/jobs", list[JobView])}
    crew = {name: view.id for name, view in providers(api).items()}

    assert world.server is not None
    world.server.end(signal.SIGKILL)
    with pytest.raises(ServerUnreachableError):
        api.get("/api/health", object)

    world.serve(port=world.port)
    after = {view.id: view for view in api.get("/api/jobs", list[JobView])}
    assert {job: view.state for job, view in after.items()} == {
        job: view.state for job, view in before.items()
    }
    assert after[done.id] == before[done.id]
    assert _crew(after[handle.id]) == _crew(before[handle.id])
    assert {name: view.id for name, view in providers(api).items()} == crew

    state = handle.result(into=small_model(), timeout=120)
    assert state
    view = handle.view()
    assert (view.state, view.progress.updates) == (JobState.DONE, 12 * EPOCHS)
    assert len(handle.losses().losses) == 12 * EPOCHS, "losses from while it was away are told later"
    starts = [e for e in handle.events() if e.kind == "job" and e.after == "training" != e.before]
    assert len(starts) == 1, "it was not started again"


@pytest.mark.slow
def test_a_job_that_waits_is_planned_after_a_restart(world: World) -> None:
    world.serve()
    api = world.requester()
    handle = world.submit(api, small_job())
    eventually(handle.view, lambda view: "wait" in view.reason or "provider" in view.reason)
    assert world.server is not None
    world.server.end(signal.SIGKILL)
    world.serve(port=world.port)
    world.provide("late")
    handle.result(timeout=120)
