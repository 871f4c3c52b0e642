"""Casts of autocast as operations of a graph.

``torch.export`` traces above autocast: the types of results are those of mixed precision, and the casts
of arguments are missing. This pass adds them, so that stages compute the same on every machine without
autocast. It observes which arguments autocast casts by calling each operator on fake tensors.

Autocast casts a trained weight once per forward pass and an activation for each use, which decides where
gradients are rounded. The casts here do the same. The cast of a weight belongs to no position in the
graph: each stage that needs it repeats it, so that it never crosses a cut.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ravnest.errors import CaptureError
from ravnest.split.aliases import find_aliases
from ravnest.split.graph import Operation, Ref, StageGraph, StageSpec
from ravnest.split.source import line_of_trace_text

aten = torch.ops.aten
CAST = aten._to_copy.default
_CAST_NAME = "aten::_to_copy.default"
NO_AUTOCAST = "ravnest_no_autocast"
"""Key in a node's meta that marks operations in a block that switches autocast off."""
_STATE_CAST = "ravnest_state_cast"
_NO_GRAD = "ravnest_no_grad"
_CONTEXT = ("stack_trace", "nn_module_stack", _NO_GRAD)
_RECURRENT = frozenset(
    getattr(aten, f"{kind}{suffix}")
    for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for suffix in ("", "_cell")
)
"""Operators that compute in float32; see ``precision``."""
_AFFECTED = (torch.float32, torch.bfloat16, torch.float16)


def is_state_cast(node: fx.Node) -> bool:
    """Return True for the cast of a parameter or buffer, which any stage can repeat."""
    return bool(node.meta.get(_STATE_CAST))


def cast_keys(graph: StageGraph) -> dict[str, str]:
    """Return the state keys of which a graph makes casts to bfloat16, by the names of the casts."""
    keys = {use.name: use.key for use in graph.state}
    found = {operation.name: _cast_source(operation) for operation in graph.operations}
    return {name: keys[source] for name, source in found.items() if source in keys}


def _cast_source(operation: Operation) -> str:
    """Return the name of the value that an operation casts to bfloat16; "" for other operations."""
    if operation.target != _CAST_NAME or operation.kwargs != (("dtype", torch.bfloat16),):
        return ""
    (source,) = operation.args
    return source.name if isinstance(source, Ref) and not operation.no_grad else ""


def keys_cast_apart(stages: Sequence[StageSpec]) -> set[str]:
    """Return the keys of weights that more than one stage casts in training."""
    uses = Counter(key for spec in stages for key in set(cast_keys(spec.graphs["train"]).values()))
    return {key for key, count in uses.items() if count > 1}


def add_casts(graph: fx.Graph, state: Sequence[str]) -> None:
    """Add the casts of a graph that was traced under autocast, in place.

    ``state`` are the names of the placeholders of parameters and buffers. Raises ``CaptureError`` for an
    operation of which the casts cannot be represented.
    """
    written = find_aliases(graph).written()
    names = set(state)
    fixed = {n for n in graph.nodes if n.op == "placeholder" and n.name in names and n not in written}
    writer = _CastWriter(graph, fixed)
    for node in list(graph.nodes):
        if node.meta.get(NO_AUTOCAST) or not _is_affected(node):
            continue
        casts = _observed_casts(node)
        _check(node, casts)
        writer.write(node, casts)


