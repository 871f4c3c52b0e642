"""Conversion of messages to frames and back; see ``docs/protocol.md``."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import numpy as np
import torch

from ravnest.errors import WireError
from ravnest.wire import envelope
from ravnest.wire.codecs import RAW, Codec, Encoded, codec_named
from ravnest.wire.control import START, Position
from ravnest.wire.envelope import Buffer, Frame, Kind, seal, unseal
from ravnest.wire.header import Limits, NumberEntry, Opening, TensorEntry, layouts, pack, unpack
from ravnest.wire.layout import NAMES, TensorLayout, dense, plain_strides
from ravnest.wire.messages import Message, Value

INLINE_BYTES = 256 << 10
"""Maximum size of payloads that share the frame of their head, which saves a network message."""
CHUNK_BYTES = 2 << 20
"""Size of the chunks of larger payloads.

Each frame costs a dozen thread switches; the copies of much larger frames would not fit in the cache.
"""
LARGEST_CHUNK = 8 << 20
DEFAULT_LIMITS = Limits()

_LENGTH = struct.Struct("<I")


def largest_frame(limits: Limits) -> int:
    """Return the size of the largest frame that an ``Assembler`` accepts, in bytes."""
    opening = _LENGTH.size + limits.max_opening_bytes + INLINE_BYTES
    return envelope.SIZE + max(opening, LARGEST_CHUNK)


def encode(
    message: Message,
    codec: Codec = RAW,
    chunk: int = CHUNK_BYTES,
    limits: Limits = DEFAULT_LIMITS,
    clamped: Callable[[int], None] | None = None,
    number: int = 0,
) -> Iterator[bytes]:
    """Yield the frames of a message; ``WireError`` if a value cannot be sent.

    ``clamped`` is called with the number of values of a tensor outside the range of the codec.
    ``number`` counts the messages before it on the link.
    """
    place = Position(number)
    parts = encode_parts(message, codec, lambda: chunk, limits, clamped, place)
    return (b"".join(each) for each in parts)


_NUMBERS = 1 << 32
"""Numbers of messages in frames are counted modulo this."""


def encode_parts(
    message: Message,
    codec: Codec = RAW,
    chunk: Callable[[], int] = lambda: CHUNK_BYTES,
    limits: Limits = DEFAULT_LIMITS,
    clamped: Callable[[int], None] | None = None,
    place: Position = START,
) -> Iterator[list[Buffer]]:
    """Yield frames like ``encode``, but as parts that share the memory of the tensors.

    ``chunk`` returns the size of the next chunk. ``place`` counts the messages before it on the link and
    what the receiver already has of this one, which is left out.
    """
    entries: list[TensorEntry | NumberEntry] = []
    payloads: list[memoryview] = []
    offset = 0
    for name, value in message.values.items():
        if isinstance(value, torch.Tensor):
            chosen = RAW if name in message.exact else codec
            entry, encoded = _tensor(name, value, chosen, offset)
            offset += entry.nbytes
            entries.append(entry)
            payloads.append(encoded.payload.numpy().data)
            if encoded.clamped and clamped is not None:
                clamped(encoded.clamped)
        else:
            entries.append(NumberEntry(name, value))
    inline = offset <= INLINE_BYTES
    opening = Opening(message.head, tuple(entries), offset, inline)
    layouts(opening, limits)  # do not send what a receiver would reject
    packed = pack(opening, limits)
    if place.frames and (inline or place.payload >= offset):
        raise WireError("the peer has a part of a message that this message does not have")
    if not place.frames:
        body = (_LENGTH.pack(len(packed)), packed, *(payloads if inline else ()))
        yield seal(Kind.OPENING, place.messages % _NUMBERS, body)
    if not inline:
        chunks = _pieces(payloads, chunk, place.payload)
        for number, parts in enumerate(chunks, max(place.frames - 1, 0)):
            yield seal(Kind.CHUNK, number, parts)


def _tensor(name: str, tensor: torch.Tensor, codec: Codec, offset: int) -> tuple[TensorEntry, Encoded]:
    tensor = dense(name, tensor)
    layout = TensorLayout(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
    encoded = codec.encode(tensor, layout)
    strides = None if layout.strides == plain_strides(layout.shape) else layout.strides
    entry = TensorEntry(
        name, NAMES[layout.dtype], layout.shape, strides, encoded.codec, offset, encoded.payload.numel()
    )
    return entry, encoded


def _pieces(
    payloads: list[memoryview], chunk: Callable[[], int], skip: int
) -> Iterator[list[memoryview]]:
    """Yield the payloads as one stream without its first ``skip`` bytes, cut into chunks."""
    parts: list[memoryview] = []
    room = chunk()
    for payload in payloads:
        start = min(skip, len(payload))
        skip -= start
        while start < len(payload):
            part = payload[start : start + room]
            parts.append(part)
            start += len(part)
            room -= len(part)
            if not room:
                yield parts
                parts, room = [], chunk()
    if parts:
        yield parts


class Assembler:
    """Assembler of messages from the frames of one link, in order.

    Each tensor has its own buffer, allocated once (torch aligns it to 64 bytes; kernels round
    differently at unaligned addresses) and filled as chunks arrive. After a ``WireError`` neither the
    assembler nor the link can be used.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._largest = largest_frame(limits)
        self._pending: _Pending | None = None
        self.messages = 0
        """Number of complete messages."""

    @property
    def partial(self) -> tuple[int, int]:
        """Frames and bytes of the payload of an incomplete message."""
        pending = self._pending
        return (0, 0) if pending is None else (1 + pending.chunks, pending.filled)

    def feed(self, frame: Buffer) -> Message | None:
        """Add a frame; return the message if it is complete."""
        return self.take(unseal(frame, self._largest))

    def take(self, frame: Frame) -> Message | None:
        """Add a frame that is already unsealed; return the message if it is complete."""
        match frame.kind:
            case Kind.OPENING:
                return self._open(frame)
            case Kind.CHUNK:
                return self._chunk(frame)
            case Kind.CONTROL:
                raise WireError("a control frame cannot be part of a message")

    def _open(self, frame: Frame) -> Message | None:
        if self._pending is not None:
            raise WireError("a message begins before the previous one is complete")
        if frame.number != self.messages % _NUMBERS:
            raise WireError(f"message {frame.number} arrived, expected message {self.messages}")
        body = frame.body
        if len(body) < _LENGTH.size:
            raise WireError("the first frame of a message is truncated")
        stop = _LENGTH.size + _LENGTH.unpack_from(body)[0]
        if stop > len(body) or stop > _LENGTH.size + self._limits.max_opening_bytes:
            raise WireError(f"a head of {stop - _LENGTH.size} bytes exceeds the limit or is truncated")
        opening = unpack(body[_LENGTH.size : stop])
        pending = _Pending(opening, layouts(opening, self._limits))
        if opening.inline:
            if len(body) - stop != opening.nbytes:
                raise WireError(f"{len(body) - stop} bytes arrived, but {opening.nbytes} were announced")
            pending.fill(body[stop:])
        elif len(body) != stop or not opening.nbytes:
            raise WireError("a message announces chunks, but has an inline or empty payload")
        return self._finish(pending)

    def _chunk(self, frame: Frame) -> Message | None:
        pending = self._pending
        if pending is None:
            raise WireError("a chunk arrived outside a message")
        if frame.number != pending.chunks:
            raise WireError(f"chunk {frame.number} arrived, expected chunk {pending.chunks}")
        if not 0 < len(frame.body) <= pending.missing:
            raise WireError(
                f"a chunk of {len(frame.body)} bytes arrived, but {pending.missing} are missing"
            )
        pending.chunks += 1
        pending.fill(frame.body)
        return self._finish(pending)

    def _finish(self, pending: _Pending) -> Message | None:
        complete = not pending.missing
        self._pending = None if complete else pending
        self.messages += complete
        return pending.message() if complete else None


