"""Dial-back, the provider's side: a listener that proves to the server that it is this process."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import secrets
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ravnest.deadlines import DIAL_BACK, DIAL_BACK_EACH
from ravnest.schemas.reachability import CHALLENGE_BYTES, dial_back_proof
from ravnest.transport.certificates import Authority, Identity
from ravnest.types import Address

_BACKLOG = 16


@contextmanager
def dial_back_listener(address: Address, nonce: str) -> Iterator[str]:
    """Answer the server's challenges at an address while the block runs; yield the fingerprint.

    ``OSError`` if something listens there already, such as the worker of a running job.
    """
    now = datetime.datetime.now(datetime.UTC)
    identity = Authority("Ravnest dial-back", now).issue("provider", [])
    with _listening(address) as listener:
        answering = _Answering(listener, _context(identity), nonce)
        thread = threading.Thread(target=answering.run, name="dial-back", daemon=True)
        thread.start()
        try:
            yield hashlib.sha256(ssl.PEM_cert_to_DER_cert(identity.certificate.decode())).hexdigest()
        finally:
            answering.stop()
            thread.join()


def new_nonce() -> str:
    """Return a random secret for one request."""
    return secrets.token_hex(32)


@contextmanager
def _listening(address: Address) -> Iterator[socket.socket]:
    """Listen at a port that this process has reserved."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address.host, address.port))
        listener.listen(_BACKLOG)
        yield listener


class _Answering:
    """Event loop that answers challenges, in a thread."""

    def __init__(self, listener: socket.socket, context: ssl.SSLContext, nonce: str) -> None:
        self._listener = listener
        self._context = context
        self._nonce = nonce
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # ends open connections too
            runner.run(self._serve())

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._answer,
            sock=self._listener,
            ssl=self._context,
            ssl_handshake_timeout=DIAL_BACK,
            limit=CHALLENGE_BYTES,
        )
        await self._stopped.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(DIAL_BACK_EACH):
                challenge = await reader.readexactly(CHALLENGE_BYTES)
                writer.write(dial_back_proof(self._nonce, challenge))
                await writer.drain()
                await reader.read(1)  # the server ends the connection when it has the answer
        except (OSError, EOFError, TimeoutError):
            return
        finally:
            writer.transport.abort()


def _context(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory(prefix="ravnest-") as folder:  # ssl reads keys from files only
        certificate, key = (Path(folder) / name for name in ("certificate.pem", "key.pem"))
        certificate.write_bytes(identity.certificate)
        key.touch(mode=0o600)
        key.write_bytes(identity.key)
        context.load_cert_chain(certificate, key)
    return context
