"""Measure and write docs/benchmarks.md.

    python benchmarks/run.py                            all sections
    python benchmarks/run.py --only split_time,memory   some sections; the others stay unchanged

Most results are ratios of measurements from the same run, because machines differ and are shared.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import re
from pathlib import Path

import torch

REPORT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
SECTIONS = {
    "stage_cost": "Cost of a step in stages",
    "lstm_cost": "Cost of LSTM layers that defer weight gradients",
    "split_time": "Time and memory of splitting",
    "memory": "Planned memory against measured memory",
    "offered_memory": "Training within the offered memory",
    "planning": "Quality and growth of planning",
    "schedule": "Predicted rates of the schedules",
    "transport": "Cost of a link",
    "relay": "Cost of a relay",
    "allreduce": "Averaging between clusters",
    "efficiency": "Efficiency of the schedule",
    "pipeline": "Pipelines compared",
    "idle": "Cost of an idle node",
    "checkpoints": "Cost of checkpoints",
    "spot_checks": "Cost of spot checks",
    "observation": "Cost of metrics, logs and traces",
    "learning": "Learning compared with one process",
    "delay": "Cost of late gradients",
    "virtual": "Learning under virtual time",
    "cluster_learning": "Learning of several clusters",
    "going_back": "Learning of clusters that go back to a checkpoint",
    "robust_mean": "Averages with a lying cluster",
    "optimizer_state": "Optimizer state in 8 bits",
    "compression": "Savings and cost of compression",
    "averaging": "Value and cost of averaging clusters",
    "page": "The page with many providers and losses",
}


def main() -> None:
    """Run the selected sections, and write each to the report as soon as it is measured."""
    for name in _options().only:
        print(f"measuring {name} ...", flush=True)
        module = importlib.import_module(name)
        text = f"{_about(module.__doc__)}\n\n{module.measure()}\n\n{_conditions()}"
        print(text, flush=True)
        sections = _sections(REPORT.read_text(encoding="utf-8")) if REPORT.exists() else {}
        sections[SECTIONS[name]] = text
        REPORT.write_text(_report(sections), encoding="utf-8")


def _sections(report: str) -> dict[str, str]:
    """Return the texts of a report by title."""
    _, *pieces = re.split(r"^## (.+)\n", report, flags=re.MULTILINE)
    return {title: text.strip() for title, text in zip(pieces[::2], pieces[1::2], strict=True)}


def _report(sections: dict[str, str]) -> str:
    known = [title for title in SECTIONS.values() if title in sections]
    return "\n".join([_HEADLINE, *(f"## {title}\n\n{sections[title]}\n" for title in known)])


_HEADLINE = """\
# Benchmarks

Reproduce with `make bench`, or some sections with `make bench ARGS='--only stage_cost,memory'`.
Most results are ratios of measurements from the same run, because machines differ and are shared.
"""


def _about(docstring: str | None) -> str:
    """Return the description of a section: the module's docstring without the part about scripts."""
    text = (docstring or "").strip()
    return text.partition("Run as a script")[0].strip()


def _conditions() -> str:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return (
        f"*Measured {today} with torch {torch.__version__} on {os.cpu_count()} shared cores, no GPU; "
        f"load average at the end {os.getloadavg()[0]:.1f}.*"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", type=_names, default=list(SECTIONS), metavar="NAME,...")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(
            f"unknown section {unknown[0]}; choose from {', '.join(SECTIONS)}"
        )
    return names


if __name__ == "__main__":
    main()
