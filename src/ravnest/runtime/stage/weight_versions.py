"""Versions of a stage's weights for forwards and backwards while the optimizer updates them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ravnest.runtime.stage.updates import LookAhead

Weights = dict[str, torch.Tensor]


class WeightVersions:
    """Weights by version number, in two buffers at most.

    Without ``stash`` no update happens between the forward and the backward of a micro-batch, and the
    weights themselves are used. With it, an update that overtakes micro-batches in flight moves the
    newest weights to the other buffer first; the older version stays where the micro-batches use it.
    A ``look_ahead`` needs a third one, for the weights that it predicts.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        *,
        stash: bool,
        look_ahead: LookAhead | None = None,
    ) -> None:
        self.weights = dict(weights)
        """Newest weights, which updates change in place."""
        self._stash = stash
        self._look_ahead = look_ahead
        self.delay = 0
        """Staleness of the last gradient in updates; ``look_ahead`` predicts that many updates ahead."""
        self._kept: dict[int, Weights] = {}
        """Weights that forwards use, by version; those of the newest share its memory."""
        self._pool: list[Weights] = []
        """Buffers that no version uses."""
        self.memory = {_address(weight) for weight in self.weights.values()}
        """Addresses of all memory that holds weights and may be overwritten."""

    def at(self, version: int) -> Mapping[str, torch.Tensor]:
        """Return the weights of ``version``; the first call must come while it is the newest."""
        if not self._stash:
            return self.weights
        if version not in self._kept:
            self._kept[version] = self._predicted(version) if self._look_ahead else self._aliases()
        return self._kept[version]

    def before_update(self, *, in_use: bool) -> None:
        """Prepare an update; ``in_use``: micro-batches in flight use the newest version."""
        if not self._stash or self._look_ahead is not None or not in_use:
            return
        buffer = self._buffer()
        with torch.no_grad():
            for key, weight in self.weights.items():
                buffer[key].copy_(weight)
                weight.data = buffer[key]

    def free(self, version: int) -> None:
        """Free a version that no micro-batch in flight uses."""
        kept = self._kept.pop(version, None)
        if kept is None or any(_address(kept[key]) == _address(w) for key, w in self.weights.items()):
            return
        self._pool.append({key: tensor.detach() for key, tensor in kept.items()})

    def moved(self, changes: Mapping[str, torch.Tensor]) -> None:
        """Record a change of the weights that is not an update; kept versions stay as they are."""
        if self._look_ahead is not None:
            self._look_ahead.moved(changes)

    def renew(self) -> None:
        """Free all copies: the weights were replaced, and no micro-batch is in flight."""
        for version in list(self._kept):
            self.free(version)
        if self._look_ahead is not None:
            self._look_ahead.renew()

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

    def _predicted(self, version: int) -> Weights:
        assert self._look_ahead is not None
        buffer = self._buffer()
        self._look_ahead.predict(version, self.delay, self.weights, buffer)
        return {key: tensor.requires_grad_() for key, tensor in buffer.items()}

    def _buffer(self) -> Weights:
        if self._pool:
            return self._pool.pop()
        buffer = {key: torch.empty_like(w, requires_grad=False) for key, w in self.weights.items()}
        self.memory.update(_address(tensor) for tensor in buffer.values())
        return buffer


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
