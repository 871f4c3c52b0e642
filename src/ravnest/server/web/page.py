"""The page at ``/``: providers, jobs, and how their losses fall. Plain, and without any script."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from ravnest.errors import ServerRefusedError
from ravnest.schemas.auth import JoinToken
from ravnest.server.auth.dependencies import ServerHere, server_of, source_of
from ravnest.server.db.records import MemberRecord
from ravnest.server.job_status import leading_root
from ravnest.server.server import Server
from ravnest.server.views import provider_views
from ravnest.server.web.rendering import document, lost_way, overview, welcome

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

COOKIE = "ravnest"
_JOBS = 30
_POINTS = 300
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


@router.get("/")
def page(request: Request) -> HTMLResponse:
    """All that this browser's member may see."""
    server = server_of(request)
    member = _visitor(server, request)
    if member is None:
        return HTMLResponse(document(lost_way()), 401, headers=_HEADERS)
    jobs = server.jobs_of(member, _JOBS)
    since = server.clock.wall() - server.settings.shown_after_loss
    with server.store.look() as books:
        providers = provider_views(books, server.steward.liveness, since)
        curves = {}
        for job in jobs:
            root = leading_root(books.parts.of_job(job.id))
            curves[job.id] = [] if root is None else books.parts.sampled_losses(root, _POINTS)
    body = overview(member, providers, jobs, curves, server.clock.wall())
    return HTMLResponse(document(body, refresh="10"), headers=_HEADERS)


@router.get("/login")
def login(
    request: Request, server: ServerHere, token: Annotated[str, Query(max_length=400)] = ""
) -> HTMLResponse:
    """Exchange the token in a link for a cookie that only this server sees.

    It answers with a page that goes on to ``/`` by itself, not with a redirect: a browser that came
    from elsewhere would not send a strict cookie along with that.
    """
    lifetime = server.settings.page_login
    try:
        secret = JoinToken.parse(token).secret
        expires = server.clock.wall() + lifetime
        joined = server.trust.join(secret, "a browser", source_of(request), expires=expires)
    except (ValueError, ServerRefusedError) as error:
        return HTMLResponse(document(lost_way(str(error))), 401, headers=_HEADERS)
    answer = HTMLResponse(document(welcome(), refresh="0;url=/"), headers=_HEADERS)
    answer.set_cookie(
        COOKIE,
        joined.credential,
        max_age=int(lifetime),
        httponly=True,
        samesite="strict",
        secure=server.tls,
    )
    return answer


def _visitor(server: Server, request: Request) -> MemberRecord | None:
    credential = request.cookies.get(COOKIE)
    if not credential:
        return None
    try:
        return server.trust.member(credential, source_of(request))
    except ServerRefusedError:
        return None
