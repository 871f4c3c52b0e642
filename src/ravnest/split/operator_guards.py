"""Checks before calls of operators whose kernels trust their arguments.

A kernel that trusts sizes or indices reads and writes outside of its tensors if they do not fit, and an
integer division can end the process. Each guard has the arguments of its operator, in the order and
with the names of its schema, and raises ``RefusedCallError``. Guards compare shapes where that suffices;
they read values only of integer tensors (lengths, offsets, targets) that the kernel does not check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from ravnest.errors import OperandError
from ravnest.split.number_bounds import NumberError, bounded
from ravnest.split.operators import resolve
from ravnest.split.piece_guards import PIECE_GUARDS
from ravnest.split.recurrent_guards import cell, packed_recurrent, recurrent
from ravnest.split.refused_calls import Guard, RefusedCallError, numbers, require, within
from ravnest.split.window_guards import WINDOW_GUARDS

Tensor = torch.Tensor

_LARGEST_WHOLE = 2**53
_DIVIDING = (torch.int32, torch.int64)
"""Types whose division by -1 overflows in the processor; smaller ones are widened."""


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
        except RefusedCallError as refusal:
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


def _as_strided(
    self: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> None:
    """Keep the result inside of the elements of ``self``; torch checks only its storage."""
    require(len(size) == len(stride), "size and stride differ in length")
    require(min((*size, *stride), default=0) >= 0, "a size or stride is negative")
    first = 0 if storage_offset is None else storage_offset - self.storage_offset()
    last = first + _extent(size, stride)
    require(
        first >= 0 and last <= _extent(self.shape, self.stride()), "the result is larger than its tensor"
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
    require(
        not (_holds(other, -1) and _holds(self, lowest)),
        f"it divides {lowest}, the lowest integer, by -1",
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
    require(log_probs.dim() in (2, 3) and log_probs.numel() > 0, "log_probs has no (T, N, C) values")
    steps, classes = log_probs.shape[0], log_probs.shape[-1]
    samples = log_probs.shape[1] if log_probs.dim() == 3 else 1
    require(0 <= blank < classes, "blank is not a class")
    inputs = numbers(input_lengths, "input_lengths")
    wanted = numbers(target_lengths, "target_lengths")
    require(len(inputs) == len(wanted) == samples, "it needs one length for each sample")
    require(min(inputs) >= 0 and max(inputs) <= steps, "an input length is not within log_probs")
    require(min(wanted) >= 0, "a target length is negative")
    require(targets.dtype in (torch.int32, torch.int64), "targets are not integers")
    if targets.dim() == 2 and log_probs.dim() == 3:
        fits = targets.shape[0] == samples and max(wanted) <= targets.shape[1]
    else:
        fits = targets.dim() == 1 and sum(wanted) == targets.numel()
    require(fits, "the target lengths do not fit the targets")
    within(targets, 0, classes, "targets")


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
    require(weight.dim() == 2, "the weight is not a matrix")
    require(indices.dim() == 1 and offsets.dim() == 1, "indices and offsets are not vectors")
    require(mode in (0, 1, 2), "the mode is not sum, mean or max")
    starts = numbers(offsets, "offsets")
    require(bool(starts), "there are no offsets")
    ascending = all(a <= b for a, b in pairwise(starts))
    inside = starts[0] == 0 and starts[-1] <= indices.numel()
    require(ascending and inside, "the offsets do not ascend from 0 within the indices")
    if include_last_offset:
        complete = len(starts) > 1 and starts[-1] == indices.numel()
        require(complete, "the last offset is not the number of indices")
    require(not indices.is_floating_point(), "indices are not integers")
    within(indices, 0, weight.shape[0], "indices")
    if per_sample_weights is not None:
        require(per_sample_weights.shape == indices.shape, "per_sample_weights do not fit the indices")


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> None:
    require(v.dim() > 0 and v.dtype == g.dtype and v.is_floating_point(), "v and g are not alike")
    if dim in (0, v.dim() - 1):
        shape = [1] * v.dim()
        shape[dim] = v.shape[dim]
        require(list(g.shape) == shape and g.numel() > 0, f"g has not the shape {shape}")


def _grouped_mm(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> None:
    require(self.dim() in (2, 3) and mat2.dim() in (2, 3), "it multiplies matrices and batches of them")
    if offs is None:
        return
    require(offs.dim() == 1, "the offsets are not a vector")
    ends = numbers(offs, "offs")
    # Offsets divide rows of the first matrix, or what both are summed over, or columns of the second.
    divided = self.shape[-1] if mat2.dim() == 2 and self.dim() == 2 else self.shape[0]
    if self.dim() == 3:
        divided = mat2.shape[-1]
    ascending = all(a <= b for a, b in pairwise([0, *ends]))
    require(
        ascending and (not ends or ends[-1] == divided), f"the offsets do not ascend from 0 to {divided}"
    )


def _sum_of_products(self: Tensor, batch1: Tensor, batch2: Tensor, *_: Any, **__: Any) -> None:
    """Refuse to write a sum of products into a smaller matrix."""
    require(batch1.dim() == 3 and batch2.dim() == 3, "it multiplies batches of matrices")
    require(
        tuple(self.shape) == (batch1.shape[1], batch2.shape[2]), "the product does not fit the tensor"
    )


def _power(self: Tensor, n: int) -> None:
    """Bound the exponent: the lowest integer has no absolute value, and its power does not end."""
    require(abs(n) <= _LARGEST_EXPONENT, f"the exponent is not within {_LARGEST_EXPONENT}")


def _binomial(count: Tensor, prob: Tensor, generator: None = None) -> None:
    """Refuse parameters that are not those of a distribution, with which drawing does not end."""
    for values, most, name in ((count, _MOST_REPETITIONS, "count"), (prob, 1, "prob")):
        inside = (values.detach() >= 0) & (values.detach() <= most)  # false for NaN
        require(bool(inside.all()), f"{name} has values outside of 0 to {most}")


def _repetitions(repeats: Tensor, *, output_size: int | None = None) -> None:
    """Bound the repetitions, whose sum can overflow, and compare it with the size of the result."""
    require(repeats.dtype in _DIVIDING and repeats.dim() < 2, "the repetitions are not integers")
    within(repeats, 0, _MOST_REPETITIONS, "repeats")
    _fits_total(int(repeats.sum()), output_size)


def _fits_total(total: int, output_size: int | None) -> None:
    require(output_size is None or output_size == total, f"the output size is not the sum {total}")


def _repeat(
    self: Tensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> None:
    """Check ``repeat_interleave`` of a tensor: repetitions for each of its items, or one for all."""
    require(dim is None or -self.dim() <= dim < self.dim(), "the dimension does not exist")
    items = self.numel() if dim is None else self.shape[dim]
    if not isinstance(repeats, Tensor):
        require(0 <= repeats < _MOST_REPETITIONS, "the repetitions are not within their bounds")
        _fits_total(repeats * items, output_size)
        return
    _repetitions(repeats)
    single = repeats.numel() == 1
    require(single or repeats.numel() == items, "it needs one number of repetitions for each item")
    _fits_total(int(repeats.sum()) * (items if single else 1), output_size)


def _wrapped_diagonal(self: Tensor, fill_value: Any, wrap: bool = False) -> None:
    """Refuse to wrap the diagonal of a tensor whose rows are not in order: it leaves the tensor.

    The kernel also adds up strides of dimensions of size 1, which ``is_contiguous`` ignores.
    """
    strides = tuple(math.prod(self.shape[at + 1 :]) for at in range(self.dim()))
    require(not wrap or self.stride() == strides, "the diagonal of a strided tensor cannot be wrapped")


def _samples(self: Tensor, *_: Any, **__: Any) -> None:
    """Refuse no samples, of which results are fresh memory and gradients end the process."""
    require(self.numel() > 0, "there are no samples")


_LARGEST_EXPONENT = 1 << 31

_MOST_REPETITIONS = 1 << 31
"""Bound of the repetitions of one item; their sum over all items of a tensor fits into 64 bits."""


def _least_squares(self: Tensor, b: Tensor, *_: Any, **__: Any) -> None:
    """Refuse systems without elements, and values that no solver takes: results stay unwritten."""
    require(self.numel() > 0 and b.numel() > 0, "the system has no elements")
    finite = all(bool(each.detach().isfinite().all()) for each in (self, b))
    require(finite, "the system has values that are infinite or NaN")


def _random_from(self: Tensor, first: int = 0, *_: Any, **rest: Any) -> None:
    """Bound the first number: from the largest one, the search for the next float does not end."""
    first = rest.get("from", first)
    require(abs(first) <= _LARGEST_WHOLE, f"the numbers do not begin within {_LARGEST_WHOLE}")


def _overlaps(tensor: Tensor) -> bool:
    """Return whether elements share memory in another way than by repetition (stride 0)."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride:
            if stride < extent:
                return True
            extent += stride * (size - 1)
    return False


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *_: Any, enable_gqa: bool = False, **__: Any
) -> None:
    """The kernel divides the heads of the query by those of key and value.

    It also gives its result the strides of the query, and leaves elements unwritten if these overlap.
    """
    require(not any(map(_overlaps, (query, key, value))), "elements of an argument share memory")
    heads = [each.size(-3) for each in (key, value) if each.dim() > 2]
    require(not enable_gqa or all(heads), "key or value has no heads for the groups of the query")


