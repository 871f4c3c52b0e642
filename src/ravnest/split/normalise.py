"""Rewrite a captured graph so that it can be cut and computes the same in every stage.

Each pass is small. It keeps the results, the order of random numbers and the kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from ravnest.errors import CaptureError
from ravnest.split.aliases import find_aliases
from ravnest.split.capture import ModeCapture
from ravnest.split.casts import NO_AUTOCAST, add_casts
from ravnest.split.recurrent import expand_recurrent_layers
from ravnest.split.source import line_of_trace_text

aten = torch.ops.aten
NO_GRAD = "ravnest_no_grad"
"""Key in a node's meta that marks operations under ``torch.no_grad()``."""

_ASSERTIONS = {
    "_assert_async",
    "_assert_scalar",
    "_assert_tensor_metadata",
    "_functional_assert_scalar",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
}


def normalise(capture: ModeCapture) -> None:
    """Rewrite ``capture.graph`` in place."""
    graph = capture.graph
    while _inline_regions(graph, capture.program.graph_module):
        pass
    _drop_assertions(graph)
    _copy_instead_of_out(graph)
    if capture.autocast:
        add_casts(graph, list(capture.state_of))
    expand_recurrent_layers(graph)
    _settle_buffer_writes(graph, capture)
    _own_written_inputs(graph, capture)
    _follow_in_place(graph, capture)
    _reshape_instead_of_view(graph)
    _gather_items(graph)
    _drop_unused(graph)
    graph.lint()


