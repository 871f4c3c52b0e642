"""``ravnest token``: who may join a server."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ravnest.schemas.auth import ApiRole
from ravnest.server.auth.tokens import DEFAULT_HOURS
from ravnest.server.http.runner import DEFAULT_FOLDER, create_token

app = typer.Typer(help="Tokens to join a server with.", no_args_is_help=True)


class TokenRole(StrEnum):
    """Roles that a token can be for."""

    PROVIDER = "provider"
    REQUESTER = "requester"
    VIEWER = "viewer"


@app.callback()
def _tokens() -> None:
    """Tokens to join a server with."""


@app.command("create")
def create(
    role: Annotated[TokenRole, typer.Option(help="What its holder may do.")],
    uses: Annotated[int, typer.Option(min=0, help="How often it works; 0: until it expires.")] = 1,
    hours: Annotated[float, typer.Option(min=0.01, help="How long it works.")] = DEFAULT_HOURS,
    folder: Annotated[Path, typer.Option(help="The folder of the server.")] = Path(DEFAULT_FOLDER),
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Make a token. Run this where the server runs; whoever has the token can join."""
    url, token = create_token(folder, ApiRole(role), uses=uses or None, hours=hours)
    if as_json:
        made = {"url": url, "token": token, "role": role, "uses": uses or None, "hours": hours}
        typer.echo(json.dumps(made))
        return
    typer.echo(token)
    typer.echo(_usage(role, url, token), err=True)


def _usage(role: TokenRole, url: str, token: str) -> str:
    """What to do with a token; apart from it, so that ``$(ravnest token create ...)`` is the token."""
    match role:
        case TokenRole.PROVIDER:
            return f"\n  ravnest provide --server {url} --token {token}"
        case TokenRole.REQUESTER:
            return f"\n  ravnest submit module:function --server {url} --token {token}"
        case TokenRole.VIEWER:
            return f"\n  {url}/login?token={token}"
