"""Compression of averages between clusters.

Compressed rounds send the change since the last average, which all members hold bit for bit: it is small
compared with the values themselves, and so are the rounding errors. The rounding error of a sum is added
to the same sum of the next round.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ravnest.averaging.ports import Vectors
from ravnest.averaging.ring import Roundtrip
from ravnest.averaging.sinks import DeltaSink, Sink
from ravnest.wire.codecs import RAW, ErrorFeedback, codec_named
from ravnest.wire.codecs.base import MIN_ELEMENTS
from ravnest.wire.layout import TensorLayout
from ravnest.wire.messages import RoundId, Start


class RoundCompression:
    """The last average of a node, and the rounding errors of its sums."""

    def __init__(self, codec: str) -> None:
        """``codec`` is the codec that the node asks for."""
        self.codec = codec
        self.base: RoundId | None = None
        """The last average that was applied here; None while a round overwrites it."""
        self._average: dict[int, Tensor] = {}
        """That average by ring; during a round, a mixture with the next one."""
        self._errors: dict[tuple[int, tuple[int, ...]], ErrorFeedback] = {}

    def outgoing(self, start: Start, copy: Vectors) -> Vectors:
        """Return the vectors that enter a round, in the memory of the copy.

        They are the values or, compressed, their differences from the last average.
        """
        self.base = None  # until this round is applied
        if start.codec == RAW.name:
            self._average = {}  # link threads may still write chunks of a failed round into the old one
            return copy
        for ring, vector in copy.items():
            np.subtract(vector.numpy(), self._average[ring].numpy(), out=vector.numpy())
        return copy

    def sink(self, start: Start, ring: int, vector: Tensor, moving: int) -> Sink:
        """Return the destination of a ring's result, in the memory of the vector that entered."""
        if self.codec == RAW.name:
            return DeltaSink(vector, moving)
        if ring not in self._average:
            self._average[ring] = torch.empty_like(vector)
        return DeltaSink(vector, moving, self._average[ring], relative=start.codec != RAW.name)

    def roundtrip(self, start: Start, ring: int) -> Roundtrip | None:
        """Return the effect of the codec on sums; None if values travel unchanged."""
        if start.codec == RAW.name:
            return None
        # Sums differ with the members, so errors of other member sets do not apply here.
        key = ring, tuple(sorted(start.weights))
        return self._errors.setdefault(key, ErrorFeedback(codec_named(start.codec))).apply

    def bytes_of(self, start: Start) -> Callable[[Tensor], int]:
        """Return the function that gives the encoded size of values."""
        codec = codec_named(start.codec)

        def count(values: Tensor) -> int:
            if values.numel() < MIN_ELEMENTS:
                return values.nbytes
            return codec.nbytes(TensorLayout(values.dtype, tuple(values.shape), values.stride()))

        return count

    def settled(self, round_id: RoundId, *, applied: bool) -> None:
        """Note the end of a round and whether its average was applied here."""
        if not applied:
            self._errors.clear()  # the sums that they belong to were never applied
        elif self.codec != RAW.name:
            self.base = round_id
