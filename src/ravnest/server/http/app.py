"""The HTTP application of the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from weakref import WeakValueDictionary

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from ravnest.deadlines import TIMER_LATE
from ravnest.server.http.middleware import DOCUMENTED, AccessLog, StrangerLimit, explain_errors
from ravnest.server.http.routes import (
    artifacts,
    assignments,
    auth,
    estimates,
    jobs,
    links,
    members,
    metrics,
    probe,
    providers,
    relays,
    traces,
)
from ravnest.server.server import Server
from ravnest.server.web import assets, page
from ravnest.server.web import routes as page_routes
from ravnest.server.web.feed import PageFeed
from ravnest.server.web.stream import StreamPlaces
from ravnest.version import __version__

_LOG_SECONDS = 1.0
"""Seconds between two copies of the database's log."""
_log = logging.getLogger(__name__)


def create_app(server: Server) -> FastAPI:
    """Return the application of an opened server, with all routes."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        background = (_run_timers, _control_relay, _clean_up, _copy_log)
        tasks = [asyncio.create_task(work(server)) for work in background]
        try:
            with server.matching_in_background():
                yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    app = FastAPI(
        title="Ravnest",
        summary="The intermediary server: matches jobs and providers, plans and ships.",
        version=__version__,
        lifespan=lifespan,
        responses=DOCUMENTED,
        openapi_url=None,  # members get it from a route of ours; FastAPI's page loads scripts from a CDN
    )
    app.state.server = server
    app.state.turns = WeakValueDictionary()
    limits = server.settings.connections
    app.state.page_feed = PageFeed(server)
    app.state.page_streams = StreamPlaces(limits.pages, limits.pages_per_address)
    explain_errors(app)
    app.add_middleware(StrangerLimit, server=server)
    app.add_middleware(AccessLog)
    app.include_router(providers.heartbeats)  # first: most requests are heartbeats
    for module in (
        auth,
        members,
        providers,
        relays,
        links,
        assignments,
        artifacts,
        jobs,
        probe,
        estimates,
        metrics,
        traces,
    ):
        app.include_router(module.router)
    for module in (page, assets, page_routes):
        app.include_router(module.router)
    return app


async def _run_timers(server: Server) -> None:
    """Call ``run_due`` at each deadline; a notification announces an earlier deadline."""
    clock = asyncio.get_running_loop().time
    with server.notifications.subscribe(("clock", "")) as earlier:
        while not earlier.is_closed:
            try:
                delay = await run_in_threadpool(server.run_due)
            except Exception:
                _log.exception("a timer failed; the timers continue")
                delay = server.settings.lost_after
            due = clock() + delay
            await earlier.wait(delay)
            if clock() > due + TIMER_LATE:
                _log.warning("the server was halted; the silence of providers counts from now on")
                await run_in_threadpool(server.provider_service.excuse_silence)


async def _control_relay(server: Server) -> None:
    """Tell the server's own relay which jobs run, at each change."""
    with server.notifications.subscribe(("relays", "")) as news:
        while not news.is_closed:
            try:
                await run_in_threadpool(server.relay_service.tell_own)
            except Exception:
                _log.exception("the relay of the server was not told which jobs run")
            await news.wait(server.settings.lost_after)


async def _clean_up(server: Server) -> None:
    """Delete files that nobody needs any more, all the time."""
    while True:
        try:
            await run_in_threadpool(server.clean_up)
        except Exception:
            _log.exception("files could not be deleted; the server continues")
        await asyncio.sleep(server.settings.clean_up_pause)


async def _copy_log(server: Server) -> None:
    """Copy the database's log, so that no commit has to."""
    while True:
        pause = _LOG_SECONDS
        try:
            await run_in_threadpool(server.db.copy_log)
        except Exception:
            _log.exception("the log of the database was not copied; the server tries again later")
            pause = server.settings.clean_up_pause
        await asyncio.sleep(pause)
