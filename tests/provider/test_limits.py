"""Limits of a worker: its environment, and real processes that reach them."""

import errno
import json
import os
import queue
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from ravnest import host
from ravnest.provider import worker_process
from ravnest.provider.events import WorkerEnded
from ravnest.provider.job_dir import JobDir, JobsDir, WorkerSettings
from ravnest.provider.limits import (
    BUFFERS,
    LEAST_FREE,
    MOST_ENTRIES,
    MOST_OPEN_FILES,
    MOST_THREADS,
    FolderUsage,
    disk_shortage,
    environment,
    excess,
    folder_usage,
    held_memory,
    job_excess,
)
from ravnest.provider.worker_process import WorkerProcess

SOURCE = Path(__file__).parents[2] / "src"
SECONDS = 60
BOOT = (
    f"import sys\nsys.path.insert(0, {str(SOURCE)!r})\n"
    "from ravnest.provider import limits\nlimits.confine()\n"
)


def confined(script: str, **options: object) -> subprocess.Popen[str]:
    """Start a process that is confined as a worker is and then runs ``script``."""
    return subprocess.Popen(
        [sys.executable, "-I", "-c", BOOT + textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def output_of(script: str) -> str:
    """Return its output; its stdin stays open until it ends."""
    with confined(script) as process:
        assert process.stdout is not None
        return process.stdout.read()


def test_only_known_variables_reach_a_worker(tmp_path: Path) -> None:
    source = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "HOME": "/home/me",
        "TMPDIR": "/tmp",
        "AWS_SECRET_ACCESS_KEY": "x",
        "PYTHONPATH": "/evil",
        "LD_PRELOAD": "/evil.so",
        "https_proxy": "http://proxy",
        "OMP_NUM_THREADS": "64",
    }
    found = environment(tmp_path, 2, source)
    assert found == {
        "PATH": "/bin",
        "LC_ALL": "C",
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "tmp"),
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "OPENBLAS_NUM_THREADS": "2",
    }


def test_a_worker_does_without_instructions_that_would_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "bf16_products_work", lambda: False)
    assert environment(tmp_path, 2, {})["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"


def test_the_reason_names_the_taken_and_the_offered_memory() -> None:
    assert excess(held=1_200, idle=200, offered=1_000) == ""
    reason = excess(held=3_250_000_000 + BUFFERS, idle=250_000_000, offered=2_000_000_000)
    assert "3.00 GB" in reason
    assert "2.00 GB" in reason


USAGE = FolderUsage(size=10, entries=10, free=1 << 40)


@pytest.mark.parametrize(
    ("usage", "threads", "seconds", "words"),
    [
        (USAGE, 10, 10.0, ""),
        (USAGE, 10, 7201.0, "ran for 2 hours"),
        (USAGE, MOST_THREADS + 1, 10.0, f"{MOST_THREADS + 1} threads"),
        (FolderUsage(3_000_000_000, 1, 0), 1, 1.0, "take 3.00 GB, 2.00 GB are allowed"),
        (FolderUsage(1, MOST_ENTRIES + 1, 0), 1, 1.0, "files"),
    ],
)
def test_the_limits_of_a_job(usage: FolderUsage, threads: int, seconds: float, words: str) -> None:
    reason = job_excess(usage, threads, seconds, disk=2_000_000_000, longest=7200.0)
    assert words in reason
    assert bool(words) == bool(reason)


def test_a_worker_leaves_its_owner_some_of_the_disk() -> None:
    assert disk_shortage(FolderUsage(1, 1, LEAST_FREE)) == ""
    assert "0.10 GB left" in disk_shortage(FolderUsage(1, 1, 100_000_000))


def test_the_disk_space_of_a_folder(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "file").write_bytes(bytes(1 << 20))
    (inner / "link").symlink_to("/")
    with (inner / "sparse").open("wb") as sparse:
        sparse.truncate(1 << 40)
    found = folder_usage(tmp_path)
    assert found.entries == 5
    assert 1 << 20 <= found.size < 2 << 20
    assert found.free > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"seconds": 0.0}, "the most that this provider allows"), ({"disk": 1 << 20}, "are allowed")],
)
def test_a_worker_that_exceeds_a_limit_of_a_job_ends_with_the_reason(
    tmp_path: Path, settings: dict[str, float], words: str
) -> None:
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    (tmp_path / "data").write_bytes(bytes(2 << 20))
    limits = WorkerSettings.model_validate({"ram": 1 << 30, "cores": 1, **settings})
    worker = WorkerProcess("job-1", JobDir(tmp_path), limits, events.put, None, tuple)
    worker.start()
    ended = events.get(timeout=SECONDS)
    assert isinstance(ended, WorkerEnded)
    assert words in ended.failure
    assert ended.cause == "job"


