"""``ravnest launch`` with processes of small scripts: output, logs and figures."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from node_files import node_file
from workloads import free_ports

from ravnest.cli.app import main
from ravnest.logs.json_lines import JsonFormatter
from ravnest.logs.run_log import METRICS, RECORDS
from ravnest.store.node_spec import write_node


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a script that does nothing."""
    (tmp_path / "provider.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ravnest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """The command as the shell runs it, in this process."""

    def run(*args: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["ravnest", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return run


def is_one_error(ended: Ended) -> bool:
    """Exit code 1, nothing on stdout, and on stderr one message."""
    return (ended.code, ended.out) == (1, "") and ended.err.startswith("error: ")


def test_launch_runs_the_script_for_each_node(
    project: Path, ravnest: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for number in range(2):
        write_node(project / "elsewhere", node_file(number))
    (project / "provider.py").write_text(
        "import sys\nprint(sys.argv[1:])\nsys.exit(sys.argv[1] == 'node_1')"
    )
    ended = ravnest("launch", "--folder", "elsewhere", "provider.py", "--folder", "x", "-v", "y")
    assert ended.code == 1
    *lines, last = ended.out.splitlines()
    assert sorted(lines) == [f"node_{n} | ['node_{n}', '--folder', 'x', '-v', 'y']" for n in range(2)]
    assert last == "node_1 failed: exit code 1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothere.py"], "there is no script nothere.py"),
        (["provider.py"], "node_data holds no nodes: run clusterize() first"),
        (["--folder", "far", "provider.py"], "no node of far has an address of this machine"),
    ],
)
def test_launch_names_what_is_missing(
    project: Path, ravnest: Callable[..., Ended], arguments: list[str], message: str
) -> None:
    write_node(project / "far", node_file(0, address="192.0.2.1:8080"))
    ended = ravnest("launch", *arguments)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith(f"error: {message}")
    assert ended.err.count("\n") == 1


READS_ITS_FIGURES = """
import os, sys, time, urllib.request
records = os.fdopen(int(os.environ["RAVNEST_RECORDS"]), "w")
records.write('{"kind": "phase", "phase": "train", "epoch": 0}\\n')
records.flush()
deadline, text = time.monotonic() + 60, ""
while f'node="{sys.argv[1]}",phase="train"' not in text and time.monotonic() < deadline:
    text = urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[2]}/metrics", timeout=60).read().decode()
    time.sleep(0.02)
print(*(line for line in text.splitlines() if f'phase{{node="{sys.argv[1]}"' in line))
print("own progress:", os.environ.get("RAVNEST_PROGRESS", "yes"))
"""


def test_launch_serves_the_figures_of_all_nodes(project: Path, ravnest: Callable[..., Ended]) -> None:
    for number in range(2):
        write_node(project / "elsewhere", node_file(number))
    (project / "provider.py").write_text(READS_ITS_FIGURES)
    (port,) = free_ports(1)
    options = ["--folder", "elsewhere", "--metrics-port", str(port)]
    ended = ravnest("launch", *options, "provider.py", str(port))
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[0] == f"Prometheus reads figures at http://127.0.0.1:{port}/metrics"
    for name in ("node_0", "node_1"):
        assert f'{name} | ravnest_node_phase{{node="{name}",phase="train"}} 1' in lines
        assert f"{name} | own progress: yes" in lines, "nothing else shows it"


REPORTS_A_LOSS = """
import os, sys
with os.fdopen(int(os.environ["RAVNEST_RECORDS"]), "w") as records:
    kind = '"kind": "loss", "update": 0, "epoch": 0, "microbatches": 1, "staleness": 0'
    records.write(f'{{{kind}, "loss": {sys.argv[1][-1]}.5}}\\n')
"""


def test_launch_writes_the_log_of_the_root_once(project: Path, ravnest: Callable[..., Ended]) -> None:
    for number in range(2):
        write_node(project / "elsewhere", node_file(number))
    (project / "provider.py").write_text(REPORTS_A_LOSS)
    command = ["launch", "--folder", "elsewhere", "--log-dir", "runs/first", "provider.py"]
    assert ravnest(*command).code == 0
    (record,) = (project / "runs" / "first" / RECORDS).read_text().splitlines()
    assert (json.loads(record)["loss"], json.loads(record)["kind"]) == (0.5, "loss")
    assert "train/loss,0.5" in (project / "runs" / "first" / METRICS).read_text()
    again = ravnest(*command)
    assert is_one_error(again), again
    assert "runs/first has the log of an earlier run" in again.err


def test_launch_writes_a_log_for_each_root(project: Path, ravnest: Callable[..., Ended]) -> None:
    for number in range(2):
        write_node(project / "two", node_file(number, cluster=number, stage=0))
    write_node(project / "far", node_file(1))
    (project / "provider.py").write_text(REPORTS_A_LOSS)
    assert ravnest("launch", "--folder=two", "--log-dir=runs", "provider.py").code == 0
    for number in range(2):
        assert f"train/loss,{number}.5" in (project / "runs" / f"cluster_{number}" / METRICS).read_text()
    none = ravnest("launch", "--folder=far", "--log-dir=others", "provider.py")
    assert is_one_error(none), none
    assert "--log-dir needs the Root of a cluster" in none.err
    assert not (project / "others").exists()


def test_launch_logs_as_json(
    project: Path, ravnest: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    handler = logging.StreamHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    for number in range(2):
        write_node(project / "elsewhere", node_file(number))
    (project / "provider.py").write_text(
        "import sys\nprint('10%\\r[bold]\"quoted\"')\nsys.exit(sys.argv[1] == 'node_1')"
    )
    ended = ravnest("launch", "--folder=elsewhere", "--log-format=json", "provider.py")
    assert (ended.code, ended.err) == (1, "")
    *lines, last = [json.loads(line) for line in ended.out.splitlines()]
    found = sorted((line["event"], line["node"], line["message"]) for line in lines)
    assert found == [("node", f"node_{number}", '[bold]"quoted"') for number in range(2)]
    assert (last["event"], last["message"]) == ("launch", "node_1 failed: exit code 1")
    assert isinstance(handler.formatter, JsonFormatter)


@pytest.mark.parametrize(("log_format", "progress"), [("text", "0"), ("json", "None")])
def test_a_terminal_shows_the_pipelines_unless_lines_are_json(
    project: Path,
    ravnest: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
    log_format: str,
    progress: str,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal for rich
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    write_node(project / "elsewhere", node_file(0, stages=1))
    (project / "provider.py").write_text("import os\nprint('own', os.environ.get('RAVNEST_PROGRESS'))")
    ended = ravnest("launch", "--folder=elsewhere", f"--log-format={log_format}", "provider.py")
    assert ended.code == 0, ended.err
    assert f"own {progress}" in ended.out
    assert ("cluster 0: node_0 (Root, starts)" in ended.out) == (log_format == "text")
