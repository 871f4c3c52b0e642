"""Limits of a worker: its environment, and real processes that reach them."""

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from ravnest.provider.limits import BUFFERS, environment, excess, held_memory

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
        "GRPC_VERBOSITY": "info",
    }


def test_the_reason_names_the_taken_and_the_offered_memory() -> None:
    assert excess(held=1_200, idle=200, offered=1_000) == ""
    reason = excess(held=3_250_000_000 + BUFFERS, idle=250_000_000, offered=2_000_000_000)
    assert "3.00 GB" in reason
    assert "2.00 GB" in reason


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
