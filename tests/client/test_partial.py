"""Weights of jobs that are not done, from their checkpoints at the server."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from job_server import JobServer, small_job
from torch import nn
from typer.testing import CliRunner

from ravnest.cli.app import app
from ravnest.client.handle import JobHandle
from ravnest.client.submission import upload_job
from ravnest.errors import ServerRefusedError
from ravnest.jobs.job import Job


@pytest.fixture
def server(shared_server: JobServer) -> Iterator[JobServer]:
    yield shared_server
    shared_server.cancel_jobs()


def handle_of(server: JobServer, job: Job) -> JobHandle:
    api = server.requester.api()
    return JobHandle(upload_job(api, job), api)


def with_frozen_layer() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(requires_grad=False)
    return model


def test_a_job_that_trains_or_was_cancelled_delivers_its_newest_checkpoint(
    server: JobServer, tmp_path: Path
) -> None:
    model = with_frozen_layer()
    with handle_of(server, small_job(model=model, epochs=3)) as handle:
        with pytest.raises(ServerRefusedError, match="does not train yet: it is submitted"):
            handle.partial()
        with server.provider() as provider:
            provider.take_assignment()
            provider.report("training")
            with pytest.raises(ServerRefusedError, match="then one about every 10 minutes"):
                handle.partial()
            provider.save_checkpoint(2, change=1.0)
            provider.save_checkpoint(4, change=2.0)
            mine = with_frozen_layer()
            found = handle.partial(into=mine, folder=tmp_path)
            assert (found.update, found.epoch, found.epochs, found.clusters) == (4, 1, 3, (0,))
            assert str(found).startswith("update 4 in epoch 1 of 3, 0:0")
            before = model.state_dict()
            assert list(found.state_dict) == list(before)
            for name, tensor in mine.state_dict().items():
                is_frozen = name.startswith("0.")
                assert torch.equal(tensor, before[name] + (0 if is_frozen else 2)), name
            assert sorted(path.name for path in tmp_path.iterdir()) == ["partial_state_dict.pt"]
            handle.cancel()
        assert torch.equal(handle.partial().state_dict["3.bias"], found.state_dict["3.bias"])


def test_of_several_clusters_the_mean_is_fetched(
    server: JobServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAVNEST_HOME", str(tmp_path / "home"))
    server.remember()
    job = small_job(clusters=2, min_providers=2)
    with handle_of(server, job) as handle, ExitStack() as stack:
        providers = [stack.enter_context(server.provider(f"pc{n}", 7000 + n)) for n in range(2)]
        for each in providers:
            each.take_assignment()
        for each in providers:
            each.report("fetched")
        for each, change, samples in zip(providers, (1.0, 5.0), (12, 4), strict=True):
            each.report("training")
            each.save_checkpoint(3, change, samples=samples)
        folder = tmp_path / "fetched"
        given = ["fetch", handle.id, "--partial", "--json", "--quiet", "--out", str(folder)]
        answer = CliRunner().invoke(app, [*given, "--server", server.url])
        assert answer.exit_code == 0, answer.output
        report = json.loads(answer.stdout)
        assert (report["update"], report["epoch"], report["clusters"]) == (3, 1, [0, 1])
        state = torch.load(report["path"], weights_only=True)
        for name, tensor in job.model.state_dict().items():  # 3/4 of 1 and 1/4 of 5
            torch.testing.assert_close(state[name], tensor + 2)


def test_a_moving_average_takes_the_place_of_the_weights(server: JobServer) -> None:
    job = small_job(ema=0.9)
    with handle_of(server, job) as handle, server.provider() as provider:
        provider.take_assignment()
        provider.report("training")
        provider.save_checkpoint(2, change=1.0, average=0.5)
        state = handle.partial().state_dict
    for name, tensor in job.model.state_dict().items():
        assert torch.equal(state[name], tensor + 0.5), name
