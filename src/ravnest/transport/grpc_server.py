"""Listening side of gRPC links, with TLS: one stream for each peer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

import grpc

from ravnest.deadlines import LINK_HELLO
from ravnest.errors import AddressInUseError, LinkClosedError, RefusedError
from ravnest.transport.base import Admit
from ravnest.transport.connection import Connection
from ravnest.transport.grpc_settings import (
    NAME,
    SERVICE,
    DaemonThreads,
    options,
    reason_of,
)
from ravnest.transport.handshake import Greeting, answer, hello_frame
from ravnest.transport.link import FrameLink, largest_batch
from ravnest.transport.listen_address import MAX_LINKS, bound_socket
from ravnest.transport.tls import Credentials
from ravnest.types import Address
from ravnest.wire.header import Limits
from ravnest.wire.messages import HelloRefused

_Opened = tuple[FrameLink, Connection, bytes]
_Answer = _Opened | HelloRefused | None


class GrpcListener:
    """gRPC server that accepts connections, of new links and of open ones."""

    def __init__(
        self,
        admit: Admit,
        find: Callable[[str], FrameLink | None],
        open_link: Callable[[Greeting], FrameLink],
        limits: Limits,
    ) -> None:
        self._admit = admit
        self._find = find
        self._open_link = open_link
        self._limits = limits
        self._server: grpc.Server | None = None

    def start(self, address: Address, credentials: Credentials) -> int:
        """Listen with mutual TLS, and return the port."""
        bound_socket(address).close()  # gRPC does not report why it cannot bind
        server = grpc.server(
            DaemonThreads(),
            options=options(largest_batch(self._limits)),
            maximum_concurrent_rpcs=MAX_LINKS,
        )
        method = grpc.stream_stream_rpc_method_handler(self._open)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {NAME: method}),))
        try:
            port = _bind(server, address, credentials)
        except RuntimeError as error:
            raise AddressInUseError(f"cannot listen at {address}: {error}") from error
        server.start()
        self._server = server
        return port

    def stop(self) -> None:
        """Stop listening and end open streams."""
        if self._server is not None:
            self._server.stop(None).wait(LINK_HELLO)

    def _open(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield the stream's frames for the peer; gRPC runs this in the writer thread."""
        opened: SimpleQueue[_Answer] = SimpleQueue()
        threading.Thread(
            target=self._read, args=(requests, context, opened), name="ravnest link reader", daemon=True
        ).start()
        result = _awaited(opened)
        if isinstance(result, HelloRefused):
            yield hello_frame(result)
        elif result is not None:
            link, connection, ours = result
            yield ours
            yield from link.batches(connection)

    def _read(
        self,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
        opened: SimpleQueue[_Answer],
    ) -> None:
        link = None
        connection = Connection(context.cancel)
        detail = "the connection ended without a reason"
        try:
            for frame in requests:
                if link is not None:
                    link.received(connection, frame)
                    continue
                reply = answer(frame, self._admit, self._find, _common_name(context))
                if isinstance(reply, HelloRefused):
                    opened.put(reply)
                    return
                link = reply.link or self._open_link(reply)
                connection.relayed = reply.theirs.relayed
                link.attach(connection)
                opened.put((link, connection, reply.frame))
        except RefusedError as error:
            opened.put(HelloRefused(str(error)))
        except grpc.RpcError as error:
            detail = reason_of(error)
        except LinkClosedError as error:  # the peer dials again
            detail = str(error)
        finally:
            opened.put(None)
            if link is not None:
                link.disconnected(connection, detail)


def _awaited(opened: SimpleQueue[_Answer]) -> _Answer:
    """Return the next answer to the peer."""
    try:
        return opened.get(timeout=LINK_HELLO)
    except Empty:
        return HelloRefused(f"no Hello arrived within {LINK_HELLO:g} s")


def _common_name(context: grpc.ServicerContext) -> str:
    """Return the name in the peer's certificate, which the TLS handshake has verified."""
    auth = context.auth_context()
    names = auth.get("x509_common_name", [])
    return names[0].decode(errors="replace") if len(names) == 1 else ""


def _bind(server: grpc.Server, address: Address, credentials: Credentials) -> int:
    return int(
        server.add_secure_port(
            str(address),
            grpc.ssl_server_credentials(
                [(credentials.key, credentials.certificate)],
                root_certificates=credentials.authority,
                require_client_auth=True,
            ),
        )
    )
