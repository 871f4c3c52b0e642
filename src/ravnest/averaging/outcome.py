"""Outcome of a round: members, missing clusters with reasons, and costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ravnest.wire.messages import RoundId

RoundKind = Literal["background", "blocking", "final"]


@dataclass(frozen=True)
class RoundOutcome:
    """A round that is over, whether it was committed or failed."""

    round: RoundId
    """The round, with its last attempt."""
    kind: RoundKind
    committed: bool
    """True if the average was applied."""
    reason: str
    """Why it was not applied; empty if it was."""
    weights: Mapping[int, float]
    """Weight of each member of the last attempt, by cluster; empty if that did not start to average."""
    missing: Mapping[int, str]
    """Why each other known cluster did not take part."""
    problems: Mapping[int, str] = field(default_factory=dict)
    """Why the parameters of a member did not enter the average; it only received the result."""
    sent_bytes: int = 0
    """Bytes sent by all nodes, in all attempts."""
    seconds: float = 0.0
    """Time from the first Prepare to the Decision."""
    digests: Mapping[int, str] = field(default_factory=dict)
    """Digest of the average, by ring; the same for all members."""
    trimmed: int = 0
    """Number of largest, and of smallest, values that were left out of each mean."""

    def describe(self) -> str:
        """Return one line for logs and the status page."""
        kind = "" if self.kind == "background" else f"{self.kind} "
        again = f" (attempt {self.round.attempt + 1})" if self.round.attempt else ""
        parts = [f"{kind}round {self.round.number}{again}: {self._result()}"]
        parts += [f"cluster {c} only received: {why}" for c, why in sorted(self.problems.items())]
        parts += [f"cluster {c} missing: {why}" for c, why in sorted(self.missing.items())]
        return "; ".join(parts)

    def _result(self) -> str:
        if not self.committed:
            return f"nothing averaged: {self.reason}"
        clusters = ", ".join(str(cluster) for cluster in sorted(self.weights))
        weights = ", ".join(f"{weight:.2f}" for _, weight in sorted(self.weights.items()))
        cost = f"{size(self.sent_bytes)} sent in {self.seconds:.2f} s"
        if self.trimmed:
            how = f"without the {self.trimmed} largest and smallest of each value"
            return f"averaged clusters {clusters} ({how}), {cost}"
        return f"averaged clusters {clusters} (weights {weights}), {cost}"


def size(count: float) -> str:
    """Format a number of bytes, such as ``12.3 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
