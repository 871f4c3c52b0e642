"""Permissions of routes, as dependencies: every route declares the roles that may call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request

from ravnest.errors import ServerRefusedError
from ravnest.schemas.auth import ApiRole
from ravnest.server.db.records import MemberRecord
from ravnest.server.server import Server


def server_of(request: Request) -> Server:
    """Return the server that received a request."""
    server = request.app.state.server
    assert isinstance(server, Server)
    return server


def source_of(request: Request) -> str:
    """Return the host that sent a request."""
    return request.client.host if request.client is not None else "an unknown host"


def allow(*roles: ApiRole) -> Callable[[Request], MemberRecord]:
    """Return a dependency that yields the calling member if its role is one of these or admin."""

    def member(request: Request) -> MemberRecord:
        server = server_of(request)
        scheme, _, credential = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not credential:
            raise ServerRefusedError(
                "this request needs a credential: join the server with a token first", 401
            )
        found = server.auth.member(credential.strip(), source_of(request))
        if found.role not in (*roles, ApiRole.ADMIN):
            # The template of the path: the path itself may hold secrets of others.
            path = getattr(request.scope.get("route"), "path", "this")
            raise server.auth.refused(
                found.id, f"{found.name} is a {found.role} and may not {request.method} {path}"
            )
        return found

    return member


CurrentServer = Annotated[Server, Depends(server_of)]
AnyMember = Annotated[MemberRecord, Depends(allow(*ApiRole))]
AdminMember = Annotated[MemberRecord, Depends(allow())]
ProviderMember = Annotated[MemberRecord, Depends(allow(ApiRole.PROVIDER))]
RelayMember = Annotated[MemberRecord, Depends(allow(ApiRole.RELAY))]
RequesterMember = Annotated[MemberRecord, Depends(allow(ApiRole.REQUESTER))]
JobReader = Annotated[MemberRecord, Depends(allow(ApiRole.REQUESTER, ApiRole.VIEWER))]
EventReader = Annotated[MemberRecord, Depends(allow(ApiRole.VIEWER))]
ArtifactMember = Annotated[MemberRecord, Depends(allow(ApiRole.REQUESTER, ApiRole.PROVIDER))]


def require_self(server: Server, member: MemberRecord, provider: str, action: str) -> None:
    """Refuse (403) unless the member is this provider."""
    if member.id != provider:
        raise server.auth.refused(member.id, f"{member.name} tried to {action} another provider")
