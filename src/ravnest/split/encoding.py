"""Stages to JSON and back. What comes back is checked before anything is built from it."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ravnest.errors import OperatorError, StageFormatError
from ravnest.split.graph import (
    MODES,
    Argument,
    Dimension,
    InputEntry,
    Kind,
    Operation,
    OutputSpec,
    Ref,
    StageDevice,
    StageGraph,
    StageSpec,
    StateSpec,
    StateUse,
    SymbolRange,
    ValueSpec,
)
from ravnest.split.operators import resolve
from ravnest.split.structure import Structure
from ravnest.types import is_dense

FORMAT = "ravnest-stage"
VERSION = 1
_MAX_DEPTH = 16
_MAX_DIMENSION = 2**48
_MAX_INTEGER = 2**63
"""What an operator can take."""

T = TypeVar("T")
_SYMBOLIC_SIZE = re.compile(r"(?:(?P<factor>[1-9][0-9]{0,14})\*)?(?P<symbol>\w+|\?)")
_TORCH_NAMES: dict[str, dict[str, Any]] = {
    "dtype": {
        str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)
    },
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


def stage_to_json(spec: StageSpec) -> dict[str, Any]:
    """The JSON form that docs/stage-format.md describes."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "stage": spec.index,
        "stages": spec.count,
        "signature": [
            {"name": e.name, "structure": e.structure.to_json(), "values": list(e.values)}
            for e in spec.signature
        ],
        "state": [_state_to_json(entry) for entry in spec.state],
        "graphs": {mode: _graph_to_json(spec.graphs[mode]) for mode in MODES},
        "module_versions": dict(spec.module_versions),
    }


def stage_from_json(data: object) -> StageSpec:
    """Read a stage; ``StageFormatError`` or ``OperatorError`` for anything that is not one."""
    fields = _object(data, "the stage")
    if fields.get("format") != FORMAT:
        raise StageFormatError("this file is not a Ravnest stage")
    if fields.get("version") != VERSION:
        raise StageFormatError(
            f"the stage has format version {fields.get('version')}, this Ravnest reads {VERSION}: "
            "use the version of Ravnest that wrote it, or split the model again"
        )
    graphs = _object(_get(fields, "graphs"), "graphs")
    spec = StageSpec(
        index=_whole(fields, "stage"),
        count=_whole(fields, "stages"),
        state=_each(fields, "state", _state_from_json),
        graphs={mode: _graph_from_json(_get(graphs, mode)) for mode in MODES},
        signature=_each(fields, "signature", _entry_from_json),
        module_versions=_module_versions(fields),
    )
    spec.check()
    for graph in spec.graphs.values():
        for operation in graph.operations:
            _check_operator(operation.target)
    return spec


def _module_versions(fields: dict[str, Any]) -> dict[str, int]:
    versions = _object(_get(fields, "module_versions"), "the versions of the modules")
    return {_text_item(path): _whole_item(version) for path, version in versions.items()}


def _state_to_json(entry: StateSpec) -> dict[str, Any]:
    return {
        "key": entry.key,
        "kind": entry.kind,
        "dtype": _torch_name(entry.dtype),
        "shape": list(entry.shape),
        "trainable": entry.trainable,
        "persistent": entry.persistent,
        "names": list(entry.names),
        "positions": list(entry.positions),
        "stages": list(entry.stages),
        **({"strides": list(entry.strides)} if entry.strides else {}),
    }


def _state_from_json(data: object) -> StateSpec:
    fields = _object(data, "a state tensor")
    names = _each(fields, "names", _text_item)
    positions = _each(fields, "positions", _whole_item)
    key = _text(fields, "key")
    if not names or names[0] != key or len(positions) != len(names):
        raise StageFormatError(f"the names of {key!r} are malformed")
    if not all(_is_plain(part) for name in names for part in name.split(".")):
        raise StageFormatError(f"{key!r} is not the name of a parameter or buffer")
    shape = _each(fields, "shape", _size_item)
    strides = _each(fields, "strides", _size_item) if "strides" in fields else ()
    if strides and (len(strides) != len(shape) or not is_dense(shape, strides)):
        raise StageFormatError(f"the strides of {key!r} do not fit its shape")
    return StateSpec(
        key=key,
        kind=_kind(fields),
        dtype=_torch_value("dtype", _text(fields, "dtype")),
        shape=shape,
        trainable=_flag(fields, "trainable"),
        persistent=_flag(fields, "persistent"),
        names=names,
        positions=positions,
        stages=_each(fields, "stages", _whole_item),
        strides=strides,
    )


def _is_plain(part: str) -> bool:
    """Part of a state tensor's name; keys of an ``nn.ModuleDict`` need not be identifiers."""
    return bool(part) and part.isprintable() and not part.startswith("__")


def _graph_to_json(graph: StageGraph) -> dict[str, Any]:
    return {
        "inputs": [
            {
                "name": value.name,
                "dtype": None if value.dtype is None else _torch_name(value.dtype),
                "shape": [str(size) if size.symbol else size.factor for size in value.shape],
                "gradient": value.gradient,
            }
            for value in graph.inputs
        ],
        "symbols": [{"name": s.name, "minimum": s.minimum, "maximum": s.maximum} for s in graph.symbols],
        "state": [[use.name, use.key] for use in graph.state],
        "operations": [_operation_to_json(operation) for operation in graph.operations],
        "outputs": [[output.name, _argument_to_json(output.value)] for output in graph.outputs],
        "structure": None if graph.structure is None else graph.structure.to_json(),
    }


