"""Settings of gRPC for both sides, and descriptions of its errors."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc

from ravnest.transport.routes import Route
from ravnest.transport.tls import dial_address

METHOD = "/ravnest.Link/Open"
SERVICE, NAME = "ravnest.Link", "Open"

_RELAY_ANSWERS = {
    403: "the relay does not accept this node's ticket",
    404: "it is not registered at the relay",
    429: "the relay has no room for another connection",
    503: "it cannot be reached through the relay",
    504: "it did not answer the relay in time",
}
"""Reasons by the status codes of relays."""


def options(largest: int) -> list[tuple[str, int | str]]:
    """Return the options of a channel and of a server."""
    return [
        ("grpc.max_send_message_length", largest),
        ("grpc.max_receive_message_length", largest),
        # Links detect dead connections themselves; this frees what gRPC keeps of them.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 30_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", 10_000),
        # A port in use is an error, each attempt opens a new connection, no retries, no proxies.
        ("grpc.so_reuseport", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    ]


def relay_options(route: Route, largest: int) -> list[tuple[str, int | str]]:
    """Return the options of a channel that passes a relay: gRPC asks it for the peer's endpoint."""
    settings = dict(options(largest))
    settings["grpc.enable_http_proxy"] = 1
    settings["grpc.http_proxy"] = f"http://ticket:{route.ticket}@{dial_address(route.address)}"
    return list(settings.items())


def reason_of(error: grpc.RpcError) -> str:
    """Return a readable reason for a failed connection."""
    code = error.code() if isinstance(error, grpc.Call) else None
    details = str(error.details() if isinstance(error, grpc.Call) else error)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "the process that listens there is not a Ravnest node"
    if "Connection refused" in details:
        return "nothing listens there (connection refused)"
    if answer := re.search(r"HTTP proxy returned response code (\d+)", details):
        return _RELAY_ANSWERS.get(int(answer[1]), f"the relay answers with code {answer[1]}")
    last = re.sub(r"^.*last error: (UNKNOWN: |UNAVAILABLE: )?", "", details)
    return last[:500] or (str(code.name).lower() if code else "the connection broke")


def nothing_listens(error: grpc.RpcError) -> bool:
    """Return whether the machine answered, but nothing listens at the port."""
    return "Connection refused" in str(error.details() if isinstance(error, grpc.Call) else error)


def is_certificate_error(reason: str) -> bool:
    """Return whether a connection failed because of the peer's certificate."""
    return "CERTIFICATE_VERIFY_FAILED" in reason or "Hostname Verification" in reason


class DaemonThreads(futures.Executor):
    """Executor with one daemon thread per stream; a stream lasts as long as its link.

    With a ``ThreadPoolExecutor``, the threads would delay the exit: Python joins them at the end.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """Start a thread."""
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # gRPC reads it from the future
                future.set_exception(error)

        threading.Thread(target=run, name="ravnest link writer", daemon=True).start()
        return future
