"""A running job as lines of text: progress, pipelines and the loss curve. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from ravnest.schemas.jobs import AssignmentView, JobView
from ravnest.types import Role

_LEVELS = " ▁▂▃▄▅▆▇█"
"""A character cell filled to eighths, from empty to full."""
_CHART_LINES = 4
_LABEL = 9
"""Columns of the figure beside the chart."""
_WIDEST_CHART = 100
_ORDERED = 3
"""Nodes of a pipeline whose order their roles show: Root, Stem, Leaf."""
_KEPT_LOSSES = 10_000
"""Losses of a curve that are kept."""


def job_lines(view: JobView, losses: Mapping[int, float], progress: str, width: int) -> Iterator[str]:
    """Yield the lines of a job, each at most ``width`` columns long.

    ``losses``: those that were seen so far, by update; ``progress``: the progress in words.
    """
    yield cut(f"{view.name} ({view.id}) is {view.state}: {' '.join(view.reason.split())}", width)
    if progress:
        yield cut(progress, width)
    total = view.progress.total_updates
    if total:
        yield bar(min(view.progress.updates / total, 1.0), min(width, _WIDEST_CHART))
    for line in pipelines(view):
        yield cut(line, width)
    if len(losses) > 1:
        yield from loss_curve(losses, width)


def bar(share: float, width: int) -> str:
    """Return a bar of ``width`` columns that is filled to a share."""
    room = width - 5
    full = round(share * room)
    return f"{'━' * full}{'─' * (room - full)} {share:>4.0%}"


def pipelines(view: JobView) -> Iterator[str]:
    """Yield a line for each cluster: its nodes, and the time of a micro-batch at each stage.

    An older server does not say the order of several Stems; then no arrows are shown.
    """
    timings = {each.cluster: each.timings for each in view.clusters}
    for number in sorted({each.cluster for each in view.assignments}):
        own = sorted((e for e in view.assignments if e.cluster == number), key=_position)
        in_order = len(own) <= _ORDERED or all(each.stage is not None for each in own)
        nodes = (" → " if in_order else ", ").join(map(_node, own))
        stages = ", ".join(f"{1000 * (t.forward + t.backward):.3g}" for t in timings.get(number, ()))
        yield f"cluster {number}: {nodes}" + (f"; stages take {stages} ms" if stages else "")


def _position(each: AssignmentView) -> tuple[int, int, int]:
    role = {Role.ROOT: 0, Role.STEM: 1, Role.LEAF: 2}.get(Role(each.role), 1)
    return role, each.stage or 0, each.node


def _node(each: AssignmentView) -> str:
    phase = "" if each.phase == "training" else f", {each.phase}"
    return f"{each.provider_name} ({each.role}{phase})"


def bounded(losses: dict[int, float]) -> dict[int, float]:
    """Return the losses of a curve by update, every second one if they are too many."""
    return losses if len(losses) <= _KEPT_LOSSES else dict(sorted(losses.items())[::-2][::-1])


def loss_curve(losses: Mapping[int, float], width: int) -> Iterator[str]:
    """Yield the lines of a curve, at most ``width`` columns long, in which each update has its place."""
    first, count = min(losses), max(losses) - min(losses) + 1
    columns = min(count, max(min(width, _WIDEST_CHART) - _LABEL - 1, 1))
    found: list[list[float]] = [[] for _ in range(columns)]
    for update, loss in losses.items():
        found[(update - first) * columns // count].append(loss)
    values: list[float] = []
    for each in found:  # the first is not empty
        values.append(sum(each) / len(each) if each else values[-1])
    for line in chart(values, min(width, _WIDEST_CHART), _CHART_LINES):
        yield cut(line, width)


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return a curve of ``height`` lines, with its largest and smallest value at the left.

    More values than columns are averaged, so that the curve always shows all of them.
    """
    columns = _averaged(values, max(width - _LABEL - 1, 1))
    low, high = min(columns), max(columns)
    span = (high - low) or 1.0
    steps = height * (len(_LEVELS) - 1)
    heights = [1 + round((value - low) / span * (steps - 1)) for value in columns]
    lines = []
    for row in range(height - 1, -1, -1):
        below = row * (len(_LEVELS) - 1)
        cells = "".join(_LEVELS[min(max(each - below, 0), len(_LEVELS) - 1)] for each in heights)
        label = f"{high:.4g}" if row == height - 1 else f"{low:.4g}" if row == 0 else ""
        lines.append(f"{label:>{_LABEL}} {cells}".rstrip())
    return lines


def _averaged(values: Sequence[float], most: int) -> list[float]:
    """Return at most ``most`` means of consecutive values."""
    count = min(len(values), most)
    bounds = [len(values) * n // count for n in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]


def cut(line: str, width: int) -> str:
    """Return a line of at most ``width`` columns."""
    return line if len(line) <= width else f"{line[: max(width - 1, 0)]}…"
