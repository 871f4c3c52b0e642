"""Profile of a prepared model: the planner's numbers, from the measured graph."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ravnest.errors import PlanError
from ravnest.plan.loss_chunks import LOSS_COPIES
from ravnest.plan.memory import PACKED_BLOCK, PACKED_LEAST
from ravnest.plan.profile import ChunkableHead, ModelProfile, RowCut, TensorProfile, UnitCost
from ravnest.split import state
from ravnest.split.aliases import find_aliases
from ravnest.split.casts import is_state_cast
from ravnest.split.cuts import CutLayout
from ravnest.split.deferred import deferrable_input
from ravnest.split.eval_cuts import crossing_bytes, state_keys
from ravnest.split.loss_head import match_loss_head
from ravnest.split.lstm_deferral import DEFERRED_LSTM_COPIES, deferrable_lstm_input
from ravnest.split.measure import Measurement, OperationCost
from ravnest.split.recurrent import DEFERRED_COPIES
from ravnest.split.sample_coupling import row_split
from ravnest.split.splitter import PreparedModel
from ravnest.split.written_state import written_weights
from ravnest.types import StateForm

_FLOPS_PER_BYTE = 4.0
"""Operations that a machine computes in the time of moving one byte. Most layers except matrix products
are bound by memory, and would otherwise count as free."""
_UPDATE_COPIES = 2.0
"""Temporaries of AdamW, as a multiple of one parameter: it updates parameters one by one. With
``foreach=True`` it would need them for all parameters at once; torch does not enable that on CPUs."""
_BACKWARD = 2.0
"""Cost of backward relative to forward: it computes a gradient for the input and one for the weight."""


def profile_model(
    prepared: PreparedModel, *, optimizer_factor: float = 2.0, splits: bool = True
) -> ModelProfile:
    """Return the costs of the units of a prepared model, at the batch size of its example.

    Without ``splits`` the profile does not say whether batches can be split, and nothing runs.
    """
    layout, measurement = prepared.layouts["train"], prepared.measurements["train"]
    bounds = [0, *layout.legal, len(layout.operations)]
    forward = crossing_bytes(layout, measurement)
    backward = _gradient_bytes(layout, measurement)
    held = _held_bytes(layout, measurement)
    sent = _sent_bytes(layout, measurement)
    trained = _parameter_gradients(prepared, layout)
    work = _work(measurement)
    deferred = _deferred_bytes(prepared, layout, measurement)
    nothing = np.zeros_like(trained)
    units = []
    for index, (begin, end) in enumerate(pairwise(bounds)):
        costs = measurement.costs[begin:end]
        last = index == len(bounds) - 2
        units.append(
            UnitCost(
                work=float(work[begin:end].sum()),
                activation_bytes=sum(cost.saved_bytes for cost in costs),
                workspace_bytes=_workspace(costs, forward[begin:], backward[begin:], trained[begin:]),
                crossing_bytes=0 if last else int(forward[end]),
                gradient_bytes=0 if last else int(backward[end]),
                held_bytes=0 if last else int(held[end]),
                sent_bytes=0 if last else int(sent[end]),
                passing_bytes=_workspace(costs, forward[begin:], backward[begin:], nothing[begin:]),
                deferred_bytes=int(deferred[begin:end].sum()),
                fixed_bytes=max((cost.fixed_bytes for cost in costs), default=0),
            )
        )
    example = prepared.capture.example
    split = row_split(prepared) if splits else None
    written = written_weights(prepared.cut(()).stages[0].spec)
    found = ModelProfile(
        units=tuple(units),
        state=_state(prepared, layout, bounds),
        batch_size=example.batch_size or 1,
        input_bytes=int(held[0]),
        example_bytes=int(forward[0]),
        loss_bytes=_loss_bytes(layout, measurement),
        chunkable=_chunkable_head(prepared, bounds),
        optimizer_bytes_per_parameter_byte=optimizer_factor,
        update_copies=_UPDATE_COPIES,
        late_reason=f"forward writes to the weight {written[0]}" if written else "",
        row_cuts=_row_cuts(prepared),
    )
    if split is None:
        return found
    smallest, reason = (split.smallest, "") if split.allowed else (None, split.reason)
    return replace(found, smallest_rows=smallest, unsplit_reason=reason)


def _row_cuts(prepared: PreparedModel) -> tuple[RowCut, ...]:
    """Return the tensors that are cut along their rows, without the biases that are cut with them."""
    found: dict[str, RowCut] = {}
    for entry in prepared.capture.state.tensors.values():
        if entry.rows is not None and entry.tensor.dim() > 1:
            name = entry.model_names[0]
            before = found.get(name, RowCut(name, 0, 0))
            found[name] = RowCut(name, before.bytes + entry.tensor.nbytes, before.blocks + 1)
    return tuple(found.values())


def _loss_bytes(layout: CutLayout, measurement: Measurement) -> int:
    """Return the peak of the loss, besides the activations of the model.

    A model that computes its own loss, an output with one element, has one tensor of them among its
    activations.
    """
    outputs = [n for n in layout.spans if any(user.op == "output" for user in n.users)]
    end = len(layout.operations)
    trained = [n for n in outputs if measurement.carries_gradient(n, end)]
    own = any(_elements(node) == 1 for node in trained)
    size = sum(measurement.value_bytes.get(node, 0) for node in trained if _elements(node) != 1)
    return size * (LOSS_COPIES - 1 if own else LOSS_COPIES)


def _elements(node: torch.fx.Node) -> Any:
    return node.meta["val"].numel()


def _chunkable_head(prepared: PreparedModel, bounds: Sequence[int]) -> ChunkableHead | None:
    """Return the last layer with the costs of its unit without the logits; None if there is none."""
    layout, measurement = prepared.layouts["train"], prepared.measurements["train"]
    head = match_loss_head(prepared.cut(()).stages[0].spec.graphs["train"])
    if isinstance(head, str):
        return None
    (position,) = (k for k, node in enumerate(layout.operations) if node.name == head.name)
    shape = layout.operations[position].meta["val"].shape
    if len(shape) < 3 or not isinstance(shape[1], int) or not measurement.costs[position].differentiated:
        return None
    unit = bisect_right(bounds, position) - 1
    begin = bounds[unit]
    costs = measurement.costs[begin:position]
    forward = crossing_bytes(layout, measurement)[begin:]
    backward, trained = _gradient_bytes(layout, measurement), _parameter_gradients(prepared, layout)
    gradient, parameters = int(backward[position]), int(trained[position])
    nothing = np.zeros_like(trained)
    workspace = _workspace(costs, forward, backward[begin:], trained[begin:])
    passing = _workspace(costs, forward, backward[begin:], nothing[begin:])
    return ChunkableHead(
        unit=unit,
        positions=shape[1],
        logits_bytes=measurement.value_bytes[layout.operations[position]],
        gradient_bytes=gradient,
        parameter_bytes=parameters,
        activation_bytes=sum(cost.saved_bytes for cost in measurement.costs[begin : position + 1]),
        workspace_bytes=max(workspace, gradient) + parameters,
        passing_bytes=max(passing, gradient),
        deferred_bytes=int(_deferred_bytes(prepared, layout, measurement)[begin:position].sum()),
    )


def unit_names(prepared: PreparedModel) -> list[str]:
    """Return the name of the user's module that each unit belongs to, for display.

    Operations outside any module count to the module before them.
    """
    layout = prepared.layouts["train"]
    named = [_module_of(node) for node in layout.operations]
    current = next((name for name in named if name), "forward")
    names = []
    for begin, end in pairwise([0, *layout.legal, len(layout.operations)]):
        current = next((name for name in named[begin:end] if name), current)
        names.append(current)
    return names


@dataclass(frozen=True)
class KeptState:
    """Memory of what is kept for updates besides parameters and gradients."""

    factor: float
    """Bytes per byte of parameter, as in ``ModelProfile.optimizer_bytes_per_parameter_byte``."""
    update_copies: float
    """Temporaries of an update, as a multiple of the largest parameter: packed state is unpacked."""

    def applied(self, profile: ModelProfile) -> ModelProfile:
        """Return the profile with these costs."""
        return replace(
            profile,
            optimizer_bytes_per_parameter_byte=self.factor,
            update_copies=self.update_copies,
        )


def optimizer_state_factor(
    optimizer: type[torch.optim.Optimizer] | None, params: Mapping[str, Any] | None = None
) -> float:
    """Return the bytes of optimizer state per byte of parameter, measured by one step on a small tensor.

    Without an optimizer, AdamW is assumed.
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


