"""Weight gradients of LSTM layers that are computed apart from those of inputs and hidden states.

On a CPU an LSTM layer is one kernel of oneDNN, whose backward pass computes all gradients at once. The
form below computes the same in several operators: the products with the inputs of all steps at once, a
loop over the steps for the rest, and the weight gradients from the gradients of all steps' gates. It
takes up to about an eighth longer in large layers and much longer in small ones, and adds sums up in
another order. So it is used only for micro-batches of which the schedule asks it, and in large layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, addcmul, addmm, fx, mul, tanh
from torch.autograd.function import once_differentiable

from ravnest.split.deferred import DeferredGradients
from ravnest.split.graph import Operation, Ref, StageGraph, refs_in

_LSTM = "aten::lstm.input"
_GATES = 4
"""Gates of a cell: input, forget, candidate, output."""
LEAST_WIDTH = 256
"""Width of the hidden state from which on a layer is deferred. In narrow ones element-wise operators,
which oneDNN computes faster, take a considerable share of the time."""
LEAST_PRODUCT = 4_000_000
"""Multiplications of a step's product with the hidden state from which on a layer is deferred. In
smaller steps the calls of operators take a considerable share of the time."""

DEFERRED_LSTM_COPIES = 5
"""Memory that deferred gradients need besides the input, as a multiple of the output: the gradients of
the gates, and the hidden states."""


class LstmRun(NamedTuple):
    """Values of a forward pass that the backward pass needs; steps come first in the shapes."""

    outputs: Tensor
    gates: Tensor
    """Steps x samples x gates x width; the backward pass replaces them by their gradients."""
    cells: Tensor
    """States of the cells before each step, and after the last."""
    squashed: Tensor
    """Hyperbolic tangent of the states after each step."""


def run_forward(x: Tensor, hidden: Tensor, cell: Tensor, weights: Sequence[Tensor]) -> LstmRun:
    """Compute a layer; ``x`` has steps x samples rows, the states are those of each sample."""
    (samples, width), biases = hidden.shape, weights[2:]
    steps = x.shape[0] // samples
    from_inputs = addmm(biases[0] + biases[1], x, weights[0].t()) if biases else x.mm(weights[0].t())
    gates = from_inputs.view(steps, samples, _GATES, width)
    outputs, squashed = (x.new_empty(steps, samples, width) for _ in range(2))
    cells = x.new_empty(steps + 1, samples, width)
    cells[0] = cell
    # Products of few rows with a transposed matrix are slower than with a copy of it.
    transposed = weights[1].t().contiguous()
    each = zip(
        from_inputs.view(steps, samples, _GATES * width).unbind(0),
        gates[:, :, :2].unbind(0),
        *(gate.unbind(0) for gate in gates.unbind(2)),
        cells[:-1].unbind(0),
        cells[1:].unbind(0),
        squashed.unbind(0),
        outputs.unbind(0),
        strict=True,
    )
    for row, first_two, i, f, g, o, before, after, flat, output in each:
        row.addmm_(hidden, transposed)
        first_two.sigmoid_()
        g.tanh_()
        o.sigmoid_()
        mul(i, g, out=after).addcmul_(f, before)
        mul(o, tanh(after, out=flat), out=output)
        hidden = output
    return LstmRun(outputs, gates, cells, squashed)


class LstmGradients(NamedTuple):
    """Gradients of what a layer has read."""

    x: Tensor
    hidden: Tensor
    cell: Tensor
    gates: Tensor
    """Gradients of the gates before their activation functions; steps x samples rows."""


def run_backward(
    run: LstmRun,
    weights: Sequence[Tensor],
    of_outputs: Tensor,
    of_hidden: Tensor | None,
    of_cell: Tensor | None,
) -> LstmGradients:
    """Compute the gradients of inputs, states and gates; overwrites the gates of ``run``.

    ``of_hidden`` and ``of_cell`` are gradients of the states after the last step.
    """
    outputs, gates, cells, squashed = run
    steps, samples, _, width = gates.shape
    i, f, g, o = gates.unbind(2)
    # All factors of the gradients that do not depend on later steps, in place of the gates.
    to_cell = addcmul(o, outputs, squashed, value=-1)
    product = i * g
    addcmul(i, product, g, value=-1, out=g)
    addcmul(product, product, i, value=-1, out=i)
    addcmul(outputs, outputs, o, value=-1, out=o)
    kept = f.clone(memory_format=torch.contiguous_format)
    mul(kept, cells[:-1], out=product)
    addcmul(product, product, kept, value=-1, out=f)
    hidden = of_outputs[-1] if of_hidden is None else of_outputs[-1] + of_hidden
    cell = torch.zeros_like(hidden) if of_cell is None else of_cell.clone()
    total, spare = torch.empty_like(cell), torch.empty_like(cell)
    for_three = total.unsqueeze(1)
    rows = gates.view(steps, samples, _GATES * width)
    earlier = (torch.zeros_like(cell), *of_outputs[:-1].unbind(0))
    columns = (rows, gates[:, :, :3], o, to_cell, kept)
    each = list(zip(*(column.unbind(0) for column in columns), earlier, strict=True))
    for row, first_three, last, factor, forget, before in reversed(each):
        addcmul(cell, hidden, factor, out=total)
        first_three.mul_(for_three)
        last.mul_(hidden)
        mul(total, forget, out=cell)
        hidden = addmm(before, row, weights[1], out=spare)
    flat = gates.view(steps * samples, _GATES * width)
    return LstmGradients(flat.mm(weights[0]), hidden, cell, flat)


class LstmSaved(NamedTuple):
    """Values from which the weight gradients follow."""

    gates: Tensor
    """Gradients of the gates."""
    x: Tensor
    hidden: Tensor
    """State before the first step."""
    outputs: Tensor


class LstmDeferral:
    """One call of an LSTM layer whose weight gradients can be deferred."""

    several = False
    dtype: torch.dtype | None = None

    def __init__(self, function: Callable[..., Any], keys: Sequence[str]) -> None:
        """``keys`` are those of the layer's weights."""
        self._function = function
        self.keys = keys

    def __call__(self, deferred: DeferredGradients | None, *arguments: Any) -> Any:
        """Call the layer; if ``deferred`` asks for it, its weight gradients go there."""
        x, states, weights = arguments[:3]
        if deferred is None or not deferred.costly or not _fits(x, states, weights, arguments[-1]):
            return self._function(*arguments)
        ordered = x.transpose(0, 1) if arguments[-1] else x
        result = _LstmCall.apply(self, deferred, ordered, *states, *weights)  # type: ignore[no-untyped-call]
        outputs, hidden, cell = result
        return outputs.transpose(0, 1) if arguments[-1] else outputs, hidden, cell

    def gradients(
        self,
        saved: LstmSaved,
        totals: Mapping[str, Tensor],
        *,
        in_place: bool,  # noqa: ARG002 - sums of the gates' form are not those of oneDNN anyway
    ) -> list[tuple[str, Tensor]]:
        """Compute the gradients with their keys, except those that are added to ``totals``."""
        left, samples = saved.gates.t(), saved.hidden.shape[0]
        first, rest = left[:, :samples], left[:, samples:]
        earlier = saved.outputs[:-1].view(-1, saved.hidden.shape[1])
        products = ([(left, saved.x)], [(rest, earlier), (first, saved.hidden)])
        found: list[tuple[str, Tensor]] = []
        for key, pairs in zip(self.keys, products, strict=False):
            total = totals.get(key)
            for one, other in pairs:
                total = one.mm(other) if total is None else total.addmm_(one, other)
            if key not in totals and total is not None:
                found.append((key, total))
        for key in self.keys[2:]:
            of_bias = saved.gates.sum(0)
            if key in totals:
                totals[key].add_(of_bias)
            else:
                found.append((key, of_bias))
        return found


