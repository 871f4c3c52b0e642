"""Handshake of a link: the first frame in each direction, or two if a secret has to be proved."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from msgspec import structs

from ravnest.errors import RefusedError, WireError
from ravnest.transport.base import Admit
from ravnest.transport.certificates import certificate_name
from ravnest.transport.link import FrameLink
from ravnest.transport.link_secret import LONGEST_NONCE, is_proof, new_nonce, proof
from ravnest.wire import envelope
from ravnest.wire.frames import Assembler, encode
from ravnest.wire.header import Limits
from ravnest.wire.messages import PROTOCOL, Hello, HelloChallenge, HelloProof, HelloRefused, Message

_HELLO_LIMITS = Limits(max_message_bytes=0, max_values=0, max_opening_bytes=64 << 10)
"""Limits for peers that have not been admitted yet."""

LARGEST_HELLO = envelope.SIZE + 4 + _HELLO_LIMITS.max_opening_bytes
"""Size of the largest frame of a handshake, in bytes."""
_LONGEST_SESSION = 64

_log = logging.getLogger(__name__)


def hello_frame(hello: Hello | HelloChallenge | HelloProof | HelloRefused) -> bytes:
    """Return a message of the handshake as one frame."""
    (frame,) = encode(Message(hello))
    return frame


@dataclass(frozen=True)
class Greeting:
    """Accepted Hello and the answer to it."""

    theirs: Hello
    ours: Hello
    link: FrameLink | None = None
    """Link that the peer continues; None for a new one."""
    sent: Hello | None = None
    """``ours`` with the proof for this connection, if there is one."""

    @property
    def frame(self) -> bytes:
        """The answer as one frame."""
        return hello_frame(self.sent or self.ours)


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
    head = _first_hello(frame)
    if isinstance(head, HelloRefused):
        return head
    claimed = certificate_name(head.node, head.generation)
    if certified is not None and certified != claimed:
        return HelloRefused(f"you claim to be {claimed}, but your certificate belongs to {certified}")
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


def _first_hello(frame: bytes) -> Hello | HelloRefused:
    """Return the Hello in the first frame of a connection."""
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
    return head


def _answer_known(link: FrameLink, hello: Hello) -> Greeting | HelloRefused:
    """Answer a peer that continues a link."""
    peer = link.peer
    if (hello.node, hello.generation, hello.plan) != (peer.node, peer.generation, peer.plan):
        return HelloRefused(f"the link that you continue belongs to node_{link.peer.node}")
    return Greeting(hello, link.local, link)


def _answer_new(reply: Hello | HelloRefused, hello: Hello) -> Greeting | HelloRefused:
    """Answer a peer that opens a link; one that continues a link must know it."""
    if isinstance(reply, HelloRefused):
        return reply
    if hello.continues:
        return HelloRefused("this process does not know the link that you continue: it was restarted")
    return Greeting(hello, reply)


class ListenHandshake:
    """Handshake of the side that listens, for one connection."""

    def __init__(
        self,
        admit: Admit,
        find: Callable[[str], FrameLink | None],
        certified: str | None,
        secret: str,
    ) -> None:
        """``secret`` has to be proved by peers without a certificate; empty: nothing has to be."""
        self._admit = admit
        self._find = find
        self._certified = certified
        self._secret = secret if certified is None else ""
        self._hello = b""
        self._nonces = ("", "")

    def next(self, frame: bytes) -> Greeting | HelloChallenge | HelloRefused:
        """Return the answer to a frame of the peer; the peer's next frame follows a challenge only."""
        if not self._secret:
            return answer(frame, self._admit, self._find, self._certified)
        if self._hello:
            return self._proved(frame)
        hello = _first_hello(frame)
        if isinstance(hello, HelloRefused):
            return hello
        if not hello.nonce:
            return HelloRefused("this node belongs to a job with a secret, which you do not know")
        if len(hello.nonce) > LONGEST_NONCE:
            return HelloRefused("your Hello is unreadable: its nonce is too long")
        self._hello, self._nonces = frame, (hello.nonce, new_nonce())
        return HelloChallenge(self._nonces[1])

    def _proved(self, frame: bytes) -> Greeting | HelloRefused:
        try:
            head = _head(frame)
        except WireError as error:
            return HelloRefused(f"your proof is unreadable: {error}")
        found = head.proof if isinstance(head, HelloProof) else ""
        if not is_proof(found, self._secret, "dialer", self._nonces, self._hello):
            return HelloRefused("you do not know the secret of this job")
        reply = answer(self._hello, self._admit, self._find, self._certified)
        if isinstance(reply, HelloRefused):
            return reply
        ours = structs.replace(reply.ours, nonce="", proof="")
        made = proof(self._secret, "listener", self._nonces, hello_frame(ours))
        return replace(reply, sent=structs.replace(ours, proof=made))


class DialHandshake:
    """Handshake of the side that dials, for one connection."""

    def __init__(self, hello: Hello, secret: str, address: str, expect: int | None) -> None:
        """``secret`` has to be proved by both sides; empty: by none. ``expect``: see ``read_answer``."""
        self._secret = secret
        self._address = address
        self._expect = expect
        self._nonce = new_nonce() if secret else ""
        self.first = hello_frame(structs.replace(hello, nonce=self._nonce))
        """First frame of the connection."""
        self._challenge = ""

    def next(self, frame: bytes) -> HelloProof | Hello:
        """Return the answer to the listener's challenge, or its Hello; ``RefusedError`` otherwise."""
        if not self._secret:
            return read_answer(frame, self._address, self._expect)
        if not self._challenge:
            head = _readable(frame, self._address)
            if isinstance(head, HelloChallenge) and 0 < len(head.nonce) <= LONGEST_NONCE:
                self._challenge = head.nonce
                nonces = self._nonce, self._challenge
                return HelloProof(proof(self._secret, "dialer", nonces, self.first))
            if isinstance(head, Hello):
                raise RefusedError(f"{self._address} does not ask for the secret of this job")
        hello = read_answer(frame, self._address, self._expect)
        bare = hello_frame(structs.replace(hello, proof=""))
        if not is_proof(hello.proof, self._secret, "listener", (self._nonce, self._challenge), bare):
            raise RefusedError(f"{self._address} does not know the secret of this job")
        return hello


def new_session() -> str:
    """Return the id of a new link."""
    return secrets.token_hex(8)


def read_answer(frame: bytes, address: str, expect: int | None) -> Hello:
    """Return the peer's Hello; ``RefusedError`` if it refused or is another node."""
    head = _readable(frame, address)
    if isinstance(head, HelloRefused):
        raise RefusedError(f"{address} refused: {head.reason}")
    if isinstance(head, HelloChallenge):
        raise RefusedError(f"{address} asks for the secret of a job, and this node has none")
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


def _readable(frame: bytes, address: str) -> object:
    try:
        return _head(frame)
    except WireError as error:
        raise RefusedError(f"the answer from {address} is not that of a node: {error}") from error


def _head(frame: bytes) -> object:
    message = Assembler(_HELLO_LIMITS).feed(frame)
    if message is None:
        raise WireError("the message is not complete in one frame")
    return message.head
