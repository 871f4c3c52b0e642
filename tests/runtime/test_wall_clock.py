"""Jumps of the wall clock do not matter: durations are measured with monotonic clocks only."""

from __future__ import annotations

import ast
import itertools
import random
import time
from pathlib import Path

import pytest
import torch
from fault_plan import FaultPlan
from local_cluster import Formed
from memory_faults import MemoryFaults
from training_cases import points

import ravnest

SOURCE = Path(ravnest.__file__).parent
WALL = {"time.time", "time.time_ns", "datetime.datetime.now", "datetime.datetime.utcnow"}
USES = {
    "formation.py": "validity of the certificates of a plan",
    "logs/background.py": "times of log lines, which people read",
    "logs/json_lines.py": "times of log lines, which programs read",
    "logs/run_log.py": "times of log lines, which people read",
    "provider/dial_back.py": "validity of a certificate for one check",
    "relay/service.py": "end of tickets, which servers sign with their time",
    "server/artifacts.py": "age of files on the disk, which the file system counts by the wall clock",
    "tracing/files.py": "names of files, so that a later run has others",
    "tracing/recorder.py": "common origin of the spans of several machines; durations are monotonic",
    "server/settings.py": "times that people read, and validity of tokens and certificates",
}
"""Modules that read the wall clock: for points in time that another machine or a person reads."""


def wall_clock_reads(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    read = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names = [
        f"{node.module}.{name.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for name in node.names
    ]
    return [each for each in (*read, *names) if each in WALL]


def test_only_named_modules_read_the_wall_clock() -> None:
    found = {
        path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if wall_clock_reads(path)
    }
    assert found == set(USES)


@pytest.mark.parametrize("name", ["time.time()", "datetime.datetime.now(datetime.UTC)"])
def test_the_check_finds_reads(tmp_path: Path, name: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(f"import datetime, time\nnow = {name}\nelapsed = time.monotonic()\n")
    assert wall_clock_reads(path) == [name.partition("(")[0]]


PLAN = FaultPlan.parse("seed=1 | partition node_0>node_1 @5.0u for 0.2s; corrupt node_1>node_2 @15.0u")
"""Faults with which links, deadlines and checkpoints look at clocks."""


def test_a_clock_that_jumps_changes_no_bit(cluster: Formed, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, reads, start = random.Random(1), itertools.count(), time.time()

    def jumping() -> float:
        next(reads)
        return start + drawn.uniform(-1e8, 1e8)

    states = []
    for plan in (FaultPlan(0, ()), PLAN):
        faults = MemoryFaults(plan)
        settings = {"schedule": "sync", "micro_batches": 2, "checkpoint_updates": 2}
        nodes = cluster("mlp", 3, **settings, record_sink=faults)
        nodes.network = faults.network
        if plan.faults:
            monkeypatch.setattr(time, "time", jumping)
        nodes.train(lambda: (points(), None), node={}, epochs=8, save=True)
        states.append(nodes.fused())
        assert faults.happened == list(plan.faults)
        faults.close()
    assert next(reads) > 0, "nothing has read the clock"
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
