"""Outcome of each checkpoint, from the nodes that take it to the Root. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ravnest.types import CheckpointId
from ravnest.wire.messages import CheckpointStored

_REMEMBERED = 16
"""Checkpoints whose outcome is open, at most: numbers come from peers."""


@dataclass
class StoredCheckpoints:
    """Checkpoints that this node and those behind it are storing.

    A stage removes old checkpoints. If another one cannot write for a while, or is slower, what both
    have might have nothing in common. Therefore all nodes report to the Root whether they have stored a
    checkpoint, each for itself and those behind it. The Root asks for the next one only then, and tells
    everyone which one all have; they keep it until it tells them about a newer one.
    """

    is_leaf: bool
    _here: dict[CheckpointId, CheckpointStored] = field(default_factory=dict)
    _behind: dict[CheckpointId, CheckpointStored] = field(default_factory=dict)

    def settled_here(self, outcome: CheckpointStored) -> CheckpointStored | None:
        """Note whether this node has stored a checkpoint; return the report, if it is due."""
        if self.is_leaf:
            return outcome
        self._here[outcome.checkpoint] = outcome
        return self._report(outcome.checkpoint)

    def settled_behind(self, outcome: CheckpointStored) -> CheckpointStored | None:
        """Note whether all nodes behind have stored a checkpoint; return the report, if it is due."""
        self._behind[outcome.checkpoint] = outcome
        return self._report(outcome.checkpoint)

    def _report(self, checkpoint: CheckpointId) -> CheckpointStored | None:
        if checkpoint in self._here and checkpoint in self._behind:
            both = self._here.pop(checkpoint), self._behind.pop(checkpoint)
            stored, seconds = all(each.stored for each in both), max(each.seconds for each in both)
            return CheckpointStored(checkpoint, stored, seconds)
        for open_ones in (self._here, self._behind):
            if len(open_ones) > _REMEMBERED:
                del open_ones[min(open_ones)]
        return None
