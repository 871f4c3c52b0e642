"""The page as HTML. Pure; everything that somebody else wrote is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from ravnest.schemas.jobs import JobView
from ravnest.schemas.providers import ProviderView
from ravnest.server.db.records import MemberRecord

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1b1f24}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.35rem .7rem;border-bottom:1px solid #d8dee4;vertical-align:top}
th{font-weight:600}td.n{text-align:right;font-variant-numeric:tabular-nums}
.lost,.failed,.cancelled{color:#a40e26}.training,.done{color:#116329}.quiet{color:#59636e}
svg{display:block}code{background:#f0f2f4;padding:.1rem .3rem}
@media (prefers-color-scheme:dark){body{background:#15191e;color:#e6e9ec}th,td{border-color:#353c44}
.lost,.failed,.cancelled{color:#ff8182}.training,.done{color:#6fdd8b}.quiet{color:#9aa4ae}
code{background:#262c33}}
"""
_WIDTH, _HEIGHT = 220, 44

Curve = Sequence[tuple[int, float]]
"""Updates and their losses."""


def document(body: str, refresh: str = "") -> str:
    """A whole page; ``refresh`` as in the header of that name."""
    again = f'<meta http-equiv="refresh" content="{escape(refresh)}">' if refresh else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"{again}<title>Ravnest</title><style>{_STYLE}</style></head><body>{body}</body></html>"
    )


def lost_way(problem: str = "") -> str:
    """How to get in."""
    said = f'<p class="failed">{escape(problem)}</p>' if problem else ""
    return (
        f"<h1>Ravnest</h1>{said}<p>This page is for members. On the machine of the server run</p>"
        "<p><code>ravnest token create --role viewer</code></p>"
        "<p>and open the login link that it prints; it works once, in one browser.</p>"
    )


def welcome() -> str:
    """Between the login and the page."""
    return '<h1>Ravnest</h1><p>Welcome. <a href="/">Go on to the page.</a></p>'


def overview(
    member: MemberRecord,
    providers: Sequence[ProviderView],
    jobs: Sequence[JobView],
    curves: Mapping[str, Curve],
    now: float,
) -> str:
    """Providers and jobs."""
    return (
        f'<h1>Ravnest</h1><p class="quiet">You are {escape(member.name)} ({escape(member.role)}).</p>'
        f"<h2>Providers</h2>{_providers(providers, now)}<h2>Jobs</h2>{_jobs(jobs, curves, now)}"
    )


def _providers(providers: Sequence[ProviderView], now: float) -> str:
    if not providers:
        return '<p class="quiet">None yet: <code>ravnest provide --server URL --token T</code></p>'
    rows = "".join(
        f"<tr><td>{escape(each.offer.name)}</td>"
        f'<td class="{escape(each.state)}">{escape(each.state)}</td>'
        f'<td class="n">{each.offer.ram:.1f} GB</td><td class="n">{each.offer.cores}</td>'
        f'<td class="n">{each.offer.compute:.0f} GFLOP/s</td>'
        f'<td class="n">{each.offer.bandwidth:.0f} Mbit/s</td>'
        f'<td>{escape(each.reason)}</td><td class="n">{_ago(now - each.seen)}</td></tr>'
        for each in providers
    )
    heads = ("Name", "State", "RAM", "Cores", "Compute", "Bandwidth", "Why", "Heard of")
    return _table(heads, rows)


def _jobs(jobs: Sequence[JobView], curves: Mapping[str, Curve], now: float) -> str:
    if not jobs:
        return '<p class="quiet">None yet: <code>ravnest submit module:function</code></p>'
    rows = "".join(
        f'<tr><td>{escape(job.name)}<br><span class="quiet">{escape(job.id)}</span></td>'
        f'<td class="{escape(job.state)}">{escape(job.state)}</td><td>{escape(job.reason)}</td>'
        f'<td class="n">{job.progress.updates}</td><td class="n">{_number(job.progress.loss)}</td>'
        f'<td class="n">{_number(job.progress.figure)}</td>'
        f'<td>{line(curves.get(job.id, ()))}</td><td class="n">{_ago(now - job.created)}</td></tr>'
        for job in jobs
    )
    heads = ("Job", "State", "Why", "Updates", "Loss", "Validation", "Loss so far", "Submitted")
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: str) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def line(curve: Curve) -> str:
    """Losses as a small drawing; nothing while there are fewer than two."""
    if len(curve) < 2:
        return ""
    first, last = curve[0][0], curve[-1][0]
    low = min(loss for _, loss in curve)
    span = max(loss for _, loss in curve) - low or 1.0
    points = " ".join(
        f"{(update - first) / (last - first) * _WIDTH:.1f},{(1 - (loss - low) / span) * _HEIGHT:.1f}"
        for update, loss in curve
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 -2 {_WIDTH} {_HEIGHT + 4}" role="img" '
        f'aria-label="loss from {curve[0][1]:.4g} to {curve[-1][1]:.4g}">'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
