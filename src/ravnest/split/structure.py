"""Describe nested inputs and outputs as plain data.

``flatten`` splits a value into tensors (and symbolic integers) and a ``Structure``, which has a JSON
form and contains no class of the user. ``Structure.build`` rebuilds the value where the user's classes
are unknown: a dataclass or a Hugging Face output becomes a ``Record``, a namedtuple a namedtuple.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from keyword import iskeyword
from typing import Any, cast

import torch

from ravnest.errors import StageFormatError, StageInputError
from ravnest.split.limits import MAX_STRUCTURE_DEPTH

logger = logging.getLogger(__name__)

Constant = None | bool | int | float | str
_CONSTANT_TYPES = (type(None), bool, int, float, str)
_CONTAINERS = ("list", "tuple", "dict", "record", "namedtuple")
_KEYED = ("dict", "record")


class Record(dict[str, Any]):
    """Output of an unknown class: fields are accessible by key, attribute or position."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the output has no field {name!r}, only {list(self)}") from None

    def __getitem__(self, key: str | int | slice) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else list(self.values())[key]


@dataclass(frozen=True)
class Structure:
    """Shape of a nested value: a leaf, a constant, or a container of structures."""

    kind: str
    """``leaf``, ``constant``, ``list``, ``tuple``, ``dict``, ``record`` or ``namedtuple``."""
    children: tuple[Structure, ...] = ()
    keys: tuple[str | int, ...] = ()
    """Keys of a dict, field names of a record or namedtuple."""
    constant: Any = None
    name: str = ""
    """Name of the class of a record or namedtuple."""

    def build(self, leaves: Iterator[Any]) -> Any:
        """Build the value, taking its leaves in order from ``leaves``."""
        match self.kind:
            case "leaf":
                return next(leaves)
            case "constant":
                return self.constant
            case "list":
                return [child.build(leaves) for child in self.children]
            case "tuple":
                return tuple(child.build(leaves) for child in self.children)
            case "dict":
                return {k: c.build(leaves) for k, c in zip(self.keys, self.children, strict=True)}
            case "record":
                fields = zip(self.keys, self.children, strict=True)
                return Record({str(key): child.build(leaves) for key, child in fields})
            case "namedtuple":
                make = _namedtuple_class(self.name, tuple(map(str, self.keys)))
                return make(*(child.build(leaves) for child in self.children))
        raise AssertionError(f"unknown structure {self.kind}")

    def leaves_of(self, value: object, path: str) -> Iterator[Any]:
        """Yield the leaves of ``value``, which must have this structure; ``path`` names it in errors."""
        match self.kind:
            case "leaf":
                yield value
            case "constant":
                if not _same_constant(value, self.constant):
                    raise StageInputError(
                        f"{path} is {value!r}, but the model was split with {self.constant!r}: values "
                        "that are not tensors are fixed when the model is split; split it again "
                        "with the new value"
                    )
            case _:
                keys = self.keys or tuple(range(len(self.children)))
                given = self._parts_of(value, path)
                for key, child in zip(keys, self.children, strict=True):
                    if key not in given:
                        raise StageInputError(f"{path} has no {key!r}, which the model needs")
                    yield from child.leaves_of(given[key], f"{path}.{key}")

    def _parts_of(self, value: object, path: str) -> dict[str | int, Any]:
        """Return the children of ``value`` by key; mappings and records are interchangeable."""
        parts = _children_of(value)
        if (
            parts is None
            or len(parts[1]) != len(self.children)
            or (parts[0].kind in _KEYED) != (self.kind in _KEYED)
        ):
            raise StageInputError(
                f"{path} does not look like the example given when the model was split: "
                f"expected a {self.kind} of {len(self.children)}, got {type(value).__name__}"
            )
        keys = parts[0].keys if self.kind in _KEYED else self.keys or range(len(parts[1]))
        return dict(zip(keys, parts[1], strict=True))

    def leaf_paths(self, path: str) -> Iterator[str]:
        """Yield the dotted path of each leaf."""
        if self.kind == "leaf":
            yield path
        for position, child in enumerate(self.children):
            key = self.keys[position] if self.keys else position
            yield from child.leaf_paths(f"{path}.{key}" if path else str(key))

    def to_json(self) -> Any:
        """Return the JSON form; see docs/stage-format.md."""
        if self.kind == "leaf":
            return "*"
        if self.kind == "constant":
            odd = isinstance(self.constant, float) and not math.isfinite(self.constant)
            return {"float": repr(self.constant)} if odd else {"constant": self.constant}
        data: dict[str, Any] = {self.kind: [child.to_json() for child in self.children]}
        if self.keys:
            data["keys"] = list(self.keys)
        if self.name:
            data["name"] = self.name
        return data

    @classmethod
    def from_json(cls, data: object, depth: int = 0) -> Structure:
        """Decode the JSON form; raise ``StageFormatError`` if it is invalid."""
        if data == "*":
            return LEAF
        if depth > MAX_STRUCTURE_DEPTH or not isinstance(data, dict):
            raise StageFormatError("a structure is malformed")
        if set(data) == {"constant"} and isinstance(data["constant"], _CONSTANT_TYPES):
            return cls("constant", constant=data["constant"])
        if set(data) == {"float"} and data["float"] in ("inf", "-inf", "nan"):
            return cls("constant", constant=float(data["float"]))
        kind = next((kind for kind in _CONTAINERS if kind in data), None)
        keys, name = data.get("keys", []), data.get("name", "")
        if (
            kind is None
            or not set(data) <= {kind, "keys", "name"}
            or not isinstance(data[kind], list)
            or not _are_keys(keys)
            or not isinstance(name, str)
            or len(keys) != (0 if kind in ("list", "tuple") else len(data[kind]))
            or (kind == "namedtuple" and not _makes_namedtuple(name, keys))
        ):
            raise StageFormatError("a structure is malformed")
        children = tuple(cls.from_json(child, depth + 1) for child in data[kind])
        return cls(kind, children, tuple(keys), name=name)


