"""The package without the modules that other systems lack, and calls that depend on the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ravnest import host

SOURCE = Path(__file__).parents[2] / "src"
POSIX_MODULES = ("fcntl", "grp", "pwd", "resource", "termios", "tty")
THIRD_PARTY = "import os, signal, sys\nimport psutil, torch, uvicorn, filelock, rich.console, typer\n"
"""Other packages look for such modules on Linux, where they exist."""
HIDE = "".join(f"sys.modules[{name!r}] = None\n" for name in POSIX_MODULES)
HIDE_CALLS = (
    "for name in ('getuid', 'killpg', 'nice', 'sched_getaffinity', 'getppid'):\n"
    "    if hasattr(os, name): delattr(os, name)\n"
    "for name in ('SIGKILL', 'SIGHUP'):\n"
    "    delattr(signal, name)\n"
)


def run(script: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_public_api_can_be_imported_without_posix_modules() -> None:
    imports = """
import ravnest
from ravnest import Job, clusterize, provide, serve, submit
from ravnest.client import local_providers
from ravnest.cli import app
print(ravnest.__version__)
"""
    assert run(THIRD_PARTY + HIDE + HIDE_CALLS + imports).strip()


@pytest.mark.parametrize("name", ["fcntl", "resource", "pwd"])
def test_only_the_host_module_imports_modules_of_one_system(name: str) -> None:
    importing = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if any(
            line.strip().startswith((f"import {name}", f"from {name}"))
            for line in path.read_text().splitlines()
        )
    ]
    assert set(importing) <= {"ravnest/host.py"}


def test_calls_do_nothing_where_the_system_lacks_them() -> None:
    script = """
from ravnest import host
host.disable_core_dumps()
host.limit_data_memory(1 << 40)
print(host.usable_cores() >= 1, host.user_id(), host.KILL.name, [s.name for s in host.END_SIGNALS])
"""
    assert run(THIRD_PARTY + HIDE + HIDE_CALLS + script).split()[:3] == ["True", "user", "SIGTERM"]


def test_names_of_signals() -> None:
    assert host.signal_name(15) == "SIGTERM"
    assert host.signal_name(120) == "signal 120"
