"""Cut large tensors of a captured model along their rows, so that several stages can hold them.

A weight that only embeddings and linear layers read is replaced by blocks of its rows, each a state
tensor of its own:

- An embedding becomes a chain: each step looks up the rows of one block and passes on the rows that
  the steps before have found. Results and gradients are those of the whole tensor, to the last bit.
- A linear layer becomes one layer per block and a concatenation. The gradient of its input is a sum of
  as many parts, so that it equals the one of the whole layer within rounding error.

Cuts between the blocks are legal, and each block of a tied weight is tied for itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from ravnest.split.capture import Capture, ModeCapture, copy_graph
from ravnest.split.graph import RowBlock
from ravnest.split.state import ModelState, StateTensor

aten = torch.ops.aten
_CONTEXT = ("stack_trace", "nn_module_stack", "ravnest_no_grad")
"""Entries of a node's meta that the nodes in its place keep."""

Blocks = Mapping[str, Sequence[RowBlock]]
"""Row ranges by state key."""


def block_ranges(rows: int, count: int) -> tuple[RowBlock, ...]:
    """Return ``count`` blocks of nearly equal size that cover the rows in order; fewer for few rows."""
    count = min(count, rows)
    bounds = [rows * index // count for index in range(count + 1)]
    return tuple(RowBlock(first, stop, rows) for first, stop in pairwise(bounds))


def cuttable_tensors(capture: Capture) -> dict[str, torch.Tensor]:
    """Return the parameters that can be cut along their rows, by key, without biases."""
    found = {}
    for key, entry in capture.state.tensors.items():
        tensor = entry.tensor
        if entry.kind != "parameter" or entry.rows is not None or tensor.dim() != 2:
            continue
        if tensor.shape[0] < 2 or not tensor.is_contiguous():
            continue
        uses = [_Uses(mode, capture.state, key) for mode in capture.modes.values()]
        biases = set[str]().union(*(use.biases for use in uses))
        if all(use.supported(biases) for use in uses) and any(use.calls for use in uses):
            found[key] = tensor
    return found


def cut_into_blocks(capture: Capture, counts: Mapping[str, int]) -> Capture:
    """Return a capture in which each of these tensors is cut into that many blocks.

    The keys must be among ``cuttable_tensors``. Biases of cut linear layers are cut with them. The given
    capture does not change.
    """
    blocks: dict[str, Sequence[RowBlock]] = {}
    for key, count in counts.items():
        ranges = block_ranges(capture.state.tensors[key].tensor.shape[0], count)
        blocks[key] = ranges
        for mode in capture.modes.values():
            blocks |= dict.fromkeys(_Uses(mode, capture.state, key).biases, ranges)
    modes = {mode: _cut_mode(each, blocks) for mode, each in capture.modes.items()}
    return replace(capture, state=_cut_state(capture.state, blocks), modes=modes)


def _cut_state(state: ModelState, blocks: Blocks) -> ModelState:
    tensors: dict[str, StateTensor] = {}
    for key, entry in state.tensors.items():
        if key in blocks:
            for rows in blocks[key]:
                part = entry.tensor.detach()[rows.first : rows.stop]
                part.requires_grad_(entry.tensor.requires_grad)
                names = tuple(rows.name_in(name) for name in entry.names)
                tensors[names[0]] = replace(entry, tensor=part, names=names, rows=rows)
        else:
            tensors[key] = entry
    return ModelState(tensors, state.order, state.module_versions)


def _cut_mode(mode: ModeCapture, blocks: Blocks) -> ModeCapture:
    graph = copy_graph(mode.graph)
    result = replace(mode, graph=graph, state_of=dict(mode.state_of))
    cut = {name: key for name, key in mode.state_of.items() if key in blocks}
    wholes = [n for n in graph.nodes if n.op == "placeholder" and n.name in cut]
    parts: dict[str, list[fx.Node]] = {}
    for node in wholes:
        key = cut[node.name]
        if node.users and key not in parts:
            parts[key] = list(_block_placeholders(result, node, key, blocks[key]))
    for node in list(graph.nodes):
        arguments = _arguments(node)
        weight, bias = (cut.get(getattr(arguments.get(n), "name", "")) for n in ("weight", "bias"))
        if node.op != "call_function" or weight is None:
            continue
        rewriter = _Rewriter(graph, node)
        with graph.inserting_before(node):
            if node.target is aten.embedding.default:
                new = rewriter.chain(arguments, parts[weight], blocks[weight])
            else:
                biases = [] if bias is None else parts[bias]
                new = rewriter.concatenation(arguments, parts[weight], biases)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    for node in wholes:
        graph.erase_node(node)
        del result.state_of[node.name]
    graph.lint()
    return result


def _block_placeholders(
    mode: ModeCapture, whole: fx.Node, key: str, ranges: Sequence[RowBlock]
) -> Iterator[fx.Node]:
    for rows in ranges:
        with mode.graph.inserting_before(whole):
            node = mode.graph.placeholder(f"{whole.name}_rows_{rows.first}_{rows.stop}")
        node.meta = dict(whole.meta)
        value = whole.meta["val"]
        with value.fake_mode, torch.no_grad():
            node.meta["val"] = value.detach()[rows.first : rows.stop]
        mode.state_of[node.name] = rows.name_in(key)
        yield node


class _Rewriter:
    """Builds the operations that take the place of one operation on a whole tensor."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self._graph = graph
        self._context = {name: node.meta[name] for name in _CONTEXT if name in node.meta}

    def chain(
        self, arguments: Mapping[str, Any], weights: Sequence[fx.Node], ranges: Sequence[RowBlock]
    ) -> fx.Node:
        """Add one lookup per block, each of which replaces the rows that are in its block.

        The ends of the index range stay open: an index outside of the tensor is an error as before.
        """
        indices, padding = arguments["indices"], arguments.get("padding_idx", -1)
        found: fx.Node | None = None
        for weight, rows in zip(weights, ranges, strict=True):
            local = self._call(aten.sub.Tensor, indices, rows.first) if rows.first else indices
            lowest = 0 if rows.first else None
            highest = rows.stop - rows.first - 1 if rows.stop < rows.total else None
            inside = self._call(aten.clamp.default, local, lowest, highest)
            own = padding - rows.first if rows.first <= padding < rows.stop else -1
            looked_up = self._call(aten.embedding.default, weight, inside, own)
            if found is None:
                found = looked_up
            else:
                here = self._call(aten.eq.Tensor, local, inside)
                here = self._call(aten.unsqueeze.default, here, -1)
                found = self._call(aten.where.self, here, looked_up, found)
        assert found is not None
        return found

    def concatenation(
        self, arguments: Mapping[str, Any], weights: Sequence[fx.Node], biases: Sequence[fx.Node]
    ) -> fx.Node:
        """Add one linear layer per block, and join their outputs."""
        x = arguments["input"]
        outputs = [
            self._call(aten.linear.default, x, weight, *([biases[index]] if biases else []))
            for index, weight in enumerate(weights)
        ]
        return self._call(aten.cat.default, outputs, -1)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self._graph.call_function(target, args)
        node.meta = dict(self._context)
        values = fx.map_arg(args, lambda argument: argument.meta["val"])
        mode = next(n for n in node.all_input_nodes).meta["val"].fake_mode
        with mode, torch.no_grad():
            node.meta["val"] = target(*values)
        return node


class _Uses:
    """Uses of one tensor in the graph of one mode."""

    def __init__(self, mode: ModeCapture, state: ModelState, key: str) -> None:
        self._mode, self._state = mode, state
        self._placeholders = self._placeholders_of(key)
        self.calls = self._users(key)
        """Operations that read the tensor."""
        self.biases = {bias for call in self.calls for bias in self._bias_keys(call)}
        """Keys of the biases of its linear layers."""

    def supported(self, biases: Collection[str]) -> bool:
        """Return True if blocks can replace all uses of the tensor and of its ``biases``."""
        return all(map(self._is_supported, self.calls)) and all(
            call in self.calls for key in biases for call in self._users(key)
        )

    def _is_supported(self, call: fx.Node) -> bool:
        arguments = _arguments(call)
        if call.target is aten.embedding.default:
            others = arguments.get("scale_grad_by_freq", False) or arguments.get("sparse", False)
            return not others and arguments["indices"] not in self._placeholders
        if call.target is aten.linear.default:
            bias = arguments.get("bias")
            return arguments["input"] not in self._placeholders and (
                bias is None or self._is_plain_bias(bias)
            )
        return False

    def _is_plain_bias(self, bias: fx.Node) -> bool:
        entry = self._state.tensors.get(self._mode.state_of.get(bias.name, ""))
        return entry is not None and entry.kind == "parameter" and entry.tensor.is_contiguous()

    def _users(self, key: str) -> list[fx.Node]:
        return [user for node in self._placeholders_of(key) for user in node.users]

    def _placeholders_of(self, key: str) -> set[fx.Node]:
        nodes: Iterable[fx.Node] = self._mode.graph.nodes
        return {n for n in nodes if n.op == "placeholder" and self._mode.state_of.get(n.name) == key}

    def _bias_keys(self, call: fx.Node) -> Iterator[str]:
        bias = _arguments(call).get("bias")
        if isinstance(bias, fx.Node) and bias.name in self._mode.state_of:
            yield self._mode.state_of[bias.name]


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operation by their names in its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}
    names = [argument.name for argument in schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
