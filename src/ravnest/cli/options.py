"""Options that several commands share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ravnest.logs.json_lines import LogFormat

_LONGEST_LINE = 4096
_HELP = (
    "Token from `ravnest token create --role ROLE` on the server's machine; needed once. `-` reads it "
    "from stdin: other users of this machine can see the command line."
)


def _read_token(given: str | None) -> str | None:
    """Return the token of the option; ``-`` reads one line of stdin."""
    if given != "-":
        return given
    line = sys.stdin.readline(_LONGEST_LINE).strip()
    if not line:
        raise typer.BadParameter("there is no token on stdin", param_hint="--token")
    return line


LogDir = Annotated[
    Path | None,
    typer.Option(
        "--log-dir", metavar="FOLDER", help="Write figures for TensorBoard, and as CSV, there."
    ),
]
LogOption = Annotated[
    LogFormat,
    typer.Option("--log-format", help="Log as text, or as JSON with one object per line."),
]
MetricsPort = Annotated[
    int,
    typer.Option(min=0, max=65535, help="Port at which Prometheus reads figures; 0: none."),
]
MetricsHost = Annotated[
    str, typer.Option(help="Address of that port; who reaches it needs no credential.")
]
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
        help=_HELP,
        callback=_read_token,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job; see `ravnest status`.")]
