"""Dialling side of a connection: directly or through a relay, with TLS except on the same machine."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from ravnest.errors import LinkClosedError, RelayError, WireError, WrongCertificateError
from ravnest.relay.heads import HeadReader, RelayMethod, parse_answer, request
from ravnest.transport.certificates import certificate_name
from ravnest.transport.frame_socket import FrameSocket
from ravnest.transport.handshake import LARGEST_HELLO, DialHandshake, hello_frame
from ravnest.transport.link import FrameLink
from ravnest.transport.routes import Route, Unanswered, connect, failed_connection
from ravnest.transport.socket_connection import SocketConnection
from ravnest.transport.tls import Credentials, dialling_context
from ravnest.transport.tls_rejections import tls_reason
from ravnest.wire.frames import largest_frame
from ravnest.wire.header import Limits
from ravnest.wire.messages import Hello, HelloProof

_RELAY_ANSWERS = {
    403: "the relay does not accept this node's ticket",
    404: "it is not registered at the relay",
    429: "the relay has no room for another connection",
    503: "it cannot be reached through the relay",
    504: "it did not answer the relay in time",
}
"""Reasons by the status codes of relays."""
_NOT_A_NODE = "the process that listens there is not a Ravnest node"


@dataclass(frozen=True)
class DialRequest:
    """Parameters of a connection to a peer."""

    route: Route
    hello: Hello
    open_link: Callable[[Hello], FrameLink]
    """Returns the link for a peer that has answered with a Hello."""
    expect: int | None
    limits: Limits
    credentials: Credentials | None
    """Identity of this node; None: the peer is on the same machine, and TLS is not used."""
    secret: str
    """Secret that both sides have to prove without TLS; empty: none."""


def try_dial(request: DialRequest, seconds: float) -> FrameLink | Unanswered:
    """Try once to connect; return the link or the failure. ``RefusedError`` if refused."""
    deadline = time.monotonic() + seconds
    try:
        stream = FrameSocket(connect(request.route.address, seconds))
    except OSError as error:
        return failed_connection(error, seconds)
    link: FrameLink | None = None
    try:
        link = _open(stream, request, deadline)
    except (LinkClosedError, RelayError) as error:  # LinkClosedError: this node is closing its links
        return Unanswered(str(error))
    except WireError:
        return Unanswered(_NOT_A_NODE)
    except ssl.SSLError as error:
        return Unanswered(tls_reason(error))
    except OSError as error:
        return failed_connection(error, seconds)
    finally:
        if link is None:
            stream.hang_up()
            stream.close()
    relayed = request.route.kind == "relayed"
    connection = SocketConnection(stream, link, largest_frame(request.limits), relayed=relayed)
    connection.start()
    threading.Thread(target=connection.read, name="ravnest link reader", daemon=True).start()
    return link


def _open(stream: FrameSocket, request: DialRequest, deadline: float) -> FrameLink:
    """Return the link to the peer at the other end of a new connection."""
    stream.start()
    if request.route.endpoint is not None:
        pass_relay(stream.socket, request.route, deadline)
    if request.credentials is None:
        return request.open_link(_greet(stream, request, deadline))
    certified = _secure(stream, request, request.credentials, deadline)
    hello = _greet(stream, request, deadline)
    claimed = certificate_name(hello.node, hello.generation)
    if request.expect is not None and certified != claimed:
        raise WrongCertificateError(
            f"{request.route} claims to be {claimed}, but its certificate belongs to {certified[:100]!r}"
        )
    return request.open_link(hello)


def pass_relay(connection: socket.socket, route: Route, deadline: float) -> None:
    """Ask a relay for its connection to the peer; ``RelayError`` if it has none."""
    reader = HeadReader()
    connection.sendall(request(RelayMethod.CONNECT, str(route.endpoint), route.ticket))
    found = None
    try:
        while found is None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            # One byte too many would be one of the peer's.
            data = connection.recv(1)
            if not data:
                raise RelayError("the relay ended the connection")
            found = reader.feed(data)
            if time.monotonic() >= deadline:
                raise TimeoutError
    finally:
        connection.settimeout(None)
    status, _ = parse_answer(found[0])
    if status != 200:
        raise RelayError(_RELAY_ANSWERS.get(status, f"the relay answers with code {status}"))


def _secure(stream: FrameSocket, request: DialRequest, credentials: Credentials, deadline: float) -> str:
    """Encrypt the connection, and return the name in the peer's certificate.

    ``WrongCertificateError`` if another machine answers.
    """
    whose = "a node" if request.expect is None else f"node_{request.expect}"
    missing = f"{request.route} has no certificate of {whose} of this plan"
    try:
        name = stream.secure(dialling_context(credentials), deadline, listens=False)
    except ssl.SSLCertVerificationError as error:
        raise WrongCertificateError(f"{missing}: {tls_reason(error)}") from error
    if request.expect is not None and name.partition("-")[0] != whose:
        raise WrongCertificateError(f"{missing}: it belongs to {name[:100]!r}")
    return name


def _greet(stream: FrameSocket, request: DialRequest, deadline: float) -> Hello:
    """Return the peer's Hello; prove the secret if the peer asks for it."""
    hello = structs.replace(request.hello, relayed=request.route.kind == "relayed")
    secret = request.secret if request.credentials is None else ""
    handshake = DialHandshake(hello, secret, str(request.route), request.expect)
    stream.send_frame(handshake.first)
    while True:
        frame = stream.read_one(LARGEST_HELLO, deadline)
        if frame is None:
            raise ConnectionResetError("the connection ended without a reason")
        reply = handshake.next(bytes(frame))
        if isinstance(reply, Hello):
            return reply
        assert isinstance(reply, HelloProof)
        stream.send_frame(hello_frame(reply))
