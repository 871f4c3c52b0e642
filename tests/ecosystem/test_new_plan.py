"""A provider is killed and nobody can take its place: the job is planned anew, or continued later."""

from __future__ import annotations

import os
import signal

import pytest
from world import World, eventually, small_job, small_model

from ravnest.client.handle import JobHandle
from ravnest.client.submission import resume_job

OFTEN = "--checkpoint-minutes=0.02"
UPDATES_PER_EPOCH = 12
EPOCHS = 120
"""Epochs that outlast the first checkpoint, which is taken after 2 s, on a fast machine too."""
ALONE = 3 * EPOCHS
"""The same for one provider, which waits for nobody."""
PATIENCE = 300.0
"""Seconds: workers of several plans start one after the other."""


def saved(handle: JobHandle) -> int:
    """Wait for a checkpoint at the server; return its updates."""
    found = eventually(handle.view, lambda view: view.saved_update is not None, PATIENCE)
    assert found.saved_update is not None
    return found.saved_update


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_goes_on_with_the_providers_that_remain(world: World) -> None:
    world.serve(OFTEN)
    crew = {name: world.provide(name) for name in ("a", "b", "c")}
    handle = world.submit(world.requester(), small_job(min_providers=3, epochs=EPOCHS))
    first = saved(handle)
    before = {each.role: each.provider_name for each in handle.view().assignments}
    assert len(before) == 3
    os.killpg(crew[before["Stem"]].process.pid, signal.SIGKILL)

    again = eventually(handle.view, lambda view: len(view.assignments) == 2, PATIENCE)
    names = {each.provider_name for each in again.assignments}
    assert names == {before["Root"], before["Leaf"]}
    assert handle.result(into=small_model(), timeout=PATIENCE)
    updates = UPDATES_PER_EPOCH * EPOCHS
    assert handle.view().progress.updates == updates
    assert handle.losses().updates == tuple(range(updates)), "no update is missing"
    said = [each.reason for each in handle.events() if each.kind == "recovery"]
    assert any("planned anew without node_" in text for text in said), said
    (start,) = (text for text in said if text.startswith("training continues from update "))
    assert int(start.rsplit(" ", 1)[1]) >= first, "not from the beginning"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cancelled_job_is_resumed(world: World) -> None:
    world.serve(OFTEN)
    world.provide("a")
    api = world.requester()
    handle = world.submit(api, small_job(epochs=ALONE))
    saved(handle)
    handle.cancel()
    start = saved(handle)
    again = JobHandle(resume_job(api, handle.id), api)
    assert again.result(into=small_model(), timeout=PATIENCE)
    assert again.losses().updates == tuple(range(start, UPDATES_PER_EPOCH * ALONE)), (
        "nothing is repeated or left out"
    )
