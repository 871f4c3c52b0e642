"""``ravnest fetch``: download the trained model of a job."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ravnest.cli.console import err, job_status_line, out, print_json, progress_bars
from ravnest.cli.options import JobId, Json, Server, Token
from ravnest.client.handle import JobHandle, ended_without_model
from ravnest.client.server_selection import select_server
from ravnest.schemas.base import Schema
from ravnest.schemas.jobs import JobProgress, JobState

Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FOLDER", help="Folder for the model; default `ravnest-JOB`."),
]


class FetchedModel(Schema):
    """Report of a download: the file and the job that it belongs to."""

    job: str
    path: str
    """Absolute path of ``trained_state_dict.pt``."""
    size: int
    """Bytes of the file."""
    reason: str
    """Why the job is done, with the clusters that failed."""
    progress: JobProgress


def fetch(
    job: JobId, folder: Out = None, server: Server = None, token: Token = None, as_json: Json = False
) -> None:
    """Wait for a job and download the model as `trained_state_dict.pt`.

    Load it with `model.load_state_dict(torch.load(path, weights_only=True))`.
    """
    with JobHandle(job, select_server(server, token).api()) as handle:
        follow_and_fetch(handle, folder, as_json=as_json)


def follow_and_fetch(handle: JobHandle, folder: Path | None, *, as_json: bool = False) -> None:
    """Show the progress of a job until it ends, then download its model."""
    with job_status_line(err()) as line:
        ended = handle.wait(on_change=line.show)
    if ended.state is not JobState.DONE:
        raise ended_without_model(ended)
    with progress_bars(err()) as bars:
        path = handle.fetch(
            folder or Path(f"ravnest-{handle.id}"), progress=partial(bars.update, "downloading")
        )
    if as_json:
        print_json(
            FetchedModel(
                job=handle.id,
                path=str(path.resolve()),
                size=path.stat().st_size,
                reason=ended.reason,
                progress=ended.progress,
            )
        )
    else:
        out().print(str(path))
