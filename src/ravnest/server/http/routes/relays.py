"""Routes of relays: join with a heartbeat, list, leave."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from ravnest.schemas.reachability import RelayHeartbeat, RelayReply, RelayView
from ravnest.server.auth.dependencies import AnyMember, CurrentServer, RelayMember
from ravnest.server.http.guarded_route import GuardedRoute

router = APIRouter(prefix="/api/relays", tags=["relays"], route_class=GuardedRoute)


@router.get("")
def listed(_: AnyMember, server: CurrentServer) -> list[RelayView]:
    """Return the relays that work now."""
    return list(server.relay_service.live().values())


@router.post("")
async def heartbeat(body: RelayHeartbeat, member: RelayMember, server: CurrentServer) -> RelayReply:
    """Offer a relay, or report that it works; the reply names the jobs whose nodes may use it."""
    clock = asyncio.get_running_loop().time
    with server.notifications.subscribe(("relays", "")) as news:
        await run_in_threadpool(server.relay_service.heartbeat, member.id, body)
        deadline = clock() + min(body.wait, server.settings.heartbeat_wait)
        while True:
            await run_in_threadpool(server.auth.check_active, member)
            reply = await run_in_threadpool(server.relay_service.reply)
            if reply.running_jobs != body.known or not await news.wait(deadline - clock()):
                return reply


@router.delete("")
def leave(member: RelayMember, server: CurrentServer) -> None:
    """Withdraw a relay."""
    server.relay_service.leave(member.id, f"the relay {member.name} left")
