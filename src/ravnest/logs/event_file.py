"""Event files of TensorBoard, with scalars only.

A file is a sequence of records (length, checksum of the length, message, checksum of the message). The
messages are ``Event``s in the encoding of protocol buffers; the few fields in use are written by hand,
so that nothing has to be installed.
"""

from __future__ import annotations

import functools
import math
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8
_BYTES, _FLOAT = 2, 5
"""Wire types of protocol buffers."""
_TIME, _STEP = b"\x09", b"\x10"
"""Tags of fields of an event: the number of the field and its wire type."""
_FORMAT = b"brain.Event:2"
_UINT32, _FLOAT32, _FLOAT64 = struct.Struct("<I"), struct.Struct("<f"), struct.Struct("<d")


def _make_table() -> tuple[int, ...]:
    table = []
    for number in range(256):
        value = number
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _make_table()


@functools.cache
def _table_of_pairs() -> array[int]:
    """Return the changes of a checksum by two bytes at once, which takes half the time."""
    firsts = (_TABLE[first] ^ second for second in range(256) for first in range(256))
    return array("I", [_TABLE[value & 0xFF] ^ value >> 8 for value in firsts])


def crc32c(data: bytes) -> int:
    """Return the Castagnoli checksum of some bytes."""
    value, table = 0xFFFFFFFF, _table_of_pairs()
    for pair in struct.unpack_from(f"<{len(data) // 2}H", data):
        value = table[(value ^ pair) & 0xFFFF] ^ value >> 16
    if len(data) % 2:
        value = _TABLE[(value ^ data[-1]) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    checksum = crc32c(data)
    return _UINT32.pack(((checksum >> 15 | checksum << 17) + _MASK) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    value &= 0xFFFFFFFFFFFFFFFF
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _field(number: int, kind: int, content: bytes) -> bytes:
    length = _varint(len(content)) if kind == _BYTES else b""
    return _varint(number << 3 | kind) + length + content


@functools.lru_cache(maxsize=1000)
def _scalar_head(name: str) -> bytes:
    """Return a scalar without its value, which are its last four bytes."""
    return _field(1, _BYTES, _field(1, _BYTES, name.encode()) + _field(2, _FLOAT, bytes(4)))[:-4]


def _scalar(name: str, value: float) -> bytes:
    try:
        number = _FLOAT32.pack(value)
    except OverflowError:
        number = _FLOAT32.pack(math.copysign(math.inf, value))
    return _scalar_head(name) + number


@functools.lru_cache(maxsize=1000)
def _length(size: int) -> bytes:
    length = struct.pack("<Q", size)
    return length + _masked(length)


def _record(message: bytes) -> bytes:
    return b"".join((_length(len(message)), message, _masked(message)))


class EventFile:
    """An event file that is being written. Its folder is a log directory of TensorBoard."""

    def __init__(self, folder: Path, time: float, suffix: str) -> None:
        """``suffix`` makes the name unique among the files of one second."""
        self.path = folder / f"events.out.tfevents.{int(time)}.{suffix}"
        self._file = self.path.open("wb")
        self._file.write(_record(_TIME + _FLOAT64.pack(time) + _field(3, _BYTES, _FORMAT)))
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, scalars: Sequence[tuple[str, float]], step: int, time: float) -> None:
        """Write scalars by name in one event; a value beyond the range of float32 becomes infinite."""
        summary = _field(5, _BYTES, b"".join([_scalar(name, value) for name, value in scalars]))
        number = _STEP + _varint(step) if step else b""
        self._file.write(_record(b"".join((_TIME, _FLOAT64.pack(time), number, summary))))

    def flush(self) -> None:
        """Have readers see what was written."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
