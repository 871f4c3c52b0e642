"""A loss curve of bounded length that grows with the training. Pure."""

from __future__ import annotations

from collections.abc import Sequence

MOST_POINTS = 120
"""Points of a curve; half of them remain when it is longer."""
Point = tuple[int, float]


def extended(curve: Sequence[Point], update: int, loss: float | None) -> tuple[Point, ...]:
    """Return a curve with one more loss; updates that are repeated replace earlier ones.

    A curve that gets too long is thinned out: every second point stays, and the last one.
    """
    if loss is None or (curve and curve[-1][0] == update):
        return tuple(curve)
    grown = [point for point in curve if point[0] < update] if _is_repeated(curve, update) else [*curve]
    grown.append((update, loss))
    if len(grown) > MOST_POINTS:
        grown = [*grown[:-1:2], grown[-1]]
    return tuple(grown)


def _is_repeated(curve: Sequence[Point], update: int) -> bool:
    return bool(curve) and curve[-1][0] >= update