class _LstmCall(torch.autograd.Function):
    """An LSTM layer whose backward pass computes the gradients of its input and states only."""

    @staticmethod
    def forward(
        ctx: Any,
        call: LstmDeferral,
        deferred: DeferredGradients,
        x: Tensor,
        hidden: Tensor,
        cell: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.call, ctx.deferred, ctx.number = call, deferred, deferred.number()
        rows = x.reshape(-1, x.shape[2])
        run = run_forward(rows, hidden[0], cell[0], weights)
        ctx.shape, ctx.run = x.shape, run._replace(outputs=run.outputs[:0])
        # Tensors that others see are kept by autograd only, which notices when one is changed in place.
        ctx.save_for_backward(rows, run.outputs, hidden, weights[0], weights[1])
        ctx.set_materialize_grads(False)
        return run.outputs, run.outputs[-1:].clone(), run.cells[-1:].clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_outputs: Tensor | None, of_hidden: Tensor | None, of_cell: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        rows, outputs, hidden, *weights = ctx.saved_tensors
        run, ctx.run = ctx.run._replace(outputs=outputs), None
        if of_outputs is None:
            of_outputs = torch.zeros_like(outputs)
        found = run_backward(
            run,
            weights,
            of_outputs,
            None if of_hidden is None else of_hidden[0],
            None if of_cell is None else of_cell[0],
        )
        ctx.deferred.add(ctx.number, ctx.call, LstmSaved(found.gates, rows, hidden[0], outputs))
        needed = ctx.needs_input_grad
        of_inputs = (found.x.view(ctx.shape), found.hidden[None], found.cell[None])
        given = [value if need else None for value, need in zip(of_inputs, needed[2:5], strict=True)]
        return None, None, *given, *[None] * (len(needed) - 5)


def _fits(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], batch_first: bool) -> bool:
    """Return whether a layer is of the kind that is deferred, and large enough.

    Others, and arguments that do not belong together, are left to the operator.
    """
    if x.dim() != 3 or len(states) != 2 or len(weights) not in (2, _GATES) or not x.numel():
        return False
    samples, width = x.shape[0 if batch_first else 1], weights[1].shape[-1]
    wide = _GATES * width
    shapes = [(wide, x.shape[2]), (wide, width), (wide,), (wide,)]
    return (
        width >= LEAST_WIDTH
        and samples * wide * width >= LEAST_PRODUCT
        and all(state.shape == (1, samples, width) for state in states)
        and [tuple(weight.shape) for weight in weights] == shapes[: len(weights)]
        and all(t.dtype == torch.float32 and not t.is_cuda for t in (x, *states, *weights))
        and all(weight.requires_grad for weight in weights)
    )


