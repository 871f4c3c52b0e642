"""The web page: providers, jobs and their losses, as HTML without scripts.

Jinja2 escapes every value: names and reasons come from other people.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from ravnest.errors import ServerRefusedError
from ravnest.schemas.auth import JoinToken
from ravnest.server.auth.dependencies import CurrentServer, server_of, source_of
from ravnest.server.db.records import MemberRecord
from ravnest.server.server import Server
from ravnest.server.views import loss_curve, provider_views

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

COOKIE = "ravnest"
SECURE_COOKIE = "__Host-ravnest"
"""The cookie with TLS: browsers accept it only from this host, for all its paths, over HTTPS."""
_JOBS = 30
_POINTS = 300
_WIDTH, _HEIGHT = 220, 44
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


@router.get("/")
def page(request: Request) -> HTMLResponse:
    """Show everything that this browser's member may see."""
    server = server_of(request)
    member = _visitor(server, request)
    if member is None:
        return _rendered("login.html", 401, problem="")
    now = server.clock.wall()
    jobs = server.visible_jobs(member, _JOBS)
    curves = {}
    with server.db.read() as db:
        lost_since = now - server.settings.shown_after_loss
        relays = server.relay_service.live()
        providers = provider_views(db, server.provider_service.liveness, lost_since, relays, member)
        for job in jobs:
            curves[job.id] = loss_curve(db, job.id, _POINTS)
    return _rendered(
        "overview.html", member=member, providers=providers, jobs=jobs, curves=curves, now=now
    )


@router.get("/login")
def login(
    request: Request, server: CurrentServer, token: Annotated[str, Query(max_length=400)] = ""
) -> HTMLResponse:
    """Exchange the token of a login link for a cookie that only this server receives.

    The reply is a page that loads ``/``, not a redirect: after a redirect, a browser that follows a
    link from another site would not send a cookie with ``SameSite=Strict``.
    """
    lifetime = server.settings.page_login
    try:
        secret = JoinToken.parse(token).secret
        expires = server.clock.wall() + lifetime
        joined = server.auth.join(secret, "browser", source_of(request), expires=expires)
    except (ValueError, ServerRefusedError) as error:
        return _rendered("login.html", 401, problem=str(error))
    answer = _rendered("welcome.html")
    answer.set_cookie(
        _cookie(server),
        joined.credential,
        max_age=int(lifetime),
        httponly=True,
        samesite="strict",
        secure=server.tls,
    )
    return answer


def _cookie(server: Server) -> str:
    return SECURE_COOKIE if server.tls else COOKIE


def _visitor(server: Server, request: Request) -> MemberRecord | None:
    credential = request.cookies.get(_cookie(server))
    if not credential:
        return None
    try:
        member = server.auth.member(credential, source_of(request))
    except ServerRefusedError:
        return None
    server.count_request(member)
    return member


def _rendered(template: str, status: int = 200, **values: object) -> HTMLResponse:
    return HTMLResponse(_templates.get_template(template).render(values), status, headers=_HEADERS)


def _points(curve: Sequence[tuple[int, float]]) -> str:
    """Return the points of an SVG polyline: updates from left to right, losses from bottom to top."""
    first, last = curve[0][0], curve[-1][0]
    low = min(loss for _, loss in curve)
    span = max(loss for _, loss in curve) - low or 1.0
    return " ".join(
        f"{(update - first) / (last - first) * _WIDTH:.1f},{(1 - (loss - low) / span) * _HEIGHT:.1f}"
        for update, loss in curve
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


_templates = Environment(
    loader=PackageLoader("ravnest.server.web"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters.update(points=_points, number=_number, ago=_ago)
_templates.globals.update(width=_WIDTH, height=_HEIGHT)
