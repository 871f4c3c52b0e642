"""The inside of a message's first frame: its head, and a table of its values.

A peer's table is checked against the limits before any memory is allocated for what it announces.
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
    """What a peer may send; more is a ``WireError`` before memory is allocated."""

    max_message_bytes: int = 16 << 30
    """Of all tensors of a message together, as they travel and as they arrive."""
    max_values: int = 100_000
    max_name: int = 1024
    """Characters in the name of a value."""
    max_dimensions: int = 64
    """As many as torch allows."""
    max_opening_bytes: int = 16 << 20
    """Of head and table."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, tag=0, forbid_unknown_fields=True):
    """A tensor; the payloads follow one another in the order of the table."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """None where the tensor is contiguous."""
    codec: str
    offset: int
    nbytes: int


class NumberEntry(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """A plain number, which needs no payload."""

    name: str
    value: bool | int | float


class Opening(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything of a message but the payloads of its tensors."""

    head: AnyHead
    values: tuple[TensorEntry | NumberEntry, ...]
    nbytes: int
    """Of all payloads."""
    inline: bool
    """They follow in the same frame, not in chunks."""


_DECODER = msgspec.msgpack.Decoder(Opening)
_ENCODER = msgspec.msgpack.Encoder()


def pack(opening: Opening, limits: Limits) -> bytes:
    """As bytes; ``WireError`` if no peer would take it."""
    try:
        data = _ENCODER.encode(opening)
    except (OverflowError, TypeError, ValueError) as error:
        raise WireError(f"this {type(opening.head).__name__} cannot travel: {error}") from error
    if len(data) > limits.max_opening_bytes:
        raise WireError(f"a head of {len(data)} bytes is over the limit of {limits.max_opening_bytes}")
    return data


def unpack(data: memoryview) -> Opening:
    """From a peer's bytes; of the right types, not yet checked for sense."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"the head of a message is malformed: {error}") from error


def layouts(opening: Opening, limits: Limits) -> dict[str, TensorLayout]:
    """The tensors that a peer announces, if they make sense and stay within the limits."""
    if len(opening.values) > limits.max_values:
        raise WireError(f"{len(opening.values)} values are over the limit of {limits.max_values}")
    found: dict[str, TensorLayout] = {}
    seen: set[str] = set()
    travelling = arriving = 0
    for entry in opening.values:
        if len(entry.name) > limits.max_name:
            raise WireError(f"a name of {len(entry.name)} characters is over {limits.max_name}")
        if entry.name in seen:
            raise WireError(f"two values are called {entry.name!r}")
        seen.add(entry.name)
        if isinstance(entry, TensorEntry):
            found[entry.name] = layout = _layout(
                entry.name, entry.dtype, entry.shape, entry.strides, entry.codec, entry.nbytes, limits
            )
            if entry.offset != travelling:
                raise WireError(f"{entry.name!r} lies at {entry.offset} and should at {travelling}")
            travelling += entry.nbytes
            arriving += _memory(layout)
            if max(travelling, arriving) > limits.max_message_bytes:
                size = max(travelling, arriving)
                raise WireError(f"{size} bytes of tensors are over {limits.max_message_bytes}")
    if travelling != opening.nbytes:
        raise WireError(f"a message announces {opening.nbytes} bytes, its tensors have {travelling}")
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
    """Remembered, as most messages of a link announce what the one before did."""
    dtype = DTYPES.get(dtype_name)
    if dtype is None:
        raise WireError(f"{name!r} has the unknown dtype {dtype_name!r}")
    if len(shape) > limits.max_dimensions:
        raise WireError(f"{name!r} has {len(shape)} dimensions, over {limits.max_dimensions}")
    # With the zeros left out: torch multiplies the others, even where there are no elements.
    elements = math.prod(size or 1 for size in shape)
    if elements >= _LARGEST or any(size < 0 for size in shape):
        raise WireError(f"{name!r} has the impossible shape {list(shape)}")
    if strides is None:
        strides = plain_strides(shape)
    elif len(strides) != len(shape) or not is_dense(shape, strides):
        raise WireError(f"{name!r} has strides {list(strides)} that do not fit {list(shape)}")
    if any(not 0 <= stride < _LARGEST for stride in strides):
        raise WireError(f"{name!r} has the impossible strides {list(strides)}")
    layout = TensorLayout(dtype, shape, strides)
    due = codec_named(codec).nbytes(layout)
    if nbytes != due:
        raise WireError(f"{name!r} announces {nbytes} bytes and its shape needs {due}")
    return layout
