"""Error feedback: adds the rounding error of a lossy codec to the next tensor of the same name."""

from __future__ import annotations

import torch

from ravnest.wire.codecs.base import RAW, Codec
from ravnest.wire.layout import TensorLayout, dense


class ErrorFeedback:
    """Rounding errors of a sender, by name.

    The sum of the received tensors stays within one rounding of the sum of the exact ones. For
    quantities that accumulate, such as contributions to an average. Activations and gradients of
    micro-batches are used once, and the error of one does not belong to the next.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._residuals: dict[str, torch.Tensor] = {}

    def apply(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor plus the last error of that name, rounded as the receiver gets it.

        Sent with the same codec it arrives bit for bit (float32 and float64), because a rounded
        value is not rounded again.
        """
        tensor = dense(name, tensor)
        residual = self._residuals.get(name)
        exact = tensor if residual is None else tensor + residual
        layout = TensorLayout(exact.dtype, tuple(exact.shape), tuple(exact.stride()))
        encoded = self._codec.encode(exact, layout)
        if encoded.codec == RAW.name:
            self._residuals.pop(name, None)
            return exact
        received = self._codec.decode(encoded.payload, layout)
        # Reuse the memory of the last error: together the errors are as large as the weights.
        error = torch.empty_like(exact) if residual is None else residual
        torch.sub(exact, received, out=error)
        # The error of a NaN or an infinity cannot be corrected.
        self._residuals[name] = error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return received
