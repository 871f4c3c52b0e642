"""Body of a message's first frame: the head and a table of the values.

A peer's table is checked against the limits before memory is allocated for the announced tensors.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import msgspec

from ravnest.errors import WireError
from ravnest.types import is_dense
from ravnest.wire.codecs import codec_named
from ravnest.wire.layout import DTYPES, TensorLayout, plain_strides
from ravnest.wire.messages import AnyHead

_LARGEST = 1 << 48


@dataclass(frozen=True)
class Limits:
    """Limits for messages of a peer; exceeding them is a ``WireError`` before memory is allocated."""

    max_message_bytes: int = 16 << 30
    """Total size of a message's tensors, both encoded and decoded."""
    max_values: int = 100_000
    max_name: int = 1024
    """Maximum number of characters in the name of a value."""
    max_dimensions: int = 64
    """Maximum number of dimensions of a tensor; torch has the same limit."""
    max_opening_bytes: int = 16 << 20
    """Maximum size of head and table."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, tag=0, forbid_unknown_fields=True):
    """Entry of a tensor; the payloads are stored in the order of the table, without gaps."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """None if the tensor is contiguous."""
    codec: str
    offset: int
    nbytes: int


class NumberEntry(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Entry of a number, which needs no payload."""

    name: str
    value: bool | int | float


class Opening(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Message without the payloads of its tensors."""

    head: AnyHead
    values: tuple[TensorEntry | NumberEntry, ...]
    nbytes: int
    """Total size of all payloads."""
    inline: bool
    """True if the payloads follow in the same frame, False if they follow in chunks."""


_DECODER = msgspec.msgpack.Decoder(Opening)
_ENCODER = msgspec.msgpack.Encoder()


def pack(opening: Opening, limits: Limits) -> bytes:
    """Return the opening as bytes; ``WireError`` if a peer would reject it."""
    try:
        data = _ENCODER.encode(opening)
    except (OverflowError, TypeError, ValueError) as error:
        raise WireError(f"a {type(opening.head).__name__} message cannot be encoded: {error}") from error
    if len(data) > limits.max_opening_bytes:
        raise WireError(f"a head of {len(data)} bytes exceeds the limit of {limits.max_opening_bytes}")
    return data


def unpack(data: memoryview) -> Opening:
    """Return the opening in a peer's bytes; types are checked, values are not yet."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"the head of a message is malformed: {error}") from error


def layouts(opening: Opening, limits: Limits) -> dict[str, TensorLayout]:
    """Return the layouts of the announced tensors; ``WireError`` if invalid or over the limits."""
    if len(opening.values) > limits.max_values:
        raise WireError(f"{len(opening.values)} values exceed the limit of {limits.max_values}")
    found: dict[str, TensorLayout] = {}
    seen: set[str] = set()
    encoded = decoded = 0
    for entry in opening.values:
        if len(entry.name) > limits.max_name:
            raise WireError(
                f"a name of {len(entry.name)} characters exceeds the limit of {limits.max_name}"
            )
        if entry.name in seen:
            raise WireError(f"two values have the name {entry.name!r}")
        seen.add(entry.name)
        if isinstance(entry, TensorEntry):
            found[entry.name] = layout = _layout(
                entry.name, entry.dtype, entry.shape, entry.strides, entry.codec, entry.nbytes, limits
            )
            if entry.offset != encoded:
                raise WireError(f"{entry.name!r} has offset {entry.offset}, expected {encoded}")
            encoded += entry.nbytes
            decoded += _memory(layout)
            if max(encoded, decoded) > limits.max_message_bytes:
                size = max(encoded, decoded)
                raise WireError(
                    f"{size} bytes of tensors exceed the limit of {limits.max_message_bytes}"
                )
    if encoded != opening.nbytes:
        raise WireError(f"a message announces {opening.nbytes} bytes, but its tensors have {encoded}")
    return found


def _memory(layout: TensorLayout) -> int:
    return layout.dtype.itemsize * math.prod(layout.shape)


@functools.lru_cache(maxsize=1024)
def _layout(
    name: str,
    dtype_name: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    codec: str,
    nbytes: int,
    limits: Limits,
) -> TensorLayout:
    """Return the checked layout of a tensor; cached, since most messages of a link are alike."""
    dtype = DTYPES.get(dtype_name)
    if dtype is None:
        raise WireError(f"{name!r} has the unknown dtype {dtype_name!r}")
    if len(shape) > limits.max_dimensions:
        raise WireError(f"{name!r} has {len(shape)} dimensions, more than {limits.max_dimensions}")
    # Zeros are left out: torch multiplies the other sizes even if the tensor has no elements.
    elements = math.prod(size or 1 for size in shape)
    if elements >= _LARGEST or any(size < 0 for size in shape):
        raise WireError(f"{name!r} has the invalid shape {list(shape)}")
    if strides is None:
        strides = plain_strides(shape)
    elif len(strides) != len(shape) or not is_dense(shape, strides):
        raise WireError(f"{name!r} has strides {list(strides)} that do not fit {list(shape)}")
    if any(not 0 <= stride < _LARGEST for stride in strides):
        raise WireError(f"{name!r} has the invalid strides {list(strides)}")
    layout = TensorLayout(dtype, shape, strides)
    due = codec_named(codec).nbytes(layout)
    if nbytes != due:
        raise WireError(f"{name!r} announces {nbytes} bytes, but its shape needs {due}")
    return layout
