"""Values of optimizers, schedulers and generators survive a file; nothing else gets through."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravnest.store.plain_data import NotPlainError, decode, encode

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["$tuple", "$", "$float"])
    | st.binary(max_size=8)
)
keys = scalars.filter(lambda key: key is not None) | st.tuples(st.integers(), st.text(max_size=3))
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


@given(values)
def test_values_survive_json(value: Any) -> None:
    text = json.dumps(encode(value), allow_nan=False)
    found = decode(json.loads(text))
    assert found == value
    assert repr(found) == repr(value)  # types too, which == does not tell apart


def test_numbers_that_json_does_not_have_survive() -> None:
    found = decode(json.loads(json.dumps(encode([math.inf, -math.inf, math.nan]), allow_nan=False)))
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])


def test_states_of_schedulers_and_generators_survive() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 2, 5])
    for state in (scheduler.state_dict(), random.getstate()):
        assert decode(json.loads(json.dumps(encode(state)))) == state


@pytest.mark.parametrize("value", [object(), len, torch.zeros(1), {1, 2}, {"a": [lambda: 0]}, 1j])
def test_objects_are_refused(value: Any) -> None:
    with pytest.raises(NotPlainError):
        encode(value)


@pytest.mark.parametrize(
    "data",
    [
        {"$tuple": 5},
        {"$pairs": [[1]]},
        {"$pairs": [[[], 1]]},
        {"$pairs": 3},
        {"$counter": [["a", "b", "c"]]},
        {"$counter": "ab"},
        {"$bytes": "no base64 !"},
        {"$bytes": 4},
        {"$bytes": "é"},
        {"$float": "x"},
        {"$float": [1]},
        {"$tuple": [], "other": 1},
        {"$unknown": 1},
        {"$pickle": "gASVHgAAAA=="},
        [{"$float": None}],
        object(),
    ],
)
def test_hostile_data_is_refused(data: Any) -> None:
    with pytest.raises(NotPlainError):
        decode(data)


def test_data_that_is_nested_without_end_is_refused() -> None:
    data: Any = 0
    for _ in range(100_000):
        data = {"$tuple": [data]}
    with pytest.raises(NotPlainError, match="nested"):
        decode(data)


json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["$tuple", "$pairs", "$counter", "$bytes", "$float", "a"]), inner, max_size=2
        )
    ),
    max_leaves=8,
)


@given(json_data)
def test_any_json_gives_a_plain_value_or_is_refused(data: Any) -> None:
    try:
        value = decode(data)
    except NotPlainError:
        return
    encode(value)
