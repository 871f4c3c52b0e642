"""``ravnest launch``: start all nodes of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ravnest.formation import NODE_DATA
from ravnest.provider.launch import launch as launch_nodes


def launch(
    script: Annotated[Path, typer.Argument(help="Script that every provider runs.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="Arguments of the script after the node's name."),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Folder that clusterize() wrote.")] = Path(NODE_DATA),
    restart: Annotated[
        bool, typer.Option("--restart", help="Start a node again that fails or is killed.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Folder for what each node does when; `ravnest trace FOLDER` reads it."),
    ] = None,
) -> None:
    """Start all nodes of this machine, each with the same script.

    Runs `python SCRIPT node_<i> ARGS...` for each node. Prints their output with the node's name
    before each line, and stops all of them together. With --restart, a node that fails is started
    again, continues from its newest checkpoint, and the others are not stopped.
    """
    raise typer.Exit(launch_nodes(script, arguments or [], folder=folder, restart=restart, trace=trace))
