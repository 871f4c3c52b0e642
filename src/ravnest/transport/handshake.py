"""Handshake of a link: the first frame in each direction."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from ravnest.errors import RefusedError, WireError
from ravnest.transport.base import Admit
from ravnest.transport.link import FrameLink
from ravnest.wire.frames import Assembler, encode
from ravnest.wire.header import Limits
from ravnest.wire.messages import PROTOCOL, Hello, HelloRefused, Message

_HELLO_LIMITS = Limits(max_message_bytes=0, max_values=0, max_opening_bytes=64 << 10)
"""Limits for peers that have not been admitted yet."""

_LONGEST_SESSION = 64

_log = logging.getLogger(__name__)


def hello_frame(hello: Hello | HelloRefused) -> bytes:
    """Return a Hello or refusal as one frame."""
    (frame,) = encode(Message(hello))
    return frame


@dataclass(frozen=True)
class Greeting:
    """Accepted Hello and the answer to it."""

    theirs: Hello
    ours: Hello
    link: FrameLink | None = None
    """Link that the peer continues; None for a new one."""


def answer(
    frame: bytes,
    admit: Admit,
    find: Callable[[str], FrameLink | None],
    certified: str | None,
) -> Greeting | HelloRefused:
    """Return a peer's Hello and our answer to it, or a refusal.

    ``find`` returns an open link by its id. ``certified`` is the name in the peer's certificate; None
    without TLS.
    """
    try:
        head = _head(frame)
    except WireError as error:
        return HelloRefused(f"your Hello is unreadable: {error}")
    if not isinstance(head, Hello):
        return HelloRefused(f"a link begins with a Hello, not with {type(head).__name__}")
    if head.protocol != PROTOCOL:
        return HelloRefused(
            f"you use protocol {head.protocol} and this node {PROTOCOL}:"
            " run the same version of Ravnest on all nodes"
        )
    if certified is not None and certified != f"node_{head.node}":
        return HelloRefused(
            f"you claim to be node_{head.node}, but your certificate belongs to {certified}"
        )
    if len(head.session) > _LONGEST_SESSION:
        return HelloRefused("your Hello is unreadable: its session is too long")
    try:
        link = find(head.session) if head.session else None
        reply = _answer_known(link, head) if link is not None else _answer_new(admit(head), head)
    except RefusedError as error:
        return HelloRefused(str(error))
    except Exception as error:
        _log.exception("failed to answer node_%d", head.node)
        return HelloRefused(f"this node failed to answer: {error!r}")
    return reply


def _answer_known(link: FrameLink, hello: Hello) -> Greeting | HelloRefused:
    """Answer a peer that continues a link."""
    if (hello.node, hello.plan) != (link.peer.node, link.peer.plan):
        return HelloRefused(f"the link that you continue belongs to node_{link.peer.node}")
    return Greeting(hello, link.local, link)


def _answer_new(reply: Hello | HelloRefused, hello: Hello) -> Greeting | HelloRefused:
    """Answer a peer that opens a link; one that continues a link must know it."""
    if isinstance(reply, HelloRefused):
        return reply
    if hello.continues:
        return HelloRefused("this process does not know the link that you continue: it was restarted")
    return Greeting(hello, reply)


def new_session() -> str:
    """Return the id of a new link."""
    return secrets.token_hex(8)


def read_answer(frame: bytes, address: str, expect: int | None) -> Hello:
    """Return the peer's Hello; ``RefusedError`` if it refused or is another node."""
    try:
        head = _head(frame)
    except WireError as error:
        raise RefusedError(f"the answer from {address} is not that of a node: {error}") from error
    if isinstance(head, HelloRefused):
        raise RefusedError(f"{address} refused: {head.reason}")
    if not isinstance(head, Hello):
        raise RefusedError(f"{address} answered with {type(head).__name__} instead of a Hello")
    if head.protocol != PROTOCOL:
        raise RefusedError(
            f"{address} uses protocol {head.protocol} and this node {PROTOCOL}:"
            " run the same version of Ravnest on all nodes"
        )
    if expect is not None and head.node != expect:
        raise RefusedError(f"node_{head.node} answers at {address}, expected node_{expect}")
    return head


def _head(frame: bytes) -> object:
    message = Assembler(_HELLO_LIMITS).feed(frame)
    if message is None:
        raise WireError("the message is not complete in one frame")
    return message.head
