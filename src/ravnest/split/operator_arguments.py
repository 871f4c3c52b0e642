"""Check an operation's arguments against its operator's schema, before anything runs.

Torch takes integers for dtypes, layouts and memory formats, and texts for devices: a number that is
none of them makes a kernel compute sizes of memory with it.
"""

from __future__ import annotations

import reprlib

import torch

from ravnest.errors import StageFormatError
from ravnest.split.graph import Argument, Operation, StageDevice
from ravnest.split.operators import resolve

_KINDS: dict[str, type] = {
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
    "Device": StageDevice,
    "Generator": type(None),
}
"""Types of arguments that only constants of one type fit, by their name in schemas."""
CODES: dict[str, tuple[int, ...]] = {"reduction": (0, 1, 2)}
"""Arguments of all operators that are codes, of which kernels do not check that they exist."""
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, StageDevice)


def check_operation(operation: Operation) -> None:
    """Raise ``OperatorError`` or ``StageFormatError`` for a call that stages cannot make."""
    target = resolve(operation.target)
    if not isinstance(target, torch._ops.OpOverload):
        if operation.kwargs:
            raise _malformed(operation, f"it has no argument {operation.kwargs[0][0]!r}")
        return
    arguments = target._schema.arguments
    positional = [argument for argument in arguments if not argument.kwarg_only]
    if len(operation.args) > len(positional):
        raise _malformed(operation, f"it takes at most {len(positional)} arguments by position")
    by_name = {argument.name: argument for argument in arguments}
    given = {argument.name for argument, _ in zip(positional, operation.args, strict=False)}
    for argument, value in zip(positional, operation.args, strict=False):
        _check_kind(operation, argument, value)
    for name, value in operation.kwargs:
        if name not in by_name or name in given:
            raise _malformed(operation, f"it has no argument {name!r}, or has it twice")
        _check_kind(operation, by_name[name], value)


def _check_kind(operation: Operation, argument: torch.Argument, value: Argument) -> None:
    if value is None:
        return
    if argument.name in CODES and value not in CODES[argument.name]:
        raise _malformed(operation, f"{argument.name} is not one of {CODES[argument.name]}")
    kind = str(argument.real_type)
    if kind.startswith("Optional["):
        kind = kind[len("Optional[") : -1]
    wanted = _KINDS.get(kind)
    if wanted is not None and not isinstance(value, wanted):
        raise _malformed(operation, f"{argument.name} is not a {kind}: {reprlib.repr(value)}")
    if wanted is None and _holds_constant(value):
        raise _malformed(operation, f"{argument.name} is a {kind}: {reprlib.repr(value)}")


def _holds_constant(value: Argument) -> bool:
    """Return True for a dtype, layout, memory format or device, or a list that contains one."""
    if isinstance(value, tuple):
        return any(map(_holds_constant, value))
    return isinstance(value, _CONSTANTS)


def _malformed(operation: Operation, reason: str) -> StageFormatError:
    return StageFormatError(f"the operation {operation.name!r} ({operation.target}): {reason}")
