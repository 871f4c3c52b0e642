"""Routes that the scripts of the page call, with the cookie of the browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from ravnest.errors import ServerRefusedError
from ravnest.schemas.auth import ApiRole, MemberView
from ravnest.schemas.base import LARGEST_NUMBER, Schema
from ravnest.schemas.job_changes import JobChanges
from ravnest.server.auth.dependencies import CurrentServer, source_of
from ravnest.server.auth.tokens import DEFAULT_HOURS
from ravnest.server.db.members import StoredToken
from ravnest.server.db.records import JobRecord
from ravnest.server.http.guarded_route import GuardedRoute, Position
from ravnest.server.web.browser_auth import (
    AdminVisitor,
    JobVisitor,
    RequestingVisitor,
    Visitor,
    cookie_name,
)
from ravnest.server.web.curves import MOST_BUCKETS, job_curves
from ravnest.server.web.details import job_detail, provider_detail
from ravnest.server.web.feed import PageFeed
from ravnest.server.web.stream import StreamPlaces, page_events

router = APIRouter(prefix="/page", include_in_schema=False, route_class=GuardedRoute)
_NO_STORE = {"Cache-Control": "no-store"}
_TOKEN_ROLES = (ApiRole.PROVIDER, ApiRole.REQUESTER, ApiRole.VIEWER, ApiRole.RELAY)


class TokenRequest(Schema):
    """Request of an admin for a token."""

    role: ApiRole
    uses: Annotated[int, Field(ge=1, le=10_000)] | None = 1
    """``None``: any number, until it expires."""
    hours: Annotated[float, Field(gt=0, le=24 * 365)] = DEFAULT_HOURS


@router.get("/stream")
async def stream(request: Request, member: Visitor, server: CurrentServer) -> Response:
    """Send the state of the page, and then its changes, as server-sent events."""
    feed, places = request.app.state.page_feed, request.app.state.page_streams
    assert isinstance(feed, PageFeed)
    assert isinstance(places, StreamPlaces)
    events = page_events(server, feed, member)
    return _PageStream(places, source_of(request), events)


class _PageStream(StreamingResponse):
    """Stream that holds a place while it is sent; it refuses (429) if there is none."""

    def __init__(self, places: StreamPlaces, address: str, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_NO_STORE)
        self._places = places
        self._address = address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._places.taken(self._address):
            await super().__call__(scope, receive, send)


@router.get("/whoami")
async def whoami(request: Request, member: Visitor) -> Response:
    """Return the member that this browser is logged in as, and why it would get no stream."""
    places = request.app.state.page_streams
    assert isinstance(places, StreamPlaces)
    refusal = places.refusal(source_of(request))
    return _json({"id": member.id, "name": member.name, "role": member.role, "refusal": refusal})


@router.get("/jobs/{job}")
def job(job: str, member: JobVisitor, server: CurrentServer) -> Response:
    """Return everything about a job except its curves."""
    record = server.visible_job(member, job)
    with server.db.read() as db:
        return _json(job_detail(db, db.jobs.get(job) or record, server.artifacts.path))


@router.get("/jobs/{job}/curves")
def curves(
    job: str,
    member: JobVisitor,
    server: CurrentServer,
    points: Annotated[int, Query(ge=10, le=MOST_BUCKETS)] = 600,
    first: Position = 0,
    last: Position = LARGEST_NUMBER - 1,
) -> Response:
    """Return the curves of a job: losses of updates ``first`` to ``last`` in at most ``points``."""
    server.visible_job(member, job)
    with server.db.read() as db:
        return _json(job_curves(db, job, points, first, last))


@router.post("/jobs/{job}/cancel")
def cancel(job: str, member: RequestingVisitor, server: CurrentServer) -> Response:
    """Cancel the job and stop its providers."""
    server.visible_job(member, job)
    server.job_service.cancel(job, member)
    return _json({})


@router.post("/jobs/{job}/resubmit")
def resubmit(job: str, body: JobChanges, member: RequestingVisitor, server: CurrentServer) -> Response:
    """Submit the job again with changed settings; return the id of the new one."""
    record = server.visible_job(member, job)
    return _json({"id": server.resubmission_service.resubmit(record, member, body)})


@router.get("/providers/{provider}")
def provider(provider: str, member: Visitor, server: CurrentServer) -> Response:
    """Return the history of a provider, as far as the member may see it."""
    sees_all = member.role in (ApiRole.VIEWER, ApiRole.ADMIN) or member.id == provider
    if not sees_all and member.role is not ApiRole.REQUESTER:
        raise server.auth.refused(member.id, f"{member.name} requested the history of {provider}")

    def may_see(record: JobRecord) -> bool:
        return sees_all or record.owner == member.id

    with server.db.read() as db:
        if db.providers.presence(provider) is None:
            raise ServerRefusedError(f"there is no provider {provider}", 404)
        return _json(provider_detail(db, provider, may_see, with_events=sees_all))


@router.get("/members")
def members(_: AdminVisitor, server: CurrentServer) -> Response:
    """Return the members and the tokens that can still be used."""
    tokens = [_token_view(each) for each in server.auth.tokens()]
    return _json({"members": _plain(server.auth.members()), "tokens": tokens})


@router.delete("/members/{member}")
def revoke(member: str, _: AdminVisitor, server: CurrentServer) -> Response:
    """End the credential of a member, now."""
    server.revoke(member)
    return _json({})


@router.post("/tokens")
def create_token(body: TokenRequest, _: AdminVisitor, server: CurrentServer) -> Response:
    """Create a token for a provider, requester, viewer or relay."""
    if body.role not in _TOKEN_ROLES:
        raise ServerRefusedError("tokens for an admin are created on the server's machine", 422)
    fingerprint = server.auth.fingerprint if server.tls else ""
    made = server.auth.create_token(body.role, fingerprint, uses=body.uses, hours=body.hours)
    return _json({"token": str(made)})


@router.delete("/tokens/{token}")
def revoke_token(token: str, _: AdminVisitor, server: CurrentServer) -> Response:
    """Delete a token, by the hash of its secret."""
    server.auth.revoke_token(token)
    return _json({})


@router.post("/logout")
def logout(_: Visitor, server: CurrentServer) -> Response:
    """Have the browser forget its cookie."""
    answer = _json({})
    answer.delete_cookie(
        cookie_name(tls=server.tls), httponly=True, samesite="strict", secure=server.tls
    )
    return answer


def _token_view(token: StoredToken) -> dict[str, Any]:
    return {
        "id": token.hash,
        "role": token.role,
        "uses_left": token.uses_left,
        "expires": token.expires,
    }


def _plain(views: list[MemberView]) -> list[dict[str, Any]]:
    return [view.model_dump(mode="json") for view in views]


def _json(value: Any) -> Response:
    """Return a reply; dataclasses and messages become objects."""
    content = msgspec.json.encode(value, enc_hook=_message)
    return Response(content, media_type="application/json", headers=_NO_STORE)


def _message(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} cannot be sent")
