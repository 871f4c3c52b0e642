"""A server that is killed and restarted keeps its state, and training continues meanwhile."""

from __future__ import annotations

import signal

import pytest
from world import DEADLINE, World, eventually, providers, small_job, small_model

from ravnest.errors import ServerUnreachableError
from ravnest.schemas.jobs import JobState, JobView

EPOCHS = 100
"""Enough to outlast the restart of the server."""


def _assignments(job: JobView) -> list[tuple[str, int, str]]:
    return [(place.provider, place.node, place.role) for place in job.assignments]


@pytest.mark.slow
def test_training_continues_without_the_server_and_its_state_survives(world: World) -> None:
    world.serve()
    for name in ("a", "b"):
        world.provide(name)
    api = world.requester()
    done = world.submit(api, small_job(min_providers=2, epochs=1))
    done.result(timeout=DEADLINE)
    handle = world.submit(api, small_job(min_providers=2, epochs=EPOCHS))
    waiting = world.submit(api, small_job(epochs=1))
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
    assert _assignments(after[handle.id]) == _assignments(before[handle.id])
    assert {name: view.id for name, view in providers(api).items()} == crew

    state = handle.result(into=small_model(), timeout=DEADLINE)
    assert state
    view = handle.view()
    assert (view.state, view.progress.updates) == (JobState.DONE, 12 * EPOCHS)
    assert len(handle.losses().losses) == 12 * EPOCHS, "losses of the outage are reported later"
    starts = [e for e in handle.events() if e.kind == "job" and e.after == "training" != e.before]
    assert len(starts) == 1, "the job was started again"
    waiting.result(timeout=DEADLINE)  # it was queued before the restart
