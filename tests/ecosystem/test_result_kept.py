"""A trained result survives the death of the server and of the provider that holds it."""

from __future__ import annotations

import signal

import pytest
from world import DEADLINE, World, small_job, small_model

EPOCHS = 60
"""Enough to outlast the death of the server."""


@pytest.mark.slow
def test_a_result_survives_a_kill_of_the_server_and_of_its_provider(world: World) -> None:
    world.serve()
    provider = world.provide("a")
    handle = world.submit(world.requester(), small_job(epochs=EPOCHS))
    provider.said("starts training")
    assert world.server is not None
    world.server.end(signal.SIGKILL)
    provider.said("the trained stages are kept here and sent again")
    provider.end(signal.SIGKILL)

    world.serve(port=world.port)
    options = ["--name=a", f"--folder={world.folder / 'a'}", "--cores=1"]
    again = world.command("provide", f"--server={world.url}", *options)
    again.said("sends the result of an earlier run of this provider")
    assert handle.result(into=small_model(), timeout=DEADLINE)
    assert not any("starts training" in line for line in again.lines)
    assert len(handle.losses().losses) == 12 * EPOCHS
