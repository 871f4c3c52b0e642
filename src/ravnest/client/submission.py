"""Submission of a job: pack it, upload the files that the server lacks, create the job."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, overload
from urllib.parse import quote

from ravnest.client.handle import JobHandle
from ravnest.client.local_server import host_server
from ravnest.client.server_selection import select_server
from ravnest.errors import JobError
from ravnest.http.api import ApiClient
from ravnest.http.transfer import upload
from ravnest.jobs.dataset_writer import StepProgress
from ravnest.jobs.job import Job
from ravnest.jobs.packing import pack_job
from ravnest.schemas.jobs import JobCreated


@overload
def submit(
    job: Job,
    *,
    server: str | None = None,
    token: str | None = None,
    serve_here: bool = False,
    progress: StepProgress | None = None,
    resume: str | None = None,
) -> JobHandle: ...


@overload
def submit(
    *,
    server: str | None = None,
    token: str | None = None,
    serve_here: bool = False,
    progress: StepProgress | None = None,
    resume: str | None = None,
    **fields: Any,
) -> JobHandle: ...


def submit(
    job: Job | None = None,
    *,
    server: str | None = None,
    token: str | None = None,
    serve_here: bool = False,
    progress: StepProgress | None = None,
    resume: str | None = None,
    **fields: Any,
) -> JobHandle:
    """Submit a job to a server and return its handle; training continues without this process.

    Instead of a ``Job``, its fields can be given as keywords: ``submit(model=..., train_data=...)``.
    The server is ``server``, or ``$RAVNEST_SERVER``, or the only server that this user has joined.
    ``token`` joins the server and is needed once. With ``serve_here`` this process runs a server of
    its own until the handle is closed. ``progress`` is called with the name of the current step, the
    amount done and the total. ``resume`` is an ended job of yours, from whose newest checkpoint
    training starts; without a job, its specification is used again and nothing is uploaded. Raises
    ``JobError`` or ``SplitError`` before anything is uploaded if the job cannot be trained as
    described.
    """
    described = None if resume is not None and job is None and not fields else _job(job, fields)
    if described is not None and resume is not None:
        described = replace(described, resume_from=resume)
    with ExitStack() as stack:
        invitation = None
        if serve_here:
            member, invitation = stack.enter_context(host_server())
        else:
            member = select_server(server, token)
        api = stack.enter_context(member.api())
        api.get("/api/health", object)  # packing takes time: fail first if no server answers
        if described is None:
            assert resume is not None
            job_id = resume_job(api, resume)
        else:
            job_id = upload_job(api, described, progress)
        close = stack.pop_all().close
        if serve_here:
            _close_after_main_thread(close)
        return JobHandle(job_id, api, close=close, invitation=invitation)


def upload_job(api: ApiClient, job: Job, progress: StepProgress | None = None) -> str:
    """Pack a job, upload the files that the server lacks, create the job and return its id."""
    with tempfile.TemporaryDirectory(prefix="ravnest-job-") as folder:
        packed = pack_job(job, Path(folder), progress)
        upload(api, packed.files, partial(progress, "uploading") if progress else None)
        return api.post("/api/jobs", packed.spec, JobCreated).id


def resume_job(api: ApiClient, job: str) -> str:
    """Submit an ended job again, to continue from its newest checkpoint; return the new id."""
    return api.post(f"/api/jobs/{quote(job, safe='')}/resume", None, JobCreated).id


def _job(job: object, fields: dict[str, Any]) -> Job:
    if job is None:
        return Job(**fields)
    if not isinstance(job, Job):
        raise JobError(
            f"submit() takes a ravnest.Job, not a {type(job).__name__}: use submit(Job(model=...)), or "
            "give all fields as keywords, submit(model=...)"
        )
    if fields:
        raise JobError(
            f"submit() takes either a Job or its fields as keywords, not both: set {min(fields)} in "
            "the Job"
        )
    return job


def _close_after_main_thread(close: Callable[[], None]) -> None:
    """Close a server that the script forgets to close, which would keep the process alive."""

    def wait() -> None:
        threading.main_thread().join()
        close()

    threading.Thread(target=wait, name="ravnest-close").start()
