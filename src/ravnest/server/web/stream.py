"""Server-sent events: each browser gets the whole state once, then what changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool

from ravnest.errors import ServerRefusedError
from ravnest.relay.sockets import network_of
from ravnest.server.db.records import MemberRecord
from ravnest.server.server import Server
from ravnest.server.web.deltas import item_changes
from ravnest.server.web.feed import CONTINUED, PageFeed, PageState
from ravnest.version import __version__

TICK = 5.0
"""Seconds after which a browser hears from the server if nothing changes."""
_RETRY = 1000
"""Milliseconds until a browser connects again."""


class StreamPlaces:
    """Open streams; their number is limited, and that of each address. Used on the event loop only."""

    def __init__(self, most: int, per_address: int) -> None:
        self._most = most
        self._per_address = per_address
        self._open: Counter[str] = Counter()

    def refusal(self, address: str) -> str:
        """Return why an address gets no place now; empty if it gets one.

        Browsers hide the answer to a refused stream from scripts, so that pages ask for it.
        """
        if self._open.total() >= self._most:
            return "too many browsers watch this server; close some pages"
        if self._open[network_of(address)] >= self._per_address:
            return "too many pages of this address watch the server; close some of them"
        return ""

    @contextmanager
    def taken(self, address: str) -> Iterator[None]:
        """Take a place while the block runs; refuse (429) if there is none."""
        if reason := self.refusal(address):
            raise ServerRefusedError(reason, 429, TICK)
        network = network_of(address)
        self._open[network] += 1
        try:
            yield
        finally:
            self._open[network] -= 1
            if not self._open[network]:
                del self._open[network]


async def page_events(
    server: Server, feed: PageFeed, member: MemberRecord, tick: float = TICK
) -> AsyncIterator[bytes]:
    """Yield the events of a stream until the server stops or the member may not see it any more."""
    sent = PageState(0.0)
    with server.notifications.subscribe(("page", "")) as news, feed.watched_by(member):
        yield f"retry: {_RETRY}\n\n".encode()
        is_first = True
        while not news.is_closed:
            try:
                state = await run_in_threadpool(_visible, server, feed, member)
            except ServerRefusedError:
                yield _event("end", {"reason": "your login has ended"})
                return
            if is_first:
                me = {"id": member.id, "name": member.name, "role": member.role}
                removed = await run_in_threadpool(server.removed_jobs, member)
                whole = {"version": __version__, "me": me, "removed": removed}
                yield _event("state", whole | _changes(sent, state))
            else:
                yield _event("change", _changes(sent, state))
            sent, is_first = state, False
            await news.wait(tick)
            # After the news: a state that was read before them, for another browser, does not have them.
            await asyncio.sleep(feed.rest())


def _visible(server: Server, feed: PageFeed, member: MemberRecord) -> PageState:
    server.auth.check_active(member)
    return feed.current().seen_by(member)


def _changes(before: PageState, after: PageState) -> dict[str, Any]:
    """Return what a browser needs to get from one state to another; always with the time."""
    jobs = item_changes(before.jobs, after.jobs, CONTINUED)
    providers = item_changes(before.providers, after.providers)
    found: dict[str, Any] = {"time": after.time}
    if before.used_memory != after.used_memory:
        found["used_memory"] = after.used_memory
    if jobs:
        found["jobs"] = jobs
    if providers:
        found["providers"] = providers
    return found


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
