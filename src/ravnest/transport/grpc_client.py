"""Dialling side of a gRPC link."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import grpc

from ravnest.errors import RefusedError
from ravnest.transport.base import LinkHandler
from ravnest.transport.grpc_settings import METHOD, is_certificate_error, options, reason_of
from ravnest.transport.handshake import HELLO_SECONDS, hello_frame, read_answer
from ravnest.transport.link import FrameLink, largest_batch
from ravnest.transport.tls import Credentials, dial_address
from ravnest.types import Address
from ravnest.wire.header import Limits
from ravnest.wire.messages import Hello


@dataclass(frozen=True)
class DialRequest:
    """Parameters of a connection to a peer."""

    address: Address
    hello: Hello
    handler: LinkHandler
    expect: int | None
    credentials: Credentials | None
    limits: Limits


def try_dial(request: DialRequest, seconds: float) -> FrameLink | str:
    """Try once to connect; return the link or the reason of the failure. ``RefusedError`` if refused."""
    channel = _channel(request)
    accepted: SimpleQueue[FrameLink | None] = SimpleQueue()
    result: SimpleQueue[FrameLink | RefusedError | str] = SimpleQueue()
    stream = channel.stream_stream(METHOD)(_requests(request.hello, accepted))
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
            outcome = result.get(timeout=HELLO_SECONDS)
        except Empty:
            outcome = ""
        if isinstance(outcome, str):
            outcome = f"no answer within {seconds:.3g} s"
    if isinstance(outcome, RefusedError):
        raise outcome
    return outcome


def _requests(hello: Hello, accepted: SimpleQueue[FrameLink | None]) -> Iterator[bytes]:
    yield hello_frame(hello)
    link = accepted.get()  # the reader always answers, at the latest when the stream ends
    if link is not None:
        yield from link.batches()


def _read(
    request: DialRequest,
    channel: grpc.Channel,
    stream: grpc.Call,
    accepted: SimpleQueue[FrameLink | None],
    result: SimpleQueue[FrameLink | RefusedError | str],
) -> None:
    link = None
    detail = "the connection ended without a reason"
    try:
        for frame in stream:
            if link is not None:
                link.received(frame)
                continue
            peer = read_answer(frame, request.address, request.expect)
            link = FrameLink(request.hello, peer, request.handler, stream.cancel, request.limits)
            accepted.put(link)
            result.put(link)
    except RefusedError as error:
        result.put(error)
        stream.cancel()
    except grpc.RpcError as error:
        detail = reason_of(error)
        if link is None and is_certificate_error(detail):
            whose = "a node" if request.expect is None else f"node_{request.expect}"
            result.put(
                RefusedError(f"{request.address} has no certificate of {whose} of this plan: {detail}")
            )
    finally:
        accepted.put(None)
        result.put(detail)
        if link is not None:
            link.ended(detail)
        channel.close()


def _channel(request: DialRequest) -> grpc.Channel:
    target = str(dial_address(request.address))
    settings = options(largest_batch(request.limits))
    if request.credentials is None:
        return grpc.insecure_channel(target, settings)
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
