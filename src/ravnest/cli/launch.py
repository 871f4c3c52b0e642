"""``ravnest launch``: all nodes of this machine with one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ravnest.formation import NODE_DATA
from ravnest.provider.launch import launch as launch_nodes


def launch(
    script: Annotated[Path, typer.Argument(help="The script that every provider runs.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="Given to the script after the node's name."),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where clusterize() wrote its files.")] = Path(NODE_DATA),
) -> None:
    """Start every node that lives on this machine, as `python SCRIPT node_<i> ARGS...`.

    Shows their output with the node's name before each line, and ends them together.
    """
    raise typer.Exit(launch_nodes(script, arguments or [], folder=folder))
