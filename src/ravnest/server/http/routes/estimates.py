"""Route of estimates: plan a job without creating it."""

from __future__ import annotations

from fastapi import APIRouter

from ravnest.schemas.estimates import EstimateRequest, JobEstimate
from ravnest.server.auth.dependencies import CurrentServer, RequesterMember
from ravnest.server.http.guarded_route import GuardedRoute, large_body

router = APIRouter(prefix="/api/estimates", tags=["jobs"], route_class=GuardedRoute)


@router.post("")
@large_body
def estimate(body: EstimateRequest, member: RequesterMember, server: CurrentServer) -> JobEstimate:
    """Plan a job for the providers of now; nothing is stored or reserved."""
    return server.estimate_service.estimate(member.id, body)
