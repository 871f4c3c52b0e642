"""Plain Python values as JSON and back: the state of optimizers, schedulers and generators.

JSON alone loses tuples, dicts whose keys are not strings, bytes and non-finite numbers; each is stored
as an object with one key that starts with ``$``. Nothing else is encoded, and decoding creates only
these types.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

_TUPLE, _PAIRS, _COUNTER, _BYTES, _FLOAT = "$tuple", "$pairs", "$counter", "$bytes", "$float"


class NotPlainError(ValueError):
    """A value that has no place in a file of data, such as a function or an object."""


def encode(value: Any) -> Any:
    """Return a value as JSON data; raise ``NotPlainError`` for anything but plain values."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {_FLOAT: repr(value)}
        case bytes():
            return {_BYTES: base64.b64encode(value).decode()}
        case list():
            return [encode(each) for each in value]
        case tuple():
            return {_TUPLE: [encode(each) for each in value]}
        case Counter():
            return {_COUNTER: _pairs(value)}
        case Mapping():
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: encode(each) for key, each in value.items()}
            return {_PAIRS: _pairs(value)}
        case _:
            raise NotPlainError(f"a {type(value).__name__} cannot be stored")


def decode(data: Any) -> Any:
    """Return the value that ``encode`` has encoded; raise ``NotPlainError`` for other data."""
    try:
        return _decode(data)
    except RecursionError as error:
        raise NotPlainError("the data is nested too deeply") from error


def _decode(data: Any) -> Any:
    match data:
        case None | bool() | int() | float() | str():
            return data
        case list():
            return [_decode(each) for each in data]
        case dict():
            return _decode_object(data)
        case _:
            raise NotPlainError(f"a {type(data).__name__} is not JSON data")


def _decode_object(data: dict[str, Any]) -> Any:
    tag = next((key for key in data if key.startswith("$")), None)
    if tag is None:
        return {key: _decode(each) for key, each in data.items()}
    if len(data) != 1:
        raise NotPlainError(f"an object with {tag} has other keys too")
    try:
        match tag:
            case "$tuple":
                return tuple(_decode(each) for each in data[tag])
            case "$pairs":
                return {_decode(key): _decode(each) for key, each in data[tag]}
            case "$counter":
                return Counter({_decode(key): _decode(each) for key, each in data[tag]})
            case "$bytes":
                return base64.b64decode(data[tag], validate=True)
            case "$float":
                return float(data[tag])
    except (TypeError, ValueError) as error:
        raise NotPlainError(f"damaged {tag}: {error}") from error
    raise NotPlainError(f"unknown type {tag}")


def _pairs(value: Mapping[Any, Any]) -> list[list[Any]]:
    return [[encode(key), encode(each)] for key, each in value.items()]
