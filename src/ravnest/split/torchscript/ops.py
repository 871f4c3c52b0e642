"""Evaluate operators of a TorchScript graph with functions that ``torch.export`` can trace.

Operators of torch's dispatcher are called directly. The others exist in TorchScript only: those on
numbers run natively unless a number is symbolic; those on lists and dicts map to Python's own; those
on tensors have a Python equivalent in a table below.
"""

from __future__ import annotations

import copy
import enum
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ravnest.split.torchscript.schema import (
    DTYPES,
    LAYOUTS,
    Function,
    Operator,
    UnsupportedOperatorError,
    as_dtype,
    as_memory_format,
    resolve,
)

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class DataDependentError(Exception):
    """The graph needs the value of a tensor, which is unknown during capture."""


def evaluate(schema: str, args: Sequence[Any]) -> Any:
    """Return the result of the operator with ``schema`` for ``args``.

    Raises:
        DataDependentError: it needs the value of a tensor.
        UnsupportedOperatorError: it has no equivalent here.
    """
    op = resolve(schema)
    if op.kind in _ANYTHING:
        return _ANYTHING[op.kind](*args)
    first = args[0] if args else None
    if isinstance(first, Tensor):
        return _on_tensor(op, args)
    if op.dispatched:
        return op.call(args)
    if isinstance(first, list | dict | tuple | enum.Enum) and op.kind in _PYTHON:
        return _PYTHON[op.kind](*args)
    return _on_numbers(op, args)


def _on_tensor(op: Operator, args: Sequence[Any]) -> Any:
    if op.kind in _DATA_DEPENDENT:
        raise DataDependentError(op.kind)
    if op.kind in _QUERIES:
        return _QUERIES[op.kind](*args)
    if op.kind.startswith("prim::is_"):
        return getattr(args[0], op.kind.removeprefix("prim::"))
    if op.name in _TENSOR_EQUIVALENTS:
        return _TENSOR_EQUIVALENTS[op.name](*args)
    if op.dispatched:
        return op.call(args)
    raise UnsupportedOperatorError(f"{op.name} cannot be captured")


def _on_numbers(op: Operator, args: Sequence[Any]) -> Any:
    if op.kind in _SIDE_EFFECTS:
        raise UnsupportedOperatorError(f"{op.name} has side effects outside the model")
    if not _has_symbol(args):
        return op.overload(*args)
    if op.kind in _SYMBOLIC:
        return _SYMBOLIC[op.kind](*args)
    raise UnsupportedOperatorError(f"{op.name} is not supported for sizes that depend on the batch size")


def _has_symbol(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_symbol, value))
    return isinstance(value, SYMBOLIC)


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def shape_arithmetic(schema: str, args: Sequence[Any], constants: Sequence[Any]) -> Any:
    """Evaluate arithmetic on sizes that a trace recorded as tensor operators, or ``NotImplemented``.

    ``torch.jit.trace`` turns ``x.size(0) // 2`` into operators on zero-dimensional tensors. As numbers
    they stay symbolic; as tensors their values would be unknown during export. ``constants`` are the
    ``args`` with numbers in place of constant tensors.
    """
    op = resolve(schema)
    function = _CASTS.get(op.kind)
    if op.dispatched and any(isinstance(arg, _NUMBERS) for arg in args[:2]):
        function = _SHAPE_ARITHMETIC.get(op.kind)
    if function is None or not all(isinstance(arg, _NUMBERS) for arg in constants[:2]):
        return NotImplemented
    return function(*constants)


