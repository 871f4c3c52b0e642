"""From a measured graph to the numbers that the planner works with."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ravnest.errors import PlanError
from ravnest.plan.profile import ModelProfile, TensorProfile, Unit
from ravnest.split import state
from ravnest.split.cuts import CutLayout
from ravnest.split.eval_cuts import crossing_bytes, state_keys
from ravnest.split.measure import Measurement, OperationCost
from ravnest.split.splitter import PreparedModel

_FLOPS_PER_BYTE = 4.0
"""Operations that a machine does in the time it moves a byte; most layers but products are bound
by memory, and would otherwise count for nothing."""
_UPDATE_COPIES = 2.0
"""Temporaries of AdamW, in sizes of a parameter: it updates one after the other. With ``foreach=True``
it would need them for all at once; torch leaves that off on CPUs."""
_BACKWARD = 2.0
"""Backward computes a gradient for the input and one for the weight: twice the forward."""


def profile_model(prepared: PreparedModel, *, optimizer_factor: float = 2.0) -> ModelProfile:
    """Costs of the units of a prepared model, at its example's batch size."""
    layout, measurement = prepared.layouts["train"], prepared.measurements["train"]
    bounds = [0, *layout.legal, len(layout.operations)]
    forward = crossing_bytes(layout, measurement)
    backward = _gradient_bytes(layout, measurement)
    held = _held_bytes(layout, measurement)
    trained = _parameter_gradients(prepared, layout)
    work = _work(measurement)
    units = []
    for index, (begin, end) in enumerate(pairwise(bounds)):
        costs = measurement.costs[begin:end]
        last = index == len(bounds) - 2
        units.append(
            Unit(
                work=float(work[begin:end].sum()),
                activation_bytes=sum(cost.saved_bytes for cost in costs),
                workspace_bytes=_workspace(costs, forward[begin:], backward[begin:], trained[begin:]),
                crossing_bytes=0 if last else int(forward[end]),
                gradient_bytes=0 if last else int(backward[end]),
                held_bytes=0 if last else int(held[end]),
            )
        )
    example = prepared.capture.example
    return ModelProfile(
        units=tuple(units),
        state=_state(prepared, layout, bounds),
        batch_size=example.batch_size or 1,
        input_bytes=int(held[0]),
        output_bytes=int(held[-1]),
        optimizer_bytes_per_parameter_byte=optimizer_factor,
        update_copies=_UPDATE_COPIES,
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


def _workspace(
    costs: Sequence[OperationCost], forward: np.ndarray, backward: np.ndarray, trained: np.ndarray
) -> int:
    """What the worst moment of a unit's backward has in memory besides its activations.

    Backward goes from its last operation to its first. At each one there are: what autograd keeps
    for those before it, the gradients of activations that wait or are being made, those of the
    parameters used from there on, and temporaries. The arrays start at the unit's first operation.
    """
    freed = made = worst = 0
    for index in reversed(range(len(costs))):
        cost = costs[index]
        made += int(trained[index])
        if cost.differentiated:
            passing = int(backward[index + 1]) + cost.gradient_bytes + cost.scratch_bytes
            worst = max(worst, passing + made - freed)
        else:
            worst = max(worst, int(forward[index]) + cost.output_bytes + cost.scratch_bytes)
        freed += cost.saved_bytes
    return worst


def _state(prepared: PreparedModel, layout: CutLayout, bounds: list[int]) -> tuple[TensorProfile, ...]:
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
            TensorProfile(
                name=key,
                bytes=tensor.numel() * tensor.element_size(),
                trainable=key in used and entry.kind == "parameter" and tensor.requires_grad,
                averaged=_averaged(entry),
                units=tuple(sorted(used.get(key, {unit}))),
            )
        )
    return tuple(tensors)


def _averaged(entry: state.StateTensor) -> bool:
    """Whether clusters average it: what trains, and statistics; whole numbers are left alone."""
    changes = entry.kind == "buffer" or entry.tensor.requires_grad
    return entry.persistent and changes and entry.tensor.is_floating_point()


def _parameter_gradients(prepared: PreparedModel, layout: CutLayout) -> np.ndarray:
    """Bytes of parameter gradients that appear with each operation's backward: at the last use."""
    found = np.zeros(len(layout.operations), dtype=np.int64)
    last = {key: position for position, keys in enumerate(state_keys(layout)) for key in keys}
    for key, position in last.items():
        entry = prepared.capture.state.tensors[key]
        if entry.kind == "parameter" and entry.tensor.requires_grad:
            found[position] += entry.tensor.numel() * entry.tensor.element_size()
    return found


def _held_bytes(layout: CutLayout, measurement: Measurement) -> np.ndarray:
    """Bytes that cross each cut and are no activations of an operation behind it.

    What autograd keeps first behind the cut is among the activations there.
    """
    steps = np.zeros(len(layout.operations) + 2)
    for node, (first, last) in layout.spans.items():
        begin = max(first, measurement.kept_from.get(node, -1) + 1)
        if begin <= last:
            size = measurement.value_bytes.get(node, 0)
            steps[begin] += size
            steps[last + 1] -= size
    return np.cumsum(steps)[:-1]


def _gradient_bytes(layout: CutLayout, measurement: Measurement) -> np.ndarray:
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
