"""Page for Prometheus: one path, no credential, and so on loopback unless the owner says otherwise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ravnest.deadlines import HTTP_ANSWER
from ravnest.errors import SettingsError
from ravnest.logs.prometheus import MEDIA_TYPE, Figure, exposition
from ravnest.types import Address

_PATH = "/metrics"


@contextmanager
def metrics_page(address: Address, figures: Callable[[], Iterable[Figure]]) -> Iterator[Address]:
    """Serve figures while the block runs; yields the address, with the actual port for port 0."""

    class Handler(BaseHTTPRequestHandler):
        """Answers GET requests for the figures."""

        timeout = HTTP_ANSWER

        def do_GET(self) -> None:
            """Send the figures as text."""
            if self.path.partition("?")[0] != _PATH:
                self.send_error(404, "the figures are at /metrics")
                return
            body = exposition(figures()).encode()
            self.send_response(200)
            self.send_header("Content-Type", MEDIA_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - of the base class
            """Log nothing: Prometheus asks every few seconds."""

    try:
        server = ThreadingHTTPServer((address.host, address.port), Handler)
    except (OSError, OverflowError) as error:  # the port is taken, or no port
        raise SettingsError(
            f"figures cannot be served at {address}: {error}. Choose another port for Prometheus"
        ) from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="metrics page", daemon=True)
    thread.start()
    try:
        yield Address(address.host, server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
