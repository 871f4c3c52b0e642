"""Encode stages as JSON, and decode them with every check that is possible before anything runs.

msgspec checks the document: fields, types and bounds, as the structs here and in ``split/graph.py``
declare them. This module decodes what msgspec has no type for (arguments, sizes, structures, names of
torch), ``StageSpec.check`` checks the stage as a whole, and ``split/operators.py`` the operators.
"""

from __future__ import annotations

import math
import re
import reprlib
from typing import Any, Final, Literal

import msgspec
import torch
from msgspec import Struct

from ravnest.errors import StageFormatError
from ravnest.split.graph import (
    MODES,
    Argument,
    Dimension,
    InputEntry,
    ModuleVersion,
    Operation,
    OutputSpec,
    Ref,
    Size,
    StageDevice,
    StageGraph,
    StageSpec,
    StateSpec,
    StateUse,
    SymbolRange,
    ValueSpec,
)
from ravnest.split.limits import MAX_ARGUMENT_DEPTH, MAX_ARGUMENTS, MAX_TEXT
from ravnest.split.operator_arguments import check_operation
from ravnest.split.structure import Structure
from ravnest.types import convert_checked

FORMAT: Final = "ravnest-stage"
VERSION: Final = 1
_MAX_INTEGER = 2**63
"""Bound of the integers that an operator can take."""

_SYMBOLIC_SIZE = re.compile(r"(?:(?P<factor>[1-9][0-9]{0,14})\*)?(?P<symbol>\w+|\?)")
_DTYPES = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
"""Types of elements that torch's own operators compute with: neither quantized nor raw bits."""
_TORCH_NAMES: dict[str, dict[str, Any]] = {
    "dtype": {str(value).removeprefix("torch."): value for value in _DTYPES},
    "layout": {"strided": torch.strided},
    "memory_format": {
        str(v).removeprefix("torch."): v
        for v in (
            torch.contiguous_format,
            torch.preserve_format,
            torch.channels_last,
            torch.channels_last_3d,
        )
    },
}


