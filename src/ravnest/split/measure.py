"""Measure the cost of each operation of a graph by running the graph once.

The run uses fake tensors, which have shapes and autograd graphs but no values. It uses real tensors
if shapes depend on data, or if the caller wants measured times.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ravnest.split.aliases import find_aliases
from ravnest.split.capture import Capture, ModeCapture
from ravnest.split.casts import is_state_cast
from ravnest.split.cuts import CutLayout
from ravnest.split.normalise import NO_GRAD
from ravnest.split.recurrent import STATES

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Recurrent:
    """Constants of a fused recurrent kernel."""

    gates: int
    kept: int
    """Kept for backward, as a multiple of the hidden size per step."""
    scratch: int
    """Temporary memory, as a multiple of the hidden size per step."""
    copies: float
    """Sets of the weights' size that backward has at once: new gradients, weights and gradients in the
    layout of oneDNN."""


_RECURRENT = {
    "lstm": _Recurrent(gates=4, kept=14, scratch=12, copies=3.0),
    "gru": _Recurrent(gates=3, kept=8, scratch=3, copies=1.5),
    "rnn_tanh": _Recurrent(gates=1, kept=2, scratch=1, copies=1.5),
    "rnn_relu": _Recurrent(gates=1, kept=2, scratch=1, copies=1.5),
}


@dataclass(frozen=True)
class OperationCost:
    """Cost of one operation's forward at the example's batch size."""

    flops: int = 0
    saved_bytes: int = 0
    """Memory that autograd keeps for backward; each storage counts where it is first kept."""
    output_bytes: int = 0
    """Memory that the operation allocates for its result; 0 for views."""
    input_bytes: int = 0
    gradient_bytes: int = 0
    """Memory that backward allocates for the gradients of the inputs, without parameters."""
    scratch_bytes: int = 0
    """Temporary memory of its kernels."""
    fixed_bytes: int = 0
    """Temporary memory of backward that does not depend on the batch size, new gradients of parameters
    included; 0 if it is at most that of the largest parameter."""
    differentiated: bool = False
    """True if a gradient flows through it."""
    frozen: bool = False
    """True if it has weights and trains none of them: backward computes the input's gradient only."""
    seconds: float = 0.0
    """Measured time; 0 with fake tensors."""


@dataclass(frozen=True)
class Measurement:
    """Costs of all operations, and properties of each value."""

    costs: tuple[OperationCost, ...]
    measured: bool = False
    """True if the run used real tensors, so that times are meaningful."""
    value_bytes: dict[fx.Node, int] = field(default_factory=dict)
    gradient_from: dict[fx.Node, int] = field(default_factory=dict)
    """First cut at which a value carries a gradient; absent if it never does."""
    kept_from: dict[fx.Node, int] = field(default_factory=dict)
    """Position of the first operation that keeps a value for backward; absent if there is none."""

    def carries_gradient(self, node: fx.Node, cut: int) -> bool:
        """Return True if a gradient flows back along ``node`` where it crosses ``cut``."""
        return node in self.gradient_from and self.gradient_from[node] <= cut


def measure(capture: Capture, layout: CutLayout, *, real: bool = False) -> Measurement:
    """Run a graph once. Fall back to real tensors if shapes depend on data."""
    if not real:
        try:
            return _Run(capture, layout, fake=True).measure()
        except Exception as error:  # any operator may fail under fake tensors, each with its own error
            logger.info("costs are measured with real tensors, because fake ones failed: %s", error)
    return _Run(capture, layout, fake=False).measure()


