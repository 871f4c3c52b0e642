"""Event files of TensorBoard, with scalars only.

A file is a sequence of records (length, checksum of the length, message, checksum of the message). The
messages are ``Event``s in the encoding of protocol buffers; the few fields in use are written by hand,
so that nothing has to be installed.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
"""Wire types of protocol buffers."""
_VERSION = b"brain.Event:2"
_FLOAT_VALUE = bytes([2 << 3 | _FLOAT])
"""Tag of the value of a scalar."""


def _make_table() -> tuple[int, ...]:
    table = []
    for number in range(256):
        value = number
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _make_table()


def crc32c(data: bytes) -> int:
    """Return the Castagnoli checksum of some bytes."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    checksum = crc32c(data)
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + _MASK) & 0xFFFFFFFF)


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
def _name(name: str) -> bytes:
    return _field(1, _BYTES, name.encode())


def _event(time: float, content: bytes, step: int = 0) -> bytes:
    return (
        _field(1, _DOUBLE, struct.pack("<d", time))
        + (_field(2, _VARINT, _varint(step)) if step else b"")
        + content
    )


def _scalar(name: str, value: float) -> bytes:
    try:
        number = struct.pack("<f", value)
    except OverflowError:
        number = struct.pack("<f", math.copysign(math.inf, value))
    return _field(1, _BYTES, _name(name) + _FLOAT_VALUE + number)


@functools.lru_cache(maxsize=1000)
def _length(size: int) -> bytes:
    length = struct.pack("<Q", size)
    return length + _masked(length)


def _record(message: bytes) -> bytes:
    return _length(len(message)) + message + _masked(message)


class EventFile:
    """An event file that is being written. Its folder is a log directory of TensorBoard."""

    def __init__(self, folder: Path, time: float, suffix: str) -> None:
        """``suffix`` makes the name unique among the files of one second."""
        self.path = folder / f"events.out.tfevents.{int(time)}.{suffix}"
        self._file = self.path.open("wb")
        self._file.write(_record(_event(time, _field(3, _BYTES, _VERSION))))
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, scalars: Sequence[tuple[str, float]], step: int, time: float) -> None:
        """Write scalars by name in one event; a value beyond the range of float32 becomes infinite."""
        summary = _field(5, _BYTES, b"".join(_scalar(name, value) for name, value in scalars))
        self._file.write(_record(_event(time, summary, step)))

    def flush(self) -> None:
        """Have readers see what was written."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
