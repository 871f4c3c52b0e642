"""Route of the figures for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Response

from ravnest.logs.prometheus import MEDIA_TYPE, exposition
from ravnest.server.auth.dependencies import CurrentServer, JobReader
from ravnest.server.http.guarded_route import GuardedRoute
from ravnest.server.prometheus import figures
from ravnest.server.views import provider_views

router = APIRouter(tags=["server"], route_class=GuardedRoute)


@router.get("/metrics", response_class=Response)
def metrics(member: JobReader, server: CurrentServer) -> Response:
    """Return the figures of the jobs and providers that this member may see, as text for Prometheus."""
    since = server.clock.wall() - server.settings.shown_after_loss
    with server.db.read() as db:
        relays = server.relay_service.live()
        providers = provider_views(db, server.provider_service.liveness, since, relays, member)
    return Response(exposition(figures(server.visible_jobs(member), providers)), media_type=MEDIA_TYPE)
