"""Expand multi-layer LSTM, GRU and RNN nodes into one node per layer, so that cuts between layers exist.

The results are bitwise the same, including dropout between the layers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode

aten = torch.ops.aten
STATES = {
    aten.lstm.input: 2,
    aten.gru.input: 1,
    aten.rnn_tanh.input: 1,
    aten.rnn_relu.input: 1,
}
"""Recurrent operators and the number of hidden states of each."""
DEFERRED_COPIES = {aten.gru.input: 7, aten.rnn_tanh.input: 3, aten.rnn_relu.input: 3}
"""Recurrent operators whose weight gradients can be deferred, and the memory that these need besides the
input, as a multiple of the output: gradients of the gates of inputs and of hidden states, and the hidden
states. An LSTM is one kernel of oneDNN, which computes all gradients at once; see ``lstm_deferral``."""
DEFERRED_TARGETS = frozenset(f"{op._schema.name}.{op._overloadname}" for op in DEFERRED_COPIES)
"""Names of these operators in stages."""


def expand_recurrent_layers(graph: fx.Graph) -> None:
    """Rewrite every multi-layer recurrent node of a graph in place."""
    for node in list(graph.nodes):
        if node.target in STATES:
            layers, per_layer = _layers(node)
            if layers > 1 and per_layer:
                _expand(graph, node, layers, per_layer)


def _layers(node: fx.Node) -> tuple[int, int]:
    """Return the number of layers and of weights per layer (0 if the weights cannot be assigned)."""
    weights, layers, bidirectional = node.args[2], node.args[4], node.args[7]
    assert isinstance(weights, list | tuple)
    assert isinstance(layers, int)
    runs = layers * (2 if bidirectional else 1)
    return layers, 0 if len(weights) % runs else len(weights) // layers


def _expand(graph: fx.Graph, node: fx.Node, layers: int, per_layer: int) -> None:
    x, hidden, weights, bias, _, dropout, training, bidirectional, batch_first = node.args
    many = STATES[node.target] > 1  # type: ignore[index]
    states: list[Any] = list(hidden) if isinstance(hidden, list | tuple) else [hidden]
    directions = 2 if bidirectional else 1
    with ExitStack() as stack:
        stack.enter_context(graph.inserting_before(node))
        call = _caller(graph, node, stack)
        if batch_first:
            x = call(aten.transpose.int, x, 0, 1)
        last: list[list[fx.Node]] = [[] for _ in states]
        for layer in range(layers):
            begin, end = layer * directions, (layer + 1) * directions
            own = [call(aten.slice.Tensor, state, 0, begin, end) for state in states]
            mine = list(weights[layer * per_layer : (layer + 1) * per_layer])  # type: ignore[index, arg-type]
            start = own if many else own[0]
            out = call(node.target, x, start, mine, bias, 1, 0.0, training, bidirectional, False)
            x = call(operator.getitem, out, 0)
            for position, column in enumerate(last):
                column.append(call(operator.getitem, out, position + 1))
            if dropout and training and layer < layers - 1:
                x = call(aten.dropout.default, x, dropout, True)
        if batch_first:
            x = call(aten.transpose.int, x, 0, 1)
        results = [x, *(call(aten.cat.default, column, 0) for column in last)]
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index, arg-type]
        graph.erase_node(user)
    graph.erase_node(node)


def _caller(graph: fx.Graph, like: fx.Node, stack: ExitStack) -> Callable[..., fx.Node]:
    """Return a function that inserts a call with the metadata that the capture would have given it."""
    fake = detect_fake_mode([like.args[0].meta["val"]])  # type: ignore[union-attr]
    assert fake is not None
    stack.enter_context(fake)
    stack.enter_context(enable_python_dispatcher())

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta = {k: v for k, v in like.meta.items() if k != "val"}
        node.meta["val"] = target(*fx.map_arg(list(args), lambda n: n.meta["val"]))
        return node

    return call
