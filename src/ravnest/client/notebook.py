"""A job as HTML for notebooks: state, progress, and the curve of its loss."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Protocol

from ravnest.client.progress_text import progress_text, schedule_text
from ravnest.schemas.jobs import JobProgress, JobState, JobView, LossHistory

_WIDTH, _HEIGHT = 480, 120
_LEFT, _BOTTOM, _TOP = 52, 18, 6
"""Space for the numbers beside and below the curve."""
_POINTS = 400
"""Points of the curve at most."""
_COLOURS = {JobState.DONE: "#1b7f4b", JobState.FAILED: "#b3261e", JobState.CANCELLED: "#6b6b6b"}
_RUNNING = "#0b62a8"


class LossSource(Protocol):
    """Where the losses of a job come from; a ``JobHandle``."""

    def losses(self, first: int = 0, since: float = 0.0) -> LossHistory:
        """Return the losses from update ``first`` on."""


class JobPicture:
    """HTML of a job that is shown again and again: only new losses are downloaded."""

    def __init__(self, source: LossSource) -> None:
        self._source = source
        self._losses: dict[int, float | None] = {}
        self._next, self._recoveries = 0, 0

    def html(self, view: JobView) -> str:
        """Return the job as HTML."""
        if view.recoveries != self._recoveries or view.progress.updates < self._next:
            self._next = 0  # updates are repeated after the loss of a node
        self._recoveries = view.recoveries
        found = self._source.losses(self._next)
        self._losses |= zip(found.updates, found.losses, strict=True)
        self._next = found.updates[-1] + 1 if found.updates else self._next
        ordered = sorted(self._losses)
        losses = tuple(self._losses[update] for update in ordered)
        return job_html(
            view, LossHistory(first=0, updates=tuple(ordered), losses=losses, validations=())
        )


def job_html(view: JobView, history: LossHistory) -> str:
    """Return a job as HTML without scripts; everything that others named is escaped."""
    colour = _COLOURS.get(view.state, _RUNNING)
    parts = [
        f"<div><b>{escape(view.name)}</b> <code>{escape(view.id)}</code> "
        f'<span style="color:{colour};font-weight:600">{escape(view.state)}</span></div>',
        f"<div>{escape(progress_text(view.progress))}</div>",
        f"<div>{escape(schedule_text(view.progress))}</div>",
        _bar(view.progress, colour),
        _curve(history.updates, history.losses, colour),
    ]
    if view.reason:
        parts.append(f'<div style="opacity:.75">{escape(view.reason)}</div>')
    style = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;max-width:560px"
    return f'<div style="{style}">{"".join(part for part in parts if part)}</div>'


def _bar(progress: JobProgress, colour: str) -> str:
    if not progress.total_updates:
        return ""
    share = min(progress.updates / progress.total_updates, 1.0)
    return (
        f'<div role="progressbar" aria-valuenow="{100 * share:.0f}" style="background:#8884;height:6px;'
        f'border-radius:3px;margin:4px 0"><div style="background:{colour};width:{share:.1%};height:6px;'
        'border-radius:3px"></div></div>'
    )


def _curve(updates: Sequence[int], losses: Sequence[float | None], colour: str) -> str:
    points = [(u, v) for u, v in zip(updates, losses, strict=True) if v is not None]
    points = points[:: -(-(-len(points) // _POINTS) or 1)][::-1]  # with the last one
    if len(points) < 2:
        return ""
    first, last = points[0][0], points[-1][0]
    low, high = min(v for _, v in points), max(v for _, v in points)
    width, height = _WIDTH - _LEFT - 8, _HEIGHT - _BOTTOM - _TOP
    line = " ".join(
        f"{_LEFT + width * (u - first) / (last - first):.1f},"
        f"{_TOP + height * (1 - (v - low) / ((high - low) or 1)):.1f}"
        for u, v in points
    )
    text = 'font-size="10" fill="currentColor" opacity=".7"'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="loss from {points[0][1]:.4g} to {points[-1][1]:.4g}">'
        f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        f'<text x="{_LEFT - 6}" y="{_TOP + 8}" text-anchor="end" {text}>{high:.4g}</text>'
        f'<text x="{_LEFT - 6}" y="{_TOP + height}" text-anchor="end" {text}>{low:.4g}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 4}" {text}>update {first}</text>'
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 4}" text-anchor="end" {text}>{last}</text></svg>'
    )
