"""How a node's averages travel: as they are, or compressed.

Compressed is what has changed since the last average, which all members hold bit by bit: it is small
next to the values themselves, and so are the errors. What rounding takes from a sum is added to the
same sum of the next round.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ravnest.averaging.ring import Roundtrip
from ravnest.averaging.stage import Vectors
from ravnest.wire.codecs import RAW, ErrorFeedback, codec_named
from ravnest.wire.codecs.base import SMALLEST
from ravnest.wire.layout import Layout
from ravnest.wire.messages import Go, RoundId


class Coding:
    """What a node knows of the last average, and of what was lost on the way."""

    def __init__(self, codec: str) -> None:
        """``codec``: how the node would like averages to travel."""
        self.codec = codec
        self.base: RoundId | None = None
        """The last average that was applied here."""
        self._values: Vectors = {}
        self._errors: dict[tuple[int, tuple[int, ...]], ErrorFeedback] = {}

    def outgoing(self, go: Go, held: Vectors) -> Vectors:
        """What enters a round: the values, or how they differ from the last average."""
        if go.codec == RAW.name:
            return held
        return {ring: vector - self._values[ring] for ring, vector in held.items()}

    def average(self, go: Go, result: Vectors) -> Vectors:
        """The average itself, from what came out of a round."""
        if go.codec == RAW.name:
            return result
        return {ring: self._values[ring] + change for ring, change in result.items()}

    def roundtrip(self, go: Go, ring: int) -> Roundtrip | None:
        """What sums are on the way; None where they stay what they are."""
        if go.codec == RAW.name:
            return None
        # Sums are others where the members are: errors of those have no business here.
        key = ring, tuple(sorted(go.weights))
        return self._errors.setdefault(key, ErrorFeedback(codec_named(go.codec))).apply

    def bytes_of(self, go: Go) -> Callable[[Tensor], int]:
        """What values cost on the way."""
        codec = codec_named(go.codec)

        def count(values: Tensor) -> int:
            if values.numel() < SMALLEST:
                return values.nbytes
            return codec.nbytes(Layout(values.dtype, tuple(values.shape), values.stride()))

        return count

    def settled(self, round_id: RoundId, average: Vectors | None) -> None:
        """A round is over; ``average`` is None where it came to nothing."""
        if average is None:
            self._errors.clear()  # what they are errors of was never applied
        elif self.codec != RAW.name:
            self.base, self._values = round_id, average