def kept_state(
    factor: float, parameters: Iterable[torch.nn.Parameter], form: StateForm, *, ema: bool = False
) -> KeptState:
    """Return the state that is kept of an optimizer with ``factor`` bytes per byte of parameter.

    ``ema``: a moving average of the parameters is kept as well.
    """
    if form == "float32":
        return KeptState(factor + ema, _UPDATE_COPIES)
    trained = [p for p in parameters if p.requires_grad]
    large = [p for p in trained if p.numel() >= PACKED_LEAST and p.dtype == torch.float32]
    share = sum(p.nbytes for p in large) / max(sum(p.nbytes for p in trained), 1)
    packed = 1 - share + share * (1 + 4 / PACKED_BLOCK) / 4
    return KeptState(factor * packed + ema, _UPDATE_COPIES + factor)


def _work(measurement: Measurement) -> np.ndarray:
    """Return the work of each operation, forward and backward, in proportion to times if measured."""
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
    """Return the work of forward and backward as a multiple of forward.

    Half of the backward pass of a layer computes the gradients of its weights, unless they are frozen.
    """
    if not cost.differentiated:
        return 1.0
    return 1 + (_BACKWARD / 2 if cost.frozen else _BACKWARD)


def _workspace(
    costs: Sequence[OperationCost], forward: np.ndarray, backward: np.ndarray, trained: np.ndarray
) -> int:
    """Return the peak memory of a unit's backward pass, besides its activations.

    Backward goes from the last operation to the first. At each operation memory holds what autograd
    saves for the earlier operations, the gradients of activations, the gradients of the parameters used
    from there on, and temporaries. The arrays start at the unit's first operation.
    """
    freed = made = peak = 0
    for index in reversed(range(len(costs))):
        cost = costs[index]
        new = int(trained[index])
        made += new
        if cost.differentiated:
            passing = int(backward[index + 1]) + cost.gradient_bytes + cost.scratch_bytes
            if new:
                passing += max(cost.fixed_bytes - new, 0)
            peak = max(peak, passing + made - freed)
        else:
            peak = max(peak, int(forward[index]) + cost.output_bytes + cost.scratch_bytes)
        freed += cost.saved_bytes
    return peak


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
    """Return True if clusters average the tensor: trained parameters and floating-point statistics."""
    changes = entry.kind == "buffer" or entry.tensor.requires_grad
    return entry.persistent and changes and entry.tensor.is_floating_point()


