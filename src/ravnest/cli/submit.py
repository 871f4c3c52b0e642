"""``ravnest submit``: submit a job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ravnest.cli.console import CommandLog, err, out, print_json, progress_bars
from ravnest.cli.exit_codes import ExitCode
from ravnest.cli.fetch import Out, follow_and_fetch, run_log
from ravnest.cli.options import LogDir, LogOption, Quiet, Server, Token
from ravnest.cli.system_errors import check_writable
from ravnest.cli.target import TargetError, call_target
from ravnest.client.handle import JobHandle, resubmit_job
from ravnest.client.local_server import host_server
from ravnest.client.server_selection import select_server
from ravnest.client.submission import resume_job, upload_job
from ravnest.http.api import ApiClient
from ravnest.jobs.changed_settings import job_changes
from ravnest.jobs.job import Job
from ravnest.logs.json_lines import log_as_json
from ravnest.schemas.job_changes import StartFrom
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
    like: Annotated[
        str | None,
        typer.Option(metavar="JOB", help="Submit a job like an earlier one, without an upload."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change a setting of --like; `lr=0.001`."),
    ] = None,
    start_from: Annotated[
        StartFrom,
        typer.Option(help="Weights that --like starts from; `checkpoint` continues an ended job."),
    ] = "original",
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
    log_format: LogOption = "text",
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
        (not (target or resume or like), "MODULE:FUNCTION", "give a function that returns a job"),
        (like and (target or resume), "--like", "it takes the place of MODULE:FUNCTION and --resume"),
        (serve_here and like, "--like", "that server knows no earlier job"),
        (changes and not like, "--set", "it changes a setting of --like JOB"),
        (start_from != "original" and not like, "--start-from", "it belongs to --like JOB"),
        (serve_here and resume, "--resume", "that server knows no earlier job"),
    )
    for given, option, problem in wrong:
        if given:
            raise typer.BadParameter(problem, param_hint=option)
    if log_format == "json":
        log_as_json()
    if not detach:
        check_writable(folder or Path.cwd())
    with ExitStack() as stack:
        log = stack.enter_context(run_log(log_dir))
        lines = CommandLog(err(quiet=quiet or as_json), log_format)
        if serve_here:
            member, invitation = stack.enter_context(host_server(host=host, port=port))
            text = f"serving at {member.url}; providers join with\n  {invitation}"
            lines.always().say("serving", text, url=member.url, invitation=invitation)
        else:
            member = select_server(server, token)
        api = stack.enter_context(member.api())
        api.get("/api/health", object)  # before the user's module, whose import may take time
        if like is not None:
            body = job_changes({**parsed_changes(changes or ()), "start_from": start_from})
            submitted = resubmit_job(api, like, body)
        else:
            submitted = _submitted(api, target, resume, lines)
        handle = JobHandle(submitted, api)
        if detach and as_json:
            print_json(JobCreated(id=handle.id))
        elif detach:
            out().print(handle.id)
        else:
            lines.say("submitted", f"submitted {handle.id}", subject=handle.id)
            follow_and_fetch(
                handle,
                folder,
                as_lines=as_json,
                quiet=quiet or as_json,
                own_server=member.url if serve_here else None,
                log=log,
                log_format=log_format,
            )


def _submitted(api: ApiClient, target: str | None, resume: str | None, lines: CommandLog) -> str:
    """Submit the job of a function, or an ended job again; return its id."""
    if target is None:
        assert resume is not None
        return resume_job(api, resume)
    try:
        job = load_job(target)
        if resume is not None:
            job = replace(job, resume_from=resume)
        with progress_bars(lines.bars) as bars:
            return upload_job(api, job, bars.update)
    except KeyboardInterrupt:
        lines.always().say("interrupted", f"\n{_NOT_SUBMITTED}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def parsed_changes(given: Sequence[str]) -> dict[str, Any]:
    """Return settings from texts such as ``epochs=10`` and ``optimizer_params.lr=0.001``.

    Values are JSON; what is not JSON is text.
    """
    found: dict[str, Any] = {}
    for each in given:
        name, sign, text = each.partition("=")
        top, dot, key = name.strip().partition(".")
        own = found.setdefault(top, {}) if dot else found
        if not sign or not top or not isinstance(own, dict):
            problem = f"{each!r} is not NAME=VALUE or NAME.KEY=VALUE, such as epochs=10"
            raise typer.BadParameter(problem, param_hint="--set")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        own[key if dot else top] = value
    return found


def load_job(target: str) -> Job:
    """Return the job that the user's function returns."""
    job = call_target(target)
    if not isinstance(job, Job):
        raise TargetError(f"{target} must return a ravnest.Job, got {type(job).__name__}")
    return job
