"""``ravnest submit``: submit a job."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from ravnest.cli.console import err, out, print_json, progress_bars
from ravnest.cli.fetch import Out, follow_and_fetch
from ravnest.cli.options import Json, Server, Token
from ravnest.cli.target import TargetError, call_target
from ravnest.client.handle import JobHandle
from ravnest.client.local_server import host_server
from ravnest.client.server_selection import select_server
from ravnest.client.submission import resume_job, upload_job
from ravnest.http.api import ApiClient
from ravnest.jobs.job import Job
from ravnest.schemas.jobs import JobCreated


def submit(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[MODULE:FUNCTION]", help="Function that returns a ravnest.Job."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="JOB",
            help="Start from the newest checkpoint of an ended job; without MODULE:FUNCTION, with its "
            "model, data and settings.",
        ),
    ] = None,
    server: Server = None,
    token: Token = None,
    serve_here: Annotated[
        bool, typer.Option("--serve-here", help="Run a server in this command until the job has ended.")
    ] = False,
    host: Annotated[
        str,
        typer.Option(help="Address of --serve-here; 0.0.0.0 accepts other machines."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of --serve-here; 0 takes a free port.")] = 0,
    detach: Annotated[
        bool,
        typer.Option("--detach", "-d", help="Print the job's id and exit; `ravnest fetch` later."),
    ] = False,
    folder: Out = None,
    as_json: Json = False,
) -> None:
    """Submit a job, show its progress and download the trained model.

    After Ctrl-C the job continues: see `ravnest status`, `ravnest fetch` and `ravnest cancel`.
    """
    if serve_here and detach:
        raise typer.BadParameter("the server would end with this command", param_hint="--detach")
    if serve_here and server:
        raise typer.BadParameter("give one of the two", param_hint="--serve-here with --server")
    if target is None and resume is None:
        raise typer.BadParameter("give a function that returns a job", param_hint="MODULE:FUNCTION")
    if serve_here and resume is not None:
        raise typer.BadParameter("that server knows no earlier job", param_hint="--resume")
    with ExitStack() as stack:
        console = err()
        if serve_here:
            member, invitation = stack.enter_context(host_server(host=host, port=port))
            console.print(f"serving at {member.url}; providers join with\n  {invitation}")
        else:
            member = select_server(server, token)
        api = stack.enter_context(member.api())
        api.get("/api/health", object)  # before the user's module, whose import may take time
        handle = JobHandle(_submitted(api, target, resume, console), api)
        if detach and as_json:
            print_json(JobCreated(id=handle.id))
        elif detach:
            out().print(handle.id)
        else:
            console.print(f"submitted {handle.id}")
            follow_and_fetch(handle, folder, as_json=as_json)


def _submitted(api: ApiClient, target: str | None, resume: str | None, console: Console) -> str:
    """Submit the job of a function, or an ended job again; return its id."""
    if target is None:
        assert resume is not None
        return resume_job(api, resume)
    job = load_job(target)
    if resume is not None:
        job = replace(job, resume_from=resume)
    with progress_bars(console) as bars:
        return upload_job(api, job, bars.update)


def load_job(target: str) -> Job:
    """Return the job that the user's function returns."""
    job = call_target(target)
    if not isinstance(job, Job):
        raise TargetError(f"{target} must return a ravnest.Job, got {type(job).__name__}")
    return job
