"""The figures of ``docs/schedules.md``, made by the simulator.

A comment in the page names the parameters; the block or table after it is the result.
"""

from __future__ import annotations

import re

from ravnest.runtime.schedule.machine import format_runs
from ravnest.runtime.schedule.simulator import LinkCost, Scenario, Simulation, StageCost, grid, simulate

BLOCK = re.compile(r"<!-- (grid|line): (.*?) -->\n```\n.*?```", re.DOTALL)
TABLE = re.compile(r"(<!-- windows: (.*?) -->\n.*?\n\|--.*?\n)((?:\|.*\n)+)")


def regenerate(page: str) -> str:
    """The page with every figure made anew."""
    return TABLE.sub(_table, BLOCK.sub(_block, page))


def _block(found: re.Match[str]) -> str:
    kind, text = found.groups()
    told = _parameters(text)
    simulation = _simulate(
        stages=3,
        cost=StageCost(1, 2),
        link=0,
        window=int(told["window"]),
        every=int(told["every"]),
        batches=int(told["batches"]),
        schedule=told["schedule"],
    )
    if kind == "grid":
        body = grid(simulation.timeline, tick=1)
    else:
        body = format_runs(span.run for span in simulation.timeline if span.stage == 0)
    return f"<!-- {kind}: {text} -->\n```\n{body}\n```"


def _table(found: re.Match[str]) -> str:
    head, text, rows = found.groups()
    told = _parameters(text)
    cost = StageCost(int(told["forward"]), int(told["backward"]))
    lines = [_row(row, cost, int(told["link"])) for row in rows.splitlines()]
    return head + "\n".join(lines) + "\n"


def _row(row: str, cost: StageCost, link: int) -> str:
    stages, window, every = (int(cell) for cell in row.strip("| ").split("|")[:3])
    simulation = _simulate(
        stages=stages, cost=cost, link=link, window=window, every=every, batches=40 * max(window, every)
    )
    share = simulation.rate * (cost.forward + cost.backward)
    root = simulation.stages[0]
    cells = (stages, window, every, f"{share:.1%}", f"{root.mean_staleness:.1f}", root.peak_versions)
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _simulate(
    *,
    stages: int,
    cost: StageCost,
    link: float,
    window: int,
    every: int,
    batches: int,
    schedule: str = "async",
) -> Simulation:
    assert schedule in ("async", "sync")
    links = (LinkCost(link, link),) * (stages - 1)
    scenario = Scenario(
        (cost,) * stages, links, window, every, "sync" if schedule == "sync" else "async", batches
    )
    return simulate(scenario, record=True)


def _parameters(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())
