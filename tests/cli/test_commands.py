"""The commands that look at jobs and providers: what they print, and how they end."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from fake_server import JOB, FakeServer, view

from ravnest.cli.app import Commands, main
from ravnest.cli.exit_codes import EXPLAINED, ExitCode
from ravnest.cli.submit import load_job
from ravnest.plan.node_configs import read_node_configs
from ravnest.schemas.jobs import AssignmentView, EventView, JobState
from ravnest.schemas.providers import ProviderOffer, ProviderState, ProviderView

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def ravnest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    def run(*args: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["ravnest", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and a user who knows no server."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("RAVNEST_HOME", str(tmp_path / "home"))
    for name in ("RAVNEST_SERVER", "RAVNEST_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "here"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """One that the environment names, with a token to join."""
    with FakeServer().running() as running:
        monkeypatch.setenv("RAVNEST_SERVER", running.url)
        monkeypatch.setenv("RAVNEST_TOKEN", "rvn..secret")
        yield running


def event(number: int, before: str = "planned", after: str = "shipping") -> EventView:
    return EventView(
        sequence=number,
        time=1e9,
        kind="job",
        subject=JOB,
        before=before,
        after=after,
        reason=f"reason {number}",
    )


def provider(number: int, state: ProviderState = ProviderState.OFFERED) -> ProviderView:
    offer = ProviderOffer(
        name=f"pc-{number}",
        address=f"127.0.0.1:{7000 + number}",
        ram=4.5,
        cores=2,
        compute=31.4,
        bandwidth=99.5,
        round_trip=0.01,
        version="1",
        torch="2",
    )
    return ProviderView(id=f"p{number}", offer=offer, state=state, reason="idle", job=None, seen=1.0)


def test_every_command_is_listed_with_its_own_help() -> None:
    for name, lazy in Commands.lazy.items():
        help_text = lazy.load(name).help or ""
        first = re.sub(r"\s+", " ", help_text.split("\n\n")[0]).strip()
        assert first == lazy.help, name


def test_help_needs_no_torch_and_names_the_exit_codes() -> None:
    script = (
        "import sys\nfrom ravnest.cli.app import main\nsys.argv = ['ravnest', '--help']\n"
        "try: main()\nexcept SystemExit: print('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "300"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("False\n")
    assert all(f" {name} " in done.stdout for name in Commands.lazy)
    assert EXPLAINED in done.stdout
    assert all(f" {code.value} " in EXPLAINED for code in ExitCode)


@pytest.mark.parametrize(
    ("words", "completed"),
    [("ravnest sta", "status"), ("ravnest status --js", "--json"), ("ravnest token cr", "create")],
)
def test_the_shell_completes(
    monkeypatch: pytest.MonkeyPatch, ravnest: Callable[..., Ended], words: str, completed: str
) -> None:
    monkeypatch.setenv("_RAVNEST_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    assert ravnest().out.split() == [completed]


def test_completion_can_be_installed(ravnest: Callable[..., Ended]) -> None:
    assert "_RAVNEST_COMPLETE=complete_bash" in ravnest("--show-completion", "bash").out


def test_status_lists_and_shows(ravnest: Callable[..., Ended], server: FakeServer) -> None:
    place = AssignmentView(
        provider="p", provider_name="pc", node=0, cluster=1, role="Root", phase="training"
    )
    shown = view(JobState.TRAINING, "all train", updates=7, loss=0.5, validation=0.9)
    server.views = [shown.model_copy(update={"places": (place,), "plan": "The plan [in words]."})]
    ended = ravnest("status")
    assert ended.code == ExitCode.FINE, ended.err
    line = ended.out.splitlines()[1]
    assert line.split() == [
        *(JOB, "digits", "training", "7", "updates,", "loss", "0.5000,", "validation", "0.9000"),
        *("all", "train"),
    ]
    ended = ravnest("status", JOB)
    assert "digits (job-1) of me is training: all train" in ended.out
    assert "cluster 1, node 0 (Root) by pc: training" in ended.out
    assert "The plan [in words]." in ended.out
    assert json.loads(ravnest("status", "--json").out) == [server.views[0].model_dump(mode="json")]
    assert json.loads(ravnest("status", JOB, "--json").out)["id"] == JOB
    server.views = []
    assert ravnest("status").out.startswith("no jobs; ")
    assert ravnest("status", "--json").out == "[]\n"


def test_a_token_is_needed_once(
    ravnest: Callable[..., Ended], server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAVNEST_TOKEN")
    ended = ravnest("status")
    assert (ended.code, ended.out) == (ExitCode.ERROR, "")
    assert "was not joined yet: add --token once" in ended.err
    assert ravnest("status", "--token", "rvn..secret").code == ExitCode.FINE
    monkeypatch.delenv("RAVNEST_SERVER")
    assert ravnest("status").code == ExitCode.FINE
    assert server.asked.count("POST /api/join") == 1


def test_a_server_that_is_not_there(ravnest: Callable[..., Ended], server: FakeServer) -> None:
    ravnest("status")
    ended = ravnest("status", "--server", "http://127.0.0.1:9", "--token", "rvn..s")
    assert ended == (
        ExitCode.UNREACHABLE,
        "",
        "error: nothing answers at http://127.0.0.1:9: is `ravnest serve` running there?\n",
    )


def test_a_refusal_is_exit_code_1(ravnest: Callable[..., Ended], server: FakeServer) -> None:
    server.refusals["GET /api/jobs"] = (403, "a viewer may not")
    assert ravnest("status") == (ExitCode.ERROR, "", "error: a viewer may not\n")
    ended = ravnest("logs", "job-9")
    assert (ended.code, ended.err) == (ExitCode.ERROR, "error: there is no /api/jobs/job-9/events\n")


def test_logs(ravnest: Callable[..., Ended], server: FakeServer) -> None:
    server.events = [event(1), event(2, "shipping", "shipping")]
    ended = ravnest("logs", JOB)
    assert ended.code == ExitCode.FINE, ended.err
    first, second = ended.out.splitlines()
    assert first.endswith("job job-1 planned -> shipping: reason 1")
    assert second.endswith("job job-1 shipping: reason 2")
    lines = ravnest("logs", JOB, "--json").out.splitlines()
    assert [EventView.model_validate_json(line) for line in lines] == server.events


def test_logs_are_followed_to_the_end(ravnest: Callable[..., Ended], server: FakeServer) -> None:
    server.views = [view(JobState.TRAINING), view(JobState.TRAINING), view(JobState.DONE, "done")]
    server.events = [event(1)]
    assert ravnest("logs", JOB, "--follow").code == ExitCode.FINE
    server.views = [view(JobState.TRAINING), view(JobState.FAILED, "node_1 is lost")]
    ended = ravnest("logs", JOB, "-f", "--json")
    assert ended.code == ExitCode.JOB_ENDED
    assert len(ended.out.splitlines()) == 1
    assert ended.err == "error: job job-1 failed: node_1 is lost\n"


def test_cancel_and_fetch_of_what_has_ended(ravnest: Callable[..., Ended], server: FakeServer) -> None:
    assert ravnest("cancel", JOB) == (ExitCode.FINE, f"cancelled {JOB}\n", "")
    server.views = [view(JobState.CANCELLED, "as its owner asked")]
    ended = ravnest("fetch", JOB)
    assert (ended.code, ended.out) == (ExitCode.JOB_ENDED, "")
    assert ended.err.endswith("error: job job-1 was cancelled: as its owner asked\n")
    assert list(Path().iterdir()) == []


def test_nodes_are_shown_and_written(
    ravnest: Callable[..., Ended], server: FakeServer, here: Path
) -> None:
    assert ravnest("nodes").out.startswith("no providers; ")
    assert ravnest("nodes", "--write").err.startswith("error: no provider is there")
    server.providers = [provider(0), provider(1, ProviderState.LOST), provider(2)]
    shown = ravnest("nodes").out.splitlines()
    assert shown[1].split() == ["pc-0", "(p0)", "offered", "-", "4.5", "GB", "2", "31", "100", "idle"]
    assert [entry["id"] for entry in json.loads(ravnest("nodes", "--json").out)] == ["p0", "p1", "p2"]
    assert ravnest("nodes", "--write").out == "wrote node_data/node_configs.json\n"
    assert ravnest("nodes", "--write", "mine.json").out == "wrote mine.json\n"
    for path in ("node_data/node_configs.json", "mine.json"):
        first, second = read_node_configs(here / path)
        assert (first.ram, first.bandwidth, first.compute) == (4.5, 99.5, 31.4)
        assert str(second.address) == "127.0.0.1:7002"
    assert ravnest("nodes", "mine.json").code == ExitCode.USAGE


TARGETS = """
import torch
from torch import nn
import ravnest

