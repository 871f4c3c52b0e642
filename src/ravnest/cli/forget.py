"""``ravnest forget``: remove the credentials of a server from this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from ravnest.cli.console import out
from ravnest.errors import ServerError
from ravnest.http.credentials import forget as forget_membership
from ravnest.http.credentials import memberships


def forget(
    server: Annotated[str, typer.Argument(metavar="URL", help="Address of the server.")],
) -> None:
    """Forget a server that you joined, for example one that is gone.

    Your credentials for it are removed from this machine; the server is not asked.
    """
    known = memberships()
    found = [each for each in known if server.rstrip("/") in (each.url, each.url.partition("://")[2])]
    if not found:
        urls = ", ".join(sorted({each.url for each in known})) or "none"
        raise ServerError(f"{server} was not joined from here; joined servers: {urls}")
    for each in found:
        forget_membership(each)
    out().print(f"forgot {found[0].url}; join it again with --token")
