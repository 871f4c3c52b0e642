"""Versions of a stage's weights for forwards and backwards while the optimizer updates them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ravnest.runtime.stage.look_ahead import LookAhead

Weights = dict[str, torch.Tensor]


class WeightVersions:
    """Weights by version number, in two buffers at most.

    Without ``stash`` no update happens between the forward and the backward of a micro-batch, and the
    weights themselves are used. With it, an update that overtakes micro-batches in flight moves the
    newest weights to the other buffer first; the older version stays where the micro-batches use it.
    A ``look_ahead`` predicts the weights of late gradients in the newest weights' own buffer, and takes
    it back in the buffer that the update changes.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        *,
        stash: bool,
        look_ahead: LookAhead | None = None,
    ) -> None:
        self.weights = dict(weights)
        """Newest weights, which updates change in place; predicted ones if ``predicted``."""
        self.stash = stash
        """True if updates happen between the forward and the backward of a micro-batch."""
        self._look_ahead = look_ahead
        self._kept: dict[int, Weights] = {}
        """Weights that forwards use, by version; those of the newest share its memory."""
        self._pool: list[Weights] = []
        """Buffers that no version uses."""
        self.memory = {_address(weight) for weight in self.weights.values()}
        """Addresses of all memory that holds weights and may be overwritten."""

    @property
    def predicted(self) -> bool:
        """True if the newest weights are predicted ones."""
        return self._look_ahead is not None and self._look_ahead.applied

    def at(self, version: int, *, late: bool = False) -> Mapping[str, torch.Tensor]:
        """Return the weights of ``version``; the first call must come while it is the newest.

        ``late``: another update comes before the one that the gradient is part of. Micro-batches whose
        gradients are not late use a version first, and then it is not predicted.
        """
        if not self.stash:
            return self.weights
        if version not in self._kept:
            if late and self._look_ahead is not None:
                self._look_ahead.apply()
            self._kept[version] = self._aliases()
        return self._kept[version]

    def undo_prediction(self, copies: Mapping[str, torch.Tensor]) -> None:
        """Change copies of the newest weights to what they are without a prediction."""
        if self._look_ahead is not None:
            self._look_ahead.undo(copies)

    def before_update(self, *, in_use: bool) -> None:
        """Prepare an update; ``in_use``: micro-batches in flight use the newest version."""
        if self.stash and in_use:
            buffer = self._buffer()
            with torch.no_grad():
                for key, weight in self.weights.items():
                    buffer[key].copy_(weight)
                    weight.data = buffer[key]
        if self._look_ahead is not None:
            self._look_ahead.take_back()

    def free(self, version: int) -> None:
        """Free a version that no micro-batch in flight uses."""
        kept = self._kept.pop(version, None)
        if kept is None or any(_address(kept[key]) == _address(w) for key, w in self.weights.items()):
            return
        self._pool.append({key: tensor.detach() for key, tensor in kept.items()})

    def renew(self, *, in_use: bool) -> None:
        """Drop what belongs to weights that were replaced; ``in_use``: micro-batches use versions."""
        if self._look_ahead is not None:
            self._look_ahead.forget()
        for version in [] if in_use else list(self._kept):
            self.free(version)

    def __len__(self) -> int:
        """Number of buffers besides the newest weights' own, in use and free."""
        newest = {_address(weight) for weight in self.weights.values()}
        older = [
            kept for kept in self._kept.values() if not newest & {_address(t) for t in kept.values()}
        ]
        return len(older) + len(self._pool)

    def _aliases(self) -> Weights:
        """Return leaves of autograd that share the memory of the newest weights.

        Unlike ``detach``, ``data`` does not share the counter of changes: an update that has moved the
        weights to the other buffer must not look like a change of these.
        """
        return {key: weight.data.requires_grad_() for key, weight in self.weights.items()}

    def _buffer(self) -> Weights:
        if self._pool:
            return self._pool.pop()
        buffer = {key: torch.empty_like(w, requires_grad=False) for key, w in self.weights.items()}
        self.memory.update(_address(tensor) for tensor in buffer.values())
        return buffer


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
