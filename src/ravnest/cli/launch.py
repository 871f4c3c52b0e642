"""``ravnest launch``: start all nodes of this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ravnest.cli.launch_view import LaunchView, live_view
from ravnest.cli.options import Quiet
from ravnest.formation import NODE_DATA
from ravnest.provider.launch import launch as launch_nodes
from ravnest.provider.launch import nodes_here, own_hosts
from ravnest.store.node_spec import read_nodes


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
    quiet: Quiet = False,
) -> None:
    """Start all nodes of this machine, each with the same script.

    Runs `python SCRIPT node_<i> ARGS...` for each node. Prints their output with the node's name
    before each line, and stops all of them together. A terminal also shows the pipelines, rates, the
    loss curve and the time left. With --restart, a node that fails is started again, continues from
    its newest checkpoint, and the others are not stopped. With --quiet, the output of the nodes is
    shown only if one fails.
    """
    console = Console()
    run = partial(
        launch_nodes,
        script,
        arguments or [],
        folder=folder,
        restart=restart,
        trace=trace,
        console=console,
    )
    nodes = nodes_here(read_nodes(folder), own_hosts()) if script.is_file() else []
    if quiet or not nodes or not console.is_terminal:
        raise typer.Exit(run(quiet=quiet))
    with live_view(LaunchView(nodes), console) as on_records:
        code = run(on_records=on_records)
    raise typer.Exit(code)
