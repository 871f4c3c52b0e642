"""Who may call a route: every route says it, and nobody else gets in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request

from ravnest.errors import ServerRefusedError
from ravnest.schemas.auth import ApiRole
from ravnest.server.db.records import MemberRecord
from ravnest.server.server import Server


def server_of(request: Request) -> Server:
    """The server that a request came to."""
    server = request.app.state.server
    assert isinstance(server, Server)
    return server


def source_of(request: Request) -> str:
    """Where a request came from."""
    return request.client.host if request.client is not None else "an unknown place"


def allow(*roles: ApiRole) -> Callable[[Request], MemberRecord]:
    """A dependency: the member that asks, if its role is one of these or admin."""

    def member(request: Request) -> MemberRecord:
        server = server_of(request)
        scheme, _, credential = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not credential:
            raise ServerRefusedError("this needs a credential: join the server with a token first", 401)
        found = server.trust.member(credential.strip(), source_of(request))
        if found.role not in (*roles, ApiRole.ADMIN):
            # The template, not the address: what is in an address may be a secret of another's.
            path = getattr(request.scope.get("route"), "path", "this")
            raise server.trust.refused(
                found.id, f"{found.name} is a {found.role} and may not {request.method} {path}"
            )
        return found

    return member


ServerHere = Annotated[Server, Depends(server_of)]
Anybody = Annotated[MemberRecord, Depends(allow(*ApiRole))]
AProvider = Annotated[MemberRecord, Depends(allow(ApiRole.PROVIDER))]
ARequester = Annotated[MemberRecord, Depends(allow(ApiRole.REQUESTER))]
AWatcher = Annotated[MemberRecord, Depends(allow(ApiRole.REQUESTER, ApiRole.VIEWER))]
AnOverseer = Annotated[MemberRecord, Depends(allow(ApiRole.VIEWER))]
AWorker = Annotated[MemberRecord, Depends(allow(ApiRole.REQUESTER, ApiRole.PROVIDER))]


def must_be(server: Server, member: MemberRecord, provider: str, what: str) -> None:
    """403 unless the member is that provider."""
    if member.id != provider:
        raise server.trust.refused(member.id, f"{member.name} wanted to {what} of another provider")
