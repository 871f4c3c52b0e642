"""Routes of providers: offer, heartbeat, leave."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from ravnest.schemas.providers import Heartbeat, HeartbeatReply, ProviderOffer, ProviderView
from ravnest.schemas.reachability import DialBackReply, DialBackRequest
from ravnest.server.auth.dependencies import (
    AnyMember,
    CurrentServer,
    ProviderMember,
    require_self,
    source_of,
)
from ravnest.server.db.records import MemberRecord
from ravnest.server.http.guarded_route import DirectRoute, GuardedRoute, large_body
from ravnest.server.notifications import Subscription
from ravnest.server.reachability.policy import parse_ip
from ravnest.server.server import Server
from ravnest.server.views import provider_views

router = APIRouter(prefix="/api/providers", tags=["providers"], route_class=GuardedRoute)
heartbeats = APIRouter(prefix="/api/providers", tags=["providers"], route_class=DirectRoute)


@router.get("")
def listed(member: AnyMember, server: CurrentServer) -> list[ProviderView]:
    """Return the connected providers and those lost recently, as far as the member may see them."""
    since = server.clock.wall() - server.settings.shown_after_loss
    with server.db.read() as db:
        relays = server.relay_service.live()
        return provider_views(db, server.provider_service.liveness, since, relays, member)


@router.post("")
def offer(body: ProviderOffer, member: ProviderMember, server: CurrentServer) -> ProviderView:
    """Offer this machine, or replace its offer."""
    return server.provider_service.offer(member, body)


@router.post("/dial-back")
async def dial_back(
    body: DialBackRequest, request: Request, member: ProviderMember, server: CurrentServer
) -> DialBackReply:
    """Dial the addresses of this machine, which listens there, and return what was reached."""
    source = source_of(request)
    checks = await server.dial_backs.check(member.id, body, source)
    relays = tuple(server.relay_service.live().values())
    observed = str(parse_ip(source) or source)
    return DialBackReply(checks=tuple(checks), observed=observed, relays=relays)


@heartbeats.post("/{provider}/heartbeat", response_model=HeartbeatReply)
@large_body
async def heartbeat(
    provider: str, body: Heartbeat, request: Request, member: ProviderMember, server: CurrentServer
) -> Response:
    """Report progress; the reply names the assignment that the provider should work on."""
    if member.id != provider:
        await run_in_threadpool(require_self, server, member, provider, "send a heartbeat of")
    service = server.provider_service
    deadline = asyncio.get_running_loop().time() + min(body.wait, server.settings.heartbeat_wait)
    try:
        with (
            server.notifications.subscribe(("provider", provider)) as news,
            service.liveness.polling(provider, server.clock.steady),
        ):
            reply = await server.heartbeats.answer(provider, body)
            if body.wait > 0 and not _is_new(reply, body):
                reply = await _news(server, member, body, reply, _Poll(request, news, deadline))
    finally:
        if service.liveness.is_limited(provider):
            server.notifications.notify(("clock", ""))  # its silence begins now
    # Earlier versions do not know these fields.
    left_out = {name for name in ("excluded", "trace") if not getattr(reply, name)}
    return Response(reply.model_dump_json(exclude=left_out), media_type="application/json")


@dataclass(frozen=True)
class _Poll:
    """A request whose reply waits for news."""

    request: Request
    news: Subscription
    deadline: float
    """Time of the event loop until which it waits."""


async def _news(
    server: Server, member: MemberRecord, body: Heartbeat, reply: HeartbeatReply, poll: _Poll
) -> HeartbeatReply:
    """Return the first reply that tells something new, or the last one before the deadline."""
    clock, asked = asyncio.get_running_loop().time, (reply.excluded, reply.trace)
    with _disconnection(poll.request, poll.news) as disconnected:
        while not (
            _is_new(reply, body) or (reply.excluded, reply.trace) != asked or disconnected.is_set()
        ):
            if not await poll.news.wait(poll.deadline - clock()):
                break
            await run_in_threadpool(server.auth.check_active, member)
            reply = await run_in_threadpool(server.provider_service.reply, member.id)
    return reply


def _is_new(reply: HeartbeatReply, body: Heartbeat) -> bool:
    """Return whether a reply tells a provider something that it does not know yet."""
    test = None if reply.link_test is None else reply.link_test.id
    told = (reply.assignment, reply.may_train, test, reply.upload)
    return reply.may_leave or told != (body.known, body.may_train, body.link_test, body.upload)


@contextmanager
def _disconnection(request: Request, news: Subscription) -> Iterator[asyncio.Event]:
    """Yield an event that is set, and wake the request, when its sender closes the connection."""
    found = asyncio.Event()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        found.set()
        news.notify()

    task = asyncio.ensure_future(watch())
    try:
        yield found
    finally:
        task.cancel()


@router.delete("/{provider}")
def leave(
    provider: str,
    member: ProviderMember,
    server: CurrentServer,
    reason: Annotated[str, Query(max_length=1000)] = "",
) -> None:
    """Withdraw the offer; another provider takes the place in the job that this one has."""
    require_self(server, member, provider, "withdraw the offer of")
    server.provider_service.leave(provider, reason)
