"""``ravnest submit``: submit a job."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ravnest.cli.console import err, out, print_json, progress_bars
from ravnest.cli.exit_codes import ExitCode
from ravnest.cli.fetch import LogDir, Out, follow_and_fetch, run_log
from ravnest.cli.options import Quiet, Server, Token
from ravnest.cli.system_errors import check_writable
from ravnest.cli.target import TargetError, call_target
from ravnest.client.handle import JobHandle
from ravnest.client.local_server import host_server
from ravnest.client.server_selection import select_server
from ravnest.client.submission import resume_job, upload_job
from ravnest.http.api import ApiClient
from ravnest.jobs.job import Job
from ravnest.schemas.jobs import JobCreated

_NOT_SUBMITTED = (
    "Nothing was submitted. The server keeps what was uploaded: the same command continues from there"
)


def submit(  # noqa: PLR0913, PLR0917 - each an option of the command
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
        typer.Option("--detach", "-d", help="Print the job's id and exit; `ravnest fetch JOB` later."),
    ] = False,
    folder: Out = None,
    log_dir: LogDir = None,
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each change as a line of JSON, the model last.")
    ] = False,
) -> None:
    """Submit a job, show its progress and download the trained model.

    After Ctrl-C the job continues: see `ravnest status`, `ravnest fetch` and `ravnest cancel`.
    """
    wrong = (
        (serve_here and detach, "--detach", "the server would end with this command"),
        (serve_here and server, "--serve-here with --server", "give one of the two"),
        (detach and log_dir, "--detach with --log-dir", "give it to `ravnest fetch JOB` instead"),
        (target is None and resume is None, "MODULE:FUNCTION", "give a function that returns a job"),
        (serve_here and resume, "--resume", "that server knows no earlier job"),
    )
    for given, option, problem in wrong:
        if given:
            raise typer.BadParameter(problem, param_hint=option)
    if not detach:
        check_writable(folder or Path.cwd())
    with ExitStack() as stack:
        log = stack.enter_context(run_log(log_dir))
        console = err(quiet=quiet or as_json)
        if serve_here:
            member, invitation = stack.enter_context(host_server(host=host, port=port))
            err().print(f"serving at {member.url}; providers join with\n  {invitation}")
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
            follow_and_fetch(
                handle,
                folder,
                as_lines=as_json,
                quiet=quiet or as_json,
                own_server=member.url if serve_here else None,
                log=log,
            )


def _submitted(api: ApiClient, target: str | None, resume: str | None, console: Console) -> str:
    """Submit the job of a function, or an ended job again; return its id."""
    if target is None:
        assert resume is not None
        return resume_job(api, resume)
    try:
        job = load_job(target)
        if resume is not None:
            job = replace(job, resume_from=resume)
        with progress_bars(console) as bars:
            return upload_job(api, job, bars.update)
    except KeyboardInterrupt:
        err().print(f"\n{_NOT_SUBMITTED}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def load_job(target: str) -> Job:
    """Return the job that the user's function returns."""
    job = call_target(target)
    if not isinstance(job, Job):
        raise TargetError(f"{target} must return a ravnest.Job, got {type(job).__name__}")
    return job
