"""``launch`` with real processes of small scripts: their output, their end, and no leftovers."""

import io
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from node_files import node_file
from rich.console import Console

from ravnest.errors import LaunchError, StageFormatError
from ravnest.logs.record_stream import PROGRESS_VARIABLE
from ravnest.provider.child_process import ChildProcess, run_together
from ravnest.provider.launch import RESUME, NodeOutput, launch, nodes_here, own_hosts, thread_shares
from ravnest.provider.supervision import RestartPolicy, Supervision
from ravnest.runtime.settings import RESUME_VARIABLE
from ravnest.store.node_spec import read_nodes, write_node
from ravnest.telemetry import PhaseRecord, WorkerRecord

ROOT = Path(__file__).parents[2]
SECONDS = 60
"""Timeout; nothing here takes this long unless it hangs."""

STAYS = """
import signal, sys, threading
{setup}
print("ready", flush=True)
threading.Event().wait({seconds})
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three nodes of this machine, as the current folder."""
    for number in range(3):
        write_node(tmp_path / "node_data", node_file(number, stages=3))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(folder: Path, text: str) -> Path:
    path = folder / "provider.py"
    path.write_text(text)
    return path


def launched(*args: object, **kwargs: object) -> tuple[int, list[str]]:
    console = Console(file=io.StringIO(), width=200)
    code = launch(*args, console=console, **kwargs)  # type: ignore[arg-type]
    return code, console.file.getvalue().splitlines()  # type: ignore[attr-defined]


# Start


def test_every_node_runs_the_script_with_its_name_and_the_arguments(project: Path) -> None:
    path = script(project, "import sys, os\nprint(*sys.argv[1:])\nprint('err', file=sys.stderr)")
    code, lines = launched(path, ["--epochs", "3"])
    assert code == 0
    for number in range(3):
        name = f"node_{number}"
        assert f"{name} | {name} --epochs 3" in lines
        assert f"{name} | err" in lines


