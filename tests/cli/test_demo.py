"""``ravnest demo`` with real processes: a trained model, and no other files or processes left."""

import io
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console
from running_providers import sandbox_option

from ravnest.cli import demo as demo_command
from ravnest.client import digits
from ravnest.client.digits import accuracy, digits_job, network
from ravnest.client.local_providers import LocalProviders
from ravnest.errors import LaunchError

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 60.0
"""From a kill until training goes on; some 10 s on a quiet machine."""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for name, value in {
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(scratch),
        "RAVNEST_HOME": str(tmp_path / "home"),
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("found", "option", "words"),
    [
        (object(), "--sandbox=auto", ""),
        (
            "there is none for Darwin",
            "--sandbox=off",
            "this machine has none: there is none for Darwin.",
        ),
    ],
    ids=["with a sandbox", "without one"],
)
def test_the_demo_runs_without_a_sandbox_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, found: object, option: str, words: str
) -> None:
    monkeypatch.setattr(demo_command, "usable_sandbox", lambda: found)
    console = Console(file=io.StringIO(), width=200)
    assert demo_command._sandbox(console) == option
    assert words in console.file.getvalue()  # type: ignore[attr-defined]


@contextmanager
def demo(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "ravnest.cli.app", "demo", *options]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def leftovers(folder: Path) -> list[str]:
    """Return the files below the folder and the processes that have it on their command line."""
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    processes = [
        process.name()
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in argument for argument in process.info["cmdline"] or [])
    ]
    return [*files, *processes]


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_the_demo_trains_and_leaves_only_the_model(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        shown, _ = process.communicate(timeout=280)
    assert process.returncode == 0, shown
    assert re.findall(r"^(\d)\. ", shown, re.M) == ["1", "2", "3", "4", "5"]
    for number in range(3):
        assert f"provider-{number} | " in shown
    found = re.search(r"^accuracy ([\d.]+)% on data", shown, re.M)
    assert found, shown
    assert float(found[1]) > 90
    assert shown.splitlines()[-1] == "ravnest-demo/trained_state_dict.pt"
    assert leftovers(tmp_path) == ["ravnest-demo/trained_state_dict.pt"]
    state = torch.load(tmp_path / "ravnest-demo" / "trained_state_dict.pt", weights_only=True)
    model = network()
    model.load_state_dict(state)
    assert accuracy(model, digits.digits()[1]) == pytest.approx(float(found[1]) / 100, abs=0.001)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("environment")
def test_a_provider_of_the_demo_is_killed_and_training_goes_on(tmp_path: Path) -> None:
    with demo(tmp_path, "--kill", "--providers=2", "--epochs=5") as process:
        shown, _ = process.communicate(timeout=500)
    assert process.returncode == 0, shown
    assert "With --kill it trains 40 epochs, not 5" in shown
    before, _, after = shown.partition(" is killed now")
    assert after, shown
    taker = re.search(r"(provider-\d) \| node_\d, .*: starts training", after)
    assert taker, shown
    assert taker[1] != before.split()[-1], "the spare takes the place"
    told = re.search(r"([\d.]+) s after the kill: node_\d: training continues from update", after)
    assert told, shown
    assert float(told[1]) < MOST_SECONDS, "a bound for a busy machine"
    assert leftovers(tmp_path) == ["ravnest-demo/trained_state_dict.pt"]


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with demo(tmp_path, "--epochs", "1000", "--providers", "1") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "validation" in line:
                process.send_signal(number)
                break
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert leftovers(tmp_path) == []


@pytest.mark.usefixtures("environment")
def test_a_provider_that_ends_early_is_reported_with_its_last_line(tmp_path: Path) -> None:
    lines: list[tuple[str, str]] = []
    options = {"server": "http://127.0.0.1:9", "token": "rvn..secret"}
    with LocalProviders(tmp_path, options, lambda *line: lines.append(line)) as providers:
        providers.start("pc", "--ram=1", sandbox_option())
        for thread in threading.enumerate():
            if thread.name == "end of pc":  # it ends after the last line of the output
                thread.join(60)
        with pytest.raises(LaunchError, match=r"pc ended with exit code 4: .*nothing answers"):
            providers.check()
    assert lines[-1][0] == "pc"


@pytest.mark.parametrize("has_sklearn", [True, False])
def test_the_demo_has_data_with_and_without_scikit_learn(
    monkeypatch: pytest.MonkeyPatch, has_sklearn: bool
) -> None:
    if not has_sklearn:
        monkeypatch.setattr(digits, "find_spec", lambda _: None)
    train, validation, description = digits.digits()
    assert len(train) > 1000
    assert len(validation) > 400
    assert ("scikit-learn" in description) is not has_sklearn
    images, labels = train.tensors
    assert images.shape[1:] == (1, 8, 8)
    assert labels.unique().tolist() == list(range(10))
    job = digits_job(train, validation, epochs=2, providers=3)
    assert job.model(images[:2]).shape == (2, 10)
    assert (job.epochs, job.min_providers, job.max_providers) == (2, 3, 3)
