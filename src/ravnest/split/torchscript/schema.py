"""Look up the operator that a node of a TorchScript graph names, and call it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

Function = Callable[..., Any]


class UnsupportedOperatorError(Exception):
    """The operator cannot be captured."""


# TorchScript passes the enums of c10 as integers, in the order of their declaration.
DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128, torch.bool),
    *(torch.qint8, torch.quint8, torch.qint32, torch.bfloat16),
)
LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr)
MEMORY_FORMATS = (
    *(torch.contiguous_format, torch.preserve_format),
    *(torch.channels_last, torch.channels_last_3d),
)


def _decode(enum: Sequence[Any]) -> Function:
    def decode(code: Any) -> Any:
        if not isinstance(code, int):
            return code
        if code >= len(enum):
            raise UnsupportedOperatorError(f"the code {code} is not one of {', '.join(map(str, enum))}")
        return enum[code]

    return decode


as_dtype = _decode(DTYPES)
as_memory_format = _decode(MEMORY_FORMATS)


def _as_tensor(value: Any) -> Any:
    """Return a tensor for a size that a trace recorded as one (``prim::NumToTensor``)."""
    if isinstance(value, int | torch.SymInt):
        return torch.ops.aten.scalar_tensor.default(value, dtype=torch.int64)
    if isinstance(value, float | torch.SymFloat):
        return torch.ops.aten.scalar_tensor.default(value)
    return value


def _as_tensors(values: Any) -> Any:
    return [_as_tensor(value) for value in values] if isinstance(values, list) else values


_DECODERS: Mapping[str, Function] = {
    "ScalarType": as_dtype,
    "Layout": _decode(LAYOUTS),
    "MemoryFormat": as_memory_format,
    "Tensor": _as_tensor,
    "List[Tensor]": _as_tensors,
}


@dataclass(frozen=True)
class OperatorArgument:
    """Name, passing convention and decoder of an operator's argument."""

    name: str
    keyword_only: bool
    decode: Function | None


@dataclass(frozen=True)
class Operator:
    """An operator of the graph with its kind (``aten::add``), overload and arguments."""

    kind: str
    name: str
    overload: OpOverload
    dispatched: bool
    arguments: tuple[OperatorArgument, ...]

    def call(self, args: Sequence[Any]) -> Any:
        """Call the overload, with integers decoded to dtypes, layouts and memory formats."""
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        for argument, value in zip(self.arguments, args, strict=False):
            decoded = argument.decode(value) if argument.decode else value
            if argument.keyword_only:
                keywords[argument.name] = decoded
            else:
                positional.append(decoded)
        result = self.overload(*positional, **keywords)
        if isinstance(result, torch.dtype):
            return DTYPES.index(result)
        is_list = isinstance(result, tuple) and len(self.overload._schema.returns) == 1
        return list(result) if is_list else result


@functools.cache
def resolve(schema: str) -> Operator:
    """Return the operator with this schema, in the notation of ``torch._C.Node.schema``."""
    name = schema.partition("(")[0]
    kind, _, overload_name = name.partition(".")
    namespace, _, packet = kind.partition("::")
    try:
        overload = getattr(getattr(getattr(torch.ops, namespace), packet), overload_name or "default")
    except (AttributeError, RuntimeError):
        raise UnsupportedOperatorError(f"{name} is not registered in this process") from None
    arguments = tuple(
        OperatorArgument(argument.name, argument.kwarg_only, _decoder(argument))
        for argument in overload._schema.arguments
    )
    return Operator(kind, name, overload, _is_dispatched(kind, overload_name), arguments)


def _decoder(argument: torch.Argument) -> Function | None:
    kind = str(argument.real_type)
    if kind.startswith("Optional["):
        kind = kind.removeprefix("Optional[").removesuffix("]")
    return _DECODERS.get(kind)


def _is_dispatched(kind: str, overload_name: str) -> bool:
    try:
        torch._C._dispatch_find_schema_or_throw(kind, overload_name)
    except RuntimeError:
        return False
    return True
