"""Dialling side of a connection over a socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ravnest.errors import LinkClosedError, WireError
from ravnest.transport.frame_socket import FrameSocket
from ravnest.transport.handshake import LARGEST_HELLO, DialHandshake, hello_frame
from ravnest.transport.link import FrameLink
from ravnest.transport.routes import Unanswered, failed_connection
from ravnest.transport.socket_connection import SocketConnection
from ravnest.transport.tls import dial_address
from ravnest.types import Address
from ravnest.wire.frames import largest_frame
from ravnest.wire.header import Limits
from ravnest.wire.messages import Hello, HelloProof


@dataclass(frozen=True)
class SocketRequest:
    """Parameters of a connection to a peer on the same machine."""

    address: Address
    hello: Hello
    open_link: Callable[[Hello], FrameLink]
    """Returns the link for a peer that has answered with a Hello."""
    expect: int | None
    limits: Limits
    secret: str
    """Secret that both sides have to prove; empty: none."""


def try_connect(request: SocketRequest, seconds: float) -> FrameLink | Unanswered:
    """Try once to connect; return the link or the failure. ``RefusedError`` if refused."""
    deadline = time.monotonic() + seconds
    target = dial_address(request.address)
    try:
        connected = socket.create_connection((target.host, target.port), max(seconds, 0.001))
    except OSError as error:
        return failed_connection(error, seconds)
    stream = FrameSocket(connected)
    link: FrameLink | None = None
    try:
        stream.start()
        hello = _greet(stream, request, deadline)
        link = request.open_link(hello)
    except LinkClosedError as error:  # this node is closing its links
        return Unanswered(str(error))
    except WireError:
        return Unanswered("the process that listens there is not a Ravnest node")
    except OSError as error:
        return failed_connection(error, seconds)
    finally:
        if link is None:
            stream.hang_up()
            stream.close()
    connection = SocketConnection(stream, link, largest_frame(request.limits))
    connection.start()
    threading.Thread(target=connection.read, name="ravnest link reader", daemon=True).start()
    return link


def _greet(stream: FrameSocket, request: SocketRequest, deadline: float) -> Hello:
    """Return the peer's Hello; prove the secret if the peer asks for it."""
    handshake = DialHandshake(request.hello, request.secret, str(request.address), request.expect)
    stream.send([handshake.first], wait=True)
    while True:
        frame = stream.read_one(LARGEST_HELLO, deadline)
        if frame is None:
            raise ConnectionResetError("the connection ended without a reason")
        reply = handshake.next(bytes(frame))
        if isinstance(reply, Hello):
            return reply
        assert isinstance(reply, HelloProof)
        stream.send([hello_frame(reply)], wait=True)
