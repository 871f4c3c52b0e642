"""The server's HTTP side."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from ravnest.server.http.middleware import AccessLog, BodyLimit, explain_errors
from ravnest.server.http.routes import artifacts, assignments, auth, jobs, probe, providers
from ravnest.server.server import Server
from ravnest.server.web import page
from ravnest.version import __version__

_log = logging.getLogger(__name__)


def create_app(server: Server) -> FastAPI:
    """All routes of an opened server."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        clock = asyncio.create_task(_run_clock(server))
        try:
            with server.at_work():
                yield
        finally:
            clock.cancel()
            with suppress(asyncio.CancelledError):
                await clock

    app = FastAPI(
        title="Ravnest",
        summary="The intermediary server: matches jobs and providers, plans and ships.",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,  # served by a route of ours, to members; its page would load from elsewhere
    )
    app.state.server = server
    explain_errors(app)
    app.add_middleware(BodyLimit, largest=server.settings.largest_message)
    app.add_middleware(AccessLog)
    for module in (auth, providers, assignments, artifacts, jobs, probe):
        app.include_router(module.router)
    app.include_router(page.router)
    return app


async def _run_clock(server: Server) -> None:
    """Do what is due when it is due; sleeps in between, unless something becomes due earlier."""
    with server.wakes.listen(("clock", "")) as earlier:
        while not earlier.is_last:
            try:
                delay = await run_in_threadpool(server.steward.clock)
            except Exception:
                _log.exception("the clock failed; it goes on")
                delay = server.settings.lost_after
            await earlier.wait(delay)
