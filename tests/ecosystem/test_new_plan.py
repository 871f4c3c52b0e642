"""A provider is killed and nobody can take its place: the job is planned anew, or continued later."""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from world import World, eventually, providers, small_data, small_job, small_model

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


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_data_of_a_cluster_that_dissolves_moves_to_the_other_nodes(world: World) -> None:
    world.serve(OFTEN)
    crew = {name: world.provide(name) for name in ("a", "b", "c", "d")}
    settings: dict[str, Any] = {"clusters": 2, "on_insufficient": "fail", "epochs": 30}
    job = replace(small_job(min_providers=4, **settings), train_data=small_data(1600))
    api = world.requester()
    eventually(lambda: providers(api), lambda found: len(found) == 4)
    handle = world.submit(api, job)
    # Without a checkpoint of each cluster at the server, the epoch would begin anew.
    eventually(lambda: saved_clusters(world), lambda found: found == {0, 1}, PATIENCE)
    leaves = {each.cluster: each for each in handle.view().assignments if each.role == "Leaf"}
    os.killpg(crew[leaves[max(leaves)].provider_name].process.pid, signal.SIGKILL)

    again = eventually(handle.view, lambda view: len(view.assignments) == 3, PATIENCE)
    assert {each.cluster for each in again.assignments} == {0, 1}
    shares = eventually(lambda: roots(world, handle.id), lambda found: len(found) == 2, PATIENCE)
    assert handle.result(into=small_model(), timeout=2 * PATIENCE)
    said = [each.reason for each in handle.events() if each.kind == "recovery"]
    assert any("planned anew without node_" in text for text in said), said
    (start,) = (text for text in said if text.startswith("training continues from update "))
    assert "the rest of the epoch in progress is divided between the new clusters" in start
    rest = shares[0]["remainder"]
    assert rest["epoch"] == shares[1]["remainder"]["epoch"]
    whole = settings["epochs"] - 1 - rest["epoch"]
    updates = math.ceil(rest["samples"] / 8) + whole * math.ceil(shares[0]["samples"] / 8)
    first = int(start.split(";")[0].split(" ")[4])
    assert handle.losses().updates[-1] + 1 == first + updates, "the rest, and then whole epochs"


def saved_clusters(world: World) -> set[int]:
    """Return the clusters of which all stages have uploaded the same checkpoint."""
    query = (
        "SELECT cluster FROM checkpoints GROUP BY cluster, attempt, update_number, phase HAVING "
        "count(*) = (SELECT count(*) FROM assignments WHERE cluster = checkpoints.cluster)"
    )
    path = world.folder / "ravnest_server" / "server.sqlite"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return {cluster for (cluster,) in connection.execute(query)}


def roots(world: World, job: str) -> list[dict[str, Any]]:
    """Return the shares of the data of the Roots of a job's second plan, by cluster."""
    paths = world.folder.glob(f"*/jobs/{job}-p1-*/assignment.json")
    found = [json.loads(path.read_text()) for path in paths]
    found.sort(key=lambda each: each["node_spec"]["cluster"])
    return [each["train"] for each in found if each["train"]["inputs"]]


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
