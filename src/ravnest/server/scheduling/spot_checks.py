"""Decisions about spot checks: how often a stage is checked, and who is blamed. Pure.

``docs/trust.md`` says what a check shows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
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


class CheckHistory:
    """Outcomes of the checks of all running jobs. Not thread-safe."""

    def __init__(self) -> None:
        self._unanswered: dict[tuple[CheckedPlace, str], int] = {}
        """Checks in a row that a provider has not answered."""
        self._accused: dict[tuple[str, str], str] = {}
        """Provider that a receiver has accused, by job and receiver: a new plan does not end it."""

    def agreed(self, place: CheckedPlace, sender: str) -> None:
        """Note an output that was computed again with the same result, or that nobody can compare."""
        self._unanswered.pop((place, sender), None)

    def differs(self, place: CheckedPlace, sender: str, receiver: str) -> Side:
        """Return who is blamed for an output that is another one than the server's.

        Either the sender has sent something else than it states, or the receiver says something else
        than it has received. The sender is blamed at first. If another provider looks wrong to the same
        receiver in the same job, two stand against one.
        """
        before = self._accused.setdefault((place.job, receiver), sender)
        return "sender" if before == sender else "receiver"

    def unanswered(self, place: CheckedPlace, sender: str, receiver: str) -> Side | None:
        """Return who is blamed for a check without an answer; ``None``: nobody yet."""
        count = self._unanswered.get((place, sender), 0) + 1
        self._unanswered[place, sender] = count
        if count < MOST_UNANSWERED:
            return None
        del self._unanswered[place, sender]
        return self.differs(place, sender, receiver)

    def keep(self, jobs: Collection[str]) -> None:
        """Forget all other jobs."""
        self._unanswered = {key: each for key, each in self._unanswered.items() if key[0].job in jobs}
        self._accused = {key: each for key, each in self._accused.items() if key[0] in jobs}