def _graph_from_json(data: object) -> StageGraph:
    fields = _object(data, "a graph")
    structure = _get(fields, "structure")
    return StageGraph(
        inputs=_each(fields, "inputs", _value_from_json),
        state=tuple(StateUse(*pair) for pair in _each(fields, "state", _name_pair)),
        operations=_each(fields, "operations", _operation_from_json),
        outputs=_each(fields, "outputs", _output_from_json),
        structure=None if structure is None else Structure.from_json(structure),
        symbols=_each(fields, "symbols", _symbol_from_json),
    )


def _value_from_json(data: object) -> ValueSpec:
    fields = _object(data, "an input")
    dtype = _get(fields, "dtype")
    return ValueSpec(
        name=_text(fields, "name"),
        dtype=None if dtype is None else _torch_value("dtype", _text(fields, "dtype")),
        shape=_each(fields, "shape", _dimension_from_json),
        gradient=_flag(fields, "gradient"),
    )


def _dimension_from_json(data: object) -> Dimension:
    if isinstance(data, str):
        found = _SYMBOLIC_SIZE.fullmatch(data)
        if found and (found["symbol"].isidentifier() or data == "?"):
            return Dimension(int(found["factor"] or 1), found["symbol"])
        raise StageFormatError(f"{reprlib.repr(data)} is not a size")
    return Dimension(_size_item(data))


def _symbol_from_json(data: object) -> SymbolRange:
    fields = _object(data, "a symbol")
    maximum = _get(fields, "maximum")
    upper = None if maximum is None else _whole(fields, "maximum")
    return SymbolRange(_text(fields, "name"), _whole(fields, "minimum"), upper)


def _operation_to_json(operation: Operation) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": operation.name,
        "target": operation.target,
        "args": [_argument_to_json(value) for value in operation.args],
    }
    if operation.kwargs:
        data["kwargs"] = {name: _argument_to_json(value) for name, value in operation.kwargs}
    if operation.no_grad:
        data["no_grad"] = True
    return data


def _operation_from_json(data: object) -> Operation:
    fields = _object(data, "an operation")
    kwargs = _object(fields.get("kwargs", {}), "kwargs")
    return Operation(
        name=_text(fields, "name"),
        target=_text(fields, "target"),
        args=_each(fields, "args", _argument_from_json),
        kwargs=tuple((name, _argument_from_json(value)) for name, value in kwargs.items()),
        no_grad=_flag(fields, "no_grad") if "no_grad" in fields else False,
    )


def _output_from_json(data: object) -> OutputSpec:
    if not isinstance(data, list) or len(data) != 2:
        raise StageFormatError("an output is malformed")
    return OutputSpec(_text_item(data[0]), _argument_from_json(data[1]))


def _entry_from_json(data: object) -> InputEntry:
    fields = _object(data, "an input of the model")
    return InputEntry(
        _text(fields, "name"),
        Structure.from_json(_get(fields, "structure")),
        _each(fields, "values", _text_item),
    )


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


def _argument_from_json(data: object, depth: int = 0) -> Argument:
    if data is None or isinstance(data, bool | float | str):
        return data
    if isinstance(data, int) and -_MAX_INTEGER <= data < _MAX_INTEGER:
        return data
    if isinstance(data, list) and depth < _MAX_DEPTH:
        return tuple(_argument_from_json(item, depth + 1) for item in data)
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
    raise StageFormatError(f"{reprlib.repr(data)} is not an argument")


def _check_operator(name: str) -> None:
    """Refuse what is not listed, and overloads that write to an ``out`` tensor under another name."""
    target = resolve(name)
    schema = getattr(target, "_schema", None)
    if schema is not None and any(argument.is_out for argument in schema.arguments):
        raise OperatorError(f"the operator {name} writes to an out tensor, which stages cannot do")


def _torch_name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _torch_value(kind: str, name: str) -> Any:
    try:
        return _TORCH_NAMES[kind][name]
    except KeyError:
        raise StageFormatError(f"{name!r} is not a {kind} of torch") from None


def _object(data: object, what: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise StageFormatError(f"{what} is malformed")
    return data


def _get(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise StageFormatError(f"{name!r} is missing")
    return fields[name]


def _each(fields: dict[str, Any], name: str, read: Callable[[object], T]) -> tuple[T, ...]:
    items = _get(fields, name)
    if not isinstance(items, list):
        raise StageFormatError(f"{name!r} must be a list")
    return tuple(read(item) for item in items)


def _text(fields: dict[str, Any], name: str) -> str:
    return _text_item(_get(fields, name))


def _text_item(data: object) -> str:
    if not isinstance(data, str):
        raise StageFormatError(f"{reprlib.repr(data)} is not a name")
    return data


def _whole(fields: dict[str, Any], name: str) -> int:
    return _whole_item(_get(fields, name))


def _whole_item(data: object) -> int:
    if not isinstance(data, int) or isinstance(data, bool):
        raise StageFormatError(f"{reprlib.repr(data)} is not a whole number")
    return data


def _size_item(data: object) -> int:
    size = _whole_item(data)
    if not 0 <= size <= _MAX_DIMENSION:
        raise StageFormatError(f"{size} is not a size")
    return size


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = _get(fields, name)
    if not isinstance(value, bool):
        raise StageFormatError(f"{name!r} must be true or false")
    return value


def _kind(fields: dict[str, Any]) -> Kind:
    match _get(fields, "kind"):
        case "parameter":
            return "parameter"
        case "buffer":
            return "buffer"
        case "constant":
            return "constant"
    raise StageFormatError(f"{reprlib.repr(fields['kind'])} is not a kind of state")


def _name_pair(data: object) -> tuple[str, str]:
    if not isinstance(data, list) or len(data) != 2:
        raise StageFormatError("a use of state is malformed")
    return _text_item(data[0]), _text_item(data[1])