def _is_affected(node: fx.Node) -> bool:
    """Return True for an operation that autocast may change: itself, or operators that it calls."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if target.overloadpacket in _RECURRENT:
        return False
    if not any(_is_float(source) for source in node.all_input_nodes):
        return False
    if _has_kernel(target, "AutocastCPU"):
        return True
    views = any(result.alias_info is not None for result in target._schema.returns)
    return not views and _has_kernel(target, "CompositeImplicitAutograd")


def _has_kernel(target: torch._ops.OpOverload, key: str) -> bool:
    name: str = target.name()  # type: ignore[no-untyped-call]
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in _AFFECTED


class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that notes the casts that come before everything else, and those that come later."""

    def __init__(self, arguments: dict[int, fx.Node]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arguments = arguments
        self._begun = False
        self.casts: dict[fx.Node, torch.dtype] = {}
        self.lowers = False
        """True if anything is cast to bfloat16."""

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        dtype = kwargs.get("dtype") if func is CAST else None
        if dtype in _AFFECTED and args[0].dtype in _AFFECTED:
            self.lowers |= dtype is torch.bfloat16
            source = self._arguments.get(id(args[0]))
            if source is not None and not self._begun:
                self.casts[source] = dtype
        elif func.namespace == "aten":  # others ask for properties of tensors
            self._begun = True
        return func(*args, **kwargs)


def _observed_casts(node: fx.Node) -> dict[fx.Node, torch.dtype]:
    """Return the types that autocast gives to arguments of an operation, without those it leaves."""
    observed = _observe(node, autocast=True)
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if _has_kernel(target, "AutocastCPU"):
        wanted = next(iter(observed.casts.values()), None)  # casts to other types are the operator's own
        casts = {source: dtype for source, dtype in observed.casts.items() if dtype is wanted}
        mixed = len({n.meta["val"].dtype for n in node.all_input_nodes if _is_float(n)}) > 1
        own = _observe(node, autocast=False).casts if casts and not mixed else {}
        return {source: dtype for source, dtype in casts.items() if own.get(source) is not dtype}
    if not observed.lowers:
        return {}
    # An operator made of others, such as einsum, whose matrix products are cast.
    floats = (source for source in node.all_input_nodes if _is_float(source))
    return dict.fromkeys(floats, torch.bfloat16)


def _observe(node: fx.Node, *, autocast: bool) -> _Observer:
    """Call an operation on fake tensors."""
    values, mode = _values_of(node)
    observer = _Observer({id(value): source for source, value in values.items()})
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(torch.no_grad())
        if autocast:
            cast = torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
            stack.enter_context(cast)
        stack.enter_context(observer)
        _call(node, values)
    return observer


def _values_of(node: fx.Node) -> tuple[dict[fx.Node, torch.Tensor], Any]:
    """Return a tensor of its own for each tensor that an operation reads, and the mode of all."""
    tensors = {n: n.meta["val"] for n in node.all_input_nodes}
    tensors = {n: value for n, value in tensors.items() if isinstance(value, torch.Tensor)}
    mode = detect_fake_mode(list(tensors.values()))
    assert mode is not None
    with mode, torch.no_grad():
        return {n: value.detach() for n, value in tensors.items()}, mode


def _call(node: fx.Node, values: dict[fx.Node, torch.Tensor]) -> Any:
    def value_of(source: fx.Node) -> Any:
        return values[source] if source in values else source.meta["val"]

    args, kwargs = fx.map_arg(node.args, value_of), fx.map_arg(node.kwargs, value_of)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _check(node: fx.Node, casts: dict[fx.Node, torch.dtype]) -> None:
    """Raise ``CaptureError`` if the operation has results of other types without autocast."""
    values, mode = _values_of(node)
    with mode, enable_python_dispatcher(), torch.no_grad():
        values |= {source: values[source].to(dtype) for source, dtype in casts.items()}
        found = _call(node, values)
    if list(_types(found)) != list(_types(node.meta["val"])):
        line = line_of_trace_text(node.meta.get("stack_trace"))
        raise CaptureError(
            f'{line}\nprecision="bf16" does not cover {node.target}: autocast computes a part of it in '
            "bfloat16. Compute it in float32: put torch.autocast('cpu', enabled=False) around the line "
            "and call .float() on its inputs"
        )


def _types(value: Any) -> Iterator[torch.dtype]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf.dtype


class _CastWriter:
    """Adds casts to a graph: one for all uses of a weight, else one for each use."""

    def __init__(self, graph: fx.Graph, fixed: set[fx.Node]) -> None:
        self._graph = graph
        self._fixed = fixed
        """Parameters and buffers that forward does not write to."""
        self._of_state: dict[tuple[fx.Node, torch.dtype, bool], fx.Node] = {}

    def write(self, node: fx.Node, casts: dict[fx.Node, torch.dtype]) -> None:
        """Let an operation read its arguments in these types."""

        def cast(source: fx.Node) -> fx.Node:
            return self._cast(node, source, casts[source]) if source in casts else source

        with self._graph.inserting_before(node):
            node.args = fx.map_arg(node.args, cast)
            node.kwargs = fx.map_arg(node.kwargs, cast)

    def _cast(self, user: fx.Node, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        shared = (source, dtype, bool(user.meta.get(_NO_GRAD)))
        if shared in self._of_state:
            return self._of_state[shared]
        name = f"{source.name}_{str(dtype).removeprefix('torch.')}"
        new = self._graph.create_node("call_function", CAST, (source,), {"dtype": dtype}, name)
        new.meta = {key: user.meta[key] for key in _CONTEXT if key in user.meta}
        value = source.meta["val"]
        with value.fake_mode, torch.no_grad():
            new.meta["val"] = value.to(dtype)
        if source in self._fixed:
            new.meta[_STATE_CAST] = True
            self._of_state[shared] = new
        return new
