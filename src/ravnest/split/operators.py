"""Allow-list of the operators that a stage may use.

``operators.txt`` lists the ATen operators by base name, one per line. They compute tensors from
tensors; none of them opens files, runs code, changes storage without autograd's knowledge or accesses
a device queue. Python's arithmetic on sizes is listed in this module.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from ravnest.errors import OperatorError


def _named(prefix: str, module: Any, names: str) -> dict[str, Callable[..., Any]]:
    return {f"{prefix}::{name}": getattr(module, name) for name in names.split(" ")}


_FUNCTIONS = {
    **_named("python", operator, "getitem add sub mul floordiv truediv mod neg pow abs"),
    **_named("python", operator, "eq ne lt le gt ge and_ or_ not_"),
    **_named("python", builtins, "round"),
    **_named("math", math, "ceil floor trunc sqrt"),
    **_named("size", torch, "sym_float sym_int sym_max sym_min sym_not sym_ite sym_sum _sym_sqrt"),
}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}


@cache
def allowed_aten() -> frozenset[str]:
    """Return the base names of the ATen operators that a stage may use."""
    text = files("ravnest.split").joinpath("operators.txt").read_text(encoding="utf-8")
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return frozenset(line for line in lines if line)


def name_of(target: Callable[..., Any]) -> str:
    """Return an operator's name in the stage format; raise ``OperatorError`` if it is not allowed."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, base = target._schema.name.split("::")
        name = f"{namespace}::{base}.{target._overloadname}"
        _check(name)
        return name
    if target in _NAMES:
        return _NAMES[target]
    if str(getattr(target, "__module__", "")).startswith("torch._functorch"):
        raise OperatorError(_transform_message(target.__name__))
    raise OperatorError(f"stages cannot use the operator {target}")


def _transform_message(name: str) -> str:
    if "batch_dim" in name or "vmap" in name:
        return (
            "torch.vmap inside forward cannot be part of a stage: a graph cannot represent its nested "
            "batches. Write the function for the whole batch at once (most torch functions take leading "
            "dimensions: matmul, einsum, unsqueeze and broadcasting), or loop over a fixed number"
        )
    return (
        f"a transform of torch.func (grad, vjp, jvp; {name}) inside forward cannot be part of a stage. "
        "Write the derivative with torch functions, or take it outside the model"
    )


def all_targets() -> list[str]:
    """Return the names of all operators that a stage may use, with their overloads."""
    names = list(_FUNCTIONS)
    for base in sorted(allowed_aten()):
        packet = getattr(torch.ops.aten, base, None)
        for overload in packet.overloads() if packet is not None else ():
            name = f"aten::{base}.{overload}"
            with suppress(OperatorError):
                resolve(name)
                names.append(name)
    return names


@cache
def resolve(name: str) -> Callable[..., Any]:
    """Return the operator of this name; raise ``OperatorError`` if it is not allowed."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    base, overload = _check(name)
    packet = getattr(torch.ops.aten, base, None)
    target = getattr(packet, overload, None)
    if not isinstance(target, torch._ops.OpOverload):
        raise OperatorError(f"this version of torch ({torch.__version__}) has no operator {name}")
    _check_schema(name, target._schema)
    return target


def _check_schema(name: str, schema: torch.FunctionSchema) -> None:
    """Raise ``OperatorError`` for an overload that writes to an ``out`` tensor or computes no tensors.

    TorchScript's overloads on numbers, strings and lists can build values of any size.
    """
    if any(argument.is_out for argument in schema.arguments):
        raise OperatorError(f"the operator {name} writes to an out tensor, which stages cannot do")
    if not any("Tensor" in str(each.type) for each in (*schema.arguments, *schema.returns)):
        raise OperatorError(f"the operator {name} neither takes nor returns a tensor")


def _check(name: str) -> tuple[str, str]:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    plain = base.isidentifier() and overload.isidentifier()
    if namespace != "aten":
        raise OperatorError(
            f"the operator {name} belongs to the namespace {namespace!r}, not to PyTorch's own "
            "operators (aten), so a provider cannot run it. Write the operation with torch functions, "
            "or look for an option of its library that does (transformers: "
            "experts_implementation='batched_mm')"
        )
    internal = overload == "out" or overload.endswith("_out") or overload.startswith("prim_")
    if not plain or internal or base not in allowed_aten():
        raise OperatorError(f"the operator {name} is not on the list of operators that stages can use")
    return base, overload
