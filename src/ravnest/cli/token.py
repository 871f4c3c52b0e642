"""``ravnest token``: create tokens for joining a server."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ravnest.schemas.auth import ApiRole
from ravnest.server.auth.tokens import DEFAULT_HOURS
from ravnest.server.http.runner import DEFAULT_FOLDER, create_token

app = typer.Typer(
    help="Create tokens for joining a server.", no_args_is_help=True, rich_markup_mode=None
)


class TokenRole(StrEnum):
    """Roles that a token can grant."""

    PROVIDER = "provider"
    RELAY = "relay"
    REQUESTER = "requester"
    VIEWER = "viewer"
    ADMIN = "admin"


@app.callback()
def _tokens() -> None:
    """Create tokens for joining a server."""


@app.command("create")
def create(
    role: Annotated[TokenRole, typer.Option(help="Role of the member that joins with it.")],
    uses: Annotated[
        int, typer.Option(min=0, help="Number of times it can be used; 0 is unlimited.")
    ] = 1,
    hours: Annotated[float, typer.Option(min=0.01, help="Hours until it expires.")] = DEFAULT_HOURS,
    folder: Annotated[Path, typer.Option(help="Folder of the server.")] = Path(DEFAULT_FOLDER),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Create a token. Run this on the server's machine; anyone with the token can join."""
    url, token = create_token(folder, ApiRole(role), uses=uses or None, hours=hours)
    if as_json:
        created = {"url": url, "token": token, "role": role, "uses": uses or None, "hours": hours}
        typer.echo(json.dumps(created))
        return
    typer.echo(token)
    typer.echo(_usage(role, url, token), err=True)


def _usage(role: TokenRole, url: str, token: str) -> str:
    """Return the command that uses a token; it goes to stderr, so that stdout is the token alone."""
    match role:
        case TokenRole.PROVIDER:
            return f"\n  ravnest provide --server {url} --token {token}"
        case TokenRole.RELAY:
            return f"\n  ravnest relay --server {url} --token {token}"
        case TokenRole.REQUESTER:
            return f"\n  ravnest submit module:function --server {url} --token {token}"
        case TokenRole.VIEWER | TokenRole.ADMIN:
            return f"\n  {url}/login?token={token}"
