"""The outside of every frame: what it is, how long it is, and a checksum over all of it.

    offset  0  magic "RVNT"        4 bytes
            4  format version      u8
            5  kind                u8
            6  zero                u16
            8  number              u32   position of a chunk in its message, else 0
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
    """What a frame holds."""

    OPENING = 1
    CHUNK = 2
    CONTROL = 3


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame whose checksum is right; the body has no copy of its own."""

    kind: Kind
    number: int
    body: memoryview


def seal(kind: Kind, number: int, body: Sequence[Buffer]) -> list[Buffer]:
    """One frame, as parts that are still to be joined: its body is not copied yet."""
    fixed = _FIXED.pack(MAGIC, VERSION, kind, 0, number, sum(map(len, body)))
    checksum = xxhash.xxh3_64(fixed)
    for part in body:
        checksum.update(part)
    return [fixed + _CHECKSUM.pack(checksum.intdigest()), *body]


def split(data: bytes) -> Iterator[memoryview]:
    """The frames in a run of whole frames; what remains at the end is for ``unseal`` to refuse."""
    view = memoryview(data)
    while len(view) > SIZE:
        stop = SIZE + _LENGTH.unpack_from(view, _LENGTH_AT)[0]
        yield view[:stop]
        view = view[stop:]
    if view:
        yield view


def unseal(data: Buffer, limit: int) -> Frame:
    """Check a frame of at most ``limit`` bytes; ``WireError`` says what is wrong with it."""
    if len(data) < SIZE:
        raise WireError(f"a frame of {len(data)} bytes is cut short: it should have at least {SIZE}")
    if len(data) > limit:
        raise WireError(f"a frame of {len(data)} bytes is larger than the limit of {limit}")
    magic, version, kind, zero, number, length = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise WireError("these bytes are no frame of Ravnest")
    if version != VERSION:
        raise WireError(f"a frame of format {version}; this node understands {VERSION} only")
    if length != len(data) - SIZE:
        raise WireError(f"a frame says that it has {length} bytes and has {len(data) - SIZE}")
    view = memoryview(data)
    checksum = xxhash.xxh3_64(view[: _FIXED.size])
    checksum.update(view[SIZE:])
    if checksum.intdigest() != _CHECKSUM.unpack_from(data, _FIXED.size)[0]:
        raise WireError("a frame was damaged on its way: its checksum does not match")
    known = _KINDS.get(kind)
    if known is None or zero:
        raise WireError(f"a frame of unknown kind {kind}")
    return Frame(known, number, view[SIZE:])
