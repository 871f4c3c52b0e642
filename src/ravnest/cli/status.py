"""``ravnest status``: the jobs of a server, or one job in detail."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from ravnest.cli.console import (
    CommandLog,
    err,
    job_status_line,
    local_time,
    out,
    print_json,
    print_table,
    warn_of_degraded,
)
from ravnest.cli.options import Json, Quiet, Server, Token
from ravnest.client.handle import JobHandle, ended_without_model
from ravnest.client.progress_text import progress_text, schedule_text
from ravnest.client.server_selection import READ_ROLES, select_server
from ravnest.schemas.jobs import JobState, JobView, MemoryView


def status(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Show this job in detail.")] = None,
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Wait until the JOB has ended; see the exit codes.")
    ] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Show the JOB, or the only one, live until it has ended or Ctrl-C."
        ),
    ] = False,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the state and progress of your jobs."""
    if wait and job is None:
        raise typer.BadParameter("name the job to wait for", param_hint="--wait")
    with select_server(server, token, READ_ROLES).api() as api:
        if watch and job is None:
            job = _only_running(api.get("/api/jobs", list[JobView]))
        wait = wait or watch
        if job is None:
            views = api.get("/api/jobs", list[JobView])
        elif wait:
            handle = JobHandle(job, api)
            with job_status_line(CommandLog(err(quiet=quiet))) as line:
                if line.is_live:
                    line.preload(handle.losses())
                view = handle.wait(on_change=line.show)
        else:
            view = api.get(f"/api/jobs/{job}", JobView)
    if as_json:
        print_json(views if job is None else view)
    elif job is None:
        _list(views)
    else:
        _show(view)
    if wait and view.state is not JobState.DONE:
        raise ended_without_model(view)
    if wait:
        warn_of_degraded(view)


def _only_running(views: list[JobView]) -> str:
    """Return the id of the only job that has not ended."""
    running = [view.id for view in views if not view.state.is_final]
    if len(running) == 1:
        return running[0]
    problem = f"name one of the jobs that run: {', '.join(running)}" if running else "no job runs"
    raise typer.BadParameter(problem, param_hint="--watch")


def _list(views: list[JobView]) -> None:
    if not views:
        out().print("no jobs; submit one with `ravnest submit module:function`")
        return
    table = Table("JOB", "NAME", "STATE", "PROGRESS", "REASON", box=None, pad_edge=False)
    for view in views:
        table.add_row(view.id, view.name, _state(view), progress_text(view.progress), view.reason)
    print_table(table)


def _state(view: JobView) -> str:
    return f"{view.state} (degraded)" if view.degraded else view.state


def _memory(memory: MemoryView | None) -> str:
    """Return the memory of a stage in words, after a comma; nothing if it was not measured."""
    if memory is None or memory.used is None:
        return ""
    named = {
        "memory": memory.used,
        "peak": memory.peak,
        "planned": memory.planned,
        "offered": memory.offered,
    }
    known = (f", {name} {value / 1e9:.3g} GB" for name, value in named.items() if value is not None)
    return "".join(known)


def _show(view: JobView) -> None:
    console = out()
    console.print(f"{view.name} ({view.id}) of {view.owner} is {view.state}: {view.reason}")
    console.print(f"submitted {local_time(view.created)}, last change {local_time(view.changed)}")
    if progress_text(view.progress):
        console.print(progress_text(view.progress))
    if schedule_text(view.progress):
        console.print(schedule_text(view.progress))
    if view.degraded:
        console.print(f"warning: {view.degraded}")
    for one in view.assignments:
        console.print(
            f"  cluster {one.cluster}, node {one.node} ({one.role}) on {one.provider_name}: {one.phase}"
            f"{_memory(one.memory)}"
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