HOSTILE = """
import os, sys, threading
sys.path.insert(0, sys.argv[1])
from ravnest.provider.limits import confine
confine(sys.argv[4], int(sys.argv[5]))
os.chdir(os.path.join(sys.argv[2], "scratch"))
"""
"""Start of a worker that a job has taken over."""
WAIT = "threading.Event().wait()\n"
TAKE_MEMORY = "taken = bytearray(200 << 20)\n" + WAIT


def end_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str, **settings: int) -> WorkerEnded:
    """Return how a worker ends that runs ``attack`` in its scratch folder, with 1 GB unless told."""
    monkeypatch.setattr(worker_process, "_BOOT", HOSTILE + attack)
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    limits = WorkerSettings.model_validate({"ram": 1 << 30, "cores": 1, **settings})
    worker = WorkerProcess("job-1", JobDir(tmp_path), limits, events.put, None, tuple)
    worker.start()
    ended = events.get(timeout=SECONDS)
    assert isinstance(ended, WorkerEnded)
    return ended


def test_folders_whose_path_is_too_long_end_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = "for _ in range(17):\n os.mkdir('x' * 255)\n os.chdir('x' * 255)\n" + WAIT
    ended = end_of(tmp_path, monkeypatch, attack)
    assert "cannot be read" in ended.failure
    assert ended.cause == "job"
    JobsDir(tmp_path.parent).discard(tmp_path.name)


def test_files_that_were_removed_and_not_closed_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = (
        "kept = []\n"
        "for number in range(4):\n"
        " kept.append(open('x', 'wb', buffering=0))\n"
        " os.unlink('x')\n"
        " kept[-1].write(bytes(1 << 20))\n"
    ) + WAIT
    ended = end_of(tmp_path, monkeypatch, attack, disk=3 << 20)
    assert "are allowed" in ended.failure
    assert ended.cause == "job"


@pytest.mark.parametrize("text", ["null", "[1]", "Infinity", "NaN", "1e400", "{}", "x", "9" * 40])
def test_a_worker_that_states_a_wrong_idle_memory_has_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    attack = (
        f"open('.idle', 'w').write({text!r})\nos.rename('.idle', 'idle.json')\n"
        "threading.Event().wait(0.6)\n"
    ) + TAKE_MEMORY
    assert "GB are offered" in end_of(tmp_path, monkeypatch, attack, ram=1 << 20).failure


def test_a_worker_that_does_not_state_its_idle_memory_has_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "WORKER_START", 0.1)
    assert "GB are offered" in end_of(tmp_path, monkeypatch, TAKE_MEMORY, ram=1 << 20).failure


def test_a_worker_cannot_say_that_it_held_everything_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "MOST_IDLE", 50 << 20)
    attack = "taken = bytearray(200 << 20)\nopen('idle.json', 'w').write('9' * 12)\n" + WAIT
    assert "GB are offered" in end_of(tmp_path, monkeypatch, attack, ram=1 << 20).failure


