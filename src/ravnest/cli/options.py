"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="The server; else $RAVNEST_SERVER, else the only one that you joined.",
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="RAVNEST_TOKEN",
        metavar="TOKEN",
        help="Joins the server; needed once. From `ravnest token create` on its machine.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, as `ravnest status` shows it.")]
