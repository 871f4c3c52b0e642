"""Plain attributes of a model's modules: all but parameters, buffers, submodules and hooks.

Stages have none of them. They are compared before and after a run of the model, and put back after it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

_OWN = frozenset(nn.Module().__dict__)
"""Attributes of every module: tables of parameters, buffers, submodules and hooks."""
_MAX_DEPTH = 8
"""Deepest nesting of containers and objects that is looked at."""
_MAX_BYTES = 64 << 20
"""Largest tensor or array whose values are compared and kept; of others only the version counts."""
_SCALARS = (type(None), bool, int, str, bytes)
_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.dtype, torch.device)

Undo = Callable[[], None]
"""Function that puts a value back to what it was."""


def describe_attributes(model: nn.Module) -> dict[str, Hashable]:
    """Return a description of each plain attribute by its dotted name; equal ones hold equal values."""
    found: dict[str, Hashable] = {}
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name not in _OWN:
                found[f"{path}.{name}" if path else name] = _describe(value, 0, set())
    return found


def changed_attributes(before: Mapping[str, Hashable], after: Mapping[str, Hashable]) -> list[str]:
    """Return the names of attributes that are new, gone or different."""
    names = dict.fromkeys((*before, *after))
    absent = object()
    return [name for name in names if before.get(name, absent) != after.get(name, absent)]


def keep_attributes(model: nn.Module) -> Undo:
    """Return a function that puts all attributes of all modules back, hooks and tables included.

    The values of parameters and buffers are not kept.
    """
    modules = list(model.modules())
    seen = {id(each) for each in (*modules, *model.parameters(), *model.buffers())}
    undo = [step for module in modules for step in _keep_table(module.__dict__, 0, seen)]

    def put_back() -> None:
        for step in undo:
            step()

    return put_back


def _describe(value: Any, depth: int, path: set[int]) -> Hashable:
    if (leaf := _describe_leaf(value)) is not None:
        return leaf
    if (state := _generator(value)) is not None:
        value = state[0]()
    if id(value) in path or depth >= _MAX_DEPTH or isinstance(value, (*_OPAQUE, nn.Module)):
        return ("object", id(value))

    def inside(item: Any) -> Hashable:
        return _describe(item, depth + 1, {*path, id(value)})

    match value:
        case list() | tuple() | deque():
            return (type(value).__name__, *map(inside, value))
        case set() | frozenset():
            return (type(value).__name__, frozenset(map(inside, value)))
    fields = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if not isinstance(fields, dict):
        return ("object", id(value))
    return (type(value).__name__, *((inside(name), inside(item)) for name, item in fields.items()))


def _describe_leaf(value: Any) -> Hashable:
    """Return the description of a number, a text, a tensor or an array; None for anything else."""
    match value:
        case _ if isinstance(value, _SCALARS):
            return (type(value).__name__, value)
        case float() | complex():
            return (type(value).__name__, repr(value))
        case torch.Tensor():
            return ("tensor", tuple(value.shape), str(value.dtype), _contents(value))
        case np.ndarray():
            return ("array", value.shape, str(value.dtype), _digest(value))
    return None


def _contents(tensor: torch.Tensor) -> Hashable:
    """Return a digest of a tensor's values, or how often it was written if that is not possible."""
    plain = tensor.detach()
    readable = plain.layout is torch.strided and plain.device.type != "meta" and not plain.is_quantized
    if readable and plain.numel() * plain.element_size() <= _MAX_BYTES:
        return xxhash.xxh3_128(bytes_of(plain).numpy().data).digest()
    return (id(tensor), 0 if tensor.is_inference() else tensor._version)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's values in row-major order, without a copy if they are."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # a single value has any stride


def _digest(array: np.ndarray[Any, Any]) -> Hashable:
    if array.dtype.hasobject or array.nbytes > _MAX_BYTES:
        return id(array)
    return xxhash.xxh3_128(np.ascontiguousarray(array).tobytes()).digest()


def _generator(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return functions that get and set the state of a random number generator; None for others."""
    match value:
        case random.SystemRandom():
            return None
        case random.Random():
            return value.getstate, value.setstate
        case np.random.RandomState():
            return partial(value.get_state, legacy=False), value.set_state
        case np.random.Generator():
            bits = value.bit_generator
            return lambda: bits.state, partial(setattr, bits, "state")
        case torch.Generator():
            return value.get_state, value.set_state
    return None


def _keep(value: Any, depth: int, seen: set[int]) -> Iterator[Undo]:
    """Yield the functions that put a value and everything inside of it back."""
    if id(value) in seen or depth > _MAX_DEPTH or isinstance(value, (*_SCALARS, float, *_OPAQUE)):
        return
    seen.add(id(value))
    if (undo := _keep_leaf(value)) is not None:
        yield undo
        return
    match value:
        case list() | deque():
            yield _put_back_items(value, list(value))
        case set():
            yield _put_back_members(value, set(value))
    if isinstance(value, list | deque | tuple):
        for item in list(value):
            yield from _keep(item, depth + 1, seen)
        return
    fields = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if isinstance(fields, dict):
        yield from _keep_table(fields, depth, seen)


def _keep_leaf(value: Any) -> Undo | None:
    """Return the function that puts a tensor, an array or a generator back; None for others."""
    if (state := _generator(value)) is not None:
        get, put = state
        return _calling(put, get())
    match value:
        case torch.Tensor():
            small = value.numel() * value.element_size() <= _MAX_BYTES
            if small and value.layout is torch.strided and value.device.type != "meta":
                return _put_back_tensor(value, value.detach().clone())
        case np.ndarray():
            if value.nbytes <= _MAX_BYTES and value.flags.writeable:
                return _put_back_array(value, value.copy())
    return None


def _keep_table(table: dict[Any, Any], depth: int, seen: set[int]) -> Iterator[Undo]:
    before = dict(table)

    def put_back() -> None:
        if list(table) != list(before) or any(table[key] is not before[key] for key in before):
            table.clear()
            table.update(before)

    yield put_back
    for item in before.values():
        yield from _keep(item, depth + 1, seen)


def _calling(function: Callable[[Any], object], argument: Any) -> Undo:
    def put_back() -> None:
        function(argument)

    return put_back


def _put_back_bits(generator: np.random.Generator, state: Any) -> Undo:
    def put_back() -> None:
        generator.bit_generator.state = state

    return put_back


def _put_back_tensor(tensor: torch.Tensor, values: torch.Tensor) -> Undo:
    def put_back() -> None:
        if not torch.equal(tensor.detach(), values):
            with torch.no_grad():
                tensor.detach().copy_(values)

    return put_back


def _put_back_array(array: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> Undo:
    def put_back() -> None:
        array[...] = values

    return put_back


def _put_back_items(items: list[Any] | deque[Any], before: list[Any]) -> Undo:
    def put_back() -> None:
        if list(map(id, items)) != list(map(id, before)):
            items.clear()
            items.extend(before)

    return put_back


def _put_back_members(members: set[Any], before: set[Any]) -> Undo:
    def put_back() -> None:
        if members != before:
            members.clear()
            members.update(before)

    return put_back