LEAF = Structure("leaf")


def is_leaf(value: object) -> bool:
    """Return True for values that the graph computes: tensors and symbolic numbers."""
    return isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)


def flatten(
    value: object, path: str = "output", on_opaque: Callable[[str, object], None] | None = None
) -> tuple[list[Any], Structure]:
    """Return the leaves and the structure of ``value``; objects that are not containers are constants.

    If ``on_opaque`` is given, it is called with the path and the object for each constant that JSON
    cannot represent, and the constant becomes None.
    """
    if is_leaf(value):
        return [value], LEAF
    parts = _children_of(value)
    if parts is None:
        if not isinstance(value, _CONSTANT_TYPES) and on_opaque is not None:
            on_opaque(path, value)
            value = None
        return [], Structure("constant", constant=value)
    outline, values = parts
    leaves: list[Any] = []
    children = []
    for position, child_value in enumerate(values):
        key = outline.keys[position] if outline.keys else position
        child_leaves, child = flatten(child_value, f"{path}.{key}", on_opaque)
        leaves += child_leaves
        children.append(child)
    return leaves, dataclasses.replace(outline, children=tuple(children))


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors in a nested value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) in (list, tuple):  # what most loaders yield; saves building a structure
        return [tensor for item in cast("list[object]", value) for tensor in tensors_in(item)]
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same nested value, of the same classes, with ``change`` applied to each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        new = {name: map_tensors(getattr(value, name), change) for name in names}
        return dataclasses.replace(value, **new)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(item, change) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(changed)  # type: ignore[call-arg]
    return value


def _children_of(value: object) -> tuple[Structure, list[Any]] | None:
    """Return the structure (without children) and the child values of a container, else None."""
    if isinstance(value, Record):
        return Structure("record", keys=tuple(value)), list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = _present_fields(value)
        outline = Structure("record", keys=tuple(names), name=type(value).__name__)
        return outline, [getattr(value, name) for name in names]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = tuple(value._fields)
        return Structure("namedtuple", keys=fields, name=type(value).__name__), list(value)
    if isinstance(value, list | tuple):
        return Structure("list" if isinstance(value, list) else "tuple"), list(value)
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return Structure("dict", keys=tuple(value)), list(value.values())
    return None


def _present_fields(value: Any) -> Iterable[str]:
    """Return the fields of a dataclass; only the set ones if it is a mapping too (Hugging Face)."""
    if isinstance(value, Mapping):
        return list(value)
    return [field.name for field in dataclasses.fields(value)]


def _same_constant(value: object, constant: object) -> bool:
    same = value is constant or value == constant
    return bool(same)


def _are_keys(keys: object) -> bool:
    return (
        isinstance(keys, list)
        and all(isinstance(key, str | int) for key in keys)
        and len(set(keys)) == len(keys)
    )


def _makes_namedtuple(name: str, fields: list[Any]) -> bool:
    plain = all(isinstance(n, str) and n.isidentifier() and not iskeyword(n) for n in [name, *fields])
    return plain and not any(field.startswith("_") for field in fields)


@lru_cache(maxsize=256)
def _namedtuple_class(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)
