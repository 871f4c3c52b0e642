"""Checks before calls of operators whose kernels trust their arguments.

A kernel that trusts sizes or indices reads and writes outside of its tensors if they do not fit, and an
integer division can end the process. Each guard here takes the arguments of its operator in the order
of the schema and raises ``_Refusal``. Guards compare shapes where that is enough; they read values
only of small integer tensors (lengths, offsets, targets) that the kernel does not check itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ravnest.errors import OperandError
from ravnest.split.number_bounds import NumberError, bounded
from ravnest.split.operators import resolve

Tensor = torch.Tensor
Guard = Callable[..., object]

_DIVIDING = (torch.int32, torch.int64)
"""Types whose division by -1 overflows in the processor; smaller ones are widened."""


class _Refusal(Exception):
    """Reason why an operator is not called."""


def executable(name: str, node: str) -> Callable[..., Any]:
    """Return the function that runs the operator ``name`` at ``node`` of a graph, with its checks.

    The function raises ``OperandError`` for arguments that the operator must not get.
    """
    target = resolve(name)
    if not isinstance(target, torch._ops.OpOverload):
        return _refusing(bounded(name, target), name, node)
    function: Callable[..., Any] = target._op  # the function inside an OpOverload: saves a call
    overload = name.partition("::")[2]
    base = overload.partition(".")[0]
    if base in _UNINITIALISED:
        return _cleared(function)
    if base in _DENSE:
        function = _on_dense(function, *_DENSE[base])
    guard = GUARDS.get(overload) or GUARDS.get(base)
    return function if guard is None else _guarded(function, guard, name, node)


def _guarded(function: Callable[..., Any], guard: Guard, name: str, node: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            guard(*args, **kwargs)
        except _Refusal as refusal:
            raise OperandError(f"the operator {name} at {node!r} was not called: {refusal}") from None
        return function(*args, **kwargs)

    return call


def _refusing(function: Callable[..., Any], name: str, node: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except NumberError as error:
            raise OperandError(f"the operator {name} at {node!r} was not called: {error}") from None

    return call


def _cleared(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``function`` with zeroed results: fresh memory may hold data of this process."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            return function(*args, **kwargs).zero_()

    return call


def _on_dense(function: Callable[..., Any], position: int, name: str) -> Callable[..., Any]:
    """Return ``function`` that gets one argument as a contiguous tensor."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if name in kwargs:
            kwargs[name] = kwargs[name].contiguous()
        elif position < len(args):
            args = (*args[:position], args[position].contiguous(), *args[position + 1 :])
        return function(*args, **kwargs)

    return call


_UNINITIALISED = frozenset({"empty", "empty_like", "new_empty"})
_DENSE: dict[str, tuple[int, str]] = {
    **dict.fromkeys(("median", "nanmedian", "kthvalue", "mode"), (0, "self")),
    "ctc_loss": (1, "targets"),
}
"""Operators that read outside of a tensor whose elements overlap (stride 0): position and name of it."""


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise _Refusal(reason)


def _numbers(values: Any, name: str) -> list[int]:
    """Return the integers of a tensor or a list."""
    if isinstance(values, Tensor):
        _require(not values.is_floating_point() and not values.is_complex(), f"{name} has no integers")
        return values.reshape(-1).tolist()  # type: ignore[no-any-return]
    _require(isinstance(values, list | tuple), f"{name} is not a list of integers")
    return list(values)


def _within(values: Tensor, low: int, high: int, name: str) -> None:
    """Check that all elements are at least ``low`` and below ``high``."""
    if values.numel():
        least, most = (int(value) for value in torch.aminmax(values.detach()))
        _require(low <= least and most < high, f"{name} has values outside of {low} to {high - 1}")