class _Pending:
    """Message whose payload is incomplete."""

    def __init__(self, opening: Opening, layouts: dict[str, TensorLayout]) -> None:
        self.missing = opening.nbytes
        self.filled = 0
        self.chunks = 0
        self._opening = opening
        self._layouts = layouts
        tensors = [entry for entry in opening.values if isinstance(entry, TensorEntry)]
        self._payloads = {entry.name: _allocate(entry) for entry in tensors}
        self._targets = iter([p.numpy() for p in self._payloads.values() if p.numel()])
        self._target = next(self._targets, None)
        self._filled = 0

    def fill(self, data: memoryview) -> None:
        """Copy received bytes to their tensors; numpy releases Python's lock during the copy."""
        source = np.frombuffer(data, dtype=np.uint8)
        start = 0
        while start < len(source):
            assert self._target is not None, "more bytes than the table announced"
            count = min(len(source) - start, len(self._target) - self._filled)
            self._target[self._filled : self._filled + count] = source[start : start + count]
            start += count
            self._filled += count
            if self._filled == len(self._target):
                self._target, self._filled = next(self._targets, None), 0
        self.missing -= len(source)
        self.filled += len(source)

    def message(self) -> Message:
        """Return the complete message."""
        return Message(
            self._opening.head, {entry.name: self._value(entry) for entry in self._opening.values}
        )

    def _value(self, entry: TensorEntry | NumberEntry) -> Value:
        if isinstance(entry, NumberEntry):
            return entry.value
        return codec_named(entry.codec).decode(self._payloads[entry.name], self._layouts[entry.name])


def _allocate(entry: TensorEntry) -> torch.Tensor:
    try:
        return torch.empty(entry.nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise WireError(f"not enough memory for {entry.name!r} ({entry.nbytes} bytes)") from error
