"""State of a round: one type for the coordinator, the Roots and the nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ravnest.wire.messages import Prepared, Reduced, RoundId

RoundState = Literal["preparing", "prepared", "reducing", "reduced", "failed"]
"""``preparing``: copies are awaited. ``prepared``: Start is awaited. ``reducing``: averages are awaited.
``reduced`` and ``failed``: the Decision is awaited."""


@dataclass(frozen=True, slots=True)
class Round:
    """One attempt of a round. Transitions return a new value.

    Members are clusters at the coordinator, nodes of the cluster at a Root, and the node itself at a
    node.
    """

    id: RoundId
    assign: bool
    """Training pauses for the round and continues from the average (blocking and final rounds)."""
    members: tuple[int, ...]
    since: float = 0.0
    """Time at which the current wait began."""
    state: RoundState = "preparing"
    prepared: Mapping[int, Prepared] = field(default_factory=dict)
    """Replies to Prepare, by member."""
    weights: Mapping[int, float] = field(default_factory=dict)
    """Weights of the clusters in the average; empty before Start."""
    reduced: Mapping[int, Reduced] = field(default_factory=dict)
    """Replies to Start, by member."""

    @property
    def awaited(self) -> tuple[int, ...]:
        """Members whose reply is missing in the current state."""
        if self.state not in ("preparing", "reducing"):
            return ()
        replies = self.prepared if self.state == "preparing" else self.reduced
        return tuple(member for member in self.members if member not in replies)

    def with_prepared(self, member: int, reply: Prepared) -> Round:
        """Add a reply to Prepare."""
        return replace(self, prepared={**self.prepared, member: reply})

    def with_reduced(self, member: int, reply: Reduced) -> Round:
        """Add a reply to Start."""
        return replace(self, reduced={**self.reduced, member: reply})

    def without(self, members: Iterable[int]) -> Round:
        """Remove members and their replies."""
        gone = set(members)
        return replace(
            self,
            members=tuple(member for member in self.members if member not in gone),
            prepared={member: reply for member, reply in self.prepared.items() if member not in gone},
            weights={member: weight for member, weight in self.weights.items() if member not in gone},
            reduced={member: reply for member, reply in self.reduced.items() if member not in gone},
        )

    def to(self, state: RoundState) -> Round:
        """Enter a state."""
        return replace(self, state=state)

    def start(self, weights: Mapping[int, float], now: float) -> Round:
        """Enter ``reducing`` with the weights of the clusters."""
        return replace(self, state="reducing", weights=dict(weights), since=now)

    def next_attempt(self, now: float) -> Round:
        """Return the next attempt of the round with the same members."""
        following = RoundId(self.id.number, self.id.attempt + 1)
        return Round(following, self.assign, self.members, now)
