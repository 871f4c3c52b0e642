"""Guards of recurrent layers: the kernels of whole layers trust the shapes of states and weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from ravnest.split.refused_calls import Guard, numbers, require


def recurrent(gates: int, states: int) -> Guard:
    """Return the guard of a recurrent layer with this many gates and hidden states, whole batches."""

    def check(
        input: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool = False,
    ) -> None:
        require(input.dim() == 3, "the input has not three dimensions")
        layer = _Layer(gates, states, has_biases, num_layers, bidirectional)
        layer.check(input.shape[2], input.shape[0 if batch_first else 1], hx, params)

    return check


def packed_recurrent(gates: int, states: int) -> Guard:
    """Return the guard of a recurrent layer on packed sequences."""

    def check(
        data: Tensor,
        batch_sizes: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> None:
        require(data.dim() == 2 and batch_sizes.dim() == 1, "the input is not a packed sequence")
        sizes = numbers(batch_sizes, "batch_sizes")
        descending = all(a >= b for a, b in pairwise(sizes))
        require(
            bool(sizes) and descending and sizes[-1] > 0 and sum(sizes) == data.shape[0],
            "the batch sizes do not fit the packed sequence",
        )
        layer = _Layer(gates, states, has_biases, num_layers, bidirectional)
        layer.check(data.shape[1], sizes[0], hx, params)

    return check


class _Layer(NamedTuple):
    """A recurrent layer whose tensors are checked."""

    gates: int
    states: int
    has_biases: bool
    num_layers: int
    bidirectional: bool

    def check(self, features: int, samples: int, hx: Any, params: Sequence[Tensor]) -> None:
        """Check the shapes of hidden states and weights."""
        hidden = [hx] if isinstance(hx, Tensor) else list(hx)
        require(len(hidden) == self.states, f"it has {self.states} hidden states")
        require(self.num_layers > 0 and all(h.dim() == 3 for h in hidden), "it has no layers")
        directions = 2 if self.bidirectional else 1
        rows = self.num_layers * directions
        output, cell = hidden[0].shape[2], hidden[-1].shape[2]
        require(output > 0 and cell > 0, "the hidden states are empty")
        for state in hidden:
            require(list(state.shape[:2]) == [rows, samples], "the hidden states do not fit the input")
        expected: list[tuple[int, ...]] = []
        wide = self.gates * cell
        for number in range(self.num_layers):
            width = features if number == 0 else output * directions
            biases: list[tuple[int, ...]] = [(wide,), (wide,)] if self.has_biases else []
            projection: list[tuple[int, ...]] = [(output, cell)] if output != cell else []
            expected += [(wide, width), (wide, output), *biases, *projection] * directions
        require([tuple(p.shape) for p in params] == expected, "the weights do not fit the layer")
        kinds = {tensor.dtype for tensor in (*hidden, *params)}
        require(len(kinds) == 1, "hidden states and weights have several dtypes")


def cell(gates: int) -> Guard:
    """Return the guard of one step of a recurrent layer."""

    def check(
        input: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> None:
        hidden = [hx] if isinstance(hx, Tensor) else list(hx)
        require(bool(hidden) and input.dim() == 2 and w_ih.dim() == 2, "the input is not a matrix")
        width = hidden[0].shape[-1] if hidden[0].dim() == 2 else 0
        require(
            all(tuple(state.shape) == (input.shape[0], width) for state in hidden),
            "the hidden states do not fit the input",
        )
        wide = gates * width
        fits = tuple(w_ih.shape) == (wide, input.shape[1]) and tuple(w_hh.shape) == (wide, width)
        require(fits, "the weights do not fit the input")
        for bias in (b_ih, b_hh):
            require(bias is None or tuple(bias.shape) == (wide,), "a bias does not fit the weights")

    return check