class _Run:
    """One run of a graph, operation by operation."""

    def __init__(self, capture: Capture, layout: CutLayout, *, fake: bool) -> None:
        self._capture = capture
        self._layout = layout
        self._mode: ModeCapture = layout.capture
        self._fake = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
        self._values: dict[fx.Node, Any] = {}
        self._costs = [OperationCost() for _ in layout.operations]
        self._position: int | None = None
        self._saved_bytes = 0
        """Memory that the current operation keeps for backward."""
        self._value_bytes: dict[fx.Node, int] = {}
        self._gradient_from: dict[fx.Node, int] = {}
        self._kept_from: dict[int, int] = {}
        self._counted: set[int] = set()
        self._kept: list[Any] = []
        self._views = {n for n, root in find_aliases(self._mode.graph).root.items() if n is not root}
        self._of_state: set[fx.Node] = set()
        """State, and values that are computed from state only, such as a transposed weight."""

    def measure(self) -> Measurement:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            if self._fake is not None:
                stack.enter_context(self._fake)
            hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
            stack.enter_context(hooks)
            counter = stack.enter_context(FlopCounterMode(display=False))
            return self._run(lambda: _total(counter))

    def _run(self, flops: Callable[[], int]) -> Measurement:
        writers: dict[fx.Node, list[fx.Node]] = {}
        aliases = find_aliases(self._mode.graph)
        for writer, root in aliases.writes:
            writers.setdefault(writer, []).extend(aliases.sharing(root))
        for node in self._mode.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = self._placeholder(node)
                self._value_bytes[node] = _bytes(self._values[node])
            elif node.op == "call_function":
                position = self._layout.position.get(node)
                cost = self._call(node, position, flops)
                self._value_bytes[node] = _bytes(self._values[node])
                if position is not None:
                    self._costs[position] = cost
                    for value in (node, *writers.get(node, ())):
                        self._note_gradient(value, position)
        return Measurement(
            costs=tuple(self._costs),
            measured=self._fake is None,
            value_bytes=self._value_bytes,
            gradient_from=self._gradient_from,
            kept_from={
                node: self._kept_from[_storage(tensor)]
                for node, value in self._values.items()
                for tensor in _tensors(value)
                if _storage(tensor) in self._kept_from
            },
        )

    def _placeholder(self, node: fx.Node) -> Any:
        key = self._mode.state_of.get(node.name)
        if key is None:
            return self._own(self._capture.example.tensors[self._mode.inputs[node.name]])
        self._of_state.add(node)
        entry = self._capture.state.tensors[key]
        value = self._own(entry.tensor.detach()).requires_grad_(entry.tensor.requires_grad)
        self._counted.add(_storage(value))
        self._kept.append(value)
        return value

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if self._fake is None else self._fake.from_tensor(tensor)

    def _call(self, node: fx.Node, position: int | None, flops: Callable[[], int]) -> OperationCost:
        """Compute a node's value and return its cost; ``position`` is None for sizes."""
        if node.all_input_nodes and self._of_state.issuperset(node.all_input_nodes):
            self._of_state.add(node)
        args = fx.map_arg(node.args, self._values.__getitem__)
        kwargs = fx.map_arg(node.kwargs, self._values.__getitem__)
        self._position, self._saved_bytes = position, 0
        before, start = flops(), time.perf_counter()
        with torch.no_grad() if node.meta.get(NO_GRAD) else contextlib.nullcontext():
            value = self._values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        seconds = time.perf_counter() - start
        is_view = node in self._views
        output_bytes = 0 if is_view else _bytes(value)
        input_bytes = 0 if is_view else sum(_bytes(v) for v in pytree.tree_leaves((args, kwargs)))
        differentiated = any(t.requires_grad for t in _tensors(value))
        convolution = "conv" in str(node.target)
        cost = OperationCost(
            flops=flops() - before,
            saved_bytes=self._saved_bytes,
            output_bytes=output_bytes,
            input_bytes=input_bytes,
            gradient_bytes=self._gradient_bytes(node) if differentiated else 0,
            scratch_bytes=input_bytes + output_bytes if convolution else 0,  # copies in oneDNN's layout
            differentiated=differentiated,
            frozen=differentiated and self._is_frozen(node),
            seconds=seconds,
        )
        return _with_recurrent_cost(node, args, cost) if node.target in STATES else cost

    def _is_frozen(self, node: fx.Node) -> bool:
        """Return whether an operation has matrices as weights, and trains none of them."""
        weights = [self._values[source] for source in node.all_input_nodes if source in self._of_state]
        matrices = [t for value in weights for t in _tensors(value) if t.dim() > 1]
        return bool(matrices) and not any(matrix.requires_grad for matrix in matrices)

    def _gradient_bytes(self, node: fx.Node) -> int:
        """Return the size of the input gradients.

        The gradient of a view's input is a view of the output's gradient, unless the view is partial.
        """
        outputs = list(_tensors(self._values[node]))
        schema = getattr(node.target, "_schema", None)
        is_view = node in self._views and not (schema is not None and schema.is_mutable)
        total = 0
        for source in node.all_input_nodes:
            if source.name not in self._mode.state_of and not is_state_cast(source):
                for tensor in _tensors(self._values[source]):
                    whole = is_view and tensor.numel() == sum(o.numel() for o in outputs)
                    if tensor.requires_grad and not whole:
                        total += tensor.numel() * tensor.element_size()
        return total

    def _note_gradient(self, value: fx.Node, position: int) -> None:
        tensor = self._values.get(value)
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            self._gradient_from.setdefault(value, position + 1)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        if storage not in self._counted:
            self._counted.add(storage)
            self._kept.append(tensor)
            self._saved_bytes += tensor.untyped_storage().nbytes()
            if self._position is not None:
                self._kept_from[storage] = self._position
        return tensor


def _total(counter: FlopCounterMode) -> int:
    return sum(counter.flop_counts["Global"].values())


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(value: Any) -> int:
    tensors = _tensors(value)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _with_recurrent_cost(node: fx.Node, args: Any, cost: OperationCost) -> OperationCost:
    """Return the cost of a fused recurrent kernel by formula: counters do not see inside it.

    The constants were measured, with what oneDNN reserves for its LSTM in forward and uses in backward
    only.
    """
    x, weights = args[0], args[2]
    steps = x.shape[0] * x.shape[1]
    matrices = [weight for weight in weights if weight.dim() == 2]
    kind = _RECURRENT[str(node.target._schema.name).partition("::")[2]]  # type: ignore[union-attr]
    flops = 2 * steps * sum(matrix.numel() for matrix in matrices)
    cost = replace(cost, flops=max(cost.flops, flops))
    if not cost.differentiated:
        return cost
    hidden = sum(matrix.shape[0] for matrix in matrices) // (2 * kind.gates)
    kept = steps * (kind.kept * hidden + x.shape[-1]) * x.element_size()
    scratch = steps * kind.scratch * max(hidden, x.shape[-1]) * x.element_size()
    fixed = int(kind.copies * sum(weight.numel() * weight.element_size() for weight in weights))
    saved = max(cost.saved_bytes, kept)
    return replace(cost, saved_bytes=saved, scratch_bytes=scratch, fixed_bytes=fixed)
