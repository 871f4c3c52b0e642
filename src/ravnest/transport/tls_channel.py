"""Encryption of one connection, such that one thread can receive while another one sends.

Python's ``ssl.SSLSocket`` must not be used by two threads at once. Here TLS works between two buffers,
under a lock, and neither side holds it while it waits for the network.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from typing import cast

from ravnest.wire.envelope import Buffer

_SEALED_BYTES = 256 << 10
"""Bytes that are encrypted at once; TLS keeps a buffer of this size."""
_RECEIVED_BYTES = 128 << 10
_RECORD_BYTES = 16 << 10
"""Largest content of a record: TLS decrypts whole records only."""


class TlsChannel:
    """Both directions of an encrypted connection."""

    def __init__(self, context: ssl.SSLContext, connection: socket.socket, *, listens: bool) -> None:
        """``listens``: the other side has dialled."""
        self._socket = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=listens)
        self._lock = threading.Lock()
        """Guards ``_tls`` and the buffers."""
        self._received = memoryview(bytearray(_RECEIVED_BYTES))

    def handshake(self, deadline: float) -> None:
        """Agree on keys and check the peer's certificate, until this time of ``time.monotonic()``.

        ``ssl.SSLError`` if either side rejects the other; with TLS 1.3, the side that dials learns that
        it was rejected when it receives.
        """
        try:
            while not self._progresses():
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                self._socket.sendall(self._outgoing.read())
                if not self._fill(_RECEIVED_BYTES):
                    raise ConnectionResetError("the connection ended during the TLS handshake")
                if time.monotonic() >= deadline:
                    raise TimeoutError
            self._socket.sendall(self._outgoing.read())
        except ssl.SSLError:
            with contextlib.suppress(OSError):  # tell the peer why, if it is still there
                self._socket.sendall(self._outgoing.read())
            raise
        finally:
            self._socket.settimeout(None)

    @property
    def peer_name(self) -> str:
        """Common name in the peer's certificate, which the handshake has verified; empty if unclear."""
        certificate = self._tls.getpeercert() or {}
        names = [
            str(field[1])
            for part in certificate.get("subject", ())
            for field in part
            if field[0] == "commonName"
        ]
        return names[0] if len(names) == 1 else ""

    def seal(self, parts: Sequence[Buffer]) -> list[Buffer]:
        """Return the parts encrypted, in the order in which they must be sent."""
        sealed: list[Buffer] = []
        with self._lock:
            for piece in _pieces(parts):
                for part in piece:
                    view = memoryview(part)
                    while view:
                        view = view[self._tls.write(view) :]
                sealed.append(self._outgoing.read())
        return sealed

    def receive(self, into: memoryview, missing: int) -> int:
        """Wait for bytes, decrypt them and return their number; 0 at the end of the stream.

        ``missing``: bytes that will arrive for certain, if known. They are awaited in one system call,
        since each return from one competes for Python's lock.
        """
        while True:
            count = self._decrypt(into)
            if count is not None:
                return count
            # A record of which a part is here already counts with its whole content.
            awaited = missing - _RECORD_BYTES
            if awaited > _RECORD_BYTES:
                arrived = self._fill(min(awaited, _RECEIVED_BYTES), socket.MSG_WAITALL)
            else:
                arrived = self._fill(_RECEIVED_BYTES)
            if not arrived:
                return 0

    def _progresses(self) -> bool:
        """Continue the handshake; return False if bytes of the peer are needed."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def _fill(self, count: int, flags: int = 0) -> int:
        """Wait for up to ``count`` encrypted bytes and return their number."""
        arrived = self._socket.recv_into(self._received[:count], 0, flags)
        with self._lock:
            self._incoming.write(self._received[:arrived])
        return arrived

    def _decrypt(self, into: memoryview) -> int | None:
        """Decrypt what has arrived and return its size; None if more is needed, 0 at the end."""
        count = 0
        with self._lock:
            try:
                while count < len(into):
                    # With a buffer, ``read`` returns the number of bytes.
                    got = cast(int, self._tls.read(len(into) - count, into[count:]))
                    count += got
                    if not got:
                        break
            except ssl.SSLWantReadError:
                if not count:
                    return None
            except ssl.SSLZeroReturnError:
                pass
            if self._outgoing.pending:
                raise ConnectionAbortedError("the peer began another TLS handshake")
        return count


def _pieces(parts: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    """Yield the parts in pieces of at most ``_SEALED_BYTES``."""
    piece: list[Buffer] = []
    room = _SEALED_BYTES
    for part in parts:
        view = memoryview(part)
        while view:
            taken, view = view[:room], view[room:]
            piece.append(taken)
            room -= len(taken)
            if not room:
                yield piece
                piece, room = [], _SEALED_BYTES
    if piece:
        yield piece
