"""What each operation of a graph costs, found by running the graph once.

The run uses fake tensors, which compute shapes and autograd graphs but no numbers, or real ones: for
graphs whose shapes depend on data, and where measured times are wanted.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ravnest.split.aliases import find_aliases
from ravnest.split.capture import Capture, ModeCapture
from ravnest.split.cuts import CutLayout
from ravnest.split.normalise import NO_GRAD
from ravnest.split.recurrent import STATES

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Recurrent:
    gates: int
    kept: int
    scratch: int


_RECURRENT = {
    "lstm": _Recurrent(gates=4, kept=6, scratch=15),
    "gru": _Recurrent(gates=3, kept=8, scratch=3),
    "rnn_tanh": _Recurrent(gates=1, kept=2, scratch=1),
    "rnn_relu": _Recurrent(gates=1, kept=2, scratch=1),
}


@dataclass
class OperationCost:
    """Cost of one operation's forward at the example's batch size."""

    flops: int = 0
    saved_bytes: int = 0
    """Kept by autograd for backward, each storage counted where it is first kept."""
    output_bytes: int = 0
    """New memory that the operation makes; 0 for views."""
    input_bytes: int = 0
    gradient_bytes: int = 0
    """New memory that backward makes for the gradients of its inputs, parameters aside."""
    scratch_bytes: int = 0
    """Copies that its kernels make for themselves."""
    differentiated: bool = False
    """A gradient flows through it."""
    seconds: float = 0.0
    """Measured, with real tensors only."""


@dataclass
class Measurement:
    """Costs of all operations, and what is known of each value."""

    costs: tuple[OperationCost, ...]
    measured: bool = False
    """The run computed with real tensors, so that the times mean something."""
    value_bytes: dict[fx.Node, int] = field(default_factory=dict)
    gradient_from: dict[fx.Node, int] = field(default_factory=dict)
    """Cut from which on a value carries a gradient; absent where it never does."""
    kept_from: dict[fx.Node, int] = field(default_factory=dict)
    """Position of the operation that is the first to keep a value for backward; absent if none is."""

    def carries_gradient(self, node: fx.Node, cut: int) -> bool:
        """Whether a gradient flows back along ``node`` where it crosses ``cut``."""
        return node in self.gradient_from and self.gradient_from[node] <= cut


def measure(capture: Capture, layout: CutLayout, *, real: bool = False) -> Measurement:
    """Run a graph once. Falls back to real tensors where the shapes depend on data."""
    if not real:
        try:
            return _Run(capture, layout, fake=True).measure()
        except Exception as error:  # the run meets every operator there is; each fails in its own way
            logger.info("costs are measured with a real run: %s", error)
    return _Run(capture, layout, fake=False).measure()


class _Run:
    def __init__(self, capture: Capture, layout: CutLayout, *, fake: bool) -> None:
        self._capture = capture
        self._layout = layout
        self._mode: ModeCapture = layout.capture
        self._fake = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
        self._values: dict[fx.Node, Any] = {}
        self._costs = [OperationCost() for _ in layout.operations]
        self._current: OperationCost | None = None
        self._position: int | None = None
        self._kept_from: dict[int, int] = {}
        self._counted: set[int] = set()
        self._kept: list[Any] = []
        self._views = {n for n, root in find_aliases(self._mode.graph).root.items() if n is not root}

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
        result = Measurement(tuple(self._costs), measured=self._fake is None)
        writers: dict[fx.Node, list[fx.Node]] = {}
        aliases = find_aliases(self._mode.graph)
        for writer, root in aliases.writes:
            writers.setdefault(writer, []).extend(aliases.sharing(root))
        for node in self._mode.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = self._placeholder(node)
                result.value_bytes[node] = _bytes(self._values[node])
            elif node.op == "call_function":
                position = self._layout.position.get(node)
                self._call(node, position, flops)
                result.value_bytes[node] = _bytes(self._values[node])
                if position is not None:
                    for value in (node, *writers.get(node, ())):
                        self._note_gradient(value, position, result)
        for node, value in self._values.items():
            for tensor in _tensors(value):
                if _storage(tensor) in self._kept_from:
                    result.kept_from[node] = self._kept_from[_storage(tensor)]
        return result

    def _placeholder(self, node: fx.Node) -> Any:
        key = self._mode.state_of.get(node.name)
        if key is None:
            return self._own(self._capture.example.tensors[self._mode.inputs[node.name]])
        entry = self._capture.state.tensors[key]
        value = self._own(entry.tensor.detach()).requires_grad_(entry.tensor.requires_grad)
        self._counted.add(_storage(value))
        self._kept.append(value)
        return value

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if self._fake is None else self._fake.from_tensor(tensor)

    def _call(self, node: fx.Node, position: int | None, flops: Callable[[], int]) -> None:
        args = fx.map_arg(node.args, self._values.__getitem__)
        kwargs = fx.map_arg(node.kwargs, self._values.__getitem__)
        cost = self._current = OperationCost() if position is None else self._costs[position]
        self._position = position
        before, start = flops(), time.perf_counter()
        with torch.no_grad() if node.meta.get(NO_GRAD) else contextlib.nullcontext():
            value = self._values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        cost.seconds = time.perf_counter() - start
        cost.flops = flops() - before
        if node not in self._views:
            cost.output_bytes = _bytes(value)
            cost.input_bytes = sum(_bytes(v) for v in pytree.tree_leaves((args, kwargs)))
        cost.differentiated = any(t.requires_grad for t in _tensors(value))
        if cost.differentiated:
            cost.gradient_bytes = self._gradient_bytes(node)
        if "conv" in str(node.target):
            cost.scratch_bytes = cost.input_bytes + cost.output_bytes  # copies in oneDNN's layout
        if node.target in STATES:
            _add_recurrent_cost(node, args, cost)

    def _gradient_bytes(self, node: fx.Node) -> int:
        """Gradients of the inputs. A view's is a view of its output's, unless it is a part only."""
        outputs = list(_tensors(self._values[node]))
        schema = getattr(node.target, "_schema", None)
        is_view = node in self._views and not (schema is not None and schema.is_mutable)
        total = 0
        for source in node.all_input_nodes:
            if source.name not in self._mode.state_of:
                for tensor in _tensors(self._values[source]):
                    whole = is_view and tensor.numel() == sum(o.numel() for o in outputs)
                    if tensor.requires_grad and not whole:
                        total += tensor.numel() * tensor.element_size()
        return total

    def _note_gradient(self, value: fx.Node, position: int, result: Measurement) -> None:
        tensor = self._values.get(value)
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            result.gradient_from.setdefault(value, position + 1)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        if storage not in self._counted:
            self._counted.add(storage)
            self._kept.append(tensor)
            if self._current is not None:
                self._current.saved_bytes += tensor.untyped_storage().nbytes()
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


def _add_recurrent_cost(node: fx.Node, args: Any, cost: OperationCost) -> None:
    """The fused CPU kernels hide their matrix products and what they keep: use the formula.

    What is kept was measured, in hidden sizes a step. oneDNN's LSTM reserves more, which it touches
    in backward only.
    """
    x, weights = args[0], args[2]
    steps = x.shape[0] * x.shape[1]
    matrices = [weight for weight in weights if weight.dim() == 2]
    kind = _RECURRENT[str(node.target._schema.name).partition("::")[2]]  # type: ignore[union-attr]
    flops = 2 * steps * sum(matrix.numel() for matrix in matrices)
    cost.flops = max(cost.flops, flops)
    if cost.differentiated:
        hidden = sum(matrix.shape[0] for matrix in matrices) // (2 * kind.gates)
        kept = steps * (kind.kept * hidden + x.shape[-1]) * x.element_size()
        cost.saved_bytes = max(cost.saved_bytes, kept)
        cost.scratch_bytes = steps * kind.scratch * max(hidden, x.shape[-1]) * x.element_size()
