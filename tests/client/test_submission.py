"""Submitting: what reaches the server, and a real server's answers where no provider is there."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from fake_server import JOB, FakeServer
from torch import nn

import ravnest
from ravnest.client.server_selection import choose
from ravnest.client.submission import hand_in, open_job, submit_job
from ravnest.errors import JobEndedError, JobError, ServerUnreachableError
from ravnest.http.api import ApiClient
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobSpec, JobState
from ravnest.server.http.runner import RunningServer, serve

ROOT = Path(__file__).parents[2]


def job(**settings: object) -> ravnest.Job:
    torch.manual_seed(0)
    given = {
        "model": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        "example_args": (torch.rand(4, 4),),
        "train_data": (torch.rand(20, 4), torch.randint(3, (20,))),
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD,
        "optimizer_params": {"lr": 0.1},
        **settings,
    }
    return ravnest.Job(**given)  # type: ignore[arg-type]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAVNEST_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAVNEST_SERVER", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def running(home: Path) -> Iterator[RunningServer]:
    with serve(folder=home / "server") as server:
        yield server


def test_all_that_a_job_names_is_sent_before_it() -> None:
    server = FakeServer()
    api = ApiClient("http://127.0.0.1:1", transport=httpx.MockTransport(server.answer))
    told: list[tuple[str, int, int]] = []
    assert hand_in(api, job(epochs=3), lambda *what: told.append(what)) == JOB
    spec = JobSpec.model_validate(server.specs[0])
    assert spec.training.epochs == 3
    named = [spec.model.units, spec.model.weights]
    named += [piece.artifact for piece in (*spec.train.inputs, *spec.train.labels)]
    assert {artifact.sha256 for artifact in named} == set(server.files.whole)
    assert server.asked[-1] == "POST /api/jobs"
    assert told[-1] == ("uploading", *[sum(map(len, server.files.whole.values()))] * 2)
    before = len(server.asked)
    hand_in(api, job(epochs=5))
    assert server.asked[before:] == ["POST /api/artifacts/missing", "POST /api/jobs"]


def test_a_job_that_cannot_be_packed_is_not_sent() -> None:
    server = FakeServer()
    api = ApiClient("http://127.0.0.1:1", transport=httpx.MockTransport(server.answer))
    with pytest.raises(JobError):
        hand_in(api, job(batch_size=0))
    assert server.asked == []


def test_without_a_server_nothing_is_packed(home: Path) -> None:
    with FakeServer().running() as server:
        choose(server.url, "rvn..s")
    with pytest.raises(ServerUnreachableError, match="nothing answers at"):
        submit_job(job())


def test_a_real_server_tells_why_a_job_has_no_model(running: RunningServer, home: Path) -> None:
    made = job(on_insufficient="fail")
    with ravnest.submit(
        made.model,
        made.example_args,
        made.train_data,
        made.criterion,
        torch.optim.SGD,
        {"lr": 0.1},
        epochs=2,
        on_insufficient="fail",
        name="hopeless",
        server=running.url,
        token=running.token(ApiRole.REQUESTER),
    ) as handle:
        with pytest.raises(JobEndedError, match=rf"job {handle.id} failed: .*provider"):
            handle.result(timeout=60)
        view = handle.view()
        assert (view.name, view.state, view.progress.epochs) == ("hopeless", JobState.FAILED, 2)
        assert [event.after for event in handle.events()][-1] == JobState.FAILED
        assert handle.losses().losses == ()
    assert [path.name for path in home.iterdir() if path.name.startswith("ravnest")] == []


def test_a_waiting_job_is_found_again_and_cancelled(running: RunningServer) -> None:
    token = running.token(ApiRole.REQUESTER)
    with submit_job(job(), server=running.url, token=token) as handle:
        assert handle.state() is JobState.SUBMITTED
        assert handle.invitation is None
        with pytest.raises(TimeoutError, match="is still submitted"):
            handle.wait(timeout=0.01)
    with open_job(handle.id) as again:
        again.cancel()
        with pytest.raises(JobEndedError, match="was cancelled"):
            again.result()
        again.cancel()
        assert again.state() is JobState.CANCELLED


SCRIPT = """
import torch
from torch import nn
import ravnest
data = (torch.rand(20, 4), torch.randint(3, (20,)))
example = (torch.rand(4, 4),)
handle = ravnest.submit(nn.Linear(4, 3), example, data, nn.CrossEntropyLoss(), serve_here=True)
assert handle.state() == "submitted"
print(handle.invitation)
"""


def test_a_script_that_serves_and_forgets_ends(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "RAVNEST_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ravnest provide --server http://127.0.0.1:")


def test_over_tls_only_the_server_of_the_token_is_talked_to(home: Path) -> None:
    with serve(folder=home / "server", tls=True) as server:
        token = server.token(ApiRole.REQUESTER)
        with submit_job(job(), server=server.url, token=token) as handle:
            assert handle.state() is JobState.SUBMITTED
        assert server.url.startswith("https://127.0.0.1:")
    with serve(folder=home / "other", port=int(server.url.rpartition(":")[2]), tls=True):
        with pytest.raises(ServerUnreachableError, match="is not the one that the token names"):
            open_job(handle.id).view()
        with pytest.raises(ServerUnreachableError, match="is not the one that the token names"):
            submit_job(job(), server=server.url, token=f"{token}x")