GUARDS: dict[str, Guard] = {
    "random_.from": _random_from,
    "linalg_lstsq": _least_squares,
    "scaled_dot_product_attention": _attention,
    **PIECE_GUARDS,
    **WINDOW_GUARDS,
    "addbmm_": _sum_of_products,
    "binomial": _binomial,
    "matrix_power": _power,
    "linalg_matrix_power": _power,
    "repeat_interleave": _repeat,
    "repeat_interleave.Tensor": _repetitions,
    "multi_margin_loss": _samples,
    "multilabel_margin_loss": _samples,
    "pdist": _samples,
    "lstm.input": recurrent(4, 2),
    "gru.input": recurrent(3, 1),
    "rnn_tanh.input": recurrent(1, 1),
    "rnn_relu.input": recurrent(1, 1),
    "lstm.data": packed_recurrent(4, 2),
    "gru.data": packed_recurrent(3, 1),
    "rnn_tanh.data": packed_recurrent(1, 1),
    "rnn_relu.data": packed_recurrent(1, 1),
    "lstm_cell": cell(4),
    "gru_cell": cell(3),
    "rnn_tanh_cell": cell(1),
    "rnn_relu_cell": cell(1),
    "as_strided": _as_strided,
    "ctc_loss": _ctc_loss,
    "embedding_bag": _embedding_bag,
    "fill_diagonal_": _wrapped_diagonal,
    "_grouped_mm": _grouped_mm,
    "_weight_norm": _weight_norm,
    **{
        name: _integer_division
        for base in ("floor_divide", "fmod", "remainder")
        for name in (base, f"{base}_")
    },
    **{
        f"{name}.{kind}_mode": _integer_division
        for name in ("div", "div_", "divide", "divide_")
        for kind in ("Tensor", "Scalar")
    },
}
"""Guards by the operator's name; one guard covers all its overloads."""
