"""Membership of a machine at a server, in the role that its command needs."""

from __future__ import annotations

from ravnest.errors import ServerError
from ravnest.http.credentials import Membership, find, joined
from ravnest.schemas.auth import ApiRole


def machine_membership(server: str, token: str | None, name: str, role: ApiRole) -> Membership:
    """Join a server with a token, or return the membership that an earlier token gave to this name."""
    if token is not None:
        member = joined(server, token, name)
        if member.role not in (role, ApiRole.ADMIN):
            raise ServerError(
                f"the token is for the role {member.role}; create one with `ravnest token create --role "
                f"{role}`"
            )
        return member
    urls = [server] if "://" in server else [f"https://{server}", f"http://{server}"]
    known = next((m for url in urls if (m := find(url, (role,), name)) is not None), None)
    if known is None:
        raise ServerError(
            f"{name} has not joined {server} yet: add --token with a token that `ravnest token create "
            f"--role {role}` prints on the server's machine"
        )
    return known
