"""``ravnest relay``: forward bytes between providers that cannot reach each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from ravnest.cli.options import LogOption, Token
from ravnest.logs.json_lines import json_line, log_as_json
from ravnest.provider.relay_program import DEFAULT_RELAY_PORT, run_relay


def relay(
    server: Annotated[str, typer.Option(help="Address of the server, such as https://host:7100.")],
    token: Token = None,
    name: Annotated[str | None, typer.Option(help="Name of this relay; default: the host name.")] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            help=f"Address to listen on: host:port, host, or :port; port {DEFAULT_RELAY_PORT}."
        ),
    ] = None,
    address: Annotated[
        list[str] | None,
        typer.Option(help="Address under which providers reach it, if different; repeatable."),
    ] = None,
    capacity: Annotated[
        float | None, typer.Option(help="Most Mbit/s to forward in total; default: no limit.")
    ] = None,
    log_format: LogOption = "text",
) -> None:
    """Run a relay for the jobs of a server until Ctrl-C.

    Nodes that cannot be dialled are reached through it. It sees encrypted bytes only.
    """
    say: Callable[[str], None] = typer.echo
    if log_format == "json":
        log_as_json()
        say = lambda line: typer.echo(json_line("relay", message=line))  # noqa: E731
    run_relay(
        server,
        token,
        name=name,
        listen=listen,
        address=address or (),
        capacity=capacity,
        say=say,
    )
