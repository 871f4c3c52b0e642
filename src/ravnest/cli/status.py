"""``ravnest status``: the jobs of a server, or one of them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from ravnest.cli.console import figures, moment, out, print_json
from ravnest.cli.options import Json, Server, Token
from ravnest.client.server_selection import MAY_LOOK, choose
from ravnest.schemas.jobs import JobView


def status(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="All about this one.")] = None,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Show your jobs: where each is, and why."""
    with choose(server, token, MAY_LOOK).api() as api:
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
        out().print("no jobs; `ravnest submit module:function` hands one in")
        return
    table = Table("JOB", "NAME", "STATE", "PROGRESS", "WHY", box=None, pad_edge=False)
    for view in views:
        table.add_row(view.id, view.name, view.state, figures(view.progress), view.reason)
    out().print(table)


def _show(view: JobView) -> None:
    console = out()
    console.print(f"{view.name} ({view.id}) of {view.owner} is {view.state}: {view.reason}")
    console.print(f"submitted {moment(view.created)}, last change {moment(view.changed)}")
    if figures(view.progress):
        console.print(f"{figures(view.progress)}; {view.progress.epochs} epochs are asked for")
    for place in view.assignments:
        console.print(
            f"  cluster {place.cluster}, node {place.node} ({place.role}) by {place.provider_name}: "
            f"{place.phase}"
        )
    if view.plan:
        console.print(f"\n{view.plan}")
