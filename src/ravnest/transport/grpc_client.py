"""Dialling side of a gRPC connection, with TLS."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import grpc
from msgspec import structs

from ravnest.deadlines import LINK_HELLO
from ravnest.errors import RefusedError, WrongCertificateError
from ravnest.transport.connection import Connection
from ravnest.transport.grpc_settings import (
    METHOD,
    is_certificate_error,
    nothing_listens,
    options,
    reason_of,
    relay_options,
)
from ravnest.transport.handshake import hello_frame, read_answer
from ravnest.transport.link import FrameLink, largest_batch
from ravnest.transport.routes import Route, Unanswered
from ravnest.transport.tls import Credentials, dial_address
from ravnest.wire.header import Limits
from ravnest.wire.messages import Hello

_Accepted = tuple[FrameLink, Connection]


@dataclass(frozen=True)
class DialRequest:
    """Parameters of a connection to a peer."""

    route: Route
    hello: Hello
    open_link: Callable[[Hello], FrameLink]
    """Returns the link for a peer that has answered with a Hello."""
    expect: int | None
    credentials: Credentials
    limits: Limits


def try_dial(request: DialRequest, seconds: float) -> FrameLink | Unanswered:
    """Try once to connect; return the link or the failure. ``RefusedError`` if refused."""
    channel = _channel(request)
    accepted: SimpleQueue[_Accepted | None] = SimpleQueue()
    result: SimpleQueue[FrameLink | RefusedError | Unanswered] = SimpleQueue()
    hello = structs.replace(request.hello, relayed=request.route.kind == "relayed")
    stream = channel.stream_stream(METHOD)(_requests(hello_frame(hello), accepted))
    threading.Thread(
        target=_read,
        args=(request, channel, stream, accepted, result),
        name="ravnest link reader",
        daemon=True,
    ).start()
    try:
        outcome = result.get(timeout=seconds)
    except Empty:
        stream.cancel()  # ends the reader, which then puts its own result
        try:
            outcome = result.get(timeout=LINK_HELLO)
        except Empty:
            outcome = Unanswered("")
        if isinstance(outcome, Unanswered):
            outcome = Unanswered(f"no answer within {seconds:.3g} s")
    if isinstance(outcome, RefusedError):
        raise outcome
    return outcome


def _requests(first: bytes, accepted: SimpleQueue[_Accepted | None]) -> Iterator[bytes]:
    yield first
    opened = accepted.get()  # the reader always answers, at the latest when the stream ends
    if opened is not None:
        link, connection = opened
        yield from link.batches(connection)


def _read(
    request: DialRequest,
    channel: grpc.Channel,
    stream: grpc.Call,
    accepted: SimpleQueue[_Accepted | None],
    result: SimpleQueue[FrameLink | RefusedError | Unanswered],
) -> None:
    link = None
    connection = Connection(stream.cancel, relayed=request.route.kind == "relayed")
    failure = Unanswered("the connection ended without a reason")
    try:
        for frame in stream:
            if link is not None:
                link.received(connection, frame)
                continue
            link = request.open_link(read_answer(frame, str(request.route), request.expect))
            link.attach(connection)
            accepted.put((link, connection))
            result.put(link)
    except RefusedError as error:
        result.put(error)
        stream.cancel()
    except grpc.RpcError as error:
        failure = Unanswered(reason_of(error), nothing_listens(error))
        if link is None and is_certificate_error(failure.reason):
            whose = "a node" if request.expect is None else f"node_{request.expect}"
            result.put(
                WrongCertificateError(
                    f"{request.route} has no certificate of {whose} of this plan: {failure.reason}"
                )
            )
    finally:
        accepted.put(None)
        result.put(failure)
        if link is not None:
            link.disconnected(connection, failure.reason)
        channel.close()


def _channel(request: DialRequest) -> grpc.Channel:
    route, largest = request.route, largest_batch(request.limits)
    target = str(dial_address(route.address)) if route.endpoint is None else f"{route.endpoint}:1"
    settings = options(largest) if route.endpoint is None else relay_options(route, largest)
    if request.expect is not None:
        # Check the certificate against the node's name: addresses change, names do not.
        settings.append(("grpc.ssl_target_name_override", f"node_{request.expect}"))
    return grpc.secure_channel(
        target,
        grpc.ssl_channel_credentials(
            request.credentials.authority, request.credentials.key, request.credentials.certificate
        ),
        settings,
    )
