"""The first frame in each direction: who is speaking, and whether the other wants to listen."""

from __future__ import annotations

import logging

from ravnest.errors import RefusedError, WireError
from ravnest.transport.base import Admit
from ravnest.types import Address
from ravnest.wire.frames import Assembler, encode
from ravnest.wire.header import Limits
from ravnest.wire.messages import PROTOCOL, Hello, HelloRefused, Message

HELLO_SECONDS = 5.0
"""For a Hello and its answer to arrive, once there is a connection."""
_SMALL = Limits(max_message_bytes=0, max_values=0, max_opening_bytes=64 << 10)
"""Nobody has been admitted yet."""

_log = logging.getLogger(__name__)


def hello_frame(hello: Hello | HelloRefused) -> bytes:
    """As one frame."""
    (frame,) = encode(Message(hello))
    return frame


def answer(frame: bytes, admit: Admit, certified: str | None) -> tuple[Hello, Hello] | HelloRefused:
    """A peer's Hello and our answer to it, or why there is none.

    ``certified`` is the name in the peer's certificate, None where there is no TLS.
    """
    try:
        head = _head(frame)
    except WireError as error:
        return HelloRefused(f"your Hello is unreadable: {error}")
    if not isinstance(head, Hello):
        return HelloRefused(f"a link begins with a Hello, not with {type(head).__name__}")
    if head.protocol != PROTOCOL:
        return HelloRefused(
            f"you speak protocol {head.protocol} and this node {PROTOCOL}:"
            " run the same version of Ravnest on all nodes"
        )
    if certified is not None and certified != f"node_{head.node}":
        return HelloRefused(f"you say that you are node_{head.node}, your certificate is {certified}'s")
    try:
        reply = admit(head)
    except Exception as error:
        _log.exception("failed to answer node_%d", head.node)
        return HelloRefused(f"this node failed to answer: {error!r}")
    return reply if isinstance(reply, HelloRefused) else (head, reply)


def read_answer(frame: bytes, address: Address, expect: int | None) -> Hello:
    """The peer's Hello; ``RefusedError`` if it said no or is somebody else."""
    try:
        head = _head(frame)
    except WireError as error:
        raise RefusedError(f"what answers at {address} is no node: {error}") from error
    if isinstance(head, HelloRefused):
        raise RefusedError(f"{address} refused: {head.reason}")
    if not isinstance(head, Hello):
        raise RefusedError(f"{address} answered with {type(head).__name__} instead of a Hello")
    if head.protocol != PROTOCOL:
        raise RefusedError(
            f"{address} speaks protocol {head.protocol} and this node {PROTOCOL}:"
            " run the same version of Ravnest on all nodes"
        )
    if expect is not None and head.node != expect:
        raise RefusedError(f"node_{head.node} answers at {address}, where node_{expect} should be")
    return head


def _head(frame: bytes) -> object:
    message = Assembler(_SMALL).feed(frame)
    if message is None:
        raise WireError("it is not complete in one frame")
    return message.head
