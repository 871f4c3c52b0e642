"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="Address of the server; default $RAVNEST_SERVER, or the only server that you joined.",
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="RAVNEST_TOKEN",
        metavar="TOKEN",
        help="Token from `ravnest token create` on the server's machine; needed once.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job; see `ravnest status`.")]
