"""Ring all-reduce of one vector, seen from one member. Pure: no threads, no clock, no network.

The vector is cut into one segment per member, and each segment into pieces. Member i sends the pieces of
segment i. Each member that receives a piece adds its own share; the last one to do so owns the sum and
sends it around the ring once more. A piece moves on as soon as it is summed, independently of other
pieces. Every member sends 2 (m - 1) / m of the vector, for any number m of members.

Each sum is computed once, by its owner, and copied from there, so that all members hold the same bits.
The arithmetic uses numpy, which starts no threads: torch would take cores from the stage that trains.
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
"""Size of a piece. Measured: a message costs about 1 ms of processor time at any size, and four or more
pieces per segment keep all members busy. Equal to the chunk size of the wire: a piece is one message."""

AHEAD = 4
"""Pieces of its own segment that a member has in flight: more would only wait in a queue, where they
would take the memory of a second vector."""

Roundtrip = Callable[[str, Tensor], Tensor]
"""Encodes and decodes a sum, as the wire does; the name identifies the sum."""


@dataclass(frozen=True)
class OutgoingChunk:
    """A piece for the next member of the ring; its values no longer change."""

    segment: int
    piece: int
    hop: int
    """Members that it has passed, including this one."""
    values: Tensor


@dataclass(frozen=True)
class RingShare:
    """Input of one member to one round of one ring."""

    position: int
    """Position of this member in the ring."""
    members: int
    vector: Tensor
    weight: float
    """Factor of the vector in the sum; with 0 the vector may hold any values."""
    piece_elements: int
    """Elements per piece, the same for all members."""
    roundtrip: Roundtrip | None = None
    """Effect of the codec on values, if it is lossy: the owner of a sum keeps the values that the
    others receive, and each sender records the rounding error."""
    sink: Sink | None = None
    """Destination of the result, which may overwrite the vector; None for new memory."""

    def __post_init__(self) -> None:
        assert 0 <= self.position < self.members, f"{self.position} of {self.members}"
        assert self.piece_elements > 0
        assert self.vector.dim() == 1
        assert self.sink is None or self.sink.into.shape == self.vector.shape


class RingReduce:
    """Takes pieces, returns those to send, and has the result when ``done``."""

    def __init__(self, share: RingShare) -> None:
        self._share = share
        self._sink = share.sink or Sink(torch.empty_like(share.vector))
        self._digests: dict[tuple[int, int], bytes] = {}
        own = range(self._count(share.position))
        self._unsent = deque((share.position, piece) for piece in own)
        self._due = {key: self._first_hop(key[0]) for key in self._pieces()}
        """The hop at which each piece arrives next; final pieces are removed."""

    @property
    def done(self) -> bool:
        """True if all pieces are final."""
        return not self._due

    @property
    def result(self) -> Tensor:
        """The sum of all shares, in the memory of the sink."""
        assert self.done, f"{len(self._due)} pieces are still in flight"
        return self._sink.into

    @property
    def digest(self) -> str:
        """Digest of the sum, the same for all members."""
        assert self.done, f"{len(self._due)} pieces are still in flight"
        return xxhash.xxh3_64_hexdigest(b"".join(self._digests[key] for key in sorted(self._digests)))

    def start(self) -> list[OutgoingChunk]:
        """Return the first pieces to send; with a single member, write the result."""
        if self._share.members > 1:
            return self._send_off(AHEAD)
        for segment, piece in self._unsent:
            self._keep(segment, piece, self._weighted(segment, piece))
        return []

    def take(self, segment: int, piece: int, hop: int, values: Tensor) -> list[OutgoingChunk]:
        """Take a piece from the previous member and return the pieces to send; overwrites its values.

        Raises ``WireError`` if the piece is not expected now.
        """
        share = self._share
        self._check(segment, piece, hop, values)
        if hop >= share.members:
            self._keep(segment, piece, values)
            onward = hop + 1 < 2 * share.members - 1
            # A piece of the own segment comes back when it is summed, which makes room for another.
            following = self._send_off(1) if segment == share.position else []
            return [*([OutgoingChunk(segment, piece, hop + 1, values)] if onward else []), *following]
        self._add(values, segment, piece)
        values = self._as_received(segment, piece, values)
        if hop + 1 < share.members:
            self._due[segment, piece] = hop + share.members
        else:
            self._keep(segment, piece, values)
        return [OutgoingChunk(segment, piece, hop + 1, values)]

    def _send_off(self, count: int) -> list[OutgoingChunk]:
        """Return the next pieces of this member's own segment."""
        outgoing = []
        for _ in range(min(count, len(self._unsent))):
            segment, piece = self._unsent.popleft()
            values = self._as_received(segment, piece, self._weighted(segment, piece))
            outgoing.append(OutgoingChunk(segment, piece, 1, values))
        return outgoing

    def _as_received(self, segment: int, piece: int, values: Tensor) -> Tensor:
        roundtrip = self._share.roundtrip
        return values if roundtrip is None else roundtrip(f"{segment}/{piece}", values)

    def _weighted(self, segment: int, piece: int) -> Tensor:
        own = self._own(segment, piece)
        # 0 times NaN is NaN, so a share with weight 0 is not read.
        if not self._share.weight:
            return torch.zeros_like(own)
        return torch.from_numpy(own.numpy() * self._share.weight)

    def _add(self, values: Tensor, segment: int, piece: int) -> None:
        if self._share.weight:
            summed = values.numpy()
            np.add(summed, self._own(segment, piece).numpy() * self._share.weight, out=summed)

    def _keep(self, segment: int, piece: int, values: Tensor) -> None:
        self._digests[segment, piece] = xxhash.xxh3_64_digest(values.numpy().data)
        self._sink.keep(*self._range(segment, piece), values)
        del self._due[segment, piece]

    def _check(self, segment: int, piece: int, hop: int, values: Tensor) -> None:
        due = self._due.get((segment, piece))
        if due is None:
            there = 0 <= segment < self._share.members and 0 <= piece < self._count(segment)
            what = "is complete already" if there else "does not exist"
            raise WireError(f"piece {piece} of segment {segment} {what}")
        if hop == 0:
            raise WireError(
                "it takes a robust mean, and this node does not: use the same robust_mean on all nodes"
            )
        if hop != due:
            raise WireError(
                f"piece {piece} of segment {segment} has passed {hop} members, expected {due}"
            )
        own = self._own(segment, piece)
        if values.shape != own.shape or values.dtype != own.dtype:
            raise WireError(
                f"piece {piece} of segment {segment} has shape {list(values.shape)} and dtype"
                f" {values.dtype}, expected {list(own.shape)} and {own.dtype}"
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
