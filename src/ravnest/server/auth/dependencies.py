"""Permissions of routes, as dependencies: every route declares the roles that may call it."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from ravnest.errors import ServerRefusedError
from ravnest.schemas.auth import ApiRole
from ravnest.server.db.records import MemberRecord
from ravnest.server.server import Server

MEMBER = "ravnest.member"
"""Key of the calling member in the scope of a request whose credential was checked."""


def server_of(request: Request) -> Server:
    """Return the server that received a request."""
    server = request.app.state.server
    assert isinstance(server, Server)
    return server


def source_of(request: Request) -> str:
    """Return the host that sent a request."""
    return request.client.host if request.client is not None else "an unknown host"


class Allow:
    """Dependency that returns the calling member if its role is one of these or admin.

    ``GuardedRoute`` evaluates it before it reads the body; the result is kept for the route itself.
    """

    def __init__(self, *roles: ApiRole) -> None:
        self.roles = (*roles, ApiRole.ADMIN)

    async def __call__(self, request: Request) -> MemberRecord:
        """Return the calling member; refuse a missing or unknown credential (401) or role (403)."""
        known = request.scope.get(MEMBER)
        if isinstance(known, MemberRecord):
            return known
        server, credential = server_of(request), self.credential(request)
        member = server.auth.known_member(credential)
        if member is None:
            member = await run_in_threadpool(server.auth.member, credential, source_of(request))
        if member.role not in self.roles:
            # The template of the path: the path itself may hold secrets of others.
            path = getattr(request.scope.get("route"), "path", "this")
            reason = f"{member.name} is a {member.role} and may not {request.method} {path}"
            raise await run_in_threadpool(server.auth.refused, member.id, reason)
        request.scope[MEMBER] = member
        return member

    def credential(self, request: Request) -> str:
        """Return the credential of a request; refuse (401) one without."""
        scheme, _, credential = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not credential:
            raise ServerRefusedError(
                "this request needs a credential: join the server with a token first", 401
            )
        return credential.strip()


async def current_server(request: Request) -> Server:
    """Return the server that received a request, as a dependency that needs no thread."""
    return server_of(request)


CurrentServer = Annotated[Server, Depends(current_server)]
AnyMember = Annotated[MemberRecord, Depends(Allow(*ApiRole))]
AdminMember = Annotated[MemberRecord, Depends(Allow())]
ProviderMember = Annotated[MemberRecord, Depends(Allow(ApiRole.PROVIDER))]
RelayMember = Annotated[MemberRecord, Depends(Allow(ApiRole.RELAY))]
RequesterMember = Annotated[MemberRecord, Depends(Allow(ApiRole.REQUESTER))]
JobReader = Annotated[MemberRecord, Depends(Allow(ApiRole.REQUESTER, ApiRole.VIEWER))]
EventReader = Annotated[MemberRecord, Depends(Allow(ApiRole.VIEWER))]
ArtifactMember = Annotated[MemberRecord, Depends(Allow(ApiRole.REQUESTER, ApiRole.PROVIDER))]


def require_self(server: Server, member: MemberRecord, provider: str, action: str) -> None:
    """Refuse (403) unless the member is this provider."""
    if member.id != provider:
        raise server.auth.refused(member.id, f"{member.name} tried to {action} another provider")
