"""Routes of jobs: submit, watch, cancel, fetch."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool

from ravnest.errors import ServerRefusedError
from ravnest.schemas.job_changes import JobChanges
from ravnest.schemas.jobs import EventView, JobCreated, JobResult, JobSpec, JobView, LossHistory
from ravnest.schemas.partial_results import PartialResult
from ravnest.server.auth.dependencies import CurrentServer, JobReader, RequesterMember
from ravnest.server.db.records import MemberRecord
from ravnest.server.http.guarded_route import GuardedRoute, Position, large_body
from ravnest.server.server import Server
from ravnest.server.views import job_losses, job_view

router = APIRouter(prefix="/api/jobs", tags=["jobs"], route_class=GuardedRoute)


@router.post("", status_code=201)
@large_body
def submit(body: JobSpec, member: RequesterMember, server: CurrentServer) -> JobCreated:
    """Submit a job whose files are uploaded."""
    return JobCreated(id=server.job_service.submit(member, body))


@router.get("")
def listed(member: JobReader, server: CurrentServer) -> list[JobView]:
    """Return the jobs that this member may see, newest first, without the records of their nodes."""
    return server.visible_jobs(member)


@router.get("/{job}")
def get(job: str, member: JobReader, server: CurrentServer) -> JobView:
    """Return the current state of a job."""
    return _view(server, member, job)


@router.get("/{job}/wait")
async def wait(
    job: str,
    member: JobReader,
    server: CurrentServer,
    changed: float = 0.0,
    timeout: Annotated[float, Query(ge=0, le=60)] = 10.0,
) -> JobView:
    """Return a job as soon as it has changed after time ``changed``, or after ``timeout`` seconds."""
    clock = asyncio.get_running_loop().time
    with server.notifications.subscribe(("job", job)) as news:
        deadline = clock() + min(timeout, server.settings.longest_wait)
        while True:
            view = await run_in_threadpool(_view, server, member, job)
            if view.changed > changed or not await news.wait(deadline - clock()):
                return view


@router.get("/{job}/losses")
def losses(
    job: str,
    member: JobReader,
    server: CurrentServer,
    first: Position = 0,
    since: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0,
) -> LossHistory:
    """Return the losses from update ``first`` on, and validations and rounds since a time."""
    server.visible_job(member, job)
    with server.db.read() as db:
        return job_losses(db, job, first, since)


@router.get("/{job}/events")
def events(job: str, member: JobReader, server: CurrentServer, after: Position = 0) -> list[EventView]:
    """Return the events of the job and those of its providers that concern it, oldest first."""
    server.visible_job(member, job)
    with server.db.read() as db:
        return db.events.after(after, job=job)


@router.post("/{job}/cancel")
def cancel(job: str, member: RequesterMember, server: CurrentServer) -> JobView:
    """Cancel the job and stop its providers."""
    server.visible_job(member, job)
    return server.job_service.cancel(job, member)


@router.post("/{job}/resume", status_code=201)
def resume(job: str, member: RequesterMember, server: CurrentServer) -> JobCreated:
    """Submit the job again, to continue from its newest checkpoint."""
    server.visible_job(member, job)
    return JobCreated(id=server.job_service.resume_job(member, job))


@router.post("/{job}/resubmit", status_code=201)
def resubmit(job: str, body: JobChanges, member: RequesterMember, server: CurrentServer) -> JobCreated:
    """Submit the job again with changed settings; it belongs to the owner of the job."""
    record = server.visible_job(member, job)
    return JobCreated(id=server.resubmission_service.resubmit(record, member, body))


@router.get("/{job}/result")
def result(job: str, member: RequesterMember, server: CurrentServer) -> JobResult:
    """Return the list of trained files; 409 if there is none."""
    record = server.visible_job(member, job)
    if record.epochs == 0:
        raise ServerRefusedError(
            f"{job} has no model: it only evaluates one. `ravnest fetch {job}` prints its figures", 409
        )
    with server.db.read() as db:
        found = db.jobs.result(job)
        digests = [] if found is None else [file.artifact.sha256 for file in found.files]
        lost = db.artifact_grants.missing(record.owner, digests)
        spec = db.jobs.spec(job)
    if lost:
        raise ServerRefusedError(f"the result of {job} was deleted: it is too old", 409)
    if found is None:
        raise ServerRefusedError(f"{job} has no result: it is {record.state}. {record.reason}", 409)
    return found.model_copy(update={"weights": spec.model.weights, "adapter": spec.adapter})


@router.get("/{job}/best")
def best(job: str, member: RequesterMember, server: CurrentServer) -> JobResult:
    """Return the list of files of the best model so far; 409 if there is none."""
    return server.job_service.best_model(server.visible_job(member, job))


@router.get("/{job}/partial")
def partial(job: str, member: RequesterMember, server: CurrentServer) -> PartialResult:
    """Return the files of the newest checkpoints of a job in any state; 409 if there is none."""
    return server.partial_service.newest(server.visible_job(member, job), member)


def _view(server: Server, member: MemberRecord, job: str) -> JobView:
    server.auth.check_active(member)  # it may have waited
    record = server.visible_job(member, job)
    with server.db.read() as db:
        return job_view(db, db.jobs.get(job) or record)
