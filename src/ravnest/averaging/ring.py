"""One ring in one round, as one of its members sees it. Pure: no threads, no clock, no network.

The vector is cut into as many segments as there are members, and each segment into pieces. Member i
starts the pieces of segment i on their way. Each member that a piece comes to adds its own share; the
last one to do so owns the sum and sends it round once more. A piece moves on as soon as it is summed,
whatever the others do. Every member sends 2 (m - 1) / m of the vector, for any number m of members.

Each sum is made once, by its owner, and copied from there, so that all members hold the same bits. The
arithmetic is numpy's, which takes no further threads: torch would take those of the stage that trains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from ravnest.averaging.sinks import Sink
from ravnest.errors import WireError

PIECE_BYTES = 2 << 20
"""Measured: a message costs about 1 ms of processor time whatever its size, and four or more pieces in
a segment keep all members busy. As long as a chunk of the wire, so that a piece is one message."""

AHEAD = 4
"""Pieces of its own that a member has on their way round at once: more would only wait in a queue, and
take the memory of a second vector there."""

Roundtrip = Callable[[str, Tensor], Tensor]
"""What a sum is after it has travelled, encoded and decoded; the name tells sums apart."""


@dataclass(frozen=True)
class OutgoingChunk:
    """A piece for the next member of the ring; nobody changes its values any more."""

    segment: int
    piece: int
    hop: int
    """Members that it has passed, this one included."""
    values: Tensor


@dataclass(frozen=True)
class RingShare:
    """What one member brings to one round of one ring."""

    position: int
    """Of this member in the ring."""
    members: int
    vector: Tensor
    weight: float
    """Times the vector is what enters the sum; with 0 the vector may hold anything."""
    piece_elements: int
    """The same for all members."""
    roundtrip: Roundtrip | None = None
    """Where values change on their way: the owner of a sum keeps what the others get, and whoever
    sends one on knows what was lost."""
    landing: Sink | None = None
    """What becomes of the result, else it goes to new memory; may use up the vector."""

    def __post_init__(self) -> None:
        assert 0 <= self.position < self.members, f"{self.position} of {self.members}"
        assert self.piece_elements > 0
        assert self.vector.dim() == 1
        assert self.landing is None or self.landing.into.shape == self.vector.shape


class RingReduce:
    """Takes pieces, says which to send on, and has the result when ``done``."""

    def __init__(self, share: RingShare) -> None:
        self._share = share
        self._landing = share.landing or Sink(torch.empty_like(share.vector))
        self._digests: dict[tuple[int, int], bytes] = {}
        own = range(self._count(share.position))
        self._unsent = deque((share.position, piece) for piece in own)
        self._due = {key: self._first_hop(key[0]) for key in self._pieces()}
        """The hop with which a piece comes next; it is not here any more when it is final."""

    @property
    def done(self) -> bool:
        """Whether all pieces are final."""
        return not self._due

    @property
    def result(self) -> Tensor:
        """Where the sum of all shares has gone."""
        assert self.done, f"{len(self._due)} pieces are still on their way"
        return self._landing.into

    @property
    def digest(self) -> str:
        """Of the sum; the same for all members, whatever has become of it."""
        assert self.done, f"{len(self._due)} pieces are still on their way"
        return xxhash.xxh3_64_hexdigest(b"".join(self._digests[key] for key in sorted(self._digests)))

    def start(self) -> list[OutgoingChunk]:
        """The pieces that this member sends off first; all that is to be done where it is alone."""
        if self._share.members > 1:
            return self._send_off(AHEAD)
        for segment, piece in self._unsent:
            self._keep(segment, piece, self._weighted(segment, piece))
        return []

    def take(self, segment: int, piece: int, hop: int, values: Tensor) -> list[OutgoingChunk]:
        """A piece came from the member before; its values are changed, and sent on.

        ``WireError`` if it is none that can come now.
        """
        share = self._share
        self._check(segment, piece, hop, values)
        if hop >= share.members:
            self._keep(segment, piece, values)
            onward = hop + 1 < 2 * share.members - 1
            # Its own pieces come back when they are summed: each makes room for another.
            following = self._send_off(1) if segment == share.position else []
            return [*([OutgoingChunk(segment, piece, hop + 1, values)] if onward else []), *following]
        self._add(values, segment, piece)
        values = self._as_it_arrives(segment, piece, values)
        if hop + 1 < share.members:
            self._due[segment, piece] = hop + share.members
        else:
            self._keep(segment, piece, values)
        return [OutgoingChunk(segment, piece, hop + 1, values)]

    def _send_off(self, count: int) -> list[OutgoingChunk]:
        """The next pieces of this member's own segment."""
        outgoing = []
        for _ in range(min(count, len(self._unsent))):
            segment, piece = self._unsent.popleft()
            values = self._as_it_arrives(segment, piece, self._weighted(segment, piece))
            outgoing.append(OutgoingChunk(segment, piece, 1, values))
        return outgoing

    def _as_it_arrives(self, segment: int, piece: int, values: Tensor) -> Tensor:
        roundtrip = self._share.roundtrip
        return values if roundtrip is None else roundtrip(f"{segment}/{piece}", values)

    def _weighted(self, segment: int, piece: int) -> Tensor:
        own = self._own(segment, piece)
        # 0 times NaN is NaN, so a share without weight does not enter at all.
        if not self._share.weight:
            return torch.zeros_like(own)
        return torch.from_numpy(own.numpy() * self._share.weight)

    def _add(self, values: Tensor, segment: int, piece: int) -> None:
        if self._share.weight:
            summed = values.numpy()
            np.add(summed, self._own(segment, piece).numpy() * self._share.weight, out=summed)

    def _keep(self, segment: int, piece: int, values: Tensor) -> None:
        self._digests[segment, piece] = xxhash.xxh3_64_digest(values.numpy().data)
        self._landing.keep(*self._range(segment, piece), values)
        del self._due[segment, piece]

    def _check(self, segment: int, piece: int, hop: int, values: Tensor) -> None:
        due = self._due.get((segment, piece))
        if due is None:
            there = 0 <= segment < self._share.members and 0 <= piece < self._count(segment)
            what = "is complete already" if there else "does not exist"
            raise WireError(f"piece {piece} of segment {segment} came, which {what}")
        if hop != due:
            raise WireError(
                f"piece {piece} of segment {segment} came after {hop} members and is due after {due}"
            )
        own = self._own(segment, piece)
        if values.shape != own.shape or values.dtype != own.dtype:
            raise WireError(
                f"piece {piece} of segment {segment} has {list(values.shape)} of {values.dtype}, and"
                f" should have {list(own.shape)} of {own.dtype}"
            )

    def _first_hop(self, segment: int) -> int:
        distance = (self._share.position - segment) % self._share.members
        return distance or self._share.members

    def _pieces(self) -> list[tuple[int, int]]:
        return [(s, piece) for s in range(self._share.members) for piece in range(self._count(s))]

    def _count(self, segment: int) -> int:
        start, stop = self._segment(segment)
        return -(-(stop - start) // self._share.piece_elements)

    def _segment(self, segment: int) -> tuple[int, int]:
        total, members = self._share.vector.numel(), self._share.members
        return segment * total // members, (segment + 1) * total // members

    def _range(self, segment: int, piece: int) -> tuple[int, int]:
        start, stop = self._segment(segment)
        begin = start + piece * self._share.piece_elements
        return begin, min(begin + self._share.piece_elements, stop)

    def _own(self, segment: int, piece: int) -> Tensor:
        start, stop = self._range(segment, piece)
        return self._share.vector[start:stop]
