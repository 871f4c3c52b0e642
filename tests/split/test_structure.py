"""Nested values are flattened and rebuilt through JSON, without the user's classes."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravnest.errors import StageFormatError, StageInputError
from ravnest.split.structure import Record, Structure, flatten, map_tensors, tensors_in

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Result:
    logits: Any
    hidden: Any = None


LEAVES = st.integers(0, 9).map(lambda n: torch.tensor(float(n)))
CONSTANTS = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3)
KEYS = st.text("abc_", min_size=1, max_size=4)
VALUES = st.recursive(
    LEAVES | CONSTANTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.builds(Point, inner, inner)
        | st.builds(Result, inner, inner)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_round_trip_through_json(value: Any) -> None:
    leaves, structure = flatten(value)
    again = Structure.from_json(json.loads(json.dumps(structure.to_json())))
    assert again == structure
    assert len(list(again.leaf_paths(""))) == len(leaves)
    rebuilt = again.build(iter(leaves))
    assert _plain(rebuilt) == _plain(value)
    assert list(again.leaves_of(value, "value")) == leaves


def _plain(value: Any) -> Any:
    """Return the value without classes, and with tensors by identity."""
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, Result):
        return {"logits": _plain(value.logits), "hidden": _plain(value.hidden)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Point):
        return ("Point", _plain(value.x), _plain(value.y))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return (type(value).__name__, *map(_plain, value))
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(_plain, value)]
    return value


def test_a_record_is_read_by_name_attribute_and_position() -> None:
    leaves, structure = flatten(Result(torch.ones(2), torch.zeros(1)))
    record = structure.build(iter(leaves))
    assert isinstance(record, Record)
    assert record.logits is record["logits"] is record[0]
    with pytest.raises(AttributeError, match="no field 'loss'"):
        _ = record.loss


def test_opaque_objects_are_reported_and_omitted() -> None:
    seen: dict[str, object] = {}
    leaves, structure = flatten({"a": torch.ones(1), "cache": object()}, on_opaque=seen.__setitem__)
    assert len(leaves) == 1
    assert list(seen) == ["output.cache"]
    assert structure.build(iter(leaves))["cache"] is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": torch.ones(1), "flag": False}, "was split with True"),
        ({"a": torch.ones(1)}, "does not look like the example"),
        ([torch.ones(1), True], "does not look like the example"),
        ({"b": torch.ones(1), "flag": True}, "has no 'a'"),
    ],
)
def test_another_structure_is_rejected(value: Any, words: str) -> None:
    _, structure = flatten({"a": torch.ones(1), "flag": True})
    with pytest.raises(StageInputError, match=words):
        list(structure.leaves_of(value, "batch"))


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "leaf",
        {},
        {"list": 3},
        {"constant": [1]},
        {"constant": 1, "extra": 2},
        {"dict": ["*"], "keys": []},
        {"namedtuple": ["*"], "keys": ["_x"], "name": "P"},
        {"namedtuple": ["*"], "keys": ["x"], "name": "import os"},
        {"object": ["*"]},
    ],
)
def test_malformed_structures_are_rejected(data: object) -> None:
    with pytest.raises(StageFormatError):
        Structure.from_json(data)


def test_deep_nesting_is_rejected() -> None:
    data: Any = "*"
    for _ in range(200):
        data = {"list": [data]}
    with pytest.raises(StageFormatError):
        Structure.from_json(data)


def test_map_tensors_keeps_classes() -> None:
    value = {
        "p": Point(torch.ones(1), 2),
        "r": Result([torch.ones(1)]),
        "o": OrderedDict(a=torch.ones(1)),
    }
    doubled = map_tensors(value, lambda tensor: tensor * 2)
    assert isinstance(doubled["p"], Point)
    assert isinstance(doubled["r"], Result)
    assert isinstance(doubled["o"], OrderedDict)
    assert [tensor.item() for tensor in tensors_in(doubled)] == [2, 2, 2]
