"""``ravnest page``: print a link to the server's page."""

from __future__ import annotations

import typer

from ravnest.cli.options import Server, Token
from ravnest.client.server_selection import select_server
from ravnest.schemas.auth import PageLink


def page(server: Server = None, token: Token = None) -> None:
    """Print a link that shows your jobs in a browser.

    It works once, within ten minutes.
    """
    member = select_server(server, token)
    with member.api() as api:
        link = api.post("/api/page-link", None, PageLink)
    typer.echo(f"{member.url}{link.path}")
