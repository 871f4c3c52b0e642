"""Submitting a training: pack it, send what the server lacks, and hand it in."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ravnest.client.handle import JobHandle
from ravnest.client.local_server import host_server
from ravnest.client.server_selection import choose
from ravnest.http.api import ApiClient
from ravnest.http.transfer import upload
from ravnest.jobs.job import Job, pack_job
from ravnest.schemas.jobs import JobCreated

Tell = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and how much there is."""


def submit(  # noqa: PLR0913  # what is trained, how, and where
    model: torch.nn.Module,
    example_args: Sequence[Any],
    train_data: Any,
    criterion: Callable[..., Any],
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    optimizer_params: Mapping[str, Any] | None = None,
    epochs: int = 1,
    *,
    server: str | None = None,
    token: str | None = None,
    serve_here: bool = False,
    tell: Tell | None = None,
    **settings: Any,
) -> JobHandle:
    """Have a model trained by the providers of a server; returns as soon as it is handed in.

    ``settings`` are further fields of ``ravnest.Job``. The server is ``server``, else
    ``$RAVNEST_SERVER``, else the only one that was joined; a ``token`` joins it. With ``serve_here``
    this process is the server until the handle is closed.
    """
    job = Job(
        model=model,
        example_args=example_args,
        train_data=train_data,
        criterion=criterion,
        optimizer=optimizer,
        optimizer_params=optimizer_params or {},
        epochs=epochs,
        **settings,
    )
    return submit_job(job, server=server, token=token, serve_here=serve_here, tell=tell)


def submit_job(
    job: Job,
    *,
    server: str | None = None,
    token: str | None = None,
    serve_here: bool = False,
    tell: Tell | None = None,
) -> JobHandle:
    """Hand in a job; see ``submit``."""
    with ExitStack() as opened:
        invitation = None
        if serve_here:
            member, invitation = opened.enter_context(host_server())
        else:
            member = choose(server, token)
        api = opened.enter_context(member.api())
        api.get("/api/health", object)  # packing takes time: first see whether there is a server
        handed_in = hand_in(api, job, tell)
        close = opened.pop_all().close
        if serve_here:
            _call_at_end(close)
        return JobHandle(handed_in, api, close=close, invitation=invitation)


def _call_at_end(close: Callable[[], None]) -> None:
    """Close also what a script forgets: its server would keep the process from ending."""

    def wait() -> None:
        threading.main_thread().join()
        close()

    threading.Thread(target=wait, name="ravnest-end").start()


def open_job(job: str, *, server: str | None = None, token: str | None = None) -> JobHandle:
    """A job that was submitted before, perhaps by another process."""
    return JobHandle(job, choose(server, token).api())


def hand_in(api: ApiClient, job: Job, tell: Tell | None = None) -> str:
    """Pack a job, upload what the server lacks, and submit it; the job's id."""
    with tempfile.TemporaryDirectory(prefix="ravnest-job-") as folder:
        packed = pack_job(job, Path(folder), tell)
        upload(api, packed.files, partial(tell, "uploading") if tell else None)
        return api.post("/api/jobs", packed.spec, JobCreated).id
