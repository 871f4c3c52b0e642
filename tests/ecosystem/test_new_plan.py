"""A provider is killed and nobody can take its place: the job is planned anew, or continued later."""

from __future__ import annotations

import os
import signal

import pytest
from world import World, events, eventually, small_job, small_model

from ravnest.schemas.jobs import JobState

OFTEN = "--checkpoint-minutes=0.02"
EPOCHS = 400
"""Enough that training outlasts the loss."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_goes_on_with_the_providers_that_remain(world: World) -> None:
    world.serve(OFTEN)
    crew = {name: world.provide(name) for name in ("a", "b", "c")}
    api = world.requester()
    handle = world.submit(api, small_job(min_providers=3, epochs=EPOCHS))
    eventually(handle.progress, lambda progress: progress.updates > 50)
    assert len(handle.view().assignments) == 3
    victim = next(each for each in handle.view().assignments if each.role == "Stem").provider_name
    os.killpg(crew[victim].process.pid, signal.SIGKILL)

    again = eventually(handle.view, lambda view: len(view.assignments) == 2)
    assert victim not in {each.provider_name for each in again.assignments}
    state = handle.result(into=small_model(), timeout=240)
    assert state
    view = handle.view()
    assert (view.state, view.progress.updates) == (JobState.DONE, 12 * EPOCHS)
    said = [each.reason for each in events(api) if each.kind == "recovery"]
    assert any("planned anew without node_" in text for text in said), said
    assert any(text.startswith("training continues from update ") for text in said), said
    updates = handle.losses().updates
    assert sorted(updates) == list(range(12 * EPOCHS)), "no update is missing"
