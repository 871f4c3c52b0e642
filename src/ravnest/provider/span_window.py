"""Spans of a worker that its server gets: the first ones, those of a request, and the last ones."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ravnest.provider.job_dir import JobDir
from ravnest.telemetry import RecordSink, SpansRecord
from ravnest.tracing.spans import TraceSpan, flattened

logger = logging.getLogger(__name__)

RECENT = 8192
"""Spans that a worker keeps for a request; some 0.6 MB as text."""
ENDS = 2048
"""Spans of the start and of the end of training that are always sent."""
SPANS_PER_RECORD = 256
_PAUSE = 1.0
"""Seconds between two looks for a request."""


class SpanWindow:
    """Keeps the newest spans of a node and sends some of them as records; implements ``SpanSink``."""

    def __init__(self, sink: RecordSink) -> None:
        self._sink = sink
        self._recent: deque[TraceSpan] = deque(maxlen=RECENT)
        self._missing = ENDS
        """Spans of the start that are still to come."""
        self._lock = threading.Lock()

    def write(self, spans: Sequence[TraceSpan]) -> None:
        """Keep spans; send them if training has just begun."""
        with self._lock:
            self._recent.extend(spans)
            first, self._missing = spans[: self._missing], max(self._missing - len(spans), 0)
        self._send(first, order=0)

    def request(self, order: int) -> None:
        """Send the spans that are kept, as the answer to a request of the server."""
        with self._lock:
            recent = list(self._recent)
        self._send(recent, order)
        if not recent:
            self._sink.emit(SpansRecord((), order))

    def close(self) -> None:
        """Send the last spans."""
        with self._lock:
            last = list(self._recent)[-ENDS:]
        self._send(last, order=0)

    def _send(self, spans: Sequence[TraceSpan], order: int) -> None:
        """Send spans; the last record has the number of the request, so that all have arrived then."""
        for start in range(0, len(spans), SPANS_PER_RECORD):
            end = start + SPANS_PER_RECORD
            number = order if end >= len(spans) else 0
            self._sink.emit(SpansRecord(flattened(spans[start:end]), number))


@contextmanager
def answering(window: SpanWindow | None, job_dir: JobDir, pause: float = _PAUSE) -> Iterator[None]:
    """Answer the requests for spans that the agent writes, while the block runs."""
    if window is None:
        yield
        return
    over = threading.Event()

    def follow() -> None:
        known = 0
        while not over.wait(pause):
            order = job_dir.read_trace_order()
            if order > known:
                known = order
                window.request(order)

    threading.Thread(target=follow, name="trace requests", daemon=True).start()
    try:
        yield
    finally:
        over.set()
