"""Envelope of every frame: its kind, its length and a checksum.

    offset  0  magic "RVNT"        4 bytes
            4  format version      u8
            5  kind                u8
            6  zero                u16
            8  number              u32   of an opening, its message on the link; of a chunk, its position
           12  length              u32   bytes after these 24
           16  checksum            u64   xxh3 of bytes 0 to 15 and of everything after 24

All little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from ravnest.errors import WireError

MAGIC = b"RVNT"
VERSION = 1
_FIXED = struct.Struct("<4sBBHII")
_CHECKSUM = struct.Struct("<Q")
_LENGTH, _LENGTH_AT = struct.Struct("<I"), 12
SIZE = _FIXED.size + _CHECKSUM.size

Buffer = bytes | memoryview


class Kind(IntEnum):
    """Kind of a frame."""

    OPENING = 1
    CHUNK = 2
    CONTROL = 3


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Frame:
    """Frame with a verified checksum; the body is a view, not a copy."""

    kind: Kind
    number: int
    body: memoryview


def seal(kind: Kind, number: int, body: Sequence[Buffer]) -> list[Buffer]:
    """Return one frame, as parts to be joined; the body is not copied."""
    fixed = _FIXED.pack(MAGIC, VERSION, kind, 0, number, sum(map(len, body)))
    checksum = xxhash.xxh3_64(fixed)
    for part in body:
        checksum.update(part)
    return [fixed + _CHECKSUM.pack(checksum.intdigest()), *body]


def split(data: Buffer) -> Iterator[memoryview]:
    """Yield the frames in a batch of whole frames; ``unseal`` rejects an incomplete rest."""
    view = memoryview(data)
    while len(view) > SIZE:
        stop = SIZE + _LENGTH.unpack_from(view, _LENGTH_AT)[0]
        yield view[:stop]
        view = view[stop:]
    if view:
        yield view


def frame_size(data: memoryview, limit: int) -> int:
    """Return the size of the frame that begins with at least ``SIZE`` bytes of data.

    ``WireError`` if it is no frame, or larger than ``limit`` bytes.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise WireError("the data is not a Ravnest frame")
    size: int = SIZE + _LENGTH.unpack_from(data, _LENGTH_AT)[0]
    if size > limit:
        raise WireError(f"a frame of {size} bytes is larger than the limit of {limit}")
    return size


def unseal(data: Buffer, limit: int) -> Frame:
    """Check a frame of at most ``limit`` bytes and return it; ``WireError`` names the problem."""
    if len(data) < SIZE:
        raise WireError(f"a frame of {len(data)} bytes is truncated: it needs at least {SIZE}")
    if len(data) > limit:
        raise WireError(f"a frame of {len(data)} bytes is larger than the limit of {limit}")
    magic, version, kind, zero, number, length = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise WireError("the data is not a Ravnest frame")
    if version != VERSION:
        raise WireError(f"a frame has format version {version}, but this node supports only {VERSION}")
    if length != len(data) - SIZE:
        raise WireError(f"a frame announces {length} bytes, but has {len(data) - SIZE}")
    view = memoryview(data)
    checksum = xxhash.xxh3_64(view[: _FIXED.size])
    checksum.update(view[SIZE:])
    if checksum.intdigest() != _CHECKSUM.unpack_from(data, _FIXED.size)[0]:
        raise WireError("a frame is damaged: its checksum does not match")
    known = _KINDS.get(kind)
    if known is None or zero:
        raise WireError(f"a frame has the unknown kind {kind}")
    return Frame(known, number, view[SIZE:])
