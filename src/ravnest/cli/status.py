"""``ravnest status``: the jobs of a server, or one job in detail."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from ravnest.cli.console import (
    local_time,
    out,
    print_json,
    print_table,
    progress_text,
    schedule_text,
)
from ravnest.cli.options import Json, Server, Token
from ravnest.client.server_selection import READ_ROLES, select_server
from ravnest.schemas.jobs import JobView


def status(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Show this job in detail.")] = None,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Show the state and progress of your jobs."""
    with select_server(server, token, READ_ROLES).api() as api:
        if job is None:
            views = api.get("/api/jobs", list[JobView])
        else:
            view = api.get(f"/api/jobs/{job}", JobView)
    if as_json:
        print_json(views if job is None else view)
    elif job is None:
        _list(views)
    else:
        _show(view)


def _list(views: list[JobView]) -> None:
    if not views:
        out().print("no jobs; submit one with `ravnest submit module:function`")
        return
    table = Table("JOB", "NAME", "STATE", "PROGRESS", "REASON", box=None, pad_edge=False)
    for view in views:
        table.add_row(view.id, view.name, view.state, progress_text(view.progress), view.reason)
    print_table(table)


def _show(view: JobView) -> None:
    console = out()
    console.print(f"{view.name} ({view.id}) of {view.owner} is {view.state}: {view.reason}")
    console.print(f"submitted {local_time(view.created)}, last change {local_time(view.changed)}")
    if progress_text(view.progress):
        console.print(f"{progress_text(view.progress)}; {view.progress.epochs} epochs requested")
    if schedule_text(view.progress):
        console.print(schedule_text(view.progress))
    for one in view.assignments:
        console.print(
            f"  cluster {one.cluster}, node {one.node} ({one.role}) on {one.provider_name}: {one.phase}"
        )
    if view.checkpoint is not None:
        console.print(
            f"last checkpoint: update {view.checkpoint.update}, {local_time(view.checkpoint.time)}"
        )
    if view.recoveries:
        console.print(f"training continued after the loss of a node: {view.recoveries} times")
    for warning in view.warnings:
        console.print(f"  {local_time(warning.time)} warning of node {warning.node}: {warning.message}")
    if view.plan:
        console.print(f"\n{view.plan}")
