"""What a lossy codec took away is made up for, where the same quantity is sent again and again."""

from __future__ import annotations

import torch

from ravnest.wire.codecs.base import RAW, Codec
from ravnest.wire.layout import TensorLayout, dense


class ErrorFeedback:
    """The rounding errors of a sender, by name, each added to the next tensor of that name.

    So the sum of what arrives stays within one rounding of the sum of what was meant. For
    quantities that accumulate, such as contributions to an average; activations and gradients of
    micro-batches are each used once, and an error of one has no business in the next.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._residuals: dict[str, torch.Tensor] = {}

    def apply(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor and what the last of that name lacked, as it will arrive.

        Sent with the same codec it arrives bit by bit (of float32 and float64), as codecs round
        once only.
        """
        tensor = dense(name, tensor)
        residual = self._residuals.get(name)
        meant = tensor if residual is None else tensor + residual
        layout = TensorLayout(meant.dtype, tuple(meant.shape), tuple(meant.stride()))
        encoded = self._codec.encode(meant, layout)
        if encoded.codec == RAW.name:
            self._residuals.pop(name, None)
            return meant
        arrives = self._codec.decode(encoded.payload, layout)
        # In the memory of the last one: of a large model these are as large as its weights.
        lacks = torch.empty_like(meant) if residual is None else residual
        torch.sub(meant, arrives, out=lacks)
        # Of a NaN or an infinity nothing can be made up for.
        self._residuals[name] = lacks.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return arrives
