"""Routes of the server itself: health, authority, join, events, API description."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from ravnest.schemas.auth import Health, JoinReply, JoinRequest, JoinToken, PageLink
from ravnest.schemas.jobs import EventView
from ravnest.server.auth.dependencies import AnyMember, CurrentServer, EventReader, source_of
from ravnest.server.http.guarded_route import GuardedRoute, Position
from ravnest.version import __version__

router = APIRouter(prefix="/api", tags=["server"], route_class=GuardedRoute)


@router.get("/health")
def health(server: CurrentServer) -> Health:
    """Return whether the database can be used and the disk has room, and the version."""
    problems = server.check_health()
    status: Literal["ok", "trouble"] = "trouble" if problems else "ok"
    return Health(status=status, problems=problems, version=__version__)


@router.get("/authority", response_class=PlainTextResponse)
def authority(server: CurrentServer) -> str:
    """Return the certificate of the server's authority (PEM); tokens contain its fingerprint."""
    return server.auth.authority


@router.post("/join")
def join(body: JoinRequest, request: Request, server: CurrentServer) -> JoinReply:
    """Exchange a token for a credential."""
    return server.auth.join(body.secret, body.name, source_of(request))


@router.post("/page-link", status_code=201)
def page_link(member: AnyMember, server: CurrentServer) -> PageLink:
    """Return a link that logs a browser in as this member, once, within ten minutes."""
    token = JoinToken(server.auth.page_logins.new_link(member.id))
    return PageLink(path=f"/login?token={token}")


@router.get("/events")
def events(_: EventReader, server: CurrentServer, after: Position = 0) -> list[EventView]:
    """Return the events after number ``after``, oldest first."""
    with server.db.read() as db:
        return db.events.after(after)


@router.get("/openapi.json", include_in_schema=False)
def openapi(_: AnyMember, request: Request) -> dict[str, Any]:
    """Return the OpenAPI description of the API."""
    document: dict[str, Any] = request.app.openapi()
    return document
