"""Permissions of the page: the cookie of a browser instead of the header of the API."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from ravnest.errors import ServerRefusedError
from ravnest.schemas.auth import ApiRole
from ravnest.server.auth.dependencies import Allow, server_of
from ravnest.server.db.records import MemberRecord

COOKIE = "ravnest"
SECURE_COOKIE = "__Host-ravnest"
"""The cookie with TLS: browsers accept it only from this host, for all its paths, over HTTPS."""
PAGE_HEADER = "X-Ravnest-Page"
"""Header of requests that change something. Other sites cannot send it: browsers ask this server first,
which never agrees."""


def cookie_name(*, tls: bool) -> str:
    """Return the name of the cookie."""
    return SECURE_COOKIE if tls else COOKIE


class AllowBrowser(Allow):
    """Dependency that returns the member that a browser is logged in as, if its role is one of these."""

    def credential(self, request: Request) -> str:
        """Return the credential in the cookie; refuse (401) a request without, or of another site."""
        found = request.cookies.get(cookie_name(tls=server_of(request).tls))
        if not found:
            raise ServerRefusedError("this browser is not logged in; open a login link", 401)
        if request.method not in ("GET", "HEAD") and PAGE_HEADER not in request.headers:
            raise ServerRefusedError("this request did not come from the page", 403)
        return found


Visitor = Annotated[MemberRecord, Depends(AllowBrowser(*ApiRole))]
JobVisitor = Annotated[MemberRecord, Depends(AllowBrowser(ApiRole.REQUESTER, ApiRole.VIEWER))]
RequestingVisitor = Annotated[MemberRecord, Depends(AllowBrowser(ApiRole.REQUESTER))]
AdminVisitor = Annotated[MemberRecord, Depends(AllowBrowser())]
