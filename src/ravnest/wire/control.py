"""What links say to each other below the messages: probes, and how much has arrived."""

from __future__ import annotations

import msgspec

from ravnest.errors import WireError
from ravnest.wire.envelope import Buffer, Frame, Kind, seal


class Probe(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Asks for an Echo at once."""

    token: int


class Echo(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The answer to a Probe: all that was sent before it has arrived."""

    token: int


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """So many messages of the link have arrived; it travels with whatever is sent next."""

    count: int
    held: float
    """Seconds since the last of them came."""


class Closing(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The last frame of a link that is closed; without it, the connection broke."""


Control = Probe | Echo | Ack | Closing

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)


def encode_control(control: Control) -> list[Buffer]:
    """As the parts of one frame."""
    return seal(Kind.CONTROL, 0, (_ENCODER.encode(control),))


def decode_control(frame: Frame) -> Control:
    """From a frame that is unsealed already."""
    try:
        return _DECODER.decode(frame.body)
    except msgspec.MsgspecError as error:
        raise WireError(f"a control frame is malformed: {error}") from error
