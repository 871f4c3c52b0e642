"""Decision when the next piece of a replica is sent, and how large it is. Pure: time is an argument.

A replica shares the links of its node with activations and gradients, and uses the gaps between them: a
piece after the other, until training sends again. The message that ends a gap waits for half a piece on
average, so that long gaps cost less than many short ones. Pieces therefore begin only when a gap has
lasted for a while; the lengths of the last gaps tell how long that should be. Links without gaps carry a
small share of pieces all the same, so that each replica ends.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from ravnest.deadlines import REPLICA_SENT
from ravnest.runtime.control.state_blocks import BLOCK

PIECE_SECONDS = 0.01
"""Time for which a piece occupies the link: a message of training waits for one at most."""
LOOK_SECONDS = 0.02
"""Time between two looks at the links. Looks and pieces cost processor time that training needs."""
SMALLEST_PIECE = 16 << 10
_FIRST_PIECE = 64 << 10
_SHARE = 0.04
"""Share of the link's time that a replica gets if the link is never quiet."""
_FRESH_SECONDS = 45.0
"""Time after which a replica should have arrived, if the gaps are long enough."""
_GAPS = 64
"""Last gaps that are remembered."""
_FEWEST_GAPS = 8
"""Gaps that must be known before their lengths count."""
_QUIET_SHARE = 0.2
"""Time of a piece in terms of the time for which the link was quiet, if that is long."""
_REMEMBERED = 16
_LEAST_PART = 0.1
"""Part of the time of a piece, at least, that the piece occupied the link; round trips are not exact."""
_LATE_SECONDS = 0.005
"""Time by which threads of a busy machine may answer late."""


class ReplicaPacer:
    """Pieces of replicas on one link, one replica after the other."""

    def __init__(self) -> None:
        self._left = 0
        """Bytes of the replica that have not arrived."""
        self._deadline = 0.0
        self._quiet_since = 0.0
        """Time at which the last bytes of training have left the links, or will have left them."""
        self._arrived_at = 0.0
        """Time at which the last piece arrived."""
        self._fresh = 0.0
        """Time at which the replica should have arrived."""
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_GAPS)
        """Times at which the last gaps ended, and their lengths."""
        self._patience = 0.0
        """Time for which a gap must have lasted before a piece."""
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)
        """Bytes per second of the last pieces that had the link for themselves; the largest counts."""
        self._shared_rates: deque[float] = deque(maxlen=_REMEMBERED)
        """The same for pieces that had to wait; they count as long as there are no others."""
        self.delayed = 0.0
        """Seconds for which messages of training waited for pieces of this replica, estimated."""

    def begin(self, size: int, now: float) -> None:
        """Begin a replica of ``size`` bytes; nothing is known of training yet."""
        self._left = size
        self._deadline, self._fresh = now + REPLICA_SENT, now + _FRESH_SECONDS
        self._arrived_at = now
        self._quiet_since = now
        self._gaps.clear()
        self._patience = PIECE_SECONDS
        self.delayed = 0.0

    def training_sent(self, count: int, now: float) -> None:
        """Record that training has sent ``count`` bytes since the last look at the links."""
        if self._quiet_since < now:
            self._end_gap(now)
        self._quiet_since = max(self._quiet_since, now) + self._seconds(count)

    def _end_gap(self, now: float) -> None:
        self._gaps.append((now, now - self._quiet_since))
        if len(self._gaps) >= _FEWEST_GAPS:
            span = now - self._gaps[0][0] + self._gaps[0][1]
            needed = self._seconds(self._left) / max(self._fresh - now, 1e-6)
            self._patience = best_patience([gap for _, gap in self._gaps], needed * span)

    def pause(self, now: float) -> float:
        """Return the seconds until the next piece may be sent, if training sends nothing meanwhile."""
        least = self._seconds(self._bytes(PIECE_SECONDS))
        when_quiet = self._quiet_since + self._patience
        in_any_case = self._arrived_at + least * (1 / self._share(now) - 1)
        return max(min(when_quiet, in_any_case) - now, 0.0)

    def piece(self, now: float) -> int:
        """Return the largest number of bytes of the next piece, if it is sent now."""
        return self._bytes(max(PIECE_SECONDS, _QUIET_SHARE * (now - self._quiet_since)))

    def arrived(
        self, count: int, seconds: float, round_trip: float, now: float, *, disturbed: bool
    ) -> None:
        """Record that the peer has a piece of ``count`` bytes, this long after it was sent.

        ``round_trip`` is that of an empty message. ``disturbed``: training has sent something meanwhile.
        """
        rate = count / max(seconds - round_trip, _LEAST_PART * seconds, 1e-6)
        # Others may use the path behind this node's own link.
        late = bool(self._rates) and seconds > 2 * (self._seconds(count) + round_trip) + _LATE_SECONDS
        shared = disturbed or self._quiet_since > now - seconds + _LATE_SECONDS
        (self._shared_rates if shared else self._rates).append(rate)
        self._left -= count
        self._arrived_at = now
        if shared or late:
            self.delayed += self._seconds(count) / 2
        if late and not shared:
            self._end_gap(now)
            self._quiet_since = now

    def _share(self, now: float) -> float:
        """Return the share of the link's time that the replica gets in any case: it ends in time."""
        needed = self._seconds(self._left) / max(self._deadline - now, 1e-6)
        return min(max(needed, _SHARE), 1.0)

    def _bytes(self, seconds: float) -> int:
        rate = self._rate()
        return _FIRST_PIECE if rate is None else int(min(max(seconds * rate, SMALLEST_PIECE), BLOCK))

    def _seconds(self, count: int) -> float:
        """Return the time for which so many bytes occupy the link."""
        return count / (self._rate() or _FIRST_PIECE / PIECE_SECONDS)

    def _rate(self) -> float | None:
        """Return the bytes per second of the link, if known."""
        return max(self._rates or self._shared_rates, default=None)


def best_patience(gaps: Sequence[float], needed: float) -> float:
    """Return how long a gap should have lasted before pieces are sent in the rest of it.

    Each gap that is used costs the same, so that those with the longest rests are the best, as long as
    the rests of all add up to ``needed`` seconds. If they never do, all of each gap is used.
    """
    best, least = 0.0, math.inf
    ordered = sorted(gaps, reverse=True)
    total = 0.0
    for used, gap in enumerate(ordered):
        # Pieces that begin when a gap has lasted for this long use the gaps before it.
        rests = total - used * gap
        if rests > 0 and rests >= needed and used / rests < least:
            best, least = gap, used / rests
        total += gap
    if total >= needed and total > 0 and len(gaps) / total < least:
        best = 0.0
    return best
