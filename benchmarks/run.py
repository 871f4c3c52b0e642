"""Measure everything and write docs/benchmarks.md.

    python benchmarks/run.py                    all sections
    python benchmarks/run.py --only split_time  one of them, printed only

The figures are ratios measured in one run, side by side, because machines differ and are shared.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
from pathlib import Path

import torch

REPORT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
SECTIONS = {
    "stage_cost": "Cost of a step in stages",
    "split_time": "Time and memory of splitting",
    "memory": "Planned memory against measured memory",
    "planning": "Quality and growth of planning",
    "schedule": "Windows of the schedule",
    "transport": "Cost of a link",
    "efficiency": "Efficiency of the schedule",
    "pipeline": "Pipelines side by side",
    "idle": "What an idle node costs",
    "learning": "What stale gradients cost",
}


def main() -> None:
    """Run the sections that were asked for."""
    options = _options()
    parts = []
    for name in [options.only] if options.only else SECTIONS:
        print(f"measuring {name} ...", flush=True)
        module = importlib.import_module(name)
        text = f"## {SECTIONS[name]}\n\n{_about(module.__doc__)}\n\n{module.measure()}\n"
        print(text, flush=True)
        parts.append(text)
    if not options.only:
        REPORT.write_text("\n".join([_headline(), *parts]), encoding="utf-8")


def _about(docstring: str | None) -> str:
    """What a section measures: its module's docstring, less the line for programmers."""
    text = (docstring or "").strip()
    return text.partition("Run as a script")[0].strip()


def _headline() -> str:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return (
        f"# Benchmarks\n\nMeasured {today} with torch {torch.__version__} on {os.cpu_count()} shared "
        "cores, no GPU. Reproduce with `make bench`.\n"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=list(SECTIONS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
