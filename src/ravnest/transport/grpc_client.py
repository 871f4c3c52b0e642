"""The dialling side of a gRPC link."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import grpc

from ravnest.errors import RefusedError
from ravnest.transport.base import LinkHandler
from ravnest.transport.grpc_settings import METHOD, is_foreign, options, reason_of
from ravnest.transport.handshake import HELLO_SECONDS, hello_frame, read_answer
from ravnest.transport.link import FrameLink, largest_batch
from ravnest.transport.tls import Credentials, dialled
from ravnest.types import Address
from ravnest.wire.header import Limits
from ravnest.wire.messages import Hello


@dataclass(frozen=True)
class Call:
    """Whom to call, as whom."""

    address: Address
    hello: Hello
    handler: LinkHandler
    expect: int | None
    credentials: Credentials | None
    limits: Limits


def attempt(call: Call, seconds: float) -> FrameLink | str:
    """One attempt to reach a peer: the link, or why there is none; ``RefusedError`` if it said no."""
    channel = _channel(call)
    accepted: SimpleQueue[FrameLink | None] = SimpleQueue()
    result: SimpleQueue[FrameLink | RefusedError | str] = SimpleQueue()
    stream = channel.stream_stream(METHOD)(_requests(call.hello, accepted))
    threading.Thread(
        target=_read,
        args=(call, channel, stream, accepted, result),
        name="ravnest link reader",
        daemon=True,
    ).start()
    try:
        outcome = result.get(timeout=seconds)
    except Empty:
        stream.cancel()  # which ends the reader, with a result of its own
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
    link = accepted.get()  # the reader always says, at the latest when the stream ends
    if link is not None:
        yield from link.batches()


def _read(
    call: Call,
    channel: grpc.Channel,
    stream: grpc.Call,
    accepted: SimpleQueue[FrameLink | None],
    result: SimpleQueue[FrameLink | RefusedError | str],
) -> None:
    link = None
    detail = "the connection ended without a word"
    try:
        for frame in stream:
            if link is not None:
                link.received(frame)
                continue
            peer = read_answer(frame, call.address, call.expect)
            link = FrameLink(call.hello, peer, call.handler, stream.cancel, call.limits)
            accepted.put(link)
            result.put(link)
    except RefusedError as error:
        result.put(error)
        stream.cancel()
    except grpc.RpcError as error:
        detail = reason_of(error)
        if link is None and is_foreign(detail):
            whose = "a node" if call.expect is None else f"node_{call.expect}"
            result.put(
                RefusedError(f"{call.address} shows no certificate of {whose} of this plan: {detail}")
            )
    finally:
        accepted.put(None)
        result.put(detail)
        if link is not None:
            link.ended(detail)
        channel.close()


def _channel(call: Call) -> grpc.Channel:
    target = str(dialled(call.address))
    settings = options(largest_batch(call.limits))
    if call.credentials is None:
        return grpc.insecure_channel(target, settings)
    if call.expect is not None:
        # Its certificate must be that node's, wherever it is: addresses change, names do not.
        settings.append(("grpc.ssl_target_name_override", f"node_{call.expect}"))
    return grpc.secure_channel(
        target,
        grpc.ssl_channel_credentials(
            call.credentials.authority, call.credentials.key, call.credentials.certificate
        ),
        settings,
    )
