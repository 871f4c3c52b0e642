"""Commands for jobs and providers against a real server: output and exit codes."""

import errno
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from job_server import (
    JobServer,
    ScriptedProvider,
    in_background,
    job_server,
    loss_record,
    small_job,
    validation_record,
)

from ravnest.cli.app import Commands, main
from ravnest.cli.exit_codes import EXIT_CODES_HELP, ExitCode
from ravnest.cli.fetch import FetchedModel
from ravnest.cli.submit import load_job
from ravnest.client.handle import JobHandle
from ravnest.client.submission import upload_job
from ravnest.http.credentials import memberships
from ravnest.logs.json_lines import JsonFormatter
from ravnest.plan.node_configs import read_node_configs
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import EventView, JobState, JobView
from ravnest.schemas.providers import ProviderView, UsedMemory
from ravnest.schemas.reachability import AddressCheck
from ravnest.telemetry import PaceRecord, ScheduleRecord, WarningRecord

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def ravnest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command as the shell runs it, in this process."""

    def run(*args: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["ravnest", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and a user who knows no server."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("RAVNEST_HOME", str(tmp_path / "home"))
    for name in ("RAVNEST_SERVER", "RAVNEST_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "here"


@pytest.fixture
def server(shared_server: JobServer) -> Iterator[JobServer]:
    """A real server that the user has joined."""
    shared_server.remember()
    yield shared_server
    shared_server.cancel_jobs()


@pytest.fixture
def job(server: JobServer) -> str:
    return server.submit()


@pytest.fixture
def provider(server: JobServer, job: str) -> Iterator[ScriptedProvider]:
    """A provider that trains the only stage of ``job``."""
    with server.provider() as made:
        assert made.take_assignment().job == job
        made.report("training")
        yield made


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
    assert EXIT_CODES_HELP in " ".join(done.stdout.split())
    assert all(f" {code.value} " in EXIT_CODES_HELP for code in ExitCode)


@pytest.mark.parametrize(
    ("words", "completed"),
    [("ravnest sta", "status"), ("ravnest status --js", "--json"), ("ravnest token cr", "create")],
)
def test_the_shell_completes_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, ravnest: Command, words: str, completed: str
) -> None:
    monkeypatch.setenv("_RAVNEST_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    assert ravnest().out.split() == [completed]


def test_completion_can_be_installed(ravnest: Command) -> None:
    assert "_RAVNEST_COMPLETE=complete_bash" in ravnest("--show-completion", "bash").out


def test_status_lists_jobs_and_shows_one(ravnest: Command, job: str, provider: ScriptedProvider) -> None:
    warning = WarningRecord("the loader is slow")
    losses = loss_record(0, 0.75), loss_record(1, 0.5)
    schedule = ScheduleRecord("sync", 4, "each batch of 8 is split")
    pace = PaceRecord(0, 40, 123.4, 3725.0)
    memory = UsedMemory(now=1_250_000_000, peak=1_500_000_000)
    records = (schedule, *losses, pace, validation_record(0, 0.9), warning)
    provider.report("training", *records, memory=memory)
    ended = ravnest("status")
    assert ended.code == ExitCode.OK, ended.err
    (line,) = (line for line in ended.out.splitlines() if line.startswith(job))
    assert line.split()[:3] == [job, "digits", "training"]
    figures = "update 2 of 40, loss 0.5000, validation accuracy 0.9000, 123 samples/s, 1:02:05 left"
    assert figures in line
    shown = ravnest("status", job).out
    assert f"digits ({job}) of " in shown
    assert "cluster 0, node 0 (Root) on pc: training, memory 1.25 GB, peak 1.5 GB, planned " in shown
    assert "warning of node 0: the loader is slow" in shown
    assert "schedule sync, 4 micro-batches per batch: each batch of 8 is split" in shown
    assert "1 node in 1 cluster" in shown, "the plan"


def test_status_as_json(ravnest: Command, job: str, provider: ScriptedProvider) -> None:
    provider.report("training", loss_record(0, 0.75), ScheduleRecord("async", 1, "batch norm"))
    one = JobView.model_validate_json(ravnest("status", job, "--json").out)
    assert (one.id, one.state, one.progress.loss) == (job, JobState.TRAINING, 0.75)
    assert one.assignments[0].memory is not None
    assert one.assignments[0].memory.used is None, "this provider does not report it"
    assert one.progress.schedule == ScheduleRecord("async", 1, "batch norm")
    listed = json.loads(ravnest("status", "--json").out)
    assert (job, "training") in {(entry["id"], entry["state"]) for entry in listed}


def test_status_without_jobs(ravnest: Command, shared_server: JobServer) -> None:
    options = ("--server", shared_server.url, "--token", shared_server.token())
    assert ravnest("status", *options).out.startswith("no jobs; ")
    assert ravnest("status", "--json").out == "[]\n"


def test_a_token_is_needed_once(
    ravnest: Command, shared_server: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAVNEST_SERVER", shared_server.url)
    ended = ravnest("status")
    assert (ended.code, ended.out) == (ExitCode.ERROR, "")
    assert "not joined yet: add --token" in ended.err
    assert ravnest("status", "--token", shared_server.token()).code == ExitCode.OK
    monkeypatch.delenv("RAVNEST_SERVER")
    assert ravnest("status").code == ExitCode.OK
    assert len(memberships()) == 1


def test_an_unreachable_server_is_exit_code_4(ravnest: Command) -> None:
    ended = ravnest("status", "--server", "http://127.0.0.1:9", "--token", "rvn..s")
    assert (ended.code, ended.out) == (ExitCode.UNREACHABLE, "")
    assert ended.err.startswith("error: nothing answers at http://127.0.0.1:9")


def test_a_refusal_of_the_server_is_exit_code_1(ravnest: Command, server: JobServer) -> None:
    for command in ("status", "logs", "fetch", "cancel"):
        ended = ravnest(command, "job-9", "--server", server.url)
        assert (ended.code, ended.out) == (ExitCode.ERROR, ""), command
        assert ended.err.splitlines()[-1].startswith("error: ")
        assert "job-9" in ended.err


def test_logs_show_events_as_lines_or_json_lines(
    ravnest: Command, job: str, provider: ScriptedProvider
) -> None:
    lines = ravnest("logs", job, "--json").out.splitlines()
    events = [EventView.model_validate_json(line) for line in lines]
    assert [event.after for event in events if event.kind == "job"][-1] == JobState.TRAINING
    shown = ravnest("logs", job).out.splitlines()
    assert len(shown) == len(events)
    last = events[-1]
    assert shown[-1].endswith(f"job {job} {last.before} -> {last.after}: {last.reason}")
    same = next(number for number, event in enumerate(events) if event.before == event.after)
    assert f"job {job} {events[same].after}: " in shown[same]


def test_logs_follow_a_job_to_its_end(
    ravnest: Command, server: JobServer, job: str, provider: ScriptedProvider
) -> None:
    with in_background(provider.finish):
        ended = ravnest("logs", job, "--follow", "--json")
    assert ended.code == ExitCode.OK, ended.err
    assert EventView.model_validate_json(ended.out.splitlines()[-1]).after == JobState.DONE


def test_logs_of_a_job_that_fails_are_exit_code_3(
    ravnest: Command, job: str, provider: ScriptedProvider
) -> None:
    with in_background(lambda: provider.report("failed", reason="out of memory")):
        ended = ravnest("logs", job, "-f")
    assert ended.code == ExitCode.JOB_ENDED
    assert ended.err.startswith(f"error: job {job} failed: ")
    assert "out of memory" in ended.err


def test_a_cancelled_job_cannot_be_fetched(ravnest: Command, job: str) -> None:
    assert ravnest("cancel", job) == (ExitCode.OK, f"cancelled {job}\n", "")
    ended = ravnest("fetch", job)
    assert (ended.code, ended.out) == (ExitCode.JOB_ENDED, "")
    assert f"error: job {job} was cancelled: " in ended.err
    assert list(Path().iterdir()) == []


def test_fetch_waits_and_writes_the_model(
    ravnest: Command, job: str, provider: ScriptedProvider
) -> None:
    with in_background(provider.finish):
        ended = ravnest("fetch", job)
    assert (ended.code, ended.out) == (ExitCode.OK, f"ravnest-{job}/trained_state_dict.pt\n"), ended.err
    state = torch.load(ended.out.strip(), weights_only=True)
    assert list(state) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_fetch_writes_a_log(ravnest: Command, job: str, provider: ScriptedProvider) -> None:
    provider.report("training", loss_record(0, 2.0), loss_record(1, 0.75))
    provider.finish()
    ended = ravnest("fetch", job, "--log-dir", "runs/first")
    assert ended.code == ExitCode.OK, ended.err
    rows = Path("runs/first/metrics.csv").read_text(encoding="utf-8").splitlines()
    losses = [row.rpartition(",")[2] for row in rows if ",train/loss," in row]
    assert losses == ["2.0", "0.75"]
    assert list(Path("runs/first").glob("events.out.tfevents.*"))


def test_a_job_whose_cluster_failed_is_exit_code_5(
    ravnest: Command,
    job: str,
    provider: ScriptedProvider,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("ravnest.server.views.degraded", lambda *_: "1 of 2 clusters did not finish")
    with in_background(provider.finish):
        ended = ravnest("status", job, "--wait")
    assert ended.code == ExitCode.DEGRADED
    assert "warning: 1 of 2 clusters did not finish" in ended.out
    fetched = ravnest("fetch", job)
    assert fetched.code == ExitCode.DEGRADED
    assert fetched.out == f"ravnest-{job}/trained_state_dict.pt\n", "the model is there all the same"
    assert "warning: 1 of 2 clusters did not finish" in fetched.err
    assert "1 of 2 clusters did not finish" in caplog.text, "the handle says it too"
    assert "done (degraded)" in ravnest("status").out
    assert json.loads(ravnest("status", job, "--json").out)["degraded"]


def test_status_waits_for_a_job_that_fails(
    ravnest: Command, job: str, provider: ScriptedProvider
) -> None:
    with in_background(lambda: provider.report("failed", reason="out of memory")):
        ended = ravnest("status", job, "--wait")
    assert ended.code == ExitCode.JOB_ENDED
    assert "out of memory" in ended.err
    assert "name the job to wait for" in ravnest("status", "--wait").err


def test_status_watches_the_only_job(ravnest: Command, job: str, provider: ScriptedProvider) -> None:
    with in_background(provider.finish):
        ended = ravnest("status", "--watch")
    assert ended.code == ExitCode.OK
    assert f"({job}) of" in ended.out
    assert "done" in ended.err
    assert "no job runs" in ravnest("status", "--watch").err
    quiet = ravnest("status", job, "--watch", "--quiet")
    assert (quiet.code, quiet.err) == (ExitCode.OK, "")


def test_ctrl_c_says_what_happens_to_the_job(
    ravnest: Command, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(JobHandle, "wait", interrupted)
    ended = ravnest("fetch", job)
    assert ended.code == ExitCode.INTERRUPTED
    assert ended.err.strip() == (
        f"{job} continues. `ravnest fetch {job}` returns to it, `ravnest cancel {job}` ends it"
    )


@pytest.mark.usefixtures("targets", "server")
def test_ctrl_c_before_the_submission_says_that_there_is_no_job(
    ravnest: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ravnest.cli.submit.upload_job", interrupted)
    ended = ravnest("submit", "targets:job", "--quiet")
    assert ended.code == ExitCode.INTERRUPTED
    assert ended.err.strip().startswith("Nothing was submitted. The server keeps what was uploaded")


def test_an_output_folder_is_checked_before_the_wait(ravnest: Command, job: str) -> None:
    Path("occupied").write_text("a file")
    for command in (("fetch", job), ("submit", "targets:job")):
        ended = ravnest(*command, "--out", "occupied/model")
        assert (ended.code, ended.out) == (ExitCode.ERROR, "")
        assert "occupied is a file: choose another folder with --out" in " ".join(ended.err.split())


def test_a_full_disk_is_one_sentence(
    ravnest: Command, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "trained.pt")

    monkeypatch.setattr(JobHandle, "wait", full)
    ended = ravnest("fetch", job)
    assert ended.code == ExitCode.ERROR
    assert ended.err == ("error: trained.pt: the disk is full: free some space, or use another folder\n")


def test_a_quiet_fetch_prints_only_the_path(
    ravnest: Command, job: str, provider: ScriptedProvider
) -> None:
    with in_background(provider.finish):
        ended = ravnest("fetch", job, "--quiet")
    assert ended == (ExitCode.OK, f"ravnest-{job}/trained_state_dict.pt\n", "")


def test_a_server_that_is_gone_can_be_forgotten(ravnest: Command, server: JobServer) -> None:
    url = server.requester.url
    assert "was not joined from here" in ravnest("forget", "http://127.0.0.1:1").err
    assert ravnest("forget", url).out.startswith(f"forgot {url}")
    assert "no server is known" in ravnest("status").err


def test_a_command_that_is_misspelt_is_suggested(ravnest: Command) -> None:
    ended = ravnest("statsu")
    assert ended.code == ExitCode.USAGE
    assert "No such command 'statsu': did you mean 'status'?" in ended.err


def test_help_fits_a_narrow_terminal(ravnest: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    groups = {"token": ["create"], "member": ["revoke"]}
    for command in ([], *([name, *groups.get(name, ())] for name in Commands.lazy)):
        shown = ravnest(*command, "--help").out
        assert max(map(len, shown.splitlines())) <= 80
        assert "<bool>" not in shown
        assert "..." not in shown.partition("Options")[2], "no summary is cut"


def test_fetch_reports_as_json(ravnest: Command, job: str, provider: ScriptedProvider) -> None:
    provider.report("training", loss_record(0, 0.75))
    provider.finish()
    ended = ravnest("fetch", job, "--out", "mine", "--json")
    assert ended.code == ExitCode.OK, ended.err
    report = FetchedModel.model_validate_json(ended.out)
    path = Path("mine", "trained_state_dict.pt").resolve()
    assert (report.job, report.path, report.size) == (job, str(path), path.stat().st_size)
    assert report.progress.loss == 0.75


def test_nodes_are_shown_and_written(ravnest: Command, tmp_path: Path) -> None:
    with job_server(tmp_path / "fresh") as server:
        server.remember()
        assert ravnest("nodes").out.startswith("no providers; ")
        assert "`ravnest provide --server URL --token TOKEN`" in ravnest("nodes", "--write").err
        with server.provider("pc-0", 7000) as first, server.provider("pc-2", 7002):
            with server.provider("pc-1", 7001):
                pass  # it leaves and is not written
            shown = {line.split()[0]: line.split() for line in ravnest("nodes").out.splitlines()}
            assert shown["pc-0"][1:11] == [
                *(f"({first.id})", "offered", "direct", "-", "4.5", "GB", "2", "31", "100", "bwrap"),
            ]
            checks = [AddressCheck(address="127.0.0.1:7000", reachable=False, reason="no answer")]
            with server.running.server.db.write(0.0) as db:
                db.providers.set_checks(first.id, checks)
            assert "\npc-0 is unreachable: " in ravnest("nodes").out
            listed = json.loads(ravnest("nodes", "--json").out)
            assert [entry["reachability"] for entry in listed if entry["id"] == first.id] == [
                "unreachable"
            ]
            offers = [ProviderView.model_validate(entry).offer.name for entry in listed]
            assert {"pc-0", "pc-2"} <= set(offers)
            assert ravnest("nodes", "--write").out == "wrote node_data/node_configs.json\n"
            assert ravnest("nodes", "--write", "mine.json").out == "wrote mine.json\n"
    for path in ("node_data/node_configs.json", "mine.json"):
        nodes = read_node_configs(Path(path))
        assert {str(node.address) for node in nodes} == {"127.0.0.1:7000", "127.0.0.1:7002"}
        assert {(n.ram, n.bandwidth, n.compute) for n in nodes} == {(4.5, 99.5, 31.4)}


def test_a_path_without_write_is_wrong_usage(ravnest: Command) -> None:
    assert ravnest("nodes", "mine.json").code == ExitCode.USAGE


def test_a_viewer_can_read_a_job_but_not_cancel_it(
    ravnest: Command, server: JobServer, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAVNEST_HOME", str(tmp_path / "viewer"))
    token = ("--token", server.token(ApiRole.VIEWER))
    assert ravnest("logs", job, "--server", server.url, *token).code == ExitCode.OK
    ended = ravnest("cancel", job, "--server", server.url)
    assert ended.code == ExitCode.ERROR
    assert "--role requester" in ended.err


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


@pytest.mark.usefixtures("targets", "server")
def test_submit_detached_prints_the_id(ravnest: Command) -> None:
    ended = ravnest("submit", "targets:job", "--detach")
    assert ended.code == ExitCode.OK, ended.err
    assert "uploading" in ended.err
    view = JobView.model_validate_json(ravnest("status", ended.out.strip(), "--json").out)
    assert (view.name, view.state) == ("Linear", JobState.SUBMITTED)
    ended = ravnest("submit", "targets:job", "--detach", "--json")
    assert json.loads(ended.out)["id"].startswith("job-")


@pytest.mark.usefixtures("targets")
def test_submit_resumes_only_jobs_that_have_ended(ravnest: Command, job: str) -> None:
    ended = ravnest("submit", "--resume", job, "--detach")
    assert ended.code == ExitCode.ERROR
    assert f"{job} is submitted: cancel it before you resume it" in " ".join(ended.err.split())
    assert ravnest("cancel", job).code == ExitCode.OK
    ended = ravnest("submit", "--resume", job, "--detach")
    assert f"{job} has no complete checkpoint" in " ".join(ended.err.split())
    assert ravnest("submit").code == ExitCode.USAGE
    assert ravnest("submit", "--resume", job, "--serve-here").code == ExitCode.USAGE


def test_a_job_like_an_earlier_one_is_submitted_and_evaluated(
    ravnest: Command, server: JobServer, here: Path
) -> None:
    with server.requester.api() as api:
        validation = torch.rand(6, 4), torch.randint(3, (6,))
        first = upload_job(api, small_job(val_data=validation, metrics=["accuracy"]))
    wanted = ["--set", "optimizer_params.lr=0.5", "--set", "name=slower"]
    ended = ravnest("submit", "--like", first, *wanted, "--detach")
    assert ended.code == ExitCode.OK, ended.err
    assert ravnest("status", ended.out.strip(), "--json").out.count('"name": "slower"') == 1
    refused = ravnest("submit", "--like", first, "--set", "batch_size=9", "--detach")
    assert refused.code == ExitCode.ERROR
    assert "cannot change without another upload" in " ".join(refused.err.split())
    for wrong in (["--set", "epochs"], ["--resume", first], ["--serve-here"], ["targets:job"]):
        assert ravnest("submit", "--like", first, *wrong).code == ExitCode.USAGE
    assert ravnest("submit", "--resume", first, "--set", "epochs=2").code == ExitCode.USAGE
    server.cancel_jobs()
    ended = ravnest("submit", "--like", first, "--set", "epochs=0", "--detach")
    with server.provider() as provider:
        assert not provider.take_assignment().train.files
        provider.report("training", validation_record(0, 1 / 3))
        provider.report("uploading")
        provider.report("finished")
    fetched = ravnest("fetch", ended.out.strip())
    assert (fetched.code, fetched.out) == (ExitCode.OK, f"accuracy {1 / 3!r}\n"), fetched.err
    report = json.loads(ravnest("fetch", ended.out.strip(), "--json").out)
    assert report["metrics"] == {"accuracy": 1 / 3}
    assert list(here.iterdir()) == []


@pytest.mark.usefixtures("targets")
def test_submit_shows_a_job_until_it_fails(ravnest: Command, server: JobServer) -> None:
    with server.provider() as provider:

        def script() -> None:
            provider.take_assignment()
            provider.report("training", loss_record(0, 0.5), loss_record(1, 0.25))
            provider.report("training", validation_record(0, 0.75))
            provider.report("failed", reason="out of memory")

        with in_background(script):
            ended = ravnest("submit", "targets:job")
    assert (ended.code, ended.out) == (ExitCode.JOB_ENDED, "")
    shown = [" ".join(line.split()) for line in ended.err.splitlines()]
    assert any(line.startswith("submitted job-") for line in shown)
    figures = "epoch 1/1, update 2, loss 0.2500, validation accuracy 0.7500"
    assert figures in shown
    assert shown.index(figures) < max(i for i, line in enumerate(shown) if line.startswith("failed"))
    assert any(line.startswith("failed ") for line in shown)
    assert shown[-1].startswith("error: job job-")
    assert "out of memory" in shown[-1]


@pytest.mark.usefixtures("targets")
def test_submit_as_json_is_a_stream_of_lines(ravnest: Command, server: JobServer) -> None:
    with server.provider() as provider:

        def script() -> None:
            provider.take_assignment()
            provider.report("training", loss_record(0, 0.5), validation_record(0, 0.75))
            provider.report("training", loss_record(1, 0.25))
            provider.finish()

        with in_background(script):
            ended = ravnest("submit", "targets:job", "--json")
    assert (ended.code, ended.err) == (ExitCode.OK, "")
    *changes, model = [json.loads(line) for line in ended.out.splitlines()]
    states = list(dict.fromkeys(change["state"] for change in changes))
    assert states == [state for state in JobState if state in states], "some may be too short to be seen"
    assert states[-1] == "done"
    assert changes[-1]["progress"]["updates"] == 2
    assert model["path"].endswith("trained_state_dict.pt")
    assert model["job"] == changes[0]["job"]


@pytest.mark.usefixtures("targets")
def test_submit_logs_as_json(
    ravnest: Command, server: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = logging.StreamHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    with server.provider() as provider:

        def script() -> None:
            provider.take_assignment()
            provider.report("training", ScheduleRecord("sync", 4, "each batch is split"))
            provider.report("training", loss_record(0, 0.5), validation_record(0, 0.75))
            provider.finish()

        with in_background(script):
            ended = ravnest("submit", "targets:job", "--log-format=json")
    assert ended.code == ExitCode.OK, ended.err
    assert ended.out.strip().endswith("trained_state_dict.pt")
    first, *lines = [json.loads(line) for line in ended.err.splitlines()]
    assert first["event"] == "submitted"
    assert {line["subject"] for line in lines} == {first["subject"]}
    changes = [line for line in lines if line["event"] == "job"]
    assert changes[-1]["after"] == "done"
    assert [each["before"] for each in changes[1:]] == [each["after"] for each in changes[:-1]]
    figures = [line for line in lines if line["event"] == "progress"]
    assert (figures[-1]["loss"], figures[-1]["validation"]) == (0.5, 0.75)
    schedules = [line["message"] for line in lines if line["event"] == "schedule"]
    assert isinstance(handler.formatter, JsonFormatter)
    assert schedules == ["schedule sync, 4 micro-batches per batch: each batch is split"]


@pytest.mark.usefixtures("targets")
def test_plan_of_a_job_asks_the_server(ravnest: Command, server: JobServer) -> None:
    missing = ravnest("plan", "targets:job", "--server", server.requester.url, "--quiet")
    assert missing.code == 1
    assert "does not fit" in missing.out
    assert "no provider is connected" in missing.out
    with server.provider():
        ended = ravnest("plan", "targets:job", "--quiet")
        assert ended.code == 0, ended.err
        assert ended.out.startswith("fits, and can start now\n")
        assert "updates in 1 epoch" in ended.out
        as_json = json.loads(ravnest("plan", "targets:job", "--json").out)
    assert as_json["fits"]
    assert as_json["clusters"][0]["stages"][0]["memory_bytes"] > 0
    assert not ended.err
    wrong = ravnest("plan", "targets:model", "--server", server.requester.url)
    assert "must return a ravnest.Job for a plan of a server" in wrong.err


@pytest.mark.usefixtures("targets")
def test_submit_refuses_what_is_not_a_job(ravnest: Command, server: JobServer) -> None:
    before = ravnest("status", "--json").out
    ended = ravnest("submit", "targets:model")
    assert ended.code == ExitCode.ERROR
    assert ended.err == "error: targets:model must return a ravnest.Job, got Linear\n"
    assert ravnest("submit", "nowhere:job").code == ExitCode.ERROR
    both = ("--serve-here", "--server", server.url)
    assert ravnest("submit", "targets:job", *both).code == ExitCode.USAGE
    assert ravnest("status", "--json").out == before


def test_a_command_that_serves_cannot_detach(ravnest: Command) -> None:
    ended = ravnest("submit", "targets:job", "--serve-here", "--detach")
    assert ended.code == ExitCode.USAGE
    assert "the server would end with this command" in " ".join(ended.err.split())


def test_the_job_of_the_example_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
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
