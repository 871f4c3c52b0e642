"""Faults of a run as a value: what happens to which node, and when. Printed on one line, and read back.

seed=7 | kill node_3 @12.5s; partition node_0>node_1 @40u for 3.0s; clock_jump node_2 @1.0s by -3600.0
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class FaultKind(StrEnum):
    """Kinds of faults."""

    KILL = "kill"
    """End the process, without a chance to react."""
    STOP = "stop"
    """Halt the process, and let it continue later."""
    PARTITION = "partition"
    """Let nothing pass between two nodes, in both directions."""
    ONE_WAY = "one_way"
    """Let nothing pass from one node to another; the other direction works."""
    DELAY = "delay"
    """Let everything from one node to another arrive later."""
    CORRUPT = "corrupt"
    """Change a bit of what one node sends to another."""
    DUPLICATE = "duplicate"
    """Deliver something that one node sends to another twice."""
    REORDER = "reorder"
    """Deliver something that one node sends to another after what follows it."""
    FULL_DISK = "full_disk"
    """Let a node write no files."""
    OUT_OF_MEMORY = "out_of_memory"
    """Give a node less memory than it needs."""
    CLOCK_JUMP = "clock_jump"
    """Set the wall clock of a node forward or back."""


LASTING = frozenset(
    {
        FaultKind.STOP,
        FaultKind.PARTITION,
        FaultKind.ONE_WAY,
        FaultKind.DELAY,
        FaultKind.FULL_DISK,
        FaultKind.OUT_OF_MEMORY,
    }
)
"""Faults that end after some time."""
OF_LINKS = frozenset(
    {
        FaultKind.PARTITION,
        FaultKind.ONE_WAY,
        FaultKind.DELAY,
        FaultKind.CORRUPT,
        FaultKind.DUPLICATE,
        FaultKind.REORDER,
    }
)
"""Faults between two nodes."""
SIZED = frozenset({FaultKind.DELAY, FaultKind.CLOCK_JUMP})
"""Faults that have a size."""
_TEXT = re.compile(
    r"(?P<kind>[a-z_]+) node_(?P<node>\d+)(?:>node_(?P<peer>\d+))? @(?P<at>[\d.e+-]+)(?P<unit>[su])"
    r"(?: for (?P<seconds>[\d.e+-]+)s)?(?: by (?P<size>[\d.e+-]+))?"
)


@dataclass(frozen=True)
class Moment:
    """Time of a fault."""

    at: float
    in_updates: bool = False
    """``at`` counts updates of the run instead of seconds since its start."""

    def __str__(self) -> str:
        return f"@{self.at}{'u' if self.in_updates else 's'}"


@dataclass(frozen=True)
class Fault:
    """One fault."""

    kind: FaultKind
    node: int
    """Node that it happens to; of a link, the node that sends."""
    moment: Moment
    peer: int | None = None
    """The other node of a link, which receives."""
    seconds: float | None = None
    """Duration."""
    size: float | None = None
    """Seconds by which something is late, or by which a clock jumps."""

    def __post_init__(self) -> None:
        for kinds, given, what in (
            (OF_LINKS, self.peer, "second node"),
            (LASTING, self.seconds, "duration"),
            (SIZED, self.size, "size"),
        ):
            if (self.kind in kinds) != (given is not None):
                raise ValueError(f"{self.kind} {'needs a' if self.kind in kinds else 'has no'} {what}")
        if self.peer == self.node:
            raise ValueError(f"{self.kind} needs two nodes, not node_{self.node} twice")
        if self.moment.at < 0 or (self.seconds or 0) < 0:
            raise ValueError(f"{self.kind} has a negative time")

    def __str__(self) -> str:
        return (
            f"{self.kind} node_{self.node}"
            + ("" if self.peer is None else f">node_{self.peer}")
            + f" {self.moment}"
            + ("" if self.seconds is None else f" for {self.seconds}s")
            + ("" if self.size is None else f" by {self.size}")
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what ``str`` returned."""
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"{text!r} is not a fault, such as 'kill node_3 @12.5s'")
        given = found.groupdict()
        return cls(
            FaultKind(given["kind"]),
            int(given["node"]),
            Moment(float(given["at"]), given["unit"] == "u"),
            None if given["peer"] is None else int(given["peer"]),
            None if given["seconds"] is None else float(given["seconds"]),
            None if given["size"] is None else float(given["size"]),
        )


@dataclass(frozen=True)
class FaultPlan:
    """Faults of a run, in the order of their times, and the seed that they were drawn from."""

    seed: int
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return f"seed={self.seed} | " + "; ".join(map(str, self.faults))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what ``str`` returned."""
        seed, bar, faults = text.strip().partition("|")
        if not bar or not re.fullmatch(r"seed=-?\d+ *", seed):
            raise ValueError("a fault plan begins with 'seed=<number> |'")
        each = [fault for fault in faults.split(";") if fault.strip()]
        return cls(int(seed.partition("=")[2]), tuple(map(Fault.parse, each)))

    @classmethod
    def random(
        cls,
        seed: int,
        nodes: Sequence[int],
        count: int,
        *,
        end: float,
        start: float = 0.0,
        kinds: Sequence[FaultKind] = (FaultKind.KILL,),
        links: Sequence[tuple[int, int]] | None = None,
        longest: float = 5.0,
        in_updates: bool = False,
    ) -> Self:
        """Return ``count`` faults between ``start`` and ``end``, drawn from a seed.

        ``links`` are the pairs of nodes that talk to each other, by default all. Faults that last do so
        for at most ``longest`` seconds.
        """
        drawn = random.Random(seed)
        pairs = list(links) if links is not None else [(a, b) for a in nodes for b in nodes if a != b]
        faults = [
            _draw(drawn, drawn.choice(kinds), nodes, pairs, longest, Moment(at, in_updates))
            for at in sorted(_round(drawn.uniform(start, end), in_updates) for _ in range(count))
        ]
        return cls(seed, tuple(faults))


def _draw(
    drawn: random.Random,
    kind: FaultKind,
    nodes: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    longest: float,
    moment: Moment,
) -> Fault:
    """Return a fault of a kind; each kind draws the same number of times, so that plans stay alike."""
    node, pair, turn = drawn.choice(nodes), drawn.choice(pairs), drawn.random() < 0.5
    seconds, late, jump = drawn.uniform(0, longest), drawn.uniform(0, 0.5), drawn.uniform(-1e5, 1e5)
    peer = None
    if kind in OF_LINKS:
        node, peer = pair[::-1] if turn else pair
    return Fault(
        kind,
        node,
        moment,
        peer,
        round(seconds, 3) if kind in LASTING else None,
        round(late if kind is FaultKind.DELAY else jump, 3) if kind in SIZED else None,
    )


def _round(at: float, in_updates: bool) -> float:
    return float(int(at)) if in_updates else round(at, 3)