def _as_strided(
    self: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> None:
    """Keep the result inside of the elements of ``self``; torch checks only its storage."""
    _require(len(size) == len(stride), "size and stride differ in length")
    _require(min((*size, *stride), default=0) >= 0, "a size or stride is negative")
    first = 0 if storage_offset is None else storage_offset - self.storage_offset()
    last = first + _extent(size, stride)
    _require(
        0 <= first and last <= _extent(self.shape, self.stride()), "the result is larger than its tensor"
    )


def _extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last."""
    if 0 in size:
        return 0
    return 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))


def _integer_division(self: Any, other: Any, *_: Any, **__: Any) -> None:
    """Refuse the lowest integer divided by -1, which ends the process (SIGFPE)."""
    kind = torch.result_type(self, other)
    if kind not in _DIVIDING:
        return
    lowest = torch.iinfo(kind).min
    _require(
        not (_holds(other, -1) and _holds(self, lowest)), f"it divides {lowest}, the lowest integer, by -1"
    )


def _holds(values: Any, number: int) -> bool:
    return bool((values == number).any()) if isinstance(values, Tensor) else values == number


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    *_: Any,
    **__: Any,
) -> None:
    _require(log_probs.dim() in (2, 3) and log_probs.numel() > 0, "log_probs has no (T, N, C) values")
    steps, classes = log_probs.shape[0], log_probs.shape[-1]
    samples = log_probs.shape[1] if log_probs.dim() == 3 else 1
    _require(0 <= blank < classes, "blank is not a class")
    inputs = _numbers(input_lengths, "input_lengths")
    wanted = _numbers(target_lengths, "target_lengths")
    _require(len(inputs) == len(wanted) == samples, "it needs one length for each sample")
    _require(min(inputs) >= 0 and max(inputs) <= steps, "an input length is not within log_probs")
    _require(min(wanted) >= 0, "a target length is negative")
    _require(targets.dtype in (torch.int32, torch.int64), "targets are not integers")
    if targets.dim() == 2 and log_probs.dim() == 3:
        fits = targets.shape[0] == samples and max(wanted) <= targets.shape[1]
    else:
        fits = targets.dim() == 1 and sum(wanted) == targets.numel()
    _require(fits, "the target lengths do not fit the targets")
    _within(targets, 0, classes, "targets")


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    *_: Any,
    **__: Any,
) -> None:
    _require(weight.dim() == 2, "the weight is not a matrix")
    _require(indices.dim() == 1 and offsets.dim() == 1, "indices and offsets are not vectors")
    _require(mode in (0, 1, 2), "the mode is not sum, mean or max")
    starts = _numbers(offsets, "offsets")
    ascending = all(a <= b for a, b in zip(starts, starts[1:], strict=False))
    inside = not starts or (starts[0] == 0 and starts[-1] <= indices.numel())
    _require(ascending and inside, "the offsets do not ascend from 0 within the indices")
    if include_last_offset:
        complete = len(starts) > 1 and starts[-1] == indices.numel()
        _require(complete, "the last offset is not the number of indices")
    _require(not indices.is_floating_point(), "indices are not integers")
    _within(indices, 0, weight.shape[0], "indices")
    if per_sample_weights is not None:
        _require(per_sample_weights.shape == indices.shape, "per_sample_weights do not fit the indices")


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> None:
    _require(v.dim() > 0 and v.dtype == g.dtype and v.is_floating_point(), "v and g are not alike")
    if dim in (0, v.dim() - 1):
        shape = [1] * v.dim()
        shape[dim] = v.shape[dim]
        _require(list(g.shape) == shape and g.numel() > 0, f"g has not the shape {shape}")


def _grouped_mm(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> None:
    _require(self.dim() in (2, 3) and mat2.dim() in (2, 3), "it multiplies matrices and batches of them")
    if offs is None:
        return
    _require(offs.dim() == 1, "the offsets are not a vector")
    ends = _numbers(offs, "offs")
    # Offsets divide the rows of the first matrix, or what both are summed over, or columns of the second.
    divided = self.shape[-1] if mat2.dim() == 2 and self.dim() == 2 else self.shape[0]
    if self.dim() == 3:
        divided = mat2.shape[-1]
    ascending = all(a <= b for a, b in zip([0, *ends], ends, strict=False))
    _require(
        ascending and (not ends or ends[-1] == divided), f"the offsets do not ascend from 0 to {divided}"
    )


def _grid_sampler(
    input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> None:
    modes = (0, 1) if input.dim() == 5 else (0, 1, 2)
    _require(interpolation_mode in modes, "the interpolation mode does not exist")
    _require(padding_mode in (0, 1, 2), "the padding mode does not exist")


def _recurrent(gates: int, states: int) -> Guard:
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
        _require(input.dim() == 3, "the input has not three dimensions")
        layer = _Layer(gates, states, has_biases, num_layers, bidirectional)
        layer.check(input.shape[2], input.shape[0 if batch_first else 1], hx, params)

    return check


def _packed_recurrent(gates: int, states: int) -> Guard:
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
        _require(data.dim() == 2 and batch_sizes.dim() == 1, "the input is not a packed sequence")
        sizes = _numbers(batch_sizes, "batch_sizes")
        descending = all(a >= b for a, b in zip(sizes, sizes[1:], strict=False))
        _require(
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
        _require(len(hidden) == self.states, f"it has {self.states} hidden states")
        _require(self.num_layers > 0 and all(h.dim() == 3 for h in hidden), "it has no layers")
        directions = 2 if self.bidirectional else 1
        rows = self.num_layers * directions
        output, cell = hidden[0].shape[2], hidden[-1].shape[2]
        _require(output > 0 and cell > 0, "the hidden states are empty")
        for state in hidden:
            _require(list(state.shape[:2]) == [rows, samples], "the hidden states do not fit the input")
        expected: list[tuple[int, ...]] = []
        wide = self.gates * cell
        for number in range(self.num_layers):
            width = features if number == 0 else output * directions
            biases: list[tuple[int, ...]] = [(wide,), (wide,)] if self.has_biases else []
            projection: list[tuple[int, ...]] = [(output, cell)] if output != cell else []
            expected += [(wide, width), (wide, output), *biases, *projection] * directions
        _require([tuple(p.shape) for p in params] == expected, "the weights do not fit the layer")
        kinds = {tensor.dtype for tensor in (*hidden, *params)}
        _require(len(kinds) == 1, "hidden states and weights have several dtypes")


def _cell(gates: int) -> Guard:
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
        _require(bool(hidden) and input.dim() == 2 and w_ih.dim() == 2, "the input is not a matrix")
        width = hidden[0].shape[-1] if hidden[0].dim() == 2 else 0
        _require(
            all(tuple(state.shape) == (input.shape[0], width) for state in hidden),
            "the hidden states do not fit the input",
        )
        wide = gates * width
        fits = tuple(w_ih.shape) == (wide, input.shape[1]) and tuple(w_hh.shape) == (wide, width)
        _require(fits, "the weights do not fit the input")
        for bias in (b_ih, b_hh):
            _require(bias is None or tuple(bias.shape) == (wide,), "a bias does not fit the weights")

    return check


def _sum_of_products(self: Tensor, batch1: Tensor, batch2: Tensor, *_: Any, **__: Any) -> None:
    """Refuse to write a sum of products into a smaller matrix."""
    _require(batch1.dim() == 3 and batch2.dim() == 3, "it multiplies batches of matrices")
    _require(
        tuple(self.shape) == (batch1.shape[1], batch2.shape[2]), "the product does not fit the tensor"
    )


def _finite(self: Tensor, *_: Any, **__: Any) -> None:
    """Refuse NaN and infinity, on which the library of linear algebra fails."""
    _require(bool(torch.isfinite(self.detach()).all()), "the matrix has values that are not finite")


def _sizes_only(self: Tensor, output_size: Sequence[int], *options: Any, **named: Any) -> None:
    """Refuse scales beside the output size, with which the kernel computes places in its input."""
    scales = [*options, *(value for name, value in named.items() if name.startswith("scales"))]
    _require(
        all(value is None or isinstance(value, bool) for value in scales),
        "stages give it an output size without scales, or scales with the overload vec",
    )


GUARDS: dict[str, Guard] = {
    "addbmm_": _sum_of_products,
    "linalg_eigvals": _finite,
    "lstm.input": _recurrent(4, 2),
    "gru.input": _recurrent(3, 1),
    "rnn_tanh.input": _recurrent(1, 1),
    "rnn_relu.input": _recurrent(1, 1),
    "lstm.data": _packed_recurrent(4, 2),
    "gru.data": _packed_recurrent(3, 1),
    "rnn_tanh.data": _packed_recurrent(1, 1),
    "rnn_relu.data": _packed_recurrent(1, 1),
    "lstm_cell": _cell(4),
    "gru_cell": _cell(3),
    "rnn_tanh_cell": _cell(1),
    "rnn_relu_cell": _cell(1),
    **{
        f"{name}.default": _sizes_only
        for name in (
            "upsample_linear1d",
            "upsample_bilinear2d",
            "upsample_bicubic2d",
            "upsample_trilinear3d",
            "_upsample_bilinear2d_aa",
            "_upsample_bicubic2d_aa",
            *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
            *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
        )
    },
    "as_strided": _as_strided,
    "ctc_loss": _ctc_loss,
    "embedding_bag": _embedding_bag,
    "grid_sampler": _grid_sampler,
    "_grouped_mm": _grouped_mm,
    "_weight_norm": _weight_norm,
    **{
        name: _integer_division
        for base in ("div", "divide", "floor_divide", "fmod", "remainder")
        for name in (base, f"{base}_")
    },
}
"""Guards by the operator's name; one guard covers all its overloads."""