def _parameter_gradients(prepared: PreparedModel, layout: CutLayout) -> np.ndarray:
    """Return the bytes of parameter gradients that each operation's backward creates (at last use)."""
    found = np.zeros(len(layout.operations), dtype=np.int64)
    last = {key: position for position, keys in enumerate(state_keys(layout)) for key in keys}
    for key, position in last.items():
        entry = prepared.capture.state.tensors[key]
        if entry.kind == "parameter" and entry.tensor.requires_grad:
            found[position] += entry.tensor.numel() * entry.tensor.element_size()
    return found


_COPIES = DEFERRED_COPIES | {torch.ops.aten.lstm.input: DEFERRED_LSTM_COPIES}
"""Memory of the deferred weight gradients of recurrent layers, as a multiple of their output."""


def _deferred_bytes(prepared: PreparedModel, layout: CutLayout, measurement: Measurement) -> np.ndarray:
    """Return the bytes that each operation keeps until its weight gradients are computed.

    These are its input and the gradient of its output; for a recurrent layer, those of its steps. An
    input of several operations counts once.
    """
    found = np.zeros(len(layout.operations), dtype=np.int64)
    roots = find_aliases(layout.capture.graph).root
    trained = {
        name
        for name, key in layout.capture.state_of.items()
        if prepared.capture.state.tensors[key].tensor.requires_grad
    }
    trained |= {
        n.name for n in layout.capture.graph.nodes if is_state_cast(n) and str(n.args[0]) in trained
    }
    seen: set[torch.fx.Node] = set()
    for position, node in enumerate(layout.operations):
        x = deferrable_input(node, trained) or deferrable_lstm_input(node, trained)
        if x is None or not measurement.costs[position].differentiated:
            continue
        copies = _COPIES.get(node.target, 1)  # type: ignore[call-overload]
        found[position] += copies * measurement.value_bytes.get(node, 0)
        if (root := roots.get(x, x)) not in seen:
            seen.add(root)
            found[position] += measurement.value_bytes.get(x, 0)
    return found


def _held_bytes(layout: CutLayout, measurement: Measurement) -> np.ndarray:
    """Return the bytes that cross each cut and are not activations of an operation behind it.

    A value that autograd saves first behind the cut counts as an activation there, unless an operation
    behind the cut writes to it: then the stage has the value and a copy.
    """
    steps = np.zeros(len(layout.operations) + 2)
    aliases = find_aliases(layout.capture.graph)
    written = {root: layout.position[writer] for writer, root in aliases.writes}
    for node, (first, last) in layout.spans.items():
        copied = min(written.get(aliases.root[node], -1), last)
        kept = max(measurement.kept_from.get(node, -1), copied) + 1
        size = measurement.value_bytes.get(node, 0)
        for begin, end in ((first, copied), (max(first, kept), last)):
            if begin <= end:
                steps[begin] += size
                steps[end + 1] -= size
    return np.cumsum(steps)[:-1]


def _sent_bytes(layout: CutLayout, measurement: Measurement) -> np.ndarray:
    """Return the bytes that cross each cut and are not activations of an operation in front of it."""
    steps = np.zeros(len(layout.operations) + 2)
    for node, (first, last) in layout.spans.items():
        end = min(last, measurement.kept_from.get(node, last))
        if first <= end:
            size = measurement.value_bytes.get(node, 0)
            steps[first] += size
            steps[end + 1] -= size
    return np.cumsum(steps)[:-1]


def _gradient_bytes(layout: CutLayout, measurement: Measurement) -> np.ndarray:
    """Return the bytes that cross each cut in backward."""
    steps = np.zeros(len(layout.operations) + 2)
    for node, (first, last) in layout.spans.items():
        begin = max(first, measurement.gradient_from.get(node, last + 1))
        if begin <= last:
            size = measurement.value_bytes.get(node, 0)
            steps[begin] += size
            steps[last + 1] -= size
    return np.cumsum(steps)[:-1]


def _module_of(node: torch.fx.Node) -> str:
    """Return the path of the innermost module in which an operation was traced."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values()]
    return paths[-1].removeprefix("model").removeprefix(".") if paths else ""
