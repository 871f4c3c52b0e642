"""A job from its requester's side: waiting, the trained model, and how it can end without one."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from fake_server import JOB, FakeServer, view
from node_files import node_file
from torch import nn

from ravnest.client import handle as handles
from ravnest.client.handle import JobHandle
from ravnest.errors import JobEndedError, ServerRefusedError
from ravnest.http.api import ApiClient
from ravnest.http.retry import RetryPolicy
from ravnest.http.transfer import artifact_of
from ravnest.schemas.jobs import EventView, JobResult, JobState, ResultFile
from ravnest.split import StageModule, split
from ravnest.store.trained import save_trained


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def handle(server: FakeServer) -> Iterator[JobHandle]:
    retry = RetryPolicy(tries=1)
    api = ApiClient(
        "http://127.0.0.1:1", "c", transport=httpx.MockTransport(server.answer), retry=retry
    )
    with JobHandle(JOB, api, clock=iter(range(100)).__next__) as made:
        yield made


@pytest.fixture
def trained(server: FakeServer, tmp_path: Path) -> Two:
    """A model whose two trained stages the server has."""
    model = Two()
    made = split(model, torch.rand(4, 3), stages=2)
    for number, stage in enumerate(made.stages):
        module = StageModule(stage.spec, stage.tensors)
        save_trained(tmp_path / "server", node_file(number, cluster=1), module, run="run")
    paths = sorted((tmp_path / "server" / "cluster_1").iterdir())
    files = tuple(ResultFile(name=path.name, artifact=artifact_of(path)) for path in paths)
    server.files.whole = {
        file.artifact.sha256: path.read_bytes() for file, path in zip(files, paths, strict=True)
    }
    server.result = JobResult(job=JOB, cluster=1, files=files)
    server.views = [view(JobState.DONE)]
    return model


def test_what_the_server_knows(server: FakeServer, handle: JobHandle) -> None:
    server.views = [view(JobState.TRAINING, updates=7, loss=0.5)]
    happened = EventView(
        sequence=4, time=1.0, kind="job", subject=JOB, before="planned", after="shipping", reason="x"
    )
    server.events = [happened]
    assert handle.id == JOB
    assert handle.state() is JobState.TRAINING
    assert (handle.progress().updates, handle.progress().loss) == (7, 0.5)
    assert handle.events() == [happened]
    assert handle.events(after=4) == []
    assert handle.losses().losses == (2.0, 1.0)
    assert handle.losses(1).losses == (1.0,)
    handle.cancel()
    assert server.asked[-1] == f"POST /api/jobs/{JOB}/cancel"
    assert server.credentials == {"Bearer c"}
    assert repr(handle) == "JobHandle('job-1' at http://127.0.0.1:1)"


def test_waiting_tells_each_news_once(server: FakeServer, handle: JobHandle) -> None:
    training = view(JobState.TRAINING, changed=2.0)
    states = [view(JobState.SUBMITTED), training, training, view(JobState.DONE, changed=3.0)]
    server.views = list(states)
    seen: list[JobState] = []
    assert handle.wait(on_change=lambda news: seen.append(news.state)) == states[-1]
    assert seen == [JobState.SUBMITTED, JobState.TRAINING, JobState.DONE]


def test_waiting_ends_at_the_deadline(server: FakeServer, handle: JobHandle) -> None:
    server.views = [view(JobState.SUBMITTED, "no providers")] * 9  # the clock ticks at each look
    with pytest.raises(TimeoutError, match="job-1 is still submitted after 3 s: no providers"):
        handle.wait(timeout=3)
    assert len(server.views) == 7


def test_waiting_outlasts_a_server_that_comes_back(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(handles, "RESTART", RetryPolicy(tries=20, sleep=pauses.append))
    server.views = [view(JobState.TRAINING), view(JobState.DONE)]
    gone = iter([False, *[True] * 10])

    def answer(request: httpx.Request) -> httpx.Response:
        if next(gone, False):
            raise httpx.ConnectError("refused")
        return server.answer(request)

    api = ApiClient(
        "http://127.0.0.1:1", transport=httpx.MockTransport(answer), retry=RetryPolicy(tries=1)
    )
    assert JobHandle(JOB, api).wait().state is JobState.DONE
    assert len(pauses) == 10


def test_the_trained_model_comes_home(handle: JobHandle, trained: Two, tmp_path: Path) -> None:
    mine = Two()
    shown: list[tuple[int, int]] = []
    state = handle.result(into=mine, folder=tmp_path / "out", progress=lambda *p: shown.append(p))
    expected = trained.state_dict()
    assert list(state) == list(expected)
    for found in (state, mine.state_dict()):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["trained_state_dict.pt"]
    assert shown[-1][0] == shown[-1][1] > 0


def test_without_a_folder_nothing_is_left(
    handle: JobHandle, trained: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    assert list(handle.result()) == list(trained.state_dict())
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (JobState.FAILED, "job job-1 failed: node_2 is lost"),
        (JobState.CANCELLED, "job job-1 was cancelled: node_2 is lost"),
    ],
)
def test_a_job_without_a_model_says_why(
    server: FakeServer, handle: JobHandle, state: JobState, says: str
) -> None:
    server.views = [view(JobState.TRAINING), view(state, "node_2 is lost")]
    with pytest.raises(JobEndedError, match=says):
        handle.result()


def test_a_refusal_is_the_servers_sentence(server: FakeServer, handle: JobHandle) -> None:
    server.refusals[f"POST /api/jobs/{JOB}/cancel"] = (409, "the job is done already")
    with pytest.raises(ServerRefusedError, match="the job is done already"):
        handle.cancel()
