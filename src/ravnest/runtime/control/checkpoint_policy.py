"""Decision at the Root: after which updates and phases checkpoints are taken. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ravnest.deadlines import REPLICA_MOST
from ravnest.runtime.control.checkpoint_slowdown import CheckpointSlowdown

_LEAST_SECONDS = 2.0
"""Shortest time between the checkpoints of two epochs, if epochs are shorter."""
_COST = 100.0
"""Least time between two checkpoints, in terms of the time that one takes from training: 1% is lost."""
_MOST_COST = 36.0
"""Seconds of cost that count at most, so that there is a checkpoint per hour whatever a node reports."""


@dataclass
class CheckpointPolicy:
    """Times and updates at which the Root asks all stages for a checkpoint."""

    updates: int | None
    """Updates between two checkpoints; None: only ``seconds`` and the ends of epochs count."""
    seconds: float
    """Seconds between two checkpoints."""
    last_update: int
    last_time: float
    cost: float = 0.0
    """Longest time that the last checkpoint took a node from training."""
    wanted: bool = False
    """A node is about to leave and asks for a checkpoint."""
    taken: int = 0
    """Checkpoints that the Root has asked for."""
    settled: int = 0
    """Those of them whose outcome is known: all nodes have stored it, or one of them could not."""
    storing: bool = False
    """A checkpoint was being stored at the last update."""
    slowdown: CheckpointSlowdown = field(default_factory=CheckpointSlowdown)
    """Time that the last checkpoint took from the whole pipeline."""

    def due_after_update(self, update: int, now: float) -> bool:
        """Return whether a checkpoint follows an update; ``update`` counts those done with it."""
        self.slowdown.update(now, storing=self.storing)
        due = self._is_due(update, now)
        self.storing = self.taken > self.settled
        return due

    def _is_due(self, update: int, now: float) -> bool:
        if self._waits(now):
            return False
        if self.wanted:
            return self._take(update, now)
        if self.updates is not None and update - self.last_update >= self.updates:
            return self._take(update, now)
        if now - self.last_time >= max(self.seconds, self._pause()):
            return self._take(update, now)
        return False

    def due_after_epoch(self, update: int, now: float) -> bool:
        """Return whether a checkpoint follows the end of an epoch."""
        self.slowdown.interrupt()
        return self._is_due_after_epoch(now) and self._take(update, now)

    def postpone_after_epoch(self, now: float) -> None:
        """Take the checkpoint of the end of an epoch, if one is due, after the next update."""
        self.slowdown.interrupt()
        self.wanted = self.wanted or self._is_due_after_epoch(now)

    def _is_due_after_epoch(self, now: float) -> bool:
        if self._waits(now):
            return False
        return self.wanted or now - self.last_time >= max(_LEAST_SECONDS, self._pause())

    def resume(self, update: int, phase: int) -> None:
        """Continue from a checkpoint; the next one waits until this one has its replicas again."""
        self.last_update = update
        self.taken = int((update, phase) > (0, 0))

    def take(self, update: int, now: float) -> None:
        """Note a checkpoint that is taken in any case."""
        self._take(update, now)

    def _pause(self) -> float:
        """Return the least time between two checkpoints, by their cost."""
        return _COST * min(max(self.cost, self.slowdown.seconds), _MOST_COST)

    def _waits(self, now: float) -> bool:
        """Return whether a checkpoint is still being stored: nodes keep only a few of them.

        A node that leaves cannot wait for replicas on busy links; there is room for one more.
        """
        open_ones = self.taken - self.settled
        return open_ones > int(self.wanted) and now - self.last_time < REPLICA_MOST

    def _take(self, update: int, now: float) -> bool:
        self.last_update, self.last_time, self.wanted = update, now, False
        self.taken += 1
        return True