def is_size(node: fx.Node) -> bool:
    """Return True for a number that is computed from sizes only, which any stage can recompute."""
    if node.op != "call_function":
        return False
    if not isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float):
        return False
    if node.target in (aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return False
    return all(is_size(argument) for argument in node.all_input_nodes)


def _inline_regions(graph: fx.Graph, owner: torch.nn.Module) -> bool:
    """Inline ``no_grad`` and disabled ``autocast`` blocks; raise ``CaptureError`` for other regions."""
    changed = False
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        marks: dict[str, bool] = {}
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            enabled, body, *arguments = node.args
            marks = {} if enabled else {NO_GRAD: True}
        elif node.target is torch.ops.higher_order.wrap_with_autocast:
            _, _, enabled, _, body, *arguments = node.args
            if enabled:
                raise CaptureError(
                    f"{_line_of_body(owner, body)}\nautocast inside forward cannot be captured: "
                    "its casts depend on the machine. Remove the autocast block; choose the precision "
                    'of the whole model instead: precision="bf16" computes like autocast around all of '
                    "forward, model.to(torch.bfloat16) has weights in bfloat16 too"
                )
            marks = {NO_AUTOCAST: True}
        else:
            raise CaptureError(
                f"{line_of_trace_text(node.meta.get('stack_trace'))}\n{node.target} is a control-flow "
                "region, which stages cannot represent: use torch.where or plain Python"
            )
        _inline(graph, node, _body(owner, body), arguments, marks)
        changed = True
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return changed


def _body(owner: torch.nn.Module, reference: Any) -> fx.GraphModule:
    body = owner.get_submodule(reference.target)
    assert isinstance(body, fx.GraphModule)
    return body


def _line_of_body(owner: torch.nn.Module, reference: Any) -> str:
    lines = (line_of_trace_text(n.meta.get("stack_trace")) for n in _body(owner, reference).graph.nodes)
    return next((line for line in lines if line), "")


def _inline(
    graph: fx.Graph,
    call: fx.Node,
    body: fx.GraphModule,
    arguments: list[Any],
    marks: dict[str, bool],
) -> None:
    """Replace the call of a region by its operations; ``marks`` are added to their meta."""
    values: dict[fx.Node, Any] = {}
    given = iter(arguments)
    results: Any = ()
    with graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "output":
                results = fx.map_arg(node.args[0], lambda n: values[n])
            else:
                copy = graph.node_copy(node, lambda n: values[n])
                copy.meta |= marks
                if node.op == "get_attr":
                    copy.target = _nested_target(call, node)
                values[node] = copy
    if isinstance(results, fx.Node):
        call.replace_all_uses_with(results)
    else:
        for user in list(call.users):
            assert user.target is operator.getitem
            index = user.args[1]
            assert isinstance(index, int)
            user.replace_all_uses_with(results[index])
            graph.erase_node(user)
    graph.erase_node(call)


def _nested_target(call: fx.Node, node: fx.Node) -> str:
    """Return the path of a nested region's body, below the outer region's body."""
    outer = next(a for a in call.args if isinstance(a, fx.Node) and a.op == "get_attr")
    return f"{outer.target}.{node.target}"


def _drop_assertions(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if isinstance(node.target, torch._ops.OpOverload):
            base = node.target._schema.name.partition("::")[2]
            if base in _ASSERTIONS:
                graph.erase_node(node)


def _copy_instead_of_out(graph: fx.Graph) -> None:
    """Replace ``torch.div(a, b, out=c)`` by ``c.copy_(a / b)``, because ``out`` may be resized."""
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or "out" not in node.kwargs:
            continue
        plain = _without_out(node.target)
        if plain is None:
            continue
        kwargs = {name: value for name, value in node.kwargs.items() if name != "out"}
        with graph.inserting_before(node):
            result = graph.call_function(plain, node.args, kwargs)
            written = graph.call_function(aten.copy_.default, (node.kwargs["out"], result))
        result.meta, written.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(written)
        graph.erase_node(node)


def _without_out(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the overload of the same operator that returns its result instead of writing it."""

    def takes(overload: torch._ops.OpOverload) -> list[tuple[str, str]]:
        arguments = overload._schema.arguments
        return [(a.name, str(a.type)) for a in arguments if not a.is_out]

    packet = target.overloadpacket
    overloads = (getattr(packet, name) for name in packet.overloads())
    fitting = (o for o in overloads if not o._schema.is_mutable and takes(o) == takes(target))
    return next(fitting, None)


def _settle_buffer_writes(graph: fx.Graph, capture: ModeCapture) -> None:
    """Move each write of a reassigned buffer to the earliest legal position.

    Export appends these writes to the end of the graph, which would keep every such buffer in the last
    stage. A buffer can be written once its new value exists and its old one is no longer read.
    """
    for node in list(graph.nodes):
        if node.target is not aten.copy_.default or node.users:
            continue
        target, source = node.args[0], node.args[1]
        if isinstance(source, fx.Node) and source.target is aten.detach.default:
            source.all_input_nodes[0].append(source)
        if not isinstance(target, fx.Node) or target.name not in capture.state_of:
            continue
        aliases = find_aliases(graph)
        if isinstance(source, fx.Node) and aliases.root[source] is target:
            graph.erase_node(node)
            continue
        if capture.state_of[target.name] in capture.reassigned:
            _read_copy(graph, target, node)
            aliases = find_aliases(graph)
        sharing = set(aliases.sharing(target))
        order = {n: position for position, n in enumerate(graph.nodes)}
        waits = [n for n in graph.nodes if sharing & set(n.all_input_nodes) and n is not node]
        waits += [source] if isinstance(source, fx.Node) else []
        if waits:
            max(waits, key=order.__getitem__).append(node)


def _read_copy(graph: fx.Graph, buffer: fx.Node, write: fx.Node) -> None:
    """Let operations read a copy of a buffer that is written later.

    The model replaces the buffer, so that what autograd has saved of the old one stays as it is.
    """
    readers = {user for user in buffer.users if user is not write}
    first = next((node for node in graph.nodes if node in readers), None)
    if first is None:
        return
    with graph.inserting_before(first):
        copy = graph.call_function(aten.clone.default, (buffer,))
    copy.meta = {name: value for name, value in buffer.meta.items() if name != "stack_trace"}
    for reader in readers:
        reader.replace_input_with(buffer, copy)


def _own_written_inputs(graph: fx.Graph, capture: ModeCapture) -> None:
    """Copy inputs that the model writes to, so that the caller's tensor does not change."""
    for root in find_aliases(graph).written():
        if root.op != "placeholder" or root.name not in capture.inputs:
            continue
        with graph.inserting_before(_first_call(graph)):
            copy = graph.call_function(aten.clone.default, (root,))
        copy.meta = dict(root.meta)
        for user in list(root.users):
            if user is not copy:
                user.replace_input_with(root, copy)


def _follow_in_place(graph: fx.Graph, capture: ModeCapture) -> None:
    """Replace later uses of x after ``y = x.relu_()`` by y, so that one name crosses a cut."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if not _returns_first_argument(node):
            continue
        first = node.args[0]
        if isinstance(first, fx.Node) and first.name not in capture.state_of:
            for user in list(first.users):
                if order[user] > order[node]:
                    user.replace_input_with(first, node)


def _returns_first_argument(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args:
        return False
    schema = node.target._schema
    if len(schema.returns) != 1:
        return False
    given, returned = schema.arguments[0].alias_info, schema.returns[0].alias_info
    return given is not None and returned is not None and given.is_write and returned.is_write


def _first_call(graph: fx.Graph) -> fx.Node:
    nodes: Iterable[fx.Node] = graph.nodes
    return next(node for node in nodes if node.op not in ("placeholder", "get_attr"))


def _reshape_instead_of_view(graph: fx.Graph) -> None:
    """Replace views by reshapes, except of memory that is written, which must stay shared.

    Export drops ``.contiguous()`` if the strides of fake tensors make it redundant. A view of a tensor
    that came over the wire or from another kernel may then fail. A reshape does not fail, and is the
    same where a view works.
    """
    aliases = find_aliases(graph)
    written = aliases.written()
    for node in graph.nodes:
        if node.target is aten.view.default and aliases.root[node] not in written:
            node.target = aten.reshape.default


def _gather_items(graph: fx.Graph) -> None:
    """Unpack the results of a multi-output operation right after it, so that cuts are legal."""
    for producer in list(graph.nodes):
        last = producer
        for item in list(producer.users):
            if item.target is operator.getitem and item.args[0] is producer:
                if last.next is not item:
                    last.append(item)
                last = item


def _drop_unused(graph: fx.Graph) -> None:
    """Remove unused operations, except those that write to memory or draw random numbers."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and _is_pure(node.target):
            graph.erase_node(node)


def _is_pure(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return True
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        return False
    return target._schema.name not in ("aten::batch_norm", "aten::instance_norm")
