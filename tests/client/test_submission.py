"""``submit`` and ``attach`` against a real server."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from job_server import JobServer, RecordingTransport, small_job
from torch import nn

import ravnest
from ravnest.client.submission import upload_job
from ravnest.errors import JobEndedError, JobError, ServerRefusedError, ServerUnreachableError
from ravnest.http.credentials import Membership, save
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobState
from ravnest.server.http.runner import serve

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who knows no server, and a folder for temporary files."""
    monkeypatch.setenv("RAVNEST_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAVNEST_SERVER", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def server(shared_server: JobServer) -> Iterator[JobServer]:
    shared_server.remember()
    yield shared_server
    shared_server.cancel_jobs()


def test_all_files_are_uploaded_before_the_job_is_created(server: JobServer) -> None:
    network = RecordingTransport()
    reported: list[tuple[str, int, int]] = []
    with server.requester.api(transport=network) as api:
        job = upload_job(api, small_job(epochs=3, seed=9), lambda *step: reported.append(step))
        assert network.requests[0] == "POST /api/artifacts/missing"
        assert any(request.startswith("PUT /api/artifacts/") for request in network.requests)
        assert network.requests[-1] == "POST /api/jobs"
        step, done, total = reported[-1]
        assert (step, done) == ("uploading", total)
        assert total > 0
        before = len(network.requests)
        again = upload_job(api, small_job(epochs=5, seed=9))
        assert network.requests[before:] == ["POST /api/artifacts/missing", "POST /api/jobs"]
    for job_id, epochs in ((job, 3), (again, 5)):
        with ravnest.attach(job_id) as handle:
            assert handle.progress().epochs == epochs


def test_a_job_can_continue_another_one(server: JobServer) -> None:
    """The server refuses these: what it is asked for is what counts here."""
    job = server.submit()
    with pytest.raises(ServerRefusedError, match=f"{job} is submitted: cancel it"):
        ravnest.submit(resume=job)
    with pytest.raises(ServerRefusedError, match=f"{job} is submitted: cancel it"):
        ravnest.submit(small_job(), resume=job)
    with pytest.raises(ServerRefusedError, match=f"{job} is submitted: cancel it"):
        ravnest.submit(small_job(resume_from=job))
    with pytest.raises(ServerRefusedError, match="there is no job"):
        ravnest.submit(resume="job-00000000")


def test_a_job_that_cannot_be_packed_sends_nothing(server: JobServer) -> None:
    network = RecordingTransport()
    with server.requester.api(transport=network) as api, pytest.raises(JobError):
        upload_job(api, small_job(batch_size=0))
    assert network.requests == []


def test_an_unreachable_server_is_reported_before_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    save(Membership("http://127.0.0.1:9", "id", ApiRole.REQUESTER, "credential", None, "me"))
    monkeypatch.setattr("ravnest.client.submission.pack_job", lambda *_: pytest.fail("packed"))
    with pytest.raises(ServerUnreachableError, match="nothing answers at"):
        ravnest.submit(small_job())


def test_submit_takes_a_job_and_names_the_reason_of_its_failure(server: JobServer, home: Path) -> None:
    job = small_job(on_insufficient="fail", name="too large", min_providers=9, max_providers=9)
    with ravnest.submit(job, server=server.url) as handle:
        assert isinstance(handle, ravnest.JobHandle)
        assert handle.invitation is None
        with pytest.raises(JobEndedError, match=rf"job {handle.id} failed: .*provider"):
            handle.result(timeout=60)
        view = handle.view()
        assert (view.name, view.state) == ("too large", JobState.FAILED)
        assert [event.after for event in handle.events()][-1] == JobState.FAILED
        assert handle.losses().losses == ()
    assert [path.name for path in home.iterdir() if path.name.startswith("ravnest")] == []


def test_submit_takes_the_fields_of_a_job_as_keywords(server: JobServer) -> None:
    job = small_job()
    with ravnest.submit(
        model=job.model,
        example_args=job.example_args,
        train_data=job.train_data,
        criterion=job.criterion,
        epochs=2,
        name="keywords",
        server=server.url,
    ) as handle:
        view = handle.view()
        assert (view.name, view.progress.epochs) == ("keywords", 2)


def test_submit_refuses_other_arguments() -> None:
    with pytest.raises(JobError, match=r"takes a ravnest.Job, not a Linear: .*submit\(model="):
        ravnest.submit(nn.Linear(2, 2))  # type: ignore[call-overload]
    with pytest.raises(JobError, match="not both: set epochs in the Job"):
        ravnest.submit(small_job(), epochs=3)  # type: ignore[call-overload]
    with pytest.raises(JobError, match=r"Job has no keyword .epoch.: did you mean epochs"):
        ravnest.submit(model=nn.Linear(2, 2), epoch=3)


ATTACH = """
import sys
import ravnest
with ravnest.attach(sys.argv[1]) as handle:
    print(handle.state())
    handle.cancel()
print("torch" in sys.modules)
"""


def run_script(script: str, *arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=home,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "RAVNEST_HOME": str(home / "home"),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_another_process_attaches_to_a_job_by_its_id(server: JobServer, home: Path) -> None:
    with ravnest.submit(small_job()) as handle:
        done = run_script(ATTACH, handle.id, home=home)
        assert (done.stderr, done.stdout.split()) == ("", ["submitted", "False"])
        with pytest.raises(JobEndedError, match="was cancelled"):
            handle.result()
        handle.cancel()
        assert handle.state() is JobState.CANCELLED


def test_attach_refuses_an_unknown_job(server: JobServer) -> None:
    with pytest.raises(ServerRefusedError, match="job-none"):
        ravnest.attach("job-none", server.url)


SERVE_HERE = """
import torch
from torch import nn
import ravnest
data = (torch.rand(20, 4), torch.randint(3, (20,)))
job = ravnest.Job(nn.Linear(4, 3), (torch.rand(4, 4),), data, nn.CrossEntropyLoss())
handle = ravnest.submit(job, serve_here=True)
assert handle.state() == "submitted"
print(handle.invitation)
"""


def test_a_script_that_does_not_close_its_server_ends(home: Path) -> None:
    done = run_script(SERVE_HERE, home=home)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ravnest provide --server http://127.0.0.1:")


def test_over_tls_the_client_talks_only_to_the_server_of_the_token(home: Path) -> None:
    torch.manual_seed(0)
    with serve(folder=home / "server", tls=True) as server:
        token = server.token(ApiRole.REQUESTER)
        with ravnest.submit(small_job(), server=server.url, token=token) as handle:
            assert handle.state() is JobState.SUBMITTED
        assert server.url.startswith("https://127.0.0.1:")
    with serve(folder=home / "other", port=int(server.url.rpartition(":")[2]), tls=True):
        with pytest.raises(ServerUnreachableError, match="is not the one that the token names"):
            ravnest.attach(handle.id)
        with pytest.raises(ServerUnreachableError, match="is not the one that the token names"):
            ravnest.submit(small_job(), server=server.url, token=f"{token}x")
