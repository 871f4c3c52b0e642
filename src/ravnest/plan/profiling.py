"""From a measured graph to the numbers that the planner works with."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ravnest.errors import PlanError
from ravnest.plan.profile import ModelProfile, StateTensor, Unit
from ravnest.split.cuts import Layout
from ravnest.split.evalcuts import crossing_bytes, state_keys
from ravnest.split.measure import Measurement, OperationCost
from ravnest.split.splitter import PreparedModel

_FLOPS_PER_BYTE = 4.0
"""Operations that a machine does in the time it moves a byte; most layers but products are bound
by memory, and would otherwise count for nothing."""
_BACKWARD = 2.0
"""Backward computes a gradient for the input and one for the weight: twice the forward."""


def profile_model(prepared: PreparedModel, *, optimizer_factor: float = 2.0) -> ModelProfile:
    """Costs of the units of a prepared model, at its example's batch size."""
    layout, measurement = prepared.layouts["train"], prepared.measurements["train"]
    bounds = [0, *layout.legal, len(layout.operations)]
    state = _state(prepared, layout, bounds)
    tied = _tied_bytes(state, len(bounds) - 1)
    forward = crossing_bytes(layout, measurement)
    backward = _gradient_bytes(layout, measurement)
    work = _work(measurement)
    units = []
    for index, (begin, end) in enumerate(pairwise(bounds)):
        costs = measurement.costs[begin:end]
        last = index == len(bounds) - 2
        units.append(
            Unit(
                work=float(work[begin:end].sum()),
                activation_bytes=sum(cost.saved_bytes for cost in costs),
                workspace_bytes=max(map(_workspace, costs)),
                crossing_bytes=0 if last else int(forward[end]) + tied[index],
                gradient_bytes=0 if last else int(backward[end]) + tied[index],
            )
        )
    example = prepared.capture.example
    return ModelProfile(
        units=tuple(units),
        state=state,
        batch_size=example.batch_size or 1,
        input_bytes=sum(t.numel() * t.element_size() for t in example.tensors),
        optimizer_bytes_per_parameter_byte=optimizer_factor,
    )


def unit_names(prepared: PreparedModel) -> list[str]:
    """The user's module that each unit belongs to, for people; glue goes with the module before it."""
    layout = prepared.layouts["train"]
    named = [_module_of(node) for node in layout.operations]
    current = next((name for name in named if name), "forward")
    names = []
    for begin, end in pairwise([0, *layout.legal, len(layout.operations)]):
        current = next((name for name in named[begin:end] if name), current)
        names.append(current)
    return names


def optimizer_state_factor(
    optimizer: type[torch.optim.Optimizer] | None, params: Mapping[str, Any] | None = None
) -> float:
    """Bytes of optimizer state for each byte of parameter, found by one step on a small tensor.

    Without an optimizer AdamW is assumed.
    """
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    parameter.grad = torch.ones_like(parameter)
    try:
        instance = (optimizer or torch.optim.AdamW)([parameter], **dict(params or {}))
        instance.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(f"the optimizer cannot be used as given: {error}") from error
    kept = [v for v in instance.state[parameter].values() if isinstance(v, torch.Tensor) and v.dim()]
    return sum(v.numel() * v.element_size() for v in kept) / (parameter.numel() * 4)


def _work(measurement: Measurement) -> np.ndarray:
    """Work of each operation, forward and backward; measured times, where there are, share it out."""
    computed = np.array([_operation_work(cost) for cost in measurement.costs])
    if not measurement.measured:
        return computed
    measured = np.array([cost.seconds * _passes(cost) for cost in measurement.costs])
    scaled: np.ndarray = measured * (computed.sum() / measured.sum())
    return scaled


def _operation_work(cost: OperationCost) -> float:
    once = cost.flops + _FLOPS_PER_BYTE * (cost.input_bytes + cost.output_bytes)
    return once * _passes(cost)


def _passes(cost: OperationCost) -> float:
    """Forward and backward, in forwards."""
    return 1 + _BACKWARD if cost.differentiated else 1.0


def _workspace(cost: OperationCost) -> int:
    """In backward, the gradients of an operation's output and inputs live at the same time."""
    if cost.differentiated:
        return cost.output_bytes + cost.input_bytes
    return cost.output_bytes


def _state(prepared: PreparedModel, layout: Layout, bounds: list[int]) -> tuple[StateTensor, ...]:
    used: dict[str, set[int]] = {}
    for position, keys in enumerate(state_keys(layout)):
        for key in keys:
            used.setdefault(key, set()).add(bisect_right(bounds, position) - 1)
    tensors = []
    unit = 0
    for key, entry in prepared.capture.state.tensors.items():
        tensor = entry.tensor
        if key in used:
            unit = min(used[key])
        tensors.append(
            StateTensor(
                name=key,
                bytes=tensor.numel() * tensor.element_size(),
                trainable=key in used and entry.kind == "parameter" and tensor.requires_grad,
                averaged=entry.persistent and tensor.is_floating_point(),
                units=tuple(sorted(used.get(key, {unit}))),
            )
        )
    return tuple(tensors)


def _tied_bytes(state: tuple[StateTensor, ...], units: int) -> list[int]:
    """Bytes of trainable tensors that are used on both sides of the cut behind each unit: their
    gradients and new values travel between the replicas.
    """
    steps = np.zeros(units + 1, dtype=np.int64)
    for tensor in state:
        if tensor.trainable and len(tensor.units) > 1:
            steps[tensor.units[0]] += tensor.bytes
            steps[tensor.units[-1]] -= tensor.bytes
    return [int(value) for value in np.cumsum(steps)[:units]]


def _gradient_bytes(layout: Layout, measurement: Measurement) -> np.ndarray:
    """Bytes that cross each cut going backward."""
    steps = np.zeros(len(layout.operations) + 2)
    for node, (first, last) in layout.spans.items():
        begin = max(first, measurement.gradient_from.get(node, last + 1))
        if begin <= last:
            size = measurement.value_bytes.get(node, 0)
            steps[begin] += size
            steps[last + 1] -= size
    return np.cumsum(steps)[:-1]


def _module_of(node: torch.fx.Node) -> str:
    """Path of the innermost module that an operation was traced in."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values()]
    return paths[-1].removeprefix("model").removeprefix(".") if paths else ""
