"""``ravnest serve``: run the intermediary server."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ravnest.cli.options import LogOption
from ravnest.deadlines import CHECKPOINT_UPLOAD
from ravnest.logs.json_lines import log_as_json
from ravnest.schemas.auth import ApiRole
from ravnest.server.event_log import log_json, log_line
from ravnest.server.http.runner import DEFAULT_FOLDER, DEFAULT_PORT, RunningServer, serve_in_foreground
from ravnest.server.settings import ServerSettings


def serve(  # noqa: PLR0913, PLR0917 - each an option of the command
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 accepts other machines, over HTTPS.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes a free port.")
    ] = DEFAULT_PORT,
    folder: Annotated[Path, typer.Option(help="Folder for the server's database and files.")] = Path(
        DEFAULT_FOLDER
    ),
    public_name: Annotated[
        list[str] | None,
        typer.Option(help="Name or address under which others reach this machine; repeatable."),
    ] = None,
    tls: Annotated[
        bool | None, typer.Option("--tls/--no-tls", help="HTTPS; default: outside of loopback.")
    ] = None,
    relay: Annotated[
        bool | None,
        typer.Option(
            "--relay/--no-relay",
            help="Forward between providers that cannot reach each other; default: outside of loopback.",
        ),
    ] = None,
    relay_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of the relay; default: the server's port + 1."),
    ] = None,
    checkpoint_minutes: Annotated[
        float,
        typer.Option(min=0.001, help="Minutes between two checkpoints that a cluster uploads."),
    ] = CHECKPOINT_UPLOAD / 60,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Do not log what happens at the server.")
    ] = False,
    log_format: LogOption = "text",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the address as JSON, and no log.")
    ] = False,
) -> None:
    """Run the intermediary server until Ctrl-C.

    Logs to stderr what happens: who joins and leaves, and what becomes of jobs.
    """

    def announce(running: RunningServer) -> None:
        typer.echo(_as_json(running) if as_json else _instructions(running, folder))

    if log_format == "json":
        log_as_json()
    serve_in_foreground(
        announce,
        folder,
        host,
        port,
        public_names=public_name or (),
        tls=tls,
        relay=relay,
        relay_port=relay_port,
        settings=ServerSettings(checkpoint_upload=60 * checkpoint_minutes),
        log=None if quiet or as_json else partial(typer.echo, err=True),
        shown=log_json if log_format == "json" else log_line,
    )
    if not as_json:
        typer.echo("The server has stopped. Start it again with the same folder to resume.")


def _as_json(running: RunningServer) -> str:
    folder = str(running.server.folder.path.resolve())
    where = {"url": running.url, "fingerprint": running.fingerprint, "folder": folder}
    return json.dumps({**where, "relay": running.relay_addresses})


def _instructions(running: RunningServer, folder: Path) -> str:
    where = "" if folder == Path(DEFAULT_FOLDER) else f" --folder {shlex.quote(str(folder))}"
    provider = running.token(ApiRole.PROVIDER, uses=None)
    requester, viewer = running.token(ApiRole.REQUESTER), running.token(ApiRole.VIEWER)
    at = running.relay_addresses
    relay = f"Providers that others cannot reach use the relay at {at[0]}.\n" if at else ""
    return (
        f"Ravnest serves at {running.url}\n\n"
        f"  provide  ravnest provide --server {running.url} --token {provider}\n"
        f"  submit   ravnest submit module:function --server {running.url} --token {requester}\n"
        f"  watch    {running.url}/login?token={viewer}\n\n"
        "The token of `provide` works for a day, on any number of machines; the others work once.\n"
        f"More: ravnest token create --role requester{where}\n"
        f"{relay}"
        "Ctrl-C stops the server; training continues without it."
    )
