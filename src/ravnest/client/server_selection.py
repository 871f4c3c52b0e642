"""Which server is meant, and who we are there."""

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
MAY_SUBMIT = (ApiRole.REQUESTER, ApiRole.ADMIN)
MAY_LOOK = (*MAY_SUBMIT, ApiRole.VIEWER)


class WhichServerError(ServerError, ValueError):
    """No server was named, or one that was never joined."""


def choose(
    server: str | None = None, token: str | None = None, roles: Sequence[ApiRole] = MAY_SUBMIT
) -> Membership:
    """Our membership of ``server``, else of ``$RAVNEST_SERVER``, else of the only server joined.

    With a ``token`` the server is joined, and remembered. Who is a member already stays the same one:
    jobs belong to who submitted them.
    """
    url = server or os.environ.get(SERVER_VARIABLE) or _only(roles)
    if token is not None:
        if url is None:
            raise WhichServerError("a token needs the address of its server too: --server URL")
        known = find(url if "://" in url else _with_scheme(url), roles)
        return known if known is not None and _is_known(known) else joined(url, token, own_name())
    if url is None:
        raise WhichServerError(
            "no server is known: name one with --server URL (or $RAVNEST_SERVER) and join it once with "
            f"--token; on its machine `ravnest token create --role {roles[0]}` makes a token"
        )
    member = find(url if "://" in url else _with_scheme(url), roles)
    if member is None:
        raise WhichServerError(
            f"{url} was not joined yet: add --token once; on its machine `ravnest token create "
            f"--role {roles[0]}` makes one"
        )
    return member


def own_name() -> str:
    """By which name a server knows this user."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = user_id()
    return f"{user}@{socket.gethostname()}"[:100]


def _is_known(member: Membership) -> bool:
    """Whether the server still knows us, and is not a new one at an old address."""
    with member.api() as api:
        try:
            api.get("/api/jobs", object)
        except ServerRefusedError:
            return False
    return True


def _only(roles: Sequence[ApiRole]) -> str | None:
    urls = sorted({member.url for member in memberships() if member.role in roles})
    if len(urls) > 1:
        raise WhichServerError(
            f"several servers are known: {', '.join(urls)}; say which with --server or $RAVNEST_SERVER"
        )
    return urls[0] if urls else None


def _with_scheme(host: str) -> str:
    """A host's address as it was joined."""
    return next((m.url for m in memberships() if m.url.partition("://")[2] == host), host)
