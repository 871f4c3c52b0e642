"""The three commands serve, provide and submit, each in a process of its own."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from world import DEADLINE, Process, World, small_data, small_job, small_model

import ravnest
from ravnest.plan.node_configs import read_node_configs
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobState, JobView

MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import ravnest

def job():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    return ravnest.Job(
        model=model, example_args=(torch.zeros(8, 6),), train_data=data, val_data=data,
        criterion=nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW, optimizer_params={"lr": 1e-2},
        epochs=5, batch_size=8, clusters=1, min_providers=2, name="learn",
    )
"""


def _spans_by_row(document: dict[str, Any]) -> dict[str, dict[str, set[str]]]:
    """Return the names of the spans of a trace by node and thread row."""
    events = document["traceEvents"]
    named = [each for each in events if each["name"] in ("process_name", "thread_name")]
    names = {(each["name"], each["pid"], each["tid"]): each["args"]["name"] for each in named}
    found: dict[str, dict[str, set[str]]] = {}
    for each in events:
        if each["ph"] == "X":
            node = found.setdefault(names["process_name", each["pid"], 0], {})
            node.setdefault(names["thread_name", each["pid"], each["tid"]], set()).add(each["name"])
    return found


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A world whose commands are started as a shell does."""
    with World(tmp_path_factory.mktemp("world"), starter=None) as made:
        yield made


@pytest.fixture(scope="module")
def crew(shared_world: World) -> Iterator[list[Process]]:
    """A server and two providers; interrupted at the end, they exit with 0."""
    server = shared_world.serve()
    providers = [shared_world.provide("first"), shared_world.provide("second")]
    yield providers
    for process in (*providers, server):
        assert process.end(signal.SIGINT) == 0, process.lines


@pytest.mark.slow
def test_a_model_is_trained_by_three_commands(shared_world: World, crew: list[Process]) -> None:
    world = shared_world
    (world.folder / "mine.py").write_text(MODULE)
    token = world.token(ApiRole.REQUESTER)
    submit = world.command("submit", "mine:job", f"--server={world.url}", f"--token={token}")
    assert submit.process.wait(DEADLINE) == 0, submit.lines
    assert not any("Traceback" in line for process in (*crew, submit) for line in process.lines)

    # The credential is stored, so that later commands need neither --server nor --token.
    listing = world.command("status", "--json")
    assert listing.process.wait(DEADLINE) == 0
    listing.said("learn")
    (view,) = [JobView.model_validate(each) for each in json.loads("".join(listing.lines))]
    assert (view.state, view.progress.updates) == (JobState.DONE, 60)
    assert {place.role for place in view.assignments} == {"Root", "Leaf"}
    assert view.progress.validation is not None

    fetch = world.command("fetch", view.id, "--out=got")
    assert fetch.process.wait(DEADLINE) == 0, fetch.lines
    model = small_model()
    inputs, labels = small_data().tensors
    before = torch.nn.functional.cross_entropy(model(inputs), labels)
    model.load_state_dict(torch.load(world.folder / "got" / "trained_state_dict.pt", weights_only=True))
    assert torch.nn.functional.cross_entropy(model(inputs), labels) < 0.7 * before

    trace = world.command("trace", view.id, "--output=trace.json")
    assert trace.process.wait(DEADLINE) == 0, trace.lines
    rows = _spans_by_row(json.loads((world.folder / "trace.json").read_text()))
    for title in ("cluster 0, stage 0", "cluster 0, stage 1"):
        (own,) = [spans for row, spans in rows.items() if row.startswith(title)]
        assert {"forward", "backward", "optimizer step"} <= own["compute"]
        links = {row: spans for row, spans in own.items() if row.startswith(("to node_", "from node_"))}
        assert "Forward" in set().union(*links.values()), own

    nodes = world.command("nodes", "--write")
    assert nodes.process.wait(DEADLINE) == 0, nodes.lines
    assert len(read_node_configs(world.folder / "node_data" / "node_configs.json")) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("crew")
def test_two_clusters_train_one_job_and_the_results_are_one_model(shared_world: World) -> None:
    api = shared_world.requester()
    handle = shared_world.submit(api, small_job(clusters=2, min_providers=2, epochs=4))
    model = small_model()
    state = handle.result(into=model, timeout=DEADLINE)
    assert list(state) == list(model.state_dict())
    assert {place.cluster for place in handle.view().assignments} == {0, 1}
    losses = handle.losses()
    # 96 samples are twelve batches; the clusters share them by the measured speed of their nodes.
    assert 4 <= len(losses.losses) < 4 * 12
    assert len(losses.losses) % 4 == 0


@pytest.mark.slow
def test_a_requester_serves_itself_and_sends_a_loss_of_its_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world.folder)

    def smoothed(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chances = scores.log_softmax(1)
        return -(0.9 * chances.gather(1, labels[:, None]).mean() + 0.1 * chances.mean())

    model = small_model()
    with ravnest.submit(
        model=model,
        example_args=(torch.zeros(8, 6),),
        train_data=small_data(),
        criterion=smoothed,
        optimizer_params={"lr": 1e-2},
        epochs=5,
        batch_size=8,
        min_providers=2,
        serve_here=True,
    ) as handle:
        assert handle.invitation is not None
        for name in ("a", "b"):
            world.command(*handle.invitation.split()[1:], f"--name={name}", f"--folder={name}", "--once")
        state = handle.result(into=model, timeout=DEADLINE)
        losses = handle.losses().losses
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert len(losses) == 60
    assert sum(losses[-12:]) < sum(losses[:12])
