"""What became of a round: who took part, who was missing and why, what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ravnest.wire.messages import RoundId

RoundKind = Literal["background", "blocking", "final"]


@dataclass(frozen=True)
class RoundOutcome:
    """A round that is over; one that failed is a value too."""

    round: RoundId
    """With the attempt that decided it."""
    kind: RoundKind
    committed: bool
    """The average was applied."""
    reason: str
    """Why not; empty where it was."""
    weights: Mapping[int, float]
    """Of the members of the last attempt, by cluster; empty if it did not come to averaging."""
    missing: Mapping[int, str]
    """Why each other cluster that is known did not take part."""
    problems: Mapping[int, str] = field(default_factory=dict)
    """What kept a member's own parameters out of the average; it only received."""
    sent_bytes: int = 0
    """By all nodes, in all attempts."""
    seconds: float = 0.0
    """From the first proposal to the verdict."""
    digests: Mapping[int, str] = field(default_factory=dict)
    """Of the average, by ring; the same in all members."""

    def describe(self) -> str:
        """One line for logs and the page."""
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
        return f"averaged clusters {clusters} (weights {weights}), {cost}"


def size(count: float) -> str:
    """Bytes for people, such as ``12.3 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
