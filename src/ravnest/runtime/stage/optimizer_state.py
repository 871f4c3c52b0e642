"""State of an optimizer between updates: as the optimizer keeps it, or in 8 bits."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ravnest.plan.memory import PACKED_LEAST
from ravnest.runtime.stage.packed_tensor import PackedTensor

FieldValue = Any
"""A tensor, a ``PackedTensor`` or a plain value of the optimizer."""


class OptimizerState:
    """State of an optimizer as it keeps it."""

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._parameters = dict(parameters)

    def step(self, update: int) -> None:
        """Update the parameters; ``update`` counts from 1."""
        del update
        self._step()

    def fields(self, key: str) -> dict[str, FieldValue]:
        """Return the state of a parameter by name; what is packed stays packed."""
        return dict(self._optimizer.state.get(self._parameters[key], {}))

    def values(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """Return the state of a parameter by name; what is packed is unpacked, in new memory."""
        found: Mapping[str, Any] = self._optimizer.state.get(parameter, {})
        return found

    def stored(self, name: str, tensor: torch.Tensor) -> FieldValue:
        """Return a tensor of a checkpoint, of this name there, in the form in which it is kept."""
        del name
        return tensor

    def restore(self, key: str, fields: dict[str, FieldValue]) -> None:
        """Replace the state of a parameter; tensors have gone through ``stored``."""
        self._optimizer.state[self._parameters[key]] = fields

    def clear(self) -> None:
        """Forget all state."""
        self._optimizer.state.clear()

    def _step(self) -> None:
        step: Callable[[], object] = self._optimizer.step
        step()


class PackedState(OptimizerState):
    """State whose larger tensors are packed between updates.

    Parameters with such state are updated one after the other, so that the state of one is unpacked at
    a time. The optimizer must treat parameters independently, as those of ``torch.optim`` do.
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(optimizer, parameters)
        self._keys: dict[torch.Tensor, str] = {p: key for key, p in parameters.items()}
        self._packed: dict[torch.Tensor, dict[str, PackedTensor]] = {}

    def step(self, update: int) -> None:
        """Update the parameters; ``update`` counts from 1 and decides how state is rounded."""
        groups = self._optimizer.param_groups
        members = [group["params"] for group in groups]
        try:
            for group, own in zip(groups, members, strict=True):
                group["params"] = [p for p in own if p.numel() < PACKED_LEAST]
            self._step()
            for group in groups:
                group["params"] = []
            for group, own in zip(groups, members, strict=True):
                for parameter in own:
                    if parameter.numel() >= PACKED_LEAST and parameter.grad is not None:
                        group["params"] = [parameter]
                        self._unpack(parameter)
                        self._step()
                        self._pack(parameter, update)
                group["params"] = []
        finally:
            for group, own in zip(groups, members, strict=True):
                group["params"] = own

    def fields(self, key: str) -> dict[str, FieldValue]:
        """Return the state of a parameter by name; what is packed stays packed."""
        return super().fields(key) | self._packed.get(self._parameters[key], {})

    def values(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """Return the state of a parameter by name; what is packed is unpacked, in new memory."""
        packed = self._packed.get(parameter, {})
        unpacked = {name: each.unpack(parameter) for name, each in packed.items()}
        return {**super().values(parameter), **unpacked}

    def stored(self, name: str, tensor: torch.Tensor) -> FieldValue:
        """Return a tensor of a checkpoint, of this name there, in the form in which it is kept."""
        return PackedTensor.of(tensor, _seed(name, 0)) if _is_packed(tensor) else tensor

    def restore(self, key: str, fields: dict[str, FieldValue]) -> None:
        """Replace the state of a parameter; tensors have gone through ``stored``."""
        packed = {name: each for name, each in fields.items() if isinstance(each, PackedTensor)}
        plain = {name: each for name, each in fields.items() if name not in packed}
        super().restore(key, plain)
        self._packed[self._parameters[key]] = packed

    def clear(self) -> None:
        """Forget all state."""
        super().clear()
        self._packed.clear()

    def _unpack(self, parameter: torch.Tensor) -> None:
        packed = self._packed.pop(parameter, {})
        state = self._optimizer.state
        for name in list(packed):
            state[parameter][name] = packed.pop(name).unpack(parameter)

    def _pack(self, parameter: torch.Tensor, update: int) -> None:
        state, packed = self._optimizer.state[parameter], {}
        for name, value in list(state.items()):
            if _is_packed(value):
                packed[name] = PackedTensor.of(value, _seed(f"{self._keys[parameter]}/{name}", update))
                del state[name]
        self._packed[parameter] = packed


def _is_packed(value: object) -> bool:
    """Return whether a value is a tensor that is worth packing."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
        and value.numel() >= PACKED_LEAST
    )


def _seed(name: str, update: int) -> int:
    """Return the seed of a tensor's rounding, which does not depend on the other tensors of a stage."""
    return zlib.crc32(name.encode()) << 31 ^ update
