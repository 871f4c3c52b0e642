"""Choice of the server that a command or call is for, and of the credential to use there."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Sequence

from ravnest.errors import ServerError, ServerRefusedError
from ravnest.host import user_id
from ravnest.http.credentials import Membership, find, joined, memberships
from ravnest.schemas.auth import ApiRole

SERVER_VARIABLE = "RAVNEST_SERVER"
SUBMIT_ROLES = (ApiRole.REQUESTER, ApiRole.ADMIN)
"""Roles that may submit and cancel jobs."""
READ_ROLES = (*SUBMIT_ROLES, ApiRole.VIEWER)
"""Roles that may read jobs and providers."""


class ServerSelectionError(ServerError, ValueError):
    """No server is given, or the given one was not joined."""


def select_server(
    server: str | None = None, token: str | None = None, roles: Sequence[ApiRole] = SUBMIT_ROLES
) -> Membership:
    """Return our membership of ``server``, or ``$RAVNEST_SERVER``, or the only joined server.

    A ``token`` joins the server and stores the membership. An existing membership is kept even if a
    token is given, because jobs belong to the member that submitted them.
    """
    url = server or os.environ.get(SERVER_VARIABLE) or _only_joined(roles)
    if token is not None:
        if url is None:
            raise ServerSelectionError("a token needs the address of its server: add --server URL")
        known = find(_with_scheme(url), roles)
        return known if known is not None and _is_valid(known) else joined(url, token, user_name())
    if url is None:
        raise ServerSelectionError(
            "no server is known: name one with --server URL (or $RAVNEST_SERVER) and join it once with "
            f"--token; `ravnest token create --role {roles[0]}` on its machine creates a token"
        )
    member = find(_with_scheme(url), roles)
    if member is None:
        raise ServerSelectionError(
            f"{url} was not joined yet: add --token once; `ravnest token create --role {roles[0]}` on "
            "its machine creates a token"
        )
    return member


def user_name() -> str:
    """Return the name under which this user joins servers: ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user may have no name
        user = user_id()
    return f"{user}@{socket.gethostname()}"[:100]


def _is_valid(member: Membership) -> bool:
    """Return whether the server still accepts the credential; a new server at the address does not."""
    with member.api() as api:
        try:
            api.get("/api/jobs", object)
        except ServerRefusedError:
            return False
    return True


def _only_joined(roles: Sequence[ApiRole]) -> str | None:
    urls = sorted({member.url for member in memberships() if member.role in roles})
    if len(urls) > 1:
        raise ServerSelectionError(
            f"several servers are known: {', '.join(urls)}; choose one with --server or "
            "$RAVNEST_SERVER; `ravnest forget URL` removes one that is gone"
        )
    return urls[0] if urls else None


def _with_scheme(url: str) -> str:
    """Return the URL under which a host was joined if ``url`` has no scheme."""
    if "://" in url:
        return url
    return next((m.url for m in memberships() if m.url.partition("://")[2] == url), url)
