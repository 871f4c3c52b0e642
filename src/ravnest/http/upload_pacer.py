"""Parts of an upload beside training, and the pauses between them. Pure: time is an argument.

The upload shares the machine's connection with activations and gradients, which pass in the pauses.
"""

from __future__ import annotations

from ravnest.deadlines import UPLOAD_SENT

PART_SECONDS = 0.05
"""Time of one part on the connection."""
SHARE = 0.25
"""Share of the time in which parts are sent, unless the upload would take too long."""
SMALLEST_PART, LARGEST_PART = 64 << 10, 32 << 20
_FIRST_PART = 256 << 10
_LONGEST_PAUSE = 2.0
"""Longest pause in seconds: an upload that was stopped ends soon."""


class UploadPacer:
    """Sizes of the parts of one upload, and pauses."""

    def __init__(self, now: float) -> None:
        self._deadline = now + UPLOAD_SENT
        self.part = _FIRST_PART
        """Bytes of the next part, at most."""

    def sent(self, count: int, seconds: float, left: int, now: float) -> float:
        """Record that a part took this long, and return the seconds until the next one.

        ``left``: bytes that follow.
        """
        if count == 0 or left == 0:
            return 0.0
        rate = count / max(seconds, 1e-6)
        self.part = int(min(max(PART_SECONDS * rate, SMALLEST_PART), LARGEST_PART))
        needed = left / rate / max(self._deadline - now, 1e-6)
        share = min(max(SHARE, needed), 1.0)
        return min(seconds * (1 / share - 1), _LONGEST_PAUSE)
