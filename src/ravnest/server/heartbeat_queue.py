"""Queue of heartbeats: those that arrive while others are processed are processed together."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from ravnest.schemas.providers import Heartbeat, HeartbeatReply

_MOST = 64
"""Heartbeats in one transaction: others that write wait for it."""
_GATHER_SECONDS = 0.025
"""Shortest time between the starts of two transactions; heartbeats that arrive meanwhile share the next.

Most of the cost of a transaction does not depend on the number of heartbeats in it. With 1000 providers
and one transaction per heartbeat, the server took 85% of a core and fell behind at times; with this
pause it takes 43%. A heartbeat that finds no other one is processed at once.
"""
_log = logging.getLogger(__name__)

_Reply = HeartbeatReply | None


@dataclass(frozen=True)
class _Waiting:
    provider: str
    heartbeat: Heartbeat
    reply: asyncio.Future[_Reply]


class HeartbeatQueue:
    """Heartbeats that wait for a thread; one thread at a time takes all that are there."""

    def __init__(
        self,
        answer_routine: Callable[[Sequence[tuple[str, Heartbeat]]], list[_Reply]],
        answer_alone: Callable[[str, Heartbeat], HeartbeatReply],
        gather: float = _GATHER_SECONDS,
    ) -> None:
        """``answer_routine`` answers several at once, or leaves some to ``answer_alone``.

        ``gather`` is the shortest time in seconds between two calls of it.
        """
        self._answer_routine = answer_routine
        self._answer_alone = answer_alone
        self._gather = gather
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._is_busy = False

    async def answer(self, provider: str, heartbeat: Heartbeat) -> HeartbeatReply:
        """Process a heartbeat; return the reply as of now, once the report is stored."""
        loop = asyncio.get_running_loop()
        own = _Waiting(provider, heartbeat, loop.create_future())
        with self._lock:
            self._waiting.append(own)
            starts, self._is_busy = not self._is_busy, True
        if starts:
            loop.run_in_executor(None, self._run)
        reply = await own.reply
        if reply is None:
            reply = await run_in_threadpool(self._answer_alone, provider, heartbeat)
        return reply

    def _run(self) -> None:
        while True:
            with self._lock:
                batch, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
                self._is_busy = bool(batch)
            if not batch:
                return
            next_start = time.monotonic() + self._gather
            try:
                replies = self._answer_routine([(each.provider, each.heartbeat) for each in batch])
            except Exception as error:
                _log.warning("%d heartbeats are processed one by one: %s", len(batch), error)
                replies = [None] * len(batch)
            except BaseException:  # the process ends: whoever waits must not wait for ever
                with self._lock:
                    batch, self._waiting, self._is_busy = batch + self._waiting, [], False
                _deliver(batch, [None] * len(batch))
                raise
            _deliver(batch, replies)
            time.sleep(max(next_start - time.monotonic(), 0.0))


def _deliver(batch: Sequence[_Waiting], replies: Sequence[_Reply]) -> None:
    """Wake the requests that wait, each in its own event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[_Reply], _Reply]]] = {}
    for each, reply in zip(batch, replies, strict=True):
        by_loop.setdefault(each.reply.get_loop(), []).append((each.reply, reply))
    for loop, found in by_loop.items():
        with suppress(RuntimeError):  # the loop has just ended, and with it the requests
            loop.call_soon_threadsafe(_set_results, found)


def _set_results(found: Sequence[tuple[asyncio.Future[_Reply], _Reply]]) -> None:
    for future, reply in found:
        if not future.done():
            future.set_result(reply)
