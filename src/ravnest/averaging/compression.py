"""How a node's averages travel: as they are, or compressed.

Compressed is what has changed since the last average, which all members hold bit by bit: it is small
next to the values themselves, and so are the errors. What rounding takes from a sum is added to the
same sum of the next round.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ravnest.averaging.ring import Roundtrip
from ravnest.averaging.sinks import DeltaSink, Sink
from ravnest.averaging.weights_port import Vectors
from ravnest.wire.codecs import RAW, ErrorFeedback, codec_named
from ravnest.wire.codecs.base import SMALLEST
from ravnest.wire.layout import TensorLayout
from ravnest.wire.messages import RoundId, Start


class RoundCompression:
    """What a node knows of the last average, and of what was lost on the way."""

    def __init__(self, codec: str) -> None:
        """``codec``: how the node would like averages to travel."""
        self.codec = codec
        self.base: RoundId | None = None
        """The last average that was applied here; None where a round has spoilt it."""
        self._average: dict[int, Tensor] = {}
        """That average; while a round is under way, on its way to the next."""
        self._errors: dict[tuple[int, tuple[int, ...]], ErrorFeedback] = {}

    def outgoing(self, go: Start, held: Vectors) -> Vectors:
        """What enters a round, in the memory of the copy: its values, or their differences from the
        last average.
        """
        self.base = None  # until this round is applied
        if go.codec == RAW.name:
            self._average = {}  # a piece of a round that failed may still be on its way into the old one
            return held
        for ring, vector in held.items():
            np.subtract(vector.numpy(), self._average[ring].numpy(), out=vector.numpy())
        return held

    def landing(self, go: Start, ring: int, vector: Tensor, moving: int) -> Sink:
        """What becomes of a ring's result, in the memory of what entered."""
        if self.codec == RAW.name:
            return DeltaSink(vector, moving)
        if ring not in self._average:
            self._average[ring] = torch.empty_like(vector)
        return DeltaSink(vector, moving, self._average[ring], relative=go.codec != RAW.name)

    def roundtrip(self, go: Start, ring: int) -> Roundtrip | None:
        """What sums are on the way; None where they stay what they are."""
        if go.codec == RAW.name:
            return None
        # Sums are others where the members are: errors of those have no business here.
        key = ring, tuple(sorted(go.weights))
        return self._errors.setdefault(key, ErrorFeedback(codec_named(go.codec))).apply

    def bytes_of(self, go: Start) -> Callable[[Tensor], int]:
        """What values cost on the way."""
        codec = codec_named(go.codec)

        def count(values: Tensor) -> int:
            if values.numel() < SMALLEST:
                return values.nbytes
            return codec.nbytes(TensorLayout(values.dtype, tuple(values.shape), values.stride()))

        return count

    def settled(self, round_id: RoundId, *, applied: bool) -> None:
        """A round is over, and was applied here or came to nothing."""
        if not applied:
            self._errors.clear()  # what they are errors of was never applied
        elif self.codec != RAW.name:
            self.base = round_id