def test_nodes_run_in_the_given_folder(project: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    path = script(project, "import os\nprint(os.getcwd())\nprint(os.environ['RAVNEST_TRACE'])")
    _, lines = launched("provider.py", work="work", trace="traces")
    assert f"node_0 | {tmp_path / 'work'}" in lines
    assert f"node_0 | {Path('traces').absolute()}" in lines, "the folder is the launcher's"
    assert path.exists()


def test_only_nodes_of_this_machine_are_started() -> None:
    hosts = frozenset({"127.0.0.1", "10.0.0.5", "fe80::1"})
    addresses = [
        "127.0.0.1:1",
        "127.0.0.9:1",
        "localhost:1",
        "0.0.0.0:1",
        "[::]:1",
        "[::1]:1",
        "10.0.0.5:1",
        "[fe80::1]:1",
        "10.0.0.6:1",
        "[fe80::2]:1",
        "nowhere.invalid:1",
    ]
    here = nodes_here(
        [node_file(n, address=address, stages=11) for n, address in enumerate(addresses)], hosts
    )
    assert [node.node for node in here] == list(range(8))


def test_the_addresses_of_this_machine_are_known() -> None:
    assert "127.0.0.1" in own_hosts()
    assert not any("%" in host for host in own_hosts())


@pytest.mark.parametrize(
    ("environment", "nodes", "cores", "expected"),
    [
        ({}, 3, 8, {"OMP_NUM_THREADS": "2"}),
        ({}, 3, 2, {"OMP_NUM_THREADS": "1"}),
        ({}, 1, 8, {}),
        ({"OMP_NUM_THREADS": "5"}, 3, 8, {}),
    ],
)
def test_nodes_of_one_machine_share_its_cores(
    environment: dict[str, str], nodes: int, cores: int, expected: dict[str, str]
) -> None:
    assert thread_shares(environment, nodes, cores) == expected


@pytest.mark.parametrize("given", [None, "7"])
def test_the_share_is_shown_and_reaches_the_nodes(
    project: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    _, lines = launched(script(project, "import os\nprint(os.environ['OMP_NUM_THREADS'])"))
    shown = [line for line in lines if "3 nodes share" in line]
    threads = {line.partition("| ")[2] for line in lines if line.startswith("node_")}
    if given is None:
        assert [f"OMP_NUM_THREADS={count} for each" in shown[0] for count in threads] == [True]
    else:
        assert (shown, threads) == ([], {given})


# Errors at the start


def test_a_missing_script_is_named(project: Path) -> None:
    with pytest.raises(LaunchError, match=r"no script nothere\.py"):
        launch("nothere.py")


def test_missing_node_data_is_named(project: Path) -> None:
    script(project, "")
    with pytest.raises(StageFormatError, match=r"other holds no nodes: run clusterize\(\) first"):
        launch("provider.py", folder="other")


def test_nodes_of_other_machines_only(project: Path) -> None:
    script(project, "")
    write_node(
        project / "far", node_file(0, address="192.0.2.1:8080")
    )  # a documentation address that no machine has
    with pytest.raises(LaunchError, match="no node of far has an address of this machine"):
        launch("provider.py", folder="far")


# Output


def test_names_are_aligned_and_coloured_on_a_terminal() -> None:
    file = io.StringIO()
    output = NodeOutput(
        Console(file=file, force_terminal=True, color_system="standard"), ["node_9", "node_10"]
    )
    output.show("node_9", "[bold]as written[/]")
    output.show("node_10", "x")
    first, second = file.getvalue().splitlines()
    assert first == "\x1b[36mnode_9  | \x1b[0m[bold]as written[/]"
    assert second == "\x1b[35mnode_10 | \x1b[0mx"


def test_long_lines_stay_whole_and_progress_lines_show_their_last_state(project: Path) -> None:
    path = script(
        project, "import sys\nprint('x' * 500)\nprint('10%\\r50%\\r100%\\r')\nprint('é', end='')"
    )
    _, lines = launched(path)
    of_one = [line.partition(" | ")[2] for line in lines if line.startswith("node_1")]
    assert of_one == ["x" * 500, "100%", "é"]


def test_output_comes_as_it_is_written(project: Path) -> None:
    """The script waits for a file that the test writes when the first line is shown."""
    os.mkfifo(project / "gate")
    text = "import sys\nprint('first')\nopen('gate').read() if sys.argv[1] == 'node_0' else 0\n"
    path = script(project, text)

    class Gate(io.StringIO):
        def write(self, text: str) -> int:
            if "node_0 | first" in text:
                (project / "gate").write_text("go")
            return super().write(text)

    assert launch(path, console=Console(file=Gate(), width=200)) == 0


def test_a_closed_output_ends_the_nodes() -> None:
    processes = children({f"node_{n}": stays() for n in range(2)})
    supervision = Supervision(["node_0", "node_1"])

    def show(name: str, line: str) -> None:
        raise BrokenPipeError

    run_together(processes, supervision, show)
    assert len(supervision.summary()) == 2
    assert supervision.exit_code != 0


# End


def children(scripts: dict[str, str]) -> list[ChildProcess]:
    return [
        ChildProcess(name, (sys.executable, "-c", text), os.environ, ends_with_us=True)
        for name, text in scripts.items()
    ]


def run(
    scripts: dict[str, str],
    *,
    when_ready: Callable[[], None] = lambda: None,
    grace: float = SECONDS,
    patience: float = SECONDS,
) -> Supervision:
    """Run scripts to their end; ``when_ready`` is called when all have written ``ready``."""
    supervision = Supervision(scripts, grace=grace, patience=patience)
    waiting = set(scripts)
    lock = threading.Lock()

    def show(name: str, line: str) -> None:
        with lock:
            if line == "ready" and name in waiting:
                waiting.remove(name)
                if not waiting:
                    when_ready()

    run_together(children(scripts), supervision, show)
    return supervision


def stays(setup: str = "") -> str:
    return STAYS.format(setup=setup, seconds=SECONDS)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_exit_code_is_that_of_the_first_failure(project: Path) -> None:
    path = script(project, "import sys\nsys.exit(7 if sys.argv[1] == 'node_1' else 0)")
    code, lines = launched(path)
    assert code == 7
    assert lines[-1] == "node_1 failed: exit code 7"


def test_a_failure_ends_the_others() -> None:
    supervision = run({"node_0": stays(), "node_1": "raise SystemExit(3)"}, grace=0.1)
    assert supervision.exit_code == 3
    assert supervision.summary() == [
        "node_1 failed: exit code 3",
        "node_0 did not end by itself: SIGTERM",
    ]


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    scripts = {
        "node_0": stays("signal.signal(signal.SIGTERM, signal.SIG_IGN)"),
        "node_1": f"print('ready', flush=True)\nopen({str(gate)!r}).read()\nraise SystemExit(3)",
    }
    supervision = run(scripts, when_ready=lambda: gate.write_text("") and None, grace=0.1, patience=0.1)
    assert supervision.summary() == [
        "node_1 failed: exit code 3",
        "node_0 did not end by itself: SIGKILL",
    ]


def test_an_interrupt_reaches_each_process_once() -> None:
    counts = (
        "seen = []\n"
        "def note(*_):\n"
        "    seen.append(1)\n"
        "    threading.Timer(0.2, lambda: __import__('os')._exit(40 + len(seen))).start()\n"
        "signal.signal(signal.SIGINT, note)"
    )
    supervision = run({"node_0": stays(counts), "node_1": stays(counts)}, when_ready=interrupt)
    assert sorted(supervision.summary()) == [f"node_{n} failed: exit code 41" for n in range(2)]


def test_the_second_interrupt_kills() -> None:
    setup = "def note(*_):\n    print('noted', flush=True)\nsignal.signal(signal.SIGINT, note)"
    supervision = Supervision(["node_0"], grace=SECONDS)

    def show(name: str, line: str) -> None:
        if line in {"ready", "noted"}:
            interrupt()

    run_together(children({"node_0": stays(setup)}), supervision, show)
    assert supervision.summary() == ["node_0 did not end by itself: SIGKILL"]
    assert supervision.exit_code == 128 + signal.SIGKILL


def test_signal_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    run({"node_0": "pass"})
    assert signal.getsignal(signal.SIGINT) is before


def test_a_grandchild_that_keeps_the_output_open_does_not_delay_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ravnest.provider.child_process.OUTPUT_CLOSE", 0.1)
    text = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'],"
        " stdin=subprocess.PIPE)\n"
        "import os; os._exit(0)"
    )
    assert run({"node_0": text}).exit_code == 0


def test_a_program_that_does_not_exist_ends_the_started_ones(tmp_path: Path) -> None:
    processes = [
        *children({"node_0": stays()}),
        ChildProcess("node_1", (str(tmp_path / "nothing"),), os.environ),
    ]
    with pytest.raises(LaunchError, match="node_1 cannot be started"):
        run_together(processes, Supervision(["node_0", "node_1"]), lambda *_: None)


# Restarts

FAILS_ONCE = """
import os, pathlib, signal, sys
print("resume", os.environ.get("RAVNEST_RESUME"), *sys.argv[1:])
gate = pathlib.Path("gate")
if sys.argv[1] == "node_1" and "RAVNEST_RESUME" not in os.environ:
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "node_1":
    gate.write_text("")
else:
    open(gate).read()
"""
"""node_1 is killed at its first start; the others wait in a pipe for its second."""


def test_a_killed_node_is_started_again_and_the_others_go_on(project: Path) -> None:
    write_node(project / "two", node_file(0, stages=2))
    write_node(project / "two", node_file(1, stages=2))
    os.mkfifo(project / "gate")
    code, lines = launched(script(project, FAILS_ONCE), ["--epochs", "3"], folder="two", restart=True)
    assert code == 0
    nodes = [line.partition("| ")[::2] for line in lines if " | " in line]
    assert [line for name, line in nodes if name == "node_0 "] == ["resume None node_0 --epochs 3"]
    assert [line for name, line in nodes if name == "node_1 "] == [
        "resume None node_1 --epochs 3",
        "resume 1 node_1 --epochs 3",
    ]
    assert "node_1 was ended by SIGKILL; started again (1)" in lines
    assert not any("failed" in line for line in lines)


def test_without_restart_a_killed_node_ends_the_others(project: Path) -> None:
    os.mkfifo(project / "gate")
    text = FAILS_ONCE.replace("open(gate).read()", "pass")
    code, lines = launched(script(project, text))
    assert code == 128 + signal.SIGKILL
    assert lines[-1] == "node_1 failed: ended by SIGKILL"


def test_a_node_that_always_fails_is_given_up() -> None:
    policy = RestartPolicy(limit=3, first_pause=0.01, longest_pause=0.01)
    supervision = Supervision(["node_0", "node_1"], grace=0.1, restart=policy)
    said: list[str] = []
    processes = children({"node_0": stays(), "node_1": "raise SystemExit(3)"})
    run_together(processes, supervision, lambda *_: None, say=said.append)
    assert said == [f"node_1 failed with exit code 3; started again ({n})" for n in (1, 2, 3)]
    assert supervision.exit_code == 3
    assert supervision.summary() == [
        "node_1 failed: exit code 3; given up after 3 restarts",
        "node_0 did not end by itself: SIGTERM",
    ]


def test_a_program_that_is_gone_at_its_restart_is_given_up(tmp_path: Path) -> None:
    program = tmp_path / "once"
    program.write_text(f"#!{sys.executable}\nimport os\nos.remove(__file__)\nraise SystemExit(3)\n")
    program.chmod(0o700)
    policy = RestartPolicy(limit=2, first_pause=0.01)
    supervision = Supervision(["node_0"], restart=policy)
    run_together([ChildProcess("node_0", (str(program),), os.environ)], supervision, lambda *_: None)
    assert supervision.summary() == ["node_0 failed: exit code 1; given up after 2 restarts"]


def test_a_closed_output_ends_nodes_that_are_started_again() -> None:
    supervision = Supervision(["node_0", "node_1"], restart=RestartPolicy(first_pause=0.01))
    ready = threading.Event()

    def say(line: str) -> None:
        assert ready.wait(SECONDS)  # a process that is interrupted before fails with its own error
        raise SystemExit(1)

    processes = children({"node_0": stays(), "node_1": "raise SystemExit(3)"})
    run_together(processes, supervision, lambda *_: ready.set(), say=say)
    assert "node_0 was interrupted" in supervision.summary()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
@pytest.mark.parametrize("options", [[], ["--restart"]])
def test_nodes_end_when_the_launcher_is_killed(project: Path, options: list[str]) -> None:
    """With restarts, each node has been started again by a launcher that has threads."""
    text = "import os, threading\nprint(os.getpid())\nthreading.Event().wait(600)"
    if options:
        text = "import os\nif 'RAVNEST_RESUME' not in os.environ: os._exit(1)\n" + text
    script(project, text)
    main = "from ravnest.cli.app import main; main()"
    launcher = subprocess.Popen(
        [sys.executable, "-c", main, "launch", *options, "provider.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    pids: list[int] = []
    while len(pids) < 3:
        line = launcher.stdout.readline()
        assert line, "the launcher has ended"
        if " | " in line:
            pids.append(int(line.partition("| ")[2]))
    watched = [os.pidfd_open(pid) for pid in pids]
    launcher.kill()
    launcher.wait()
    for descriptor in watched:
        gone, _, _ = select.select([descriptor], [], [], SECONDS)
        os.close(descriptor)
        assert gone, "a node still runs"
    launcher.stdout.close()


def test_node_files_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 2):
        write_node(tmp_path, node_file(number, address="127.0.0.1:1", stages=11))
    (tmp_path / "nodes" / "node_x.json").write_text(json.dumps({}))
    assert [node.node for node in read_nodes(tmp_path)] == [2, 9, 10]


def test_nodes_read_the_variable_that_the_launcher_sets() -> None:
    """The launcher does not import the runtime, and torch with it."""
    assert RESUME == RESUME_VARIABLE


# Progress


def test_records_of_the_nodes_are_passed_on_and_others_are_not(project: Path) -> None:
    line = json.dumps({"kind": "phase", "phase": "train", "epoch": 3})
    text = f"import os\nos.write(int(os.environ['RAVNEST_RECORDS']), b'{line}\\nno record\\n')"
    found: dict[str, list[WorkerRecord]] = {}
    code, _ = launched(
        script(project, text), on_records=lambda name, new: found.setdefault(name, []).extend(new)
    )
    assert code == 0
    assert found == {f"node_{number}": [PhaseRecord("train", 3)] for number in range(3)}


@pytest.mark.parametrize(("shown", "expected"), [(True, "0"), (False, "None")])
def test_nodes_write_no_progress_lines_if_the_launcher_shows_it(
    project: Path, shown: bool, expected: str
) -> None:
    path = script(project, f"import os\nprint(os.environ.get({PROGRESS_VARIABLE!r}))")
    _, lines = launched(path, shows_progress=shown, on_records=lambda *_: None)
    assert f"node_0 | {expected}" in lines


@pytest.mark.parametrize("code", [0, 3])
def test_quiet_shows_the_last_lines_of_a_failure_only(project: Path, code: int) -> None:
    text = f"import sys\nfor n in range(30): print('line', n)\nsys.exit({code})"
    found, lines = launched(script(project, text), quiet=True)
    assert found == code
    shown = [line for line in lines if "| line" in line]
    assert bool(shown) == bool(code)
    assert len(shown) <= 3 * 20
    assert not any(line.endswith("line 9") for line in shown)
