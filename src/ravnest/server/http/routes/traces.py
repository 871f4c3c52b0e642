"""Routes of traces: ask the nodes of a job what they did when, and read it. For its owner and admins."""

from __future__ import annotations

from fastapi import APIRouter

from ravnest.errors import ServerRefusedError
from ravnest.schemas.traces import TracedAssignment, TraceRequested, TraceSpans
from ravnest.server.auth.dependencies import CurrentServer, RequesterMember
from ravnest.server.http.guarded_route import GuardedRoute
from ravnest.server.traces import stored_spans, traced_assignments

router = APIRouter(prefix="/api/jobs/{job}/trace", tags=["jobs"], route_class=GuardedRoute)


@router.post("")
def request(job: str, member: RequesterMember, server: CurrentServer) -> TraceRequested:
    """Ask the nodes that train for their newest spans; they arrive within seconds."""
    server.visible_job(member, job)
    with server.db.read() as db:
        asked = [each.provider for each in db.assignments.of_job(job) if each.phase == "training"]
    return TraceRequested(order=server.trace_requests.add(job, asked))


@router.get("")
def listed(job: str, member: RequesterMember, server: CurrentServer) -> list[TracedAssignment]:
    """Return the nodes of the job's current plan, and which requests they have answered."""
    server.visible_job(member, job)
    with server.db.read() as db:
        return traced_assignments(db, job)


@router.get("/{assignment}")
def spans(job: str, assignment: str, member: RequesterMember, server: CurrentServer) -> TraceSpans:
    """Return the spans that a node of the job has sent."""
    server.visible_job(member, job)
    with server.db.read() as db:
        found = db.assignments.get(assignment)
        if found is None or found.job != job:
            raise ServerRefusedError(f"{job} has no assignment {assignment[:100]!r}", 404)
        return stored_spans(db, assignment)
