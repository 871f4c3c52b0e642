"""Decisions about spot checks: how often a stage is checked, and who is blamed. Pure.

``docs/trust.md`` says what a check shows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

SHARE = 0.01
"""Largest share of a node's time, and of its bandwidth, that checks take."""
_DISK_RATE = 200e6
"""Bytes per second with which a node writes, reads and hashes a file of a check, at least."""
MOST_UNANSWERED = 3
"""Checks in a row that a provider may leave unanswered: a node that is lost meanwhile answers none."""

Side = Literal["sender", "receiver"]
"""``sender``: the provider whose output is checked. ``receiver``: the one that has received it."""


@dataclass(frozen=True)
class CheckedPlace:
    """A stage whose output is checked."""

    job: str
    attempt: int
    cluster: int
    stage: int


def least_interval(size: int, bandwidth: float) -> float:
    """Return the least mean seconds between two checks of a stage, by their cost.

    ``size``: bytes of its weights and of the values of a batch. ``bandwidth``: Mbit/s of its provider.
    """
    seconds = size / _DISK_RATE + size * 8 / (bandwidth * 1e6)
    return seconds / SHARE


@dataclass
class _PlaceHistory:
    unanswered: dict[str, int] = field(default_factory=dict)
    """Checks in a row that a provider has not answered."""
    accused: dict[str, str] = field(default_factory=dict)
    """Provider that a receiver has accused, by receiver."""


class CheckHistory:
    """Outcomes of the checks of all running jobs. Not thread-safe."""

    def __init__(self) -> None:
        self._places: dict[CheckedPlace, _PlaceHistory] = {}

    def agreed(self, place: CheckedPlace, sender: str) -> None:
        """Note an output that was computed again with the same result, or that nobody can compare."""
        self._of(place).unanswered.pop(sender, None)

    def differs(self, place: CheckedPlace, sender: str, receiver: str) -> Side:
        """Return who is blamed for an output that is another one than the server's.

        Either the sender has sent something else than it states, or the receiver says something else
        than it has received. The sender is blamed at first. If the next provider of its place looks
        wrong to the same receiver, two stand against one.
        """
        history = self._of(place)
        before = history.accused.get(receiver)
        if before is not None and before != sender:
            return "receiver"
        history.accused[receiver] = sender
        return "sender"

    def unanswered(self, place: CheckedPlace, sender: str, receiver: str) -> Side | None:
        """Return who is blamed for a check without an answer; ``None``: nobody yet."""
        history = self._of(place)
        count = history.unanswered.get(sender, 0) + 1
        history.unanswered[sender] = count
        if count < MOST_UNANSWERED:
            return None
        history.unanswered.pop(sender)
        return self.differs(place, sender, receiver)

    def keep(self, jobs: Collection[str]) -> None:
        """Forget all other jobs."""
        self._places = {place: each for place, each in self._places.items() if place.job in jobs}

    def _of(self, place: CheckedPlace) -> _PlaceHistory:
        return self._places.setdefault(place, _PlaceHistory())
