"""A provider is killed and nobody can take its place: the job is planned anew, or continued later."""

from __future__ import annotations

import pytest
from world import World, eventually, small_job, small_model

from ravnest.client.handle import JobHandle
from ravnest.client.submission import resume_job

OFTEN = "--checkpoint-minutes=0.02"
EPOCHS = 60
UPDATES = 12 * EPOCHS
PATIENCE = 300.0
"""Seconds: workers of several plans start one after the other."""


def saved(handle: JobHandle) -> int:
    """Wait for a checkpoint at the server; return its updates."""
    found = eventually(handle.view, lambda view: view.saved_update is not None, PATIENCE)
    assert found.saved_update is not None
    return found.saved_update


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cancelled_job_is_resumed(world: World) -> None:
    world.serve(OFTEN)
    world.provide("a")
    api = world.requester()
    handle = world.submit(api, small_job(epochs=EPOCHS))
    saved(handle)
    handle.cancel()
    start = saved(handle)
    again = JobHandle(resume_job(api, handle.id), api)
    assert again.result(into=small_model(), timeout=PATIENCE)
    assert again.losses().updates == tuple(range(start, UPDATES)), "nothing is repeated or left out"
