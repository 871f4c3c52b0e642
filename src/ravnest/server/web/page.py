"""The web page: its shell, and the login of a browser.

The shell has no content: scripts of this server fill it with what ``/page/stream`` sends. They create
text nodes only, because names and reasons come from other people. Jinja2 escapes every value of the
login page.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from ravnest.errors import ServerRefusedError
from ravnest.schemas.auth import JoinToken
from ravnest.server.auth.dependencies import CurrentServer, server_of, source_of
from ravnest.server.db.records import MemberRecord
from ravnest.server.server import Server
from ravnest.server.web.browser_auth import cookie_name

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


@router.get("/")
def page(request: Request) -> HTMLResponse:
    """Return the shell of the page, or how to log in."""
    server = server_of(request)
    if _visitor(server, request) is None:
        return _rendered("login.html", 401, problem="")
    return _rendered("app.html")


@router.get("/login")
def login(
    request: Request, server: CurrentServer, token: Annotated[str, Query(max_length=400)] = ""
) -> HTMLResponse:
    """Exchange the token of a login link for a cookie that only this server receives.

    The token is one for joining, or that of a link that a member made for itself (``ravnest page``).
    The reply is a page that loads ``/``, not a redirect: after a redirect, a browser that follows a
    link from another site would not send a cookie with ``SameSite=Strict``.
    """
    lifetime = server.settings.page_login
    try:
        secret = JoinToken.parse(token).secret
        expires = server.clock.wall() + lifetime
        member = server.auth.page_logins.redeem(secret)
        if member is not None:
            credential = server.auth.page_logins.cookie(member, expires)
        else:
            source = source_of(request)
            credential = server.auth.join(secret, "browser", source, expires=expires).credential
    except (ValueError, ServerRefusedError) as error:
        return _rendered("login.html", 401, problem=str(error))
    answer = _rendered("welcome.html")
    answer.set_cookie(
        cookie_name(tls=server.tls),
        credential,
        max_age=int(lifetime),
        httponly=True,
        samesite="strict",
        secure=server.tls,
    )
    return answer


def _visitor(server: Server, request: Request) -> MemberRecord | None:
    credential = request.cookies.get(cookie_name(tls=server.tls))
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


_templates = Environment(
    loader=PackageLoader("ravnest.server.web"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