@pytest.mark.parametrize("broken", ["folder_usage", "held_memory", "thread_count", "removed_size"])
def test_a_worker_that_is_not_watched_any_more_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_arguments: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(worker_process, broken, fail)
    ended = end_of(tmp_path, monkeypatch, WAIT)
    assert "the limits of the worker cannot be checked: a bug" in ended.failure
    assert ended.cause == "machine"


def test_the_end_of_a_worker_is_told_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> str:
        raise RuntimeError("a bug")

    monkeypatch.setattr(worker_process, "last_line", fail)
    assert end_of(tmp_path, monkeypatch, "sys.exit(1)\n").failure == "the worker ended with exit code 1"


def test_a_disk_that_cannot_be_read_is_not_the_fault_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_folder: Path) -> FolderUsage:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(worker_process, "folder_usage", fail)
    assert end_of(tmp_path, monkeypatch, WAIT).cause == "machine"


def test_priority_and_core_dumps() -> None:
    script = """
        import json, os, resource
        print(json.dumps([os.nice(0), resource.getrlimit(resource.RLIMIT_CORE)]))
        limits.confine()
        print(os.nice(0))
    """
    first, second = output_of(script).splitlines()
    nice, core = json.loads(first)
    assert nice == max(10, os.nice(0))
    assert core == [0, 0]
    assert int(second) == nice  # not lower still


def test_the_system_refuses_a_very_large_allocation() -> None:
    script = """
        idle = limits.limit_memory(100 << 20)
        print(idle > 1 << 20)
        kept = bytearray(50 << 20)
        print("small")
        try:
            bytearray(4 << 30)
        except MemoryError:
            print("refused")
    """
    assert output_of(script).split() == ["True", "small", "refused"]


def test_mapped_files_do_not_count(tmp_path: Path) -> None:
    size = 64 << 20
    (tmp_path / "data").write_bytes(bytes(size))
    script = f"""
        import mmap
        file = open({str(tmp_path / "data")!r}, "rb")
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        before = limits.held_memory(limits.psutil.Process())
        for start in range(0, {size}, 4096):
            mapped[start]
        after = limits.held_memory(limits.psutil.Process())
        print(after - before)
    """
    assert int(output_of(script)) < size // 4


def test_shared_memory_that_is_no_file_counts() -> None:
    size = 64 << 20
    script = f"""
        import mmap
        before = limits.held_memory(limits.psutil.Process())
        shared = mmap.mmap(-1, {size}, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        for start in range(0, {size}, 4096):
            shared[start] = 1
        print(limits.held_memory(limits.psutil.Process()) - before)
    """
    assert int(output_of(script)) >= size


def test_a_worker_has_a_limited_number_of_open_files() -> None:
    script = """
        import resource
        limits.limit_files(1 << 30)
        print(*resource.getrlimit(resource.RLIMIT_NOFILE))
    """
    soft, hard = map(int, output_of(script).split())
    assert soft == hard <= MOST_OPEN_FILES


def test_an_ended_process_holds_nothing() -> None:
    with confined("") as process:
        watched = psutil.Process(process.pid)
        process.wait(SECONDS)
        assert held_memory(watched) == 0


@pytest.mark.parametrize("busy", ["threading.Event().wait()", "os.read(read, 1)"])
def test_a_worker_ends_when_its_agent_is_killed(busy: str) -> None:
    """The agent here is a process that starts a confined one and is killed."""
    worker = (
        f"{BOOT}import os, threading\n"
        f"print('ready', os.getpid(), flush=True)\nread, write = os.pipe()\n{busy}\n"
    )
    agent = (
        "import subprocess, sys, threading\n"
        f"process = subprocess.Popen([sys.executable, '-I', '-c', {worker!r}],"
        " stdin=subprocess.PIPE, process_group=0)\nthreading.Event().wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        word, pid = process.stdout.readline().split()
        assert word == "ready"
        watched = os.pidfd_open(int(pid))
        process.send_signal(signal.SIGKILL)
        gone, _, _ = select.select([watched], [], [], SECONDS)
        os.close(watched)
        assert gone, "the worker still runs"
