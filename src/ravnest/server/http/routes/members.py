"""Routes of members, for the admin: list and revoke."""

from __future__ import annotations

from fastapi import APIRouter

from ravnest.schemas.auth import MemberView
from ravnest.server.auth.dependencies import AdminMember, CurrentServer
from ravnest.server.http.guarded_route import GuardedRoute

router = APIRouter(prefix="/api/members", tags=["members"], route_class=GuardedRoute)


@router.get("")
def listed(_: AdminMember, server: CurrentServer) -> list[MemberView]:
    """Return all members, oldest first."""
    return server.auth.members()


@router.delete("/{member}")
def revoke(member: str, _: AdminMember, server: CurrentServer) -> None:
    """End the credential of a member, now; its machine leaves the job that it works on."""
    server.revoke(member)
