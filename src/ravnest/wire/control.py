"""Control frames of a link, below the messages: probes, acknowledgements, closing."""

from __future__ import annotations

import msgspec

from ravnest.errors import WireError
from ravnest.wire.envelope import Buffer, Frame, Kind, seal


class Probe(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Request for an immediate Echo."""

    token: int


class Echo(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Answer to a Probe: everything sent before the probe has arrived."""

    token: int


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Acknowledgement of messages, sent together with the next message or control frame."""

    count: int
    """Messages that have arrived on the link."""
    held: float
    """Seconds since the last of them arrived."""


class Closing(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Last frame of a link that is closed; if it is missing, the connection broke."""


Control = Probe | Echo | Ack | Closing

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
