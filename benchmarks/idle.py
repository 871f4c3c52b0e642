"""CPU use of a node that has nothing to do.

Three provider processes connect on loopback and train for a moment. Then the Root's script pauses, and
the CPU time of each process during the pause is measured. Run as a script to print the report.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import psutil
from pipeline import STAGES, Seat, team
from workloads import DIGITS, free_addresses

PAUSE = 10.0
LIMIT = 0.01


def measure() -> str:
    """Return the report as Markdown."""
    with tempfile.TemporaryDirectory() as scratch:
        names = DIGITS.form(Path(scratch), free_addresses(STAGES))
        with team("ravnest", [Seat(DIGITS.name, scratch, name) for name in names]) as nodes:
            nodes.run(2.0)
            time.sleep(1.0)
            before = [_used(pid) for pid in nodes.pids]
            time.sleep(PAUSE)
            shares = [(_used(pid) - b) / PAUSE for pid, b in zip(nodes.pids, before, strict=True)]
    lines = [
        f"Shares of a core over {PAUSE:.0f} s; the aim is under {LIMIT:.0%}.",
        "",
        "| node | of a core |",
        "|---|--:|",
        *(f"| {name} | {share:.2%} |" for name, share in zip(names, shares, strict=True)),
    ]
    return "\n".join(lines)


def _used(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    print(measure())
