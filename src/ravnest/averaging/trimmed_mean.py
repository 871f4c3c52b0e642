"""Trimmed mean of one vector, seen from one member. Pure: no threads, no clock, no network.

A ring passes sums on: the values of a single member cannot be told apart, and the owner of a sum can
replace it. Here each member sends its own values to all others, and each computes the result itself: of
every element, the largest and the smallest values are left out, and the mean of the rest is taken. A
member that lies moves an element at most to the largest or smallest value of the honest members. If it
sends different values to different members, their digests differ, and nobody applies the result.

The vector is cut into pieces, and a member sends further pieces only while the others keep up. Every
member sends (m - 1) times the vector, for m members.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from ravnest.averaging.ring import OutgoingChunk, Roundtrip
from ravnest.averaging.sinks import Sink
from ravnest.errors import WireError
from ravnest.store.robust_mean import trim_of, trimmed_mean

AHEAD = 2
"""Pieces that a member sends before it has those of all others. The others may be as much ahead of it,
so that it holds at most twice as many pieces of each member."""

CONTRIBUTION_HOP = 0
"""The ``hop`` of a piece that its author sends to all; pieces of a ring have passed a member or more."""


@dataclass(frozen=True)
class TrimmedShare:
    """Input of one member to one round."""

    position: int
    """Position of this member among all."""
    members: int
    vector: Tensor
    contributors: frozenset[int]
    """Positions of the members whose values count; the vectors of others may hold any values."""
    piece_elements: int
    """Elements per piece, the same for all members."""
    roundtrip: Roundtrip | None = None
    """Effect of the codec on values, if it is lossy: a member uses of itself what the others receive."""
    sink: Sink | None = None
    """Destination of the result, which may overwrite the vector; None for new memory."""

    def __post_init__(self) -> None:
        assert 0 <= self.position < self.members, f"{self.position} of {self.members}"
        assert self.contributors <= set(range(self.members))
        assert self.contributors
        assert self.piece_elements > 0
        assert self.vector.dim() == 1
        assert self.sink is None or self.sink.into.shape == self.vector.shape


class TrimmedReduce:
    """Takes pieces of all other members, returns those for them, and has the result when ``done``.

    The piece of a member that does not contribute is empty; it says that the member keeps up.
    """

    def __init__(self, share: TrimmedShare) -> None:
        self._share = share
        self._trim = trim_of(len(share.contributors))
        self._sink = share.sink or Sink(torch.empty_like(share.vector))
        self._pieces = -(-share.vector.numel() // share.piece_elements)
        self._sent = 0
        self._arrived = [0] * share.members
        """Number of pieces that have arrived of each member."""
        self._waiting: dict[int, dict[int, Tensor]] = {}
        """Values of pieces that are not complete, by piece and position."""
        self._digests: list[bytes] = []
        """Digests of the pieces of the result; they are completed in their order."""

    @property
    def done(self) -> bool:
        """True if the result is complete."""
        return len(self._digests) == self._pieces

    @property
    def result(self) -> Tensor:
        """The trimmed mean, in the memory of the sink."""
        assert self.done, f"{self._pieces - len(self._digests)} pieces are not complete"
        return self._sink.into

    @property
    def digest(self) -> str:
        """Digest of the result, the same for all members."""
        assert self.done, f"{self._pieces - len(self._digests)} pieces are not complete"
        return xxhash.xxh3_64_hexdigest(b"".join(self._digests))

    def start(self) -> list[OutgoingChunk]:
        """Return the first pieces to send."""
        return self._send_off(AHEAD)

    def take(self, segment: int, piece: int, hop: int, values: Tensor) -> list[OutgoingChunk]:
        """Take a piece of the member at the position ``segment``; return the pieces to send to all.

        Raises ``WireError`` if the piece is not expected now.
        """
        self._check(segment, piece, hop, values)
        self._arrived[segment] += 1
        self._waiting.setdefault(piece, {})[segment] = values
        outgoing: list[OutgoingChunk] = []
        while self._is_complete(len(self._digests)):
            self._finish(len(self._digests))
            outgoing += self._send_off(1)
        return outgoing

    def _send_off(self, count: int) -> list[OutgoingChunk]:
        """Return the next pieces of this member's own values."""
        outgoing = []
        for piece in range(self._sent, min(self._sent + count, self._pieces)):
            values = self._contribution(piece)
            self._waiting.setdefault(piece, {})[self._share.position] = values
            self._sent = self._arrived[self._share.position] = piece + 1
            outgoing.append(OutgoingChunk(self._share.position, piece, CONTRIBUTION_HOP, values))
        return outgoing

    def _contribution(self, piece: int) -> Tensor:
        share = self._share
        if share.position not in share.contributors:
            return share.vector.new_empty(0)
        # A copy, because the result may overwrite the vector while a link still holds the piece.
        own = share.vector[slice(*self._range(piece))].clone()
        return own if share.roundtrip is None else share.roundtrip(f"contribution/{piece}", own)

    def _is_complete(self, piece: int) -> bool:
        return len(self._waiting.get(piece, ())) == self._share.members

    def _finish(self, piece: int) -> None:
        values = self._waiting.pop(piece)
        counted = [values[position].numpy() for position in sorted(self._share.contributors)]
        mean = trimmed_mean(counted, self._trim)
        self._digests.append(xxhash.xxh3_64_digest(mean.data))
        self._sink.keep(*self._range(piece), torch.from_numpy(mean))

    def _check(self, segment: int, piece: int, hop: int, values: Tensor) -> None:
        share = self._share
        if hop != CONTRIBUTION_HOP:
            raise WireError(
                "it does not take the robust mean of this node: use the same robust_mean on all nodes"
            )
        if not 0 <= segment < share.members or segment == share.position:
            raise WireError(f"position {segment} is not that of another member")
        if piece != self._arrived[segment] or piece >= self._pieces:
            raise WireError(
                f"piece {piece} arrived, expected {self._arrived[segment]} of {self._pieces}"
            )
        if piece >= self._sent + AHEAD:
            raise WireError(f"piece {piece} arrived, although this node has sent {self._sent} pieces")
        start, stop = self._range(piece)
        expected = (stop - start if segment in share.contributors else 0,)
        if values.shape != expected or values.dtype != share.vector.dtype:
            raise WireError(
                f"piece {piece} has shape {list(values.shape)} and dtype {values.dtype},"
                f" expected {list(expected)} and {share.vector.dtype}"
            )

    def _range(self, piece: int) -> tuple[int, int]:
        start = piece * self._share.piece_elements
        return start, min(start + self._share.piece_elements, self._share.vector.numel())
