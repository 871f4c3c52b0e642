"""``ravnest launch``: start all nodes of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ravnest.cli.launch_view import LaunchView, live_view
from ravnest.cli.options import LogDir, LogOption, MetricsHost, MetricsPort, Quiet
from ravnest.errors import SettingsError
from ravnest.formation import NODE_DATA
from ravnest.logs.json_lines import log_as_json
from ravnest.logs.metrics_page import metrics_page
from ravnest.logs.node_figures import NodeFigures
from ravnest.logs.run_log import RunLog
from ravnest.provider.launch import NodeOutput, OnRecords, nodes_here, own_hosts
from ravnest.provider.launch import launch as launch_nodes
from ravnest.store.node_spec import NodeSpec, read_nodes
from ravnest.telemetry import WorkerRecord
from ravnest.types import Address, Role


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
    metrics_port: MetricsPort = 0,
    metrics_host: MetricsHost = "127.0.0.1",
    log_dir: LogDir = None,
    log_format: LogOption = "text",
    quiet: Quiet = False,
) -> None:
    """Start all nodes of this machine, each with the same script.

    Runs `python SCRIPT node_<i> ARGS...` for each node. Prints their output with the node's name
    before each line, and stops all of them together. A terminal also shows the pipelines, rates, the
    loss curve and the time left. With --restart, a node that fails is started again, continues from
    its newest checkpoint, and the others are not stopped. With --quiet, the output of the nodes is
    shown only if one fails.
    """
    if log_format == "json":
        log_as_json()
    console = Console()
    nodes = nodes_here(read_nodes(folder), own_hosts()) if script.is_file() else []
    is_live = bool(nodes) and console.is_terminal and not quiet and log_format == "text"
    receivers: list[OnRecords] = []
    with ExitStack() as stack:
        if metrics_port:
            figures = NodeFigures()
            address = Address(metrics_host, metrics_port)
            page = stack.enter_context(metrics_page(address, figures.figures))
            receivers.append(figures.add)
            if not quiet:
                output = NodeOutput(console, log_format=log_format)
                output.say(f"Prometheus reads figures at http://{page}/metrics")
        if log_dir is not None and nodes:
            receivers.append(stack.enter_context(_root_logs(log_dir, nodes)))
        if is_live:
            receivers.append(stack.enter_context(live_view(LaunchView(nodes), console)))
        code = launch_nodes(
            script,
            arguments or [],
            folder=folder,
            restart=restart,
            trace=trace,
            console=console,
            on_records=_passed_to(receivers) if receivers else None,
            shows_progress=is_live,
            quiet=quiet,
            log_format=log_format,
        )
    raise typer.Exit(code)


def _passed_to(receivers: Sequence[OnRecords]) -> OnRecords:
    """Return a receiver that passes records on to all of these."""

    def take(name: str, records: Sequence[WorkerRecord]) -> None:
        for receive in receivers:
            receive(name, records)

    return take


@contextmanager
def _root_logs(folder: Path, nodes: Sequence[NodeSpec]) -> Iterator[OnRecords]:
    """Write what Roots report to a folder; with several clusters, each has a folder in it."""
    roots = [node for node in nodes if node.role == Role.ROOT]
    if not roots:
        raise SettingsError(
            "--log-dir needs the Root of a cluster, and none is on this machine: give --log-dir to "
            "`ravnest launch SCRIPT` where a Root runs"
        )
    with ExitStack() as stack:
        logs = {}
        for root in roots:
            own = folder / f"cluster_{root.cluster}" if len(roots) > 1 else folder
            logs[root.name] = stack.enter_context(RunLog(own, continues=False))

        def take(name: str, records: Sequence[WorkerRecord]) -> None:
            for record in records if name in logs else ():
                logs[name].emit(record)

        yield take
