"""Versions of a stage's weights: what forwards run on while the optimizer moves on."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ravnest.runtime.stage.updates import LookAhead


class WeightVersions:
    """Weights by version number.

    Where a later update can overtake a micro-batch (``stash``), each version that a forward asks for
    is copied once, into memory that freed versions gave back. Elsewhere the weights themselves serve.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        *,
        stash: bool,
        look_ahead: LookAhead | None = None,
    ) -> None:
        self.weights = dict(weights)
        """In place: those that updates change."""
        self._stash = stash
        self._look_ahead = look_ahead
        self.delay = 0
        """Updates that overtook the last gradient; what ``look_ahead`` looks ahead by."""
        self._kept: dict[int, dict[str, torch.Tensor]] = {}
        self._pool: list[dict[str, torch.Tensor]] = []
        self.memory = {_address(weight) for weight in self.weights.values()}
        """Addresses of all memory that holds weights and will be written to again."""

    def at(self, version: int) -> Mapping[str, torch.Tensor]:
        """Weights of a version that is the newest, or was when it was first asked for."""
        if not self._stash:
            return self.weights
        if version not in self._kept:
            self._kept[version] = self._copy(version)
        return self._kept[version]

    def free(self, version: int) -> None:
        """Nothing under way uses the version any more."""
        if (buffers := self._kept.pop(version, None)) is not None:
            self._pool.append(buffers)

    def moved(self, changes: Mapping[str, torch.Tensor]) -> None:
        """The weights were changed by something else than an update; versions under way were not."""
        if self._look_ahead is not None:
            self._look_ahead.moved(changes)

    def renew(self) -> None:
        """The weights are others now, and nothing is under way: no copy is of use any more."""
        for version in list(self._kept):
            self.free(version)
        if self._look_ahead is not None:
            self._look_ahead.renew()

    def __len__(self) -> int:
        """Copies held, those in use and those waiting for use."""
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
