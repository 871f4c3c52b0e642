"""Control frames of a link, below the messages: probes, acknowledgements, new connections, closing."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ravnest.errors import WireError
from ravnest.wire.envelope import Buffer, Frame, Kind, seal

Count = Annotated[int, msgspec.Meta(ge=0)]


class Position(msgspec.Struct, frozen=True, array_like=True):
    """Everything that one side of a link has received, over all its connections."""

    messages: Count = 0
    """Complete messages."""
    frames: Count = 0
    """Frames of the next message."""
    payload: Count = 0
    """Bytes of that message's payload."""


START = Position()
"""Position of a side that has received nothing."""


class Probe(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Request for an Echo and an Ack."""

    token: int


class Echo(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Answer to a Probe."""

    token: int


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Acknowledgement of messages."""

    count: Count
    """Messages that have arrived on the link, over all its connections."""
    held: float
    """Seconds since the last of them arrived."""


class Closing(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Last frame of a link that is closed; if it is missing, the connection broke."""


class Resume(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Choice of a connection by the side that opened the link, with what that side has received."""

    epoch: Count
    """Number of the connection; one with a smaller number is not used any more."""
    position: Position


class Resumed(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Answer to a Resume, with what the other side has received."""

    epoch: Count
    position: Position


Control = Probe | Echo | Ack | Closing | Resume | Resumed

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)


def encode_control(control: Control) -> list[Buffer]:
    """Return a control frame, as parts to be joined."""
    return seal(Kind.CONTROL, 0, (_ENCODER.encode(control),))


def decode_control(frame: Frame) -> Control:
    """Return the control value in a frame."""
    try:
        return _DECODER.decode(frame.body)
    except msgspec.MsgspecError as error:
        raise WireError(f"a control frame is malformed: {error}") from error
