"""``ravnest fetch``: the trained model of a job."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ravnest.cli.console import bars, err, job_line, out
from ravnest.cli.options import JobId, Server, Token
from ravnest.client.handle import JobHandle, ended_without_model
from ravnest.client.server_selection import choose
from ravnest.schemas.jobs import JobState

Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FOLDER", help="Where the model goes; `ravnest-JOB` by default."),
]


def fetch(job: JobId, folder: Out = None, server: Server = None, token: Token = None) -> None:
    """Download the trained model as `trained_state_dict.pt`; waits for a job that still trains.

    Load it with `model.load_state_dict(torch.load(path, weights_only=True))`.
    """
    with JobHandle(job, choose(server, token).api()) as handle:
        follow_and_fetch(handle, folder)


def follow_and_fetch(handle: JobHandle, folder: Path | None) -> None:
    """Show how a job goes until it has ended, and bring its model home."""
    with job_line(err()) as line:
        ended = handle.wait(on_change=line.show)
    if ended.state is not JobState.DONE:
        raise ended_without_model(ended)
    with bars(err()) as shown:
        path = handle.fetch(
            folder or Path(f"ravnest-{handle.id}"), progress=partial(shown.tell, "fetching")
        )
    out().print(str(path))
