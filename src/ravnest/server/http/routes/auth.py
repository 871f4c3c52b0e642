"""Joining the server, and what everybody may know about it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from ravnest.schemas.auth import JoinReply, JoinRequest
from ravnest.schemas.jobs import EventView
from ravnest.server.auth.dependencies import AnOverseer, Anybody, ServerHere, source_of
from ravnest.version import __version__

router = APIRouter(prefix="/api", tags=["server"])


@router.get("/health")
async def health() -> dict[str, str]:
    """The server lives."""
    return {"status": "ok", "version": __version__}


@router.get("/authority", response_class=PlainTextResponse)
def authority(server: ServerHere) -> str:
    """The certificate of the server's authority (PEM); a token has its fingerprint."""
    return server.trust.authority


@router.post("/join")
def join(body: JoinRequest, request: Request, server: ServerHere) -> JoinReply:
    """Exchange a token for a credential."""
    return server.trust.join(body.secret, body.name, source_of(request))


@router.get("/events")
def events(_: AnOverseer, server: ServerHere, after: int = 0) -> list[EventView]:
    """What happened after an event, oldest first."""
    with server.store.look() as books:
        return books.events.after(after)


@router.get("/openapi.json", include_in_schema=False)
def openapi(_: Anybody, request: Request) -> dict[str, Any]:
    """The API, described for programs."""
    document: dict[str, Any] = request.app.openapi()
    return document
