"""``ravnest fetch``: download the trained model of a job."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ravnest.cli.console import (
    CommandLog,
    err,
    job_status_line,
    out,
    print_json,
    print_json_line,
    progress_bars,
    warn_of_degraded,
)
from ravnest.cli.exit_codes import ExitCode
from ravnest.cli.options import JobId, Json, LogDir, Quiet, Server, Token
from ravnest.cli.system_errors import check_writable
from ravnest.client.handle import JobHandle, ended_without_model, final_figures
from ravnest.client.server_selection import select_server
from ravnest.logs.json_lines import LogFormat
from ravnest.logs.run_log import RunLog
from ravnest.schemas.base import Schema
from ravnest.schemas.jobs import JobProgress, JobState, JobView

Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FOLDER", help="Folder for the model; default `ravnest-JOB`."),
]


Whole = Annotated[
    bool, typer.Option("--whole", help="The whole model, also if the job trains an adapter of peft.")
]


Raw = Annotated[
    bool,
    typer.Option("--raw", help="The weights themselves, of a job with `ema`, as `raw_state_dict.pt`."),
]


class JobUpdate(Schema):
    """A change of a job, as a line of `ravnest submit --json`."""

    job: str
    state: JobState
    reason: str
    progress: JobProgress


class FetchedModel(Schema):
    """Report of a download: the file and the job that it belongs to."""

    job: str
    path: str
    """Absolute path of the file: ``trained_state_dict.pt``, or that of an adapter or the best model."""
    size: int
    """Bytes of the file."""
    reason: str
    """Why the job is done, with the clusters that failed."""
    degraded: str
    """Why the model lacks the training of some clusters; empty if all finished."""
    progress: JobProgress


class EvaluatedModel(Schema):
    """Report of a job that only evaluates."""

    job: str
    reason: str
    metrics: dict[str, float | None]
    """Figures by name; null: not finite."""


class FetchedPartial(FetchedModel):
    """Report of a download of the newest weights of a job."""

    update: int
    epoch: int
    """Epoch of these updates, from 1."""
    age: float
    """Seconds since the server got them."""
    clusters: tuple[int, ...]
    """Clusters whose mean they are; or the one whose weights they are."""


def fetch(  # noqa: PLR0913, PLR0917 - each an option of the command
    job: JobId,
    folder: Out = None,
    server: Server = None,
    token: Token = None,
    whole: Whole = False,
    raw: Raw = False,
    log_dir: LogDir = None,
    quiet: Quiet = False,
    as_json: Json = False,
    best: Annotated[
        bool,
        typer.Option("--best", help="The best model so far, as `best_state_dict.pt`; does not wait."),
    ] = False,
    partial_: Annotated[
        bool,
        typer.Option(
            "--partial",
            help="The newest weights at the server, as `partial_state_dict.pt`; does not wait.",
        ),
    ] = False,
) -> None:
    """Wait for a job and download the model as `trained_state_dict.pt`.

    Load it with `model.load_state_dict(torch.load(path, weights_only=True))`. An adapter of peft is
    `adapter_model.safetensors`; load it with `PeftModel.from_pretrained(base_model, folder)`.
    """
    if best and partial_:
        raise typer.BadParameter("give one of the two", param_hint="--best with --partial")
    check_writable(folder or Path.cwd())
    with run_log(log_dir) as log, JobHandle(job, select_server(server, token).api()) as handle:
        if best:
            _fetch_best(handle, folder, as_json=as_json, quiet=quiet)
        elif partial_:
            _fetch_partial(handle, folder, as_json=as_json, quiet=quiet, whole=whole)
        else:
            follow_and_fetch(handle, folder, as_json=as_json, quiet=quiet, log=log, whole=whole, raw=raw)


def run_log(folder: Path | None) -> AbstractContextManager[RunLog | None]:
    """Return the log of a job in a folder; nothing without one."""
    return nullcontext() if folder is None else RunLog(folder, continues=False)


def _fetch_best(handle: JobHandle, folder: Path | None, *, as_json: bool, quiet: bool) -> None:
    """Download the best model of a job so far."""
    with progress_bars(err(quiet=quiet)) as bars:
        path = handle.fetch_best(
            folder or Path(f"ravnest-{handle.id}"), progress=partial(bars.update, "downloading")
        )
    if as_json:
        print_json(_fetched(path, handle.view()))
    else:
        out().print(str(path))


def _fetch_partial(
    handle: JobHandle, folder: Path | None, *, as_json: bool, quiet: bool, whole: bool
) -> None:
    """Download the newest weights of a job at the server."""
    console = err(quiet=quiet)
    with progress_bars(console) as bars:
        found = handle.partial(
            folder=folder or Path(f"ravnest-{handle.id}"),
            progress=partial(bars.update, "downloading"),
            whole=whole,
        )
    console.print(str(found))
    if as_json:
        fetched = _fetched(found.path, handle.view()).model_dump()
        print_json(
            FetchedPartial(
                **fetched,
                update=found.update,
                epoch=found.epoch,
                age=found.age,
                clusters=found.clusters,
            )
        )
    else:
        out().print(str(found.path))


def _fetched(path: Path, view: JobView) -> FetchedModel:
    return FetchedModel(
        job=view.id,
        path=str(path.resolve()),
        size=path.stat().st_size,
        reason=view.reason,
        degraded=view.degraded,
        progress=view.progress,
    )


def _print_figures(view: JobView, *, as_json: bool, as_lines: bool) -> None:
    """Print what a job that only evaluates has found, with all digits."""
    figures = final_figures(view.progress)
    if as_json or as_lines:
        found = EvaluatedModel(job=view.id, reason=view.reason, metrics=figures)
        (print_json_line if as_lines else print_json)(found)
        return
    for name, value in figures.items():
        out().print(f"{name} {'not finite' if value is None else repr(value)}")


def _interrupted(job: str, server: str | None) -> str:
    """Return what happens to a job after Ctrl-C, and how to return to it."""
    if server is None:
        return f"\n{job} continues. `ravnest fetch {job}` returns to it, `ravnest cancel {job}` ends it"
    port = server.rpartition(":")[2]
    return (
        f"\nThe server of this command ends with it, and {job} cannot be fetched without one. `ravnest "
        f"serve --port {port}` in this folder starts it again; then `ravnest fetch {job}` returns to it"
    )


def _update_of(view: JobView) -> JobUpdate:
    return JobUpdate(job=view.id, state=view.state, reason=view.reason, progress=view.progress)


def follow_and_fetch(
    handle: JobHandle,
    folder: Path | None,
    *,
    as_json: bool = False,
    as_lines: bool = False,
    quiet: bool = False,
    own_server: str | None = None,
    whole: bool = False,
    raw: bool = False,
    log: RunLog | None = None,
    log_format: LogFormat = "text",
) -> None:
    """Show the progress of a job until it ends, then download its model.

    ``as_json``: report the model as JSON; ``as_lines``: each change as a line of JSON, and the model as
    the last one. ``own_server``: address of the job's server, if it runs in this process.
    ``log`` gets the job's figures. ``whole``: the whole model, also if the job trains an adapter.
    ``raw``: the weights themselves, if the result is their moving average. ``log_format``: that of the
    progress.
    """
    lines = CommandLog(err(quiet=quiet), log_format)
    try:
        with job_status_line(lines) as line:
            last: JobUpdate | None = None

            def show(view: JobView) -> None:
                nonlocal last
                line.show(view)
                if as_lines and (update := _update_of(view)) != last:
                    last = update
                    print_json_line(update)

            ended = handle.wait(on_change=show) if log is None else handle.follow(log, on_change=show)
        if ended.state is not JobState.DONE:
            raise ended_without_model(ended)
        if ended.progress.epochs == 0:
            _print_figures(ended, as_json=as_json, as_lines=as_lines)
            return
        with progress_bars(lines.bars) as bars:
            path = handle.fetch(
                folder or Path(f"ravnest-{handle.id}"),
                progress=partial(bars.update, "downloading"),
                whole=whole,
                raw=raw,
            )
    except KeyboardInterrupt:
        lines.always().say("interrupted", _interrupted(handle.id, own_server))
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    if as_json or as_lines:
        (print_json_line if as_lines else print_json)(_fetched(path, ended))
    else:
        out().print(str(path))
    warn_of_degraded(ended, log_format)