def _divide(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return a / b
    return -(-a // b) if rounding_mode == "trunc" and a < 0 else a // b


def _identity(value: Any) -> Any:
    return value


_SHAPE_ARITHMETIC: Mapping[str, Function] = {
    "aten::add": lambda a, b, alpha=1: a + alpha * b,
    "aten::sub": lambda a, b, alpha=1: a - alpha * b,
    "aten::rsub": lambda a, b, alpha=1: b - alpha * a,
    "aten::mul": operator.mul,
    "aten::neg": operator.neg,
    "aten::floor": math.floor,
    "aten::ceil": math.ceil,
    "aten::floor_divide": operator.floordiv,
    "aten::remainder": operator.mod,
    "aten::div": _divide,
    "aten::item": _identity,
}

_CASTS: Mapping[str, Function] = {
    "aten::Bool": bool,
    "aten::Int": torch.sym_int,
    "aten::Float": torch.sym_float,
    "aten::IntImplicit": torch.sym_int,
    "aten::FloatImplicit": torch.sym_float,
    "aten::ScalarImplicit": _identity,
}

_DATA_DEPENDENT = frozenset(
    {
        *_CASTS,
        *("aten::item", "aten::Complex", "aten::ComplexImplicit", "aten::_tensor_to_list"),
        *("aten::equal", "aten::allclose", "aten::is_nonzero"),
    }
)
_SIDE_EFFECTS = frozenset({"aten::save", "aten::seed", "aten::manual_seed"})


def _size(tensor: Tensor, dim: int | None = None) -> Any:
    return list(tensor.shape) if dim is None else tensor.shape[dim]


def _stride(tensor: Tensor, dim: int | None = None) -> Any:
    return list(tensor.stride()) if dim is None else tensor.stride(dim)


def _is_contiguous(tensor: Tensor, memory_format: int = 0) -> bool:
    return tensor.is_contiguous(memory_format=as_memory_format(memory_format))


_QUERIES: Mapping[str, Function] = {
    "aten::size": _size,
    "aten::stride": _stride,
    "aten::dim": Tensor.dim,
    "aten::numel": Tensor.numel,
    "aten::len": lambda tensor: tensor.shape[0],
    "aten::is_floating_point": Tensor.is_floating_point,
    "aten::is_complex": Tensor.is_complex,
    "aten::is_contiguous": _is_contiguous,
    "aten::element_size": Tensor.element_size,
    "aten::storage_offset": Tensor.storage_offset,
    "aten::get_device": Tensor.get_device,
    "prim::device": lambda tensor: tensor.device,
    "prim::dtype": lambda tensor: DTYPES.index(tensor.dtype),
    "prim::layout": lambda tensor: LAYOUTS.index(tensor.layout),
    "prim::requires_grad": lambda tensor: tensor.requires_grad,
    "prim::data": lambda tensor: tensor.data,
    "prim::itemsize": lambda tensor: tensor.itemsize,
}


def _to_device(
    tensor: Tensor,
    device: torch.device | None,
    dtype: int | None = None,
    non_blocking: bool = False,
    copy: bool = False,
) -> Tensor:
    target = tensor.dtype if dtype is None else as_dtype(dtype)
    return tensor.to(device or tensor.device, target, non_blocking, copy)


_TENSOR_EQUIVALENTS: Mapping[str, Function] = {
    "aten::split": lambda tensor, sizes, dim=0: list(tensor.split(sizes, dim)),
    "aten::copy_.Tensor": Tensor.copy_,
    "aten::copy_.int": Tensor.fill_,
    "aten::copy_.float": Tensor.fill_,
    "aten::cpu": Tensor.cpu,
    "aten::numpy_T.a": lambda tensor: tensor.T,
    "aten::mT.a": lambda tensor: tensor.mT,
    "aten::mH.a": lambda tensor: tensor.mH,
    "aten::index.Tensor_hacked_twin": torch.ops.aten.index.Tensor,
    "aten::index_put.hacked_twin": torch.ops.aten.index_put.default,
    "aten::index_put_.hacked_twin": torch.ops.aten.index_put_.default,
    "aten::to.prim_Device": _to_device,
    "aten::to.prim_dtype": lambda tensor, *rest: _to_device(tensor, None, *rest),
    "aten::to.prim_other": lambda tensor, *rest: _to_device(tensor, None, None, *rest),
    "aten::_no_grad_embedding_renorm_": lambda weight, *rest: torch.embedding_renorm_(
        weight.detach(), *rest
    ),
    "prim::abs": Tensor.abs,
}


def _tensor(
    data: Any, dtype: int | None, device: torch.device | None, requires_grad: bool = False
) -> Tensor:
    if isinstance(data, Tensor):
        return _to_device(data, device, dtype)
    if isinstance(data, SYMBOLIC):
        exact = torch.int64 if isinstance(data, torch.SymInt) else None
        scalar = torch.ops.aten.scalar_tensor.default
        return scalar(data, dtype=as_dtype(dtype) or exact, device=device)  # type: ignore[no-any-return]
    return torch.tensor(data, dtype=as_dtype(dtype), device=device, requires_grad=requires_grad)


_ANYTHING: Mapping[str, Function] = {
    "aten::tensor": _tensor,
    "aten::as_tensor": _tensor,
    "aten::__is__": operator.is_,
    "aten::__isnot__": operator.is_not,
    "aten::format": str.format,
    "aten::percentFormat": lambda template, *args: template % args,
    "aten::set_grad_enabled": torch._C._set_grad_enabled,
    "aten::warn": lambda *_: None,
    "aten::wait": _identity,
    "aten::_unwrap_optional": _identity,
}


def _append(values: list[Any], value: Any) -> list[Any]:
    values.append(value)
    return values


_PYTHON: Mapping[str, Function] = {
    "aten::len": len,
    "aten::__getitem__": operator.getitem,
    "aten::__contains__": operator.contains,
    "aten::_set_item": operator.setitem,
    "aten::Delete": operator.delitem,
    "aten::append": _append,
    "aten::extend": list.extend,
    "aten::insert": list.insert,
    "aten::remove": list.remove,
    "aten::reverse": list.reverse,
    "aten::pop": lambda container, *args: container.pop(*args),
    "aten::clear": lambda container: container.clear(),
    "aten::copy": copy.copy,
    "aten::list": list,
    "aten::slice": lambda values, start, end, step: values[start:end:step],
    "aten::index": list.index,
    "aten::count": list.count,
    "aten::sort": lambda values, reverse=False: values.sort(reverse=reverse),
    "aten::sorted": sorted,
    "aten::sum": sum,
    "aten::add": operator.add,
    "aten::add_": operator.iadd,
    "aten::mul": operator.mul,
    "aten::mul_": operator.imul,
    "aten::eq": operator.eq,
    "aten::ne": operator.ne,
    "aten::dict": dict,
    "aten::keys": list,
    "aten::values": lambda mapping: list(mapping.values()),
    "aten::items": lambda mapping: list(mapping.items()),
    "aten::get": dict.get,
    "aten::update": dict.update,
    "aten::setdefault": dict.setdefault,
    "aten::popitem": dict.popitem,
}

_SYMBOLIC: Mapping[str, Function] = {
    "aten::add": operator.add,
    "aten::sub": operator.sub,
    "aten::mul": operator.mul,
    "aten::div": operator.truediv,
    "aten::floordiv": operator.floordiv,
    "aten::remainder": operator.mod,
    "aten::pow": operator.pow,
    "aten::neg": operator.neg,
    "aten::eq": operator.eq,
    "aten::ne": operator.ne,
    "aten::lt": operator.lt,
    "aten::le": operator.le,
    "aten::gt": operator.gt,
    "aten::ge": operator.ge,
    "aten::__and__": operator.and_,
    "aten::__or__": operator.or_,
    "aten::__not__": torch.sym_not,
    "aten::Bool": bool,
    "aten::Int": torch.sym_int,
    "aten::Float": torch.sym_float,
    "aten::floor": math.floor,
    "aten::ceil": math.ceil,
    "aten::sqrt": torch.sym_sqrt,
    "aten::str": str,
    "aten::__range_length": lambda start, stop, step: len(range(start, stop, step)),
    "aten::__derive_index": lambda index, start, step: start + index * step,
    "prim::abs": abs,
    "prim::max": lambda *args: functools.reduce(torch.sym_max, args[0] if len(args) == 1 else args),
    "prim::min": lambda *args: functools.reduce(torch.sym_min, args[0] if len(args) == 1 else args),
    "prim::rangelist": lambda stop: list(range(stop)),
}