def lstm_deferral_of(
    operation: Operation, function: Callable[..., Any], keys: Mapping[str, str]
) -> LstmDeferral | None:
    """Return the call of an LSTM layer as one that can be deferred, or ``None``.

    ``keys`` maps the names of the graph's state to their keys.
    """
    own = [keys[name] for name in _weights(operation) if name in keys]
    return LstmDeferral(function, own) if own and len(own) == len(_weights(operation)) else None


def deferrable_lstm_input(node: fx.Node, trained: Collection[str]) -> fx.Node | None:
    """Return the input of a traced LSTM layer whose weight gradients can be deferred, else ``None``.

    ``trained`` are the names of the placeholders of trained weights.
    """
    if node.target is not torch.ops.aten.lstm.input:
        return None
    x, _, weights, has_biases, layers, _, _, bidirectional, _ = node.args
    one = layers == 1 and not bidirectional and len(weights) == (_GATES if has_biases else 2)  # type: ignore[arg-type]
    if not one or not {str(weight) for weight in weights} <= set(trained):  # type: ignore[union-attr]
        return None
    width = weights[1].meta["val"].shape[-1]  # type: ignore[index, union-attr]
    return x if width >= LEAST_WIDTH else None  # type: ignore[return-value]


def has_costly_deferral(graph: StageGraph) -> bool:
    """Return whether layers of the graph can defer weight gradients in a form that takes more time."""
    return any(_weights(operation) for operation in graph.operations)


def _weights(operation: Operation) -> tuple[str, ...]:
    """Return the names of the weights of an LSTM layer in one direction; none for other operations."""
    if operation.target != _LSTM or operation.no_grad or operation.kwargs or len(operation.args) != 9:
        return ()
    x, states, weights, has_biases, layers, _, _, bidirectional, _ = operation.args
    if layers != 1 or bidirectional or not isinstance(weights, tuple):
        return ()
    names = tuple(weight.name for weight in weights if isinstance(weight, Ref))
    count = _GATES if has_biases else 2
    apart = not set(refs_in((x, states))) & set(names)
    return names if apart and len(names) == len(weights) == count else ()
