"""Providers: offers, heartbeats, and leaving."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool

from ravnest.schemas.providers import Heartbeat, HeartbeatReply, ProviderOffer, ProviderView
from ravnest.server.auth.dependencies import Anybody, AProvider, ServerHere, must_be
from ravnest.server.views import provider_views

router = APIRouter(prefix="/api/providers", tags=["providers"])


@router.get("")
def listed(_: Anybody, server: ServerHere) -> list[ProviderView]:
    """Who is here, and who was lost lately."""
    since = server.clock.wall() - server.settings.shown_after_loss
    with server.store.look() as books:
        return provider_views(books, server.steward.liveness, since)


@router.post("")
def offer(body: ProviderOffer, member: AProvider, server: ServerHere) -> ProviderView:
    """Offer this machine; again: with other figures."""
    return server.steward.offer(member, body)


@router.post("/{provider}/heartbeat")
async def heartbeat(
    provider: str, body: Heartbeat, member: AProvider, server: ServerHere
) -> HeartbeatReply:
    """Say that this provider lives and how its work goes; the answer says what it should do."""
    clock = asyncio.get_running_loop().time
    with server.wakes.listen(("provider", provider)) as news:
        await run_in_threadpool(must_be, server, member, provider, "speak for the machine")
        await run_in_threadpool(server.steward.beat, provider, body)
        deadline = clock() + min(body.wait, server.settings.heartbeat_wait)
        while True:
            orders = await run_in_threadpool(server.steward.orders, provider)
            if orders.assignment != body.known or not await news.wait(deadline - clock()):
                return orders


@router.delete("/{provider}")
def leave(
    provider: str,
    member: AProvider,
    server: ServerHere,
    reason: Annotated[str, Query(max_length=1000)] = "",
) -> None:
    """Go; what it worked at is lost."""
    must_be(server, member, provider, "end the offer")
    server.steward.leave(provider, reason)
