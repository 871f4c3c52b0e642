"""``ravnest provide``: this machine works for the jobs of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ravnest.provider.provide import provide as provide_machine


def provide(
    server: Annotated[str, typer.Option(help="The server's address, such as https://host:7100.")],
    token: Annotated[
        str | None, typer.Option(help="As `ravnest token create` printed it; needed the first time.")
    ] = None,
    ram: Annotated[float | None, typer.Option(help="The most RAM to give, in GB.")] = None,
    cores: Annotated[int | None, typer.Option(help="The most cores to give.")] = None,
    hours: Annotated[float | None, typer.Option(help="Leave after so many hours.")] = None,
    name: Annotated[str | None, typer.Option(help="Of this provider; the machine's by default.")] = None,
    listen: Annotated[
        str | None, typer.Option(help="Where its node listens: host:port, host, or :port.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Where others reach its node, if that is elsewhere.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="For what jobs need while they run.", file_okay=False)
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Leave after one job.")] = False,
) -> None:
    """Offer this machine to a server, and work for its jobs until Ctrl-C.

    Measures memory, cores, speed and the way to the server first. No code of a requester's runs here.
    """
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
        once=once,
    )
