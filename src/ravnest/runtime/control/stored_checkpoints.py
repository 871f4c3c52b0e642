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
    _here: dict[CheckpointId, bool] = field(default_factory=dict)
    _behind: dict[CheckpointId, bool] = field(default_factory=dict)

    def settled_here(self, checkpoint: CheckpointId, stored: bool) -> CheckpointStored | None:
        """Note whether this node has stored a checkpoint; return the report, if it is due."""
        self._here[checkpoint] = stored
        return self._report(checkpoint)

    def settled_behind(self, checkpoint: CheckpointId, stored: bool) -> CheckpointStored | None:
        """Note whether all nodes behind have stored a checkpoint; return the report, if it is due."""
        self._behind[checkpoint] = stored
        return self._report(checkpoint)

    def _report(self, checkpoint: CheckpointId) -> CheckpointStored | None:
        if self.is_leaf:
            self._behind[checkpoint] = True
        if checkpoint in self._here and checkpoint in self._behind:
            stored = self._here.pop(checkpoint) & self._behind.pop(checkpoint)
            return CheckpointStored(checkpoint, stored)
        for open_ones in (self._here, self._behind):
            if len(open_ones) > _REMEMBERED:
                del open_ones[min(open_ones)]
        return None
