"""``ravnest provide``: work on the jobs of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ravnest.cli.console import out
from ravnest.cli.options import LogOption, MetricsHost, MetricsPort, Quiet, Token
from ravnest.cli.provider_console import provider_console
from ravnest.provider.provide import provide as provide_machine
from ravnest.provider.sandbox.choice import SandboxChoice
from ravnest.types import Address


def provide(  # noqa: PLR0913, PLR0917 - each an option of the command
    server: Annotated[str, typer.Option(help="Address of the server, such as https://host:7100.")],
    token: Token = None,
    ram: Annotated[float | None, typer.Option(help="Maximum RAM to offer, in GB.")] = None,
    cores: Annotated[int | None, typer.Option(help="Maximum number of cores to offer.")] = None,
    hours: Annotated[float | None, typer.Option(help="Leave after this many hours.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of this provider; default: the host name.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(help="Address its node listens on: host:port, host, :port, or :20000-20010."),
    ] = None,
    address: Annotated[
        list[str] | None,
        typer.Option(help="Address under which others reach its node, if different; repeatable."),
    ] = None,
    map_port: Annotated[
        bool,
        typer.Option(
            "--map-port", help="Ask the router to forward the node's port (UPnP, extra `upnp`)."
        ),
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for the files of running jobs.", file_okay=False)
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Leave after one job.")] = False,
    sandbox: Annotated[
        SandboxChoice,
        typer.Option(help="Sandbox of jobs; off: they run with all permissions of this user."),
    ] = "auto",
    disk: Annotated[float | None, typer.Option(help="Maximum disk space of a job, in GB.")] = None,
    job_hours: Annotated[float | None, typer.Option(help="Maximum hours of a job.")] = None,
    metrics_port: MetricsPort = 0,
    metrics_host: MetricsHost = "127.0.0.1",
    log_format: LogOption = "text",
    quiet: Quiet = False,
) -> None:
    """Offer this machine to a server and work on its jobs until Ctrl-C.

    Measures memory, cores, compute speed and the connection to the server first. Runs no code of
    requesters.
    """
    with provider_console(out(quiet=quiet), log_format) as console:
        provide_machine(
            server,
            token,
            ram=ram,
            cores=cores,
            hours=hours,
            folder=folder,
            name=name,
            listen=listen,
            address=address,
            map_port=map_port,
            once=once,
            sandbox=sandbox,
            disk=disk,
            job_hours=job_hours,
            say=console.say,
            progress=console.progress,
            metrics=Address(metrics_host, metrics_port) if metrics_port else None,
        )
