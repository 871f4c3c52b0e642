"""Line charts as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 720, 360, 56
COLOURS = ("#1f6feb", "#2da44e", "#cf222e", "#8250df")
_TICKS = 5

Points = Sequence[tuple[float, float]]


def line_chart(series: Mapping[str, Points], x_title: str, y_title: str) -> str:
    """Return a chart with one line per series; both axes begin at 0."""
    right = max(x for points in series.values() for x, _ in points)
    top = max(y for points in series.values() for _, y in points)
    width, height = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN

    def place(x: float, y: float) -> tuple[float, float]:
        return MARGIN + width * x / right, HEIGHT - MARGIN - height * y / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, HEIGHT - 12, x_title),
        _text(MARGIN, MARGIN - 16, y_title),
    ]
    for tick in range(_TICKS + 1):
        x, y = right * tick / _TICKS, top * tick / _TICKS
        (across, bottom), (left, up) = place(x, 0), place(0, y)
        parts += [
            f'<path d="M{left:.1f} {up:.1f}h{width}" stroke="#d0d7de"/>',
            _text(across, bottom + 18, f"{x:.3g}"),
            _text(left - 8, up + 4, f"{y:.2g}", anchor="end"),
        ]
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        label = MARGIN + 16 * number
        parts += [
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
            _text(WIDTH - MARGIN, label, name, anchor="end", fill=colour),
        ]
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "middle", fill: str = "#24292f") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
