"""The figures of ``docs/schedules.md``, made by the simulator.

A comment in the page names the parameters; the block or table after it is the result.
"""

from __future__ import annotations

import re

from ravnest.runtime.schedule.simulator import LinkCost, Scenario, StageCost, grid, simulate, steady_rate
from ravnest.types import Schedule

BLOCK = re.compile(r"<!-- grid: (.*?) -->\n```\n.*?```", re.DOTALL)
TABLE = re.compile(r"(<!-- rates -->\n.*?\n\|--.*?\n)((?:\|.*\n)+)")


def regenerate(page: str) -> str:
    """Return the page with every figure made anew."""
    return TABLE.sub(_table, BLOCK.sub(_block, page))


def _block(found: re.Match[str]) -> str:
    text = found.group(1)
    told = dict(pair.split("=") for pair in text.split())
    schedule, parts = told["schedule"], int(told["parts"])
    cost = StageCost(1, 1, 0, 1) if told["deferred"] == "yes" else StageCost(1, 2)
    scenario = _scenario(3, parts, 0, "sync" if schedule == "sync" else "async", cost)
    timeline = simulate(scenario, record=True).timeline
    body = "\n".join(line[: int(told["columns"])].rstrip() for line in grid(timeline, 1).splitlines())
    return f"<!-- grid: {text} -->\n```\n{body}\n```"


def _table(found: re.Match[str]) -> str:
    head, rows = found.groups()
    return head + "\n".join(_row(row) for row in rows.splitlines()) + "\n"


def _row(row: str) -> str:
    stages, parts, link = (int(cell) for cell in row.strip("| ").split("|")[:3])
    cost, together = StageCost(10, 10, 0, 10), StageCost(10, 20)
    rates = (
        _scenario(stages, parts, link, "sync", cost),
        _scenario(stages, parts, link, "sync", together),
        _scenario(stages, parts, link, "sync", cost, clip=True),
        _scenario(stages, parts, link, "async", cost),
    )
    shares = (f"{steady_rate(scenario) * cost.microbatch:.0%}" for scenario in rates)
    return f"| {' | '.join([str(stages), str(parts), str(link), *shares])} |"


def _scenario(
    stages: int, parts: int, link: float, schedule: Schedule, cost: StageCost, *, clip: bool = False
) -> Scenario:
    """Return a scenario of three updates with as many micro-batches in flight as are useful."""
    return Scenario(
        (cost,) * stages,
        (LinkCost(link, link),) * (stages - 1),
        window=parts * (1 if schedule == "sync" else 2),
        update_size=parts,
        schedule=schedule,
        microbatches=3 * parts,
        clip=clip,
    )