def job():
    data = (torch.rand(20, 4), torch.randint(3, (20,)))
    return ravnest.Job(nn.Linear(4, 3), (torch.rand(4, 4),), data, nn.CrossEntropyLoss())

def model():
    return nn.Linear(4, 3)
"""


@pytest.fixture
def targets(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (here / "targets.py").write_text(TARGETS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield here
    sys.modules.pop("targets", None)


@pytest.mark.usefixtures("targets")
def test_submit_and_go(ravnest: Callable[..., Ended], server: FakeServer) -> None:
    ended = ravnest("submit", "targets:job", "--detach")
    assert (ended.code, ended.out) == (ExitCode.FINE, f"{JOB}\n"), ended.err
    assert "uploading" in ended.err
    assert server.specs[0]["name"] == "Linear"


@pytest.mark.usefixtures("targets")
def test_submit_and_wait_for_one_that_fails(ravnest: Callable[..., Ended], server: FakeServer) -> None:
    server.views = [
        view(JobState.TRAINING, "all train", updates=1),
        view(JobState.TRAINING, "all train", updates=2, loss=0.25, validation=0.75),
        view(JobState.FAILED, "node_1 is lost"),
    ]
    ended = ravnest("submit", "targets:job")
    assert (ended.code, ended.out) == (ExitCode.JOB_ENDED, "")
    assert f"submitted {JOB}\n" in ended.err
    shown = [" ".join(line.split()) for line in ended.err.splitlines()]
    assert shown[-4:] == [
        "training all train",
        "2 updates, loss 0.2500, validation 0.7500",
        "failed node_1 is lost",
        "error: job job-1 failed: node_1 is lost",
    ]


@pytest.mark.usefixtures("targets")
def test_what_cannot_be_submitted(ravnest: Callable[..., Ended], server: FakeServer) -> None:
    ended = ravnest("submit", "targets:model")
    assert (ended.code, ended.err) == (
        ExitCode.ERROR,
        "error: targets:model must return a ravnest.Job, got Linear\n",
    )
    assert ravnest("submit", "nowhere:job").code == ExitCode.ERROR
    both = ("--serve-here", "--server", server.url)
    assert ravnest("submit", "targets:job", *both).code == ExitCode.USAGE
    assert server.specs == []


def test_a_command_cannot_serve_and_go(ravnest: Callable[..., Ended]) -> None:
    ended = ravnest("submit", "targets:job", "--serve-here", "--detach")
    assert ended.code == ExitCode.USAGE
    assert "the server would end with this command" in " ".join(ended.err.split())


def test_the_job_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(ROOT / "examples" / "digits")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    try:
        job = load_job("job:job")
    finally:
        for name in ("job", "model"):
            sys.modules.pop(name, None)
    assert (job.name, job.epochs, len(job.train_data)) == ("digits", 20, 1347)
