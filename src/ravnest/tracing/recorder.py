"""Recording of spans while a node trains, with as little cost as possible.

The threads of a node append notes to a bounded deque, which takes no lock of ours and waits for
nothing. A thread of its own turns them into spans about once per second and passes them to a sink. If
that thread is late, the oldest notes are lost.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Protocol

from ravnest.tracing.spans import MESSAGES, PHASES, SpanKind, TraceSpan

logger = logging.getLogger(__name__)

RING = 1 << 15
"""Notes that may wait for the thread; a node makes some ten per micro-batch."""
INTERVAL = 1.0
"""Seconds between two looks of the thread."""
_MESSAGE_CODES = {name: code for code, name in enumerate(MESSAGES)}
_PHASE_CODES = {name: code for code, name in enumerate(PHASES)}

now = time.monotonic_ns
"""Clock of recorded times, in nanoseconds."""
Fields = tuple[int, int, int, int, int, int, int, int, int, int]
"""Fields of a ``TraceSpan``, with start and end in nanoseconds by ``now``."""
Note = tuple[Any, ...]
"""A function that returns fields of spans, and its arguments.

It runs in the thread of the writer: code that runs once in ten milliseconds of computation takes ten
times as long there as in a loop, since it is in no cache, and training would wait for it.
"""


class SpanRecorder:
    """Collects the spans of one node. All methods may be called from any thread."""

    def __init__(self, limit: int = RING) -> None:
        self._recorded: deque[Note] = deque(maxlen=limit)
        self.note: Callable[[Note], None] = self._recorded.append
        """Record something; what its spans are is found out later."""
        self._offset = time.time_ns() - now()
        """Difference between the wall clock and ``now``, measured once: later steps of the wall clock
        must not tear the trace."""
        self._phase = 0, now(), 0
        """Code of the phase in progress, its start, and its epoch."""
        self._phase_lock = threading.Lock()

    def add(
        self, kind: int, start: int, first: int = 0, second: int = 0, what: int = 0, end: int = 0
    ) -> None:
        """Record what began at ``start`` and ends now, or at ``end``."""
        self.note((_one, kind, start, end or now(), what, first, second))

    def message(
        self, kind: int, start: int, head: object, link: tuple[int, int], number: int, size: int
    ) -> None:
        """Record a message that was sent or received until now.

        ``link``: the peer and the number of the link (``link_number``); ``number``: that of the message.
        """
        self.note((_message, kind, start, now(), head, link, number, size))

    def phase(self, name: str, epoch: int) -> None:
        """Record the phase that ends now; another one begins."""
        with self._phase_lock:
            code, start, before = self._phase
            self._phase = _PHASE_CODES[name], now(), epoch
        if code:
            self.add(SpanKind.PHASE, start, before, what=code)

    def take(self) -> list[TraceSpan]:
        """Return the spans recorded since the last call."""
        found, waiting, offset = [], self._recorded, self._offset
        for _ in range(len(waiting)):
            try:
                note = waiting.popleft()
            except IndexError:
                break
            for kind, start, end, what, first, second, peer, link, number, size in note[0](*note[1:]):
                begin = (start + offset) // 1000
                length = (end + offset) // 1000 - begin
                numbers = (
                    index(kind),
                    begin,
                    length if length > 0 else 0,
                    index(what),
                    first,
                    second,
                    peer,
                    link,
                    number,
                    size,
                )
                found.append(tuple.__new__(TraceSpan, numbers))  # faster than ``TraceSpan(*numbers)``
        return found


def _one(kind: int, start: int, end: int, what: int, first: int, second: int) -> tuple[Fields]:
    return ((kind, start, end, what, first, second, 0, 0, 0, 0),)


def _message(
    kind: int, start: int, end: int, head: object, link: tuple[int, int], number: int, size: int
) -> tuple[Fields]:
    microbatch = getattr(head, "microbatch", None)
    first, second = (0, 0) if microbatch is None else (microbatch.phase, microbatch.index)
    what = _MESSAGE_CODES.get(type(head).__name__, 0)
    return ((kind, start, end, what, first, second, *link, number, size),)


def link_number(session: str) -> int:
    """Return the number of a link in spans, from the random name that both ends know."""
    return zlib.crc32(session.encode())


class SpanSink(Protocol):
    """Receiver of a node's spans."""

    def write(self, spans: Sequence[TraceSpan]) -> None:
        """Take some spans, oldest first. Called in one thread, which may wait here."""

    def close(self) -> None:
        """Take no more spans."""


class SpanWriter:
    """Passes the spans of a recorder to a sink, in a thread of its own; a failure ends nothing else."""

    def __init__(self, recorder: SpanRecorder, sink: SpanSink) -> None:
        self._recorder = recorder
        self._sink = sink
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ravnest-trace", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Write what was recorded, and end."""
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            while not self._over.wait(INTERVAL):
                self._pass_on()
            self._pass_on()
            self._sink.close()
        except Exception as error:  # a full disk: training must not end for it
            logger.warning("the trace ends here, training continues: %s", error)

    def _pass_on(self) -> None:
        spans = self._recorder.take()
        if spans:
            self._sink.write(spans)
