"""Measurement of a link's delays from the times of sends and answers. Pure: time is an argument.

The round trip is the minimum of the last few probes: a probe that waited behind data does not measure
the network. The time that a message takes beyond the round trip is the time during which it occupied
the link: since it was sent, or since the previous message had left the link, so that queueing does not
count.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque

from ravnest.transport.base import LinkDelay

_PROBES_AT_START = 3
"""Number of probes at the start; the first one is slow because of cold caches and idle threads."""
_PROBE_SECONDS = 3.0
_REMEMBERED = 16
_UNANSWERED = 4096
"""Maximum number of unacknowledged messages that are timed; beyond that, only the newest."""


class DelayMeter:
    """Delays of one link, and the decisions when to probe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unacknowledged: deque[tuple[int, float]] = deque(maxlen=_UNANSWERED)
        self._busy = deque[float](maxlen=_REMEMBERED)
        self._left = -math.inf
        self._round_trips = deque[float](maxlen=_REMEMBERED // 2)
        self._probes = 0
        self._probe: tuple[int, float] | None = None
        self._next_probe = 0.0
        self._delay: LinkDelay | None = LinkDelay(0.0, 0.0)
        """Cached result of ``delay``; None after a new measurement."""

    def message_sent(self, number: int, now: float) -> int | None:
        """Record a queued message; return the token of a probe if one is due."""
        with self._lock:
            self._unacknowledged.append((number, now))
            return self._new_probe(now) if now >= self._next_probe else None

    def probe(self, now: float) -> int:
        """Return the token of another probe."""
        with self._lock:
            return self._new_probe(now)

    def reconnected(self) -> None:
        """Forget what is under way: the time without a connection is no delay of the link."""
        with self._lock:
            self._unacknowledged.clear()
            self._probe = None
            self._probes = 0

    def probe_left(self, token: int, now: float) -> None:
        """Record that a probe was sent."""
        with self._lock:
            self._probe = (token, now)

    def echo_arrived(self, token: int, now: float) -> int | None:
        """Record the answer to a probe; return the token of another probe if one is due."""
        with self._lock:
            if self._probe is None or self._probe[0] != token:
                return None
            self._round_trips.append(now - self._probe[1])
            self._probe = self._delay = None
            return self._new_probe(now) if self._probes < _PROBES_AT_START else None

    def ack_arrived(self, count: int, now: float) -> None:
        """Record that the peer has received ``count`` messages, the last half a round trip ago."""
        with self._lock:
            sent = []
            while self._unacknowledged and self._unacknowledged[0][0] < count:
                sent.append(self._unacknowledged.popleft()[1])
            if not sent:
                return
            left = now - min(self._round_trips, default=0.0)
            self._busy.append(_busy_seconds(sent, self._left, left))
            self._left = left
            self._delay = None

    def delay(self) -> LinkDelay:
        """Return the measured delays."""
        with self._lock:
            if self._delay is None:
                round_trip = min(self._round_trips, default=0.0)
                busy = statistics.median(self._busy) if self._busy else 0.0
                self._delay = LinkDelay(round_trip, round_trip / 2 + busy, busy)
            return self._delay

    def _new_probe(self, now: float) -> int:
        self._probes += 1
        self._next_probe = now + _PROBE_SECONDS
        return self._probes


def _busy_seconds(sent: list[float], free: float, left: float) -> float:
    """Return the time for which each of some messages occupied a link that was free from ``free`` on.

    The last one left the link at ``left``. If they were sent apart, the link was idle in between, so
    that the last ones alone tell the time.
    """
    shares = ((left - max(at, free)) / (len(sent) - i) for i, at in enumerate(sent))
    return max(min(shares), 0.0)