class _Document(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the JSON objects whose fields differ from those of the types in ``split/graph.py``."""


class _InputEntryDocument(_Document, frozen=True):
    name: str
    structure: Any
    values: tuple[str, ...]


class _ValueDocument(_Document, frozen=True):
    name: str
    dtype: torch.dtype | None
    shape: tuple[Size | str, ...]
    gradient: bool


class _OperationDocument(_Document, frozen=True):
    name: str
    target: str
    args: list[Any]
    kwargs: dict[str, Any] = {}
    no_grad: bool = False


class _GraphDocument(_Document, frozen=True):
    inputs: tuple[_ValueDocument, ...]
    symbols: tuple[SymbolRange, ...]
    state: tuple[StateUse, ...]
    operations: tuple[_OperationDocument, ...]
    outputs: tuple[tuple[str, Any], ...]
    structure: Any


class _GraphsDocument(_Document, frozen=True):
    train: _GraphDocument
    eval: _GraphDocument


class _StageDocument(_Document, frozen=True):
    format: Literal["ravnest-stage"]
    version: Literal[1]
    stage: int
    stages: int
    signature: tuple[_InputEntryDocument, ...]
    state: tuple[StateSpec, ...]
    graphs: _GraphsDocument
    module_versions: dict[str, ModuleVersion]
    weights: Any = None
    """Name and digest of the weights, which ``store/bundle.py`` adds and checks."""


def stage_to_json(spec: StageSpec) -> dict[str, Any]:
    """Return the JSON form that docs/stage-format.md describes."""
    document = _StageDocument(
        format=FORMAT,
        version=VERSION,
        stage=spec.index,
        stages=spec.count,
        signature=tuple(
            _InputEntryDocument(entry.name, entry.structure.to_json(), entry.values)
            for entry in spec.signature
        ),
        state=spec.state,
        graphs=_GraphsDocument(*(_graph_to_document(spec.graphs[mode]) for mode in MODES)),
        module_versions=spec.module_versions,
    )
    return msgspec.to_builtins(document, enc_hook=_torch_name)  # type: ignore[no-any-return]


def stage_from_json(data: object) -> StageSpec:
    """Decode and check a stage; raise ``StageFormatError`` or ``OperatorError`` if it is invalid."""
    if not isinstance(data, dict):
        raise StageFormatError("the stage is malformed: it is not a JSON object")
    if data.get("format") != FORMAT:
        raise StageFormatError("this file is not a Ravnest stage")
    if data.get("version") != VERSION:
        raise StageFormatError(
            f"the stage has format version {reprlib.repr(data.get('version'))}, this Ravnest reads "
            f"{VERSION}: use the version of Ravnest that wrote it, or split the model again"
        )
    try:
        document = convert_checked(data, _StageDocument, _decode_torch_type)
    except msgspec.ValidationError as error:
        raise StageFormatError(f"the stage is malformed: {error}") from error
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can escape
        raise StageFormatError(f"the stage holds text that is not Unicode: {error}") from error
    spec = StageSpec(
        index=document.stage,
        count=document.stages,
        state=document.state,
        graphs={mode: _graph_from_document(getattr(document.graphs, mode)) for mode in MODES},
        signature=tuple(
            InputEntry(entry.name, Structure.from_json(entry.structure), entry.values)
            for entry in document.signature
        ),
        module_versions=document.module_versions,
    )
    spec.check()
    for graph in spec.graphs.values():
        for operation in graph.operations:
            check_operation(operation)
    return spec


def _graph_to_document(graph: StageGraph) -> _GraphDocument:
    return _GraphDocument(
        inputs=tuple(_value_to_document(value) for value in graph.inputs),
        symbols=graph.symbols,
        state=graph.state,
        operations=tuple(
            _OperationDocument(
                name=operation.name,
                target=operation.target,
                args=[_argument_to_json(value) for value in operation.args],
                kwargs={name: _argument_to_json(value) for name, value in operation.kwargs},
                no_grad=operation.no_grad,
            )
            for operation in graph.operations
        ),
        outputs=tuple((output.name, _argument_to_json(output.value)) for output in graph.outputs),
        structure=None if graph.structure is None else graph.structure.to_json(),
    )


def _graph_from_document(document: _GraphDocument) -> StageGraph:
    return StageGraph(
        inputs=tuple(_value_from_document(value) for value in document.inputs),
        state=document.state,
        operations=tuple(_operation_from_document(operation) for operation in document.operations),
        outputs=tuple(
            OutputSpec(name, _argument_from_json(value, f"output {name!r}"))
            for name, value in document.outputs
        ),
        structure=None if document.structure is None else Structure.from_json(document.structure),
        symbols=document.symbols,
    )


def _value_to_document(value: ValueSpec) -> _ValueDocument:
    shape = tuple(str(size) if size.symbol else size.factor for size in value.shape)
    return _ValueDocument(value.name, value.dtype, shape, value.gradient)


def _value_from_document(document: _ValueDocument) -> ValueSpec:
    shape = tuple(_dimension(size, document.name) for size in document.shape)
    return ValueSpec(document.name, document.dtype, shape, document.gradient)


def _dimension(size: int | str, name: str) -> Dimension:
    if isinstance(size, int):
        return Dimension(size)
    found = _SYMBOLIC_SIZE.fullmatch(size)
    if found and (found["symbol"].isidentifier() or size == "?"):
        return Dimension(int(found["factor"] or 1), found["symbol"])
    raise StageFormatError(f"the shape of {name!r} is malformed: {reprlib.repr(size)} is not a size")


def _operation_from_document(document: _OperationDocument) -> Operation:
    name = document.name
    if _count([*document.args, *document.kwargs.values()]) > MAX_ARGUMENTS:
        raise StageFormatError(f"the operation {name!r} has more than {MAX_ARGUMENTS} arguments")
    return Operation(
        name=name,
        target=document.target,
        args=tuple([_argument_from_json(value, name) for value in document.args]),
        kwargs=tuple([(k, _argument_from_json(value, name)) for k, value in document.kwargs.items()]),
        no_grad=document.no_grad,
    )


def _count(data: list[Any], depth: int = 0) -> int:
    """Return the number of values in a list and the lists inside of it."""
    if depth > MAX_ARGUMENT_DEPTH:
        return 1
    return sum(_count(item, depth + 1) if isinstance(item, list) else 1 for item in data)


def _argument_to_json(value: Argument) -> Any:
    match value:
        case Ref():
            return {"value": value.name}
        case StageDevice():
            return {"device": "stage"}
        case float() if not math.isfinite(value):
            return {"float": repr(value)}
        case torch.dtype():
            return {"dtype": _torch_name(value)}
        case torch.layout():
            return {"layout": _torch_name(value)}
        case torch.memory_format():
            return {"memory_format": _torch_name(value)}
        case tuple():
            return [_argument_to_json(item) for item in value]
        case _:
            return value


def _argument_from_json(data: Any, reader: str, depth: int = 0) -> Argument:
    """Decode an argument; ``reader`` names the operation or output in errors.

    The single key of an object says what it is, which msgspec cannot express: its unions need a field
    that holds the tag.
    """
    if data is None or isinstance(data, bool | float):
        return data
    if isinstance(data, str) and len(data) <= MAX_TEXT:
        return data
    if isinstance(data, int) and -_MAX_INTEGER <= data < _MAX_INTEGER:
        return data
    if isinstance(data, list) and depth < MAX_ARGUMENT_DEPTH:
        return tuple([_argument_from_json(item, reader, depth + 1) for item in data])
    if isinstance(data, dict) and len(data) == 1:
        ((tag, value),) = data.items()
        match tag, value:
            case "value", str():
                return Ref(value)
            case "device", "stage":
                return StageDevice()
            case "float", "inf" | "-inf" | "nan":
                return float(value)
            case (("dtype" | "layout" | "memory_format"), str()):
                return _torch_value(tag, value)  # type: ignore[no-any-return]
    raise StageFormatError(f"{reader}: {reprlib.repr(data)} is not an argument")


def _torch_name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _decode_torch_type(kind: type, data: object) -> torch.dtype:
    """Decode the one type of the documents that msgspec does not know."""
    assert kind is torch.dtype, kind
    if not isinstance(data, str):
        raise StageFormatError(f"{reprlib.repr(data)} is not the name of a dtype")
    return _torch_value("dtype", data)  # type: ignore[no-any-return]


def _torch_value(kind: str, name: str) -> Any:
    try:
        return _TORCH_NAMES[kind][name]
    except KeyError:
        raise StageFormatError(f"{name!r} is not a {kind} of torch") from None
