"""What a link costs, from the times at which things left and were answered. Pure: time is an argument.

The round trip is the smallest of the last few: a probe that waited behind data says nothing about the
network. What a message takes beyond that is how long the link was busy with it: from when it was sent,
or from when the link was free of the one before, so that the wait in the queue does not count.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque

from ravnest.transport.base import LinkDelay

_PROBES_AT_START = 3
"""The first of a link finds cold caches and idle threads."""
_PROBE_SECONDS = 3.0
_ACK_SECONDS = 0.01
_REMEMBERED = 16
_UNANSWERED = 4096
"""Messages under way that are timed; beyond, only the newest."""


class DelayMeter:
    """Decides when to probe and when to acknowledge, and keeps the figures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = 0
        self._under_way: deque[tuple[int, float]] = deque(maxlen=_UNANSWERED)
        self._busy = deque[float](maxlen=_REMEMBERED)
        self._left = -math.inf
        self._round_trips = deque[float](maxlen=_REMEMBERED // 2)
        self._probes = 0
        self._probe: tuple[int, float] | None = None
        self._next_probe = 0.0
        self._arrived = 0
        self._next_ack = 0.0
        self._delay: LinkDelay | None = LinkDelay(0.0, 0.0)
        """What ``delay`` found, until there are new figures."""

    def message_sent(self, now: float) -> int | None:
        """A message was queued; the token of a probe if one is due."""
        with self._lock:
            self._sent += 1
            self._under_way.append((self._sent, now))
            return self._new_probe(now) if now >= self._next_probe else None

    def start(self, now: float) -> int:
        """The token of the first probe."""
        with self._lock:
            return self._new_probe(now)

    def probe_left(self, token: int, now: float) -> None:
        """A probe was handed to the network."""
        with self._lock:
            self._probe = (token, now)

    def echo_arrived(self, token: int, now: float) -> int | None:
        """A probe was answered; the token of another if one is due."""
        with self._lock:
            if self._probe is None or self._probe[0] != token:
                return None
            self._round_trips.append(now - self._probe[1])
            self._probe = self._delay = None
            return self._new_probe(now) if self._probes < _PROBES_AT_START else None

    def ack_arrived(self, count: int, now: float) -> None:
        """The peer has got ``count`` messages, the last of them half a round trip ago."""
        with self._lock:
            sent = []
            while self._under_way and self._under_way[0][0] <= count:
                sent.append(self._under_way.popleft()[1])
            if not sent:
                return
            left = now - min(self._round_trips, default=0.0)
            self._busy.append(max(left - max(sent[0], self._left), 0.0) / len(sent))
            self._left = left
            self._delay = None

    def message_arrived(self, now: float) -> int | None:
        """A message came; the count to acknowledge, if it is time to."""
        with self._lock:
            self._arrived += 1
            if now < self._next_ack:
                return None
            self._next_ack = now + _ACK_SECONDS
            return self._arrived

    def delay(self) -> LinkDelay:
        """The figures so far."""
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
