"""Versions of a stage's weights for forwards and backwards while the optimizer updates them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ravnest.runtime.stage.updates import LookAhead


class WeightVersions:
    """Weights by version number.

    With ``stash``, updates can happen between the forward and the backward of a micro-batch: each
    version that a forward uses is copied once, into memory that freed versions have returned. Without
    it, the weights themselves are used.
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
        self._kept: dict[int, dict[str, torch.Tensor]] = {}
        self._pool: list[dict[str, torch.Tensor]] = []
        self.memory = {_address(weight) for weight in self.weights.values()}
        """Addresses of all memory that holds weights and may be overwritten."""

    def at(self, version: int) -> Mapping[str, torch.Tensor]:
        """Return the weights of ``version``; the first call must come while it is the newest."""
        if not self._stash:
            return self.weights
        if version not in self._kept:
            self._kept[version] = self._copy(version)
        return self._kept[version]

    def free(self, version: int) -> None:
        """Free a version that no micro-batch in flight uses."""
        if (buffers := self._kept.pop(version, None)) is not None:
            self._pool.append(buffers)

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
        """Number of copies, in use and free."""
        return len(self._kept) + len(self._pool)

    def _copy(self, version: int) -> dict[str, torch.Tensor]:
        if self._pool:
            copies = self._pool.pop()
        else:
            copies = {k: torch.empty_like(w, requires_grad=True) for k, w in self.weights.items()}
            self.memory.update(_address(copy) for copy in copies.values())
        if self._look_ahead is not None:
            self._look_ahead.predict(version, self.delay, self.weights, copies)
            return copies
        with torch.no_grad():
            for key, weight in self.weights.items():
                copies[key].copy_(weight)
        return copies


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
