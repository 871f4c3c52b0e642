"""Jobs: submit, watch, cancel, fetch."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool

from ravnest.errors import ServerRefusedError
from ravnest.schemas.jobs import EventView, JobCreated, JobResult, JobSpec, JobView, LossHistory
from ravnest.server.auth.dependencies import ARequester, AWatcher, ServerHere
from ravnest.server.db.records import MemberRecord
from ravnest.server.server import Server
from ravnest.server.views import job_losses, job_view

router = APIRouter(prefix="/api/jobs", tags=["jobs"])


@router.post("", status_code=201)
def submit(body: JobSpec, member: ARequester, server: ServerHere) -> JobCreated:
    """Submit a job whose files are uploaded."""
    return JobCreated(id=server.steward.submit(member, body))


@router.get("")
def listed(member: AWatcher, server: ServerHere) -> list[JobView]:
    """Jobs that this member may see, newest first."""
    return server.jobs_of(member)


@router.get("/{job}")
def get(job: str, member: AWatcher, server: ServerHere) -> JobView:
    """A job as it is now."""
    return _view(server, member, job)


@router.get("/{job}/wait")
async def wait(
    job: str,
    member: AWatcher,
    server: ServerHere,
    changed: float = 0.0,
    timeout: Annotated[float, Query(ge=0, le=60)] = 10.0,
) -> JobView:
    """A job once it has changed after ``changed``, or after ``timeout`` seconds as it is then."""
    clock = asyncio.get_running_loop().time
    with server.wakes.listen(("job", job)) as news:
        deadline = clock() + min(timeout, server.settings.longest_wait)
        while True:
            view = await run_in_threadpool(_view, server, member, job)
            if view.changed > changed or not await news.wait(deadline - clock()):
                return view


@router.get("/{job}/losses")
def losses(
    job: str, member: AWatcher, server: ServerHere, first: Annotated[int, Query(ge=0)] = 0
) -> LossHistory:
    """Losses from one update on; a long answer is cut, and goes on from where it ends."""
    server.job_of(member, job)
    with server.store.look() as books:
        return job_losses(books, job, first)


@router.get("/{job}/events")
def events(job: str, member: AWatcher, server: ServerHere, after: int = 0) -> list[EventView]:
    """What happened to the job and to its providers on its account, oldest first."""
    server.job_of(member, job)
    with server.store.look() as books:
        return books.events.after(after, job=job)


@router.post("/{job}/cancel")
def cancel(job: str, member: ARequester, server: ServerHere) -> JobView:
    """End the job; its providers stop."""
    server.job_of(member, job)
    return server.steward.cancel(job, member)


@router.get("/{job}/result")
def result(job: str, member: ARequester, server: ServerHere) -> JobResult:
    """The trained files; 409 while there are none."""
    record = server.job_of(member, job)
    with server.store.look() as books:
        found = books.jobs.result(job)
    if found is None:
        raise ServerRefusedError(f"{job} has no result: it is {record.state}. {record.reason}", 409)
    return found


def _view(server: Server, member: MemberRecord, job: str) -> JobView:
    record = server.job_of(member, job)
    with server.store.look() as books:
        return job_view(books, books.jobs.get(job) or record)
