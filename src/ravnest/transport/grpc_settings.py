"""How gRPC is set up, the same on both sides; and its errors in our words."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc

METHOD = "/ravnest.Link/Open"
SERVICE, NAME = "ravnest.Link", "Open"

MOST_LINKS = 256
"""Streams that a server serves at once; more are turned away, so that nobody can exhaust it."""


def options(largest: int) -> list[tuple[str, int | str]]:
    """Of a channel and of a server."""
    return [
        ("grpc.max_send_message_length", largest),
        ("grpc.max_receive_message_length", largest),
        # A peer that vanished without a word is noticed in 15 s.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", 10_000),
        # Ours: a port in use is an error, each attempt to connect is a fresh one, no detours.
        ("grpc.so_reuseport", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    ]


def reason_of(error: grpc.RpcError) -> str:
    """What went wrong on a connection, for a human."""
    code = error.code() if isinstance(error, grpc.Call) else None
    details = str(error.details() if isinstance(error, grpc.Call) else error)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "what listens there is no node of Ravnest"
    if "Connection refused" in details:
        return "nothing listens there (connection refused)"
    last = re.sub(r"^.*last error: (UNKNOWN: |UNAVAILABLE: )?", "", details)
    return last[:500] or (str(code.name).lower() if code else "the connection broke")


def is_foreign(reason: str) -> bool:
    """Whether the certificate that was shown is not the one that the plan gave to that node."""
    return "CERTIFICATE_VERIFY_FAILED" in reason or "Hostname Verification" in reason


class DaemonThreads(futures.Executor):
    """A thread for each stream, as each lasts as long as its link; they do not hold up the exit.

    A ``ThreadPoolExecutor`` would: Python joins its threads before it ends the process.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """Start a thread."""
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # gRPC asks the future
                future.set_exception(error)

        threading.Thread(target=run, name="ravnest link writer", daemon=True).start()
        return future
