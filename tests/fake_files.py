"""In-memory implementation of the server's artifact routes, with connections that break on request.

``test_artifact_contract.py`` runs the same tests on it and on the real server.
"""

import hashlib
import json
import re
from collections.abc import Iterator

import httpx


class FakeFiles:
    """The artifact routes of a server, as a transport of httpx."""

    def __init__(self) -> None:
        self.whole: dict[str, bytes] = {}
        self.parts: dict[str, bytes] = {}
        self.breaks: list[int] = []
        """Bytes after which the connection breaks, for each of the next requests with a body."""
        self.asked: list[str] = []
        self.ranges = True
        """Answer requests for a range; otherwise send the whole artifact."""
        self.pauses: list[float] = []

    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.answer)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url.raw_path.decode().split('?')[0]}")
        if request.url.path == "/api/artifacts/missing":
            asked = json.loads(request.read())["digests"]
            return httpx.Response(200, json={"digests": [one for one in asked if one not in self.whole]})
        found = re.fullmatch(r"/api/artifacts/([0-9a-f]{64})(/upload)?", request.url.path)
        assert found, request.url
        digest = found[1]
        if not found[2]:
            return self._bytes(request, self.whole[digest])
        if request.method == "GET":
            has = self.whole.get(digest, self.parts.get(digest, b""))
            return httpx.Response(200, json={"received": len(has)})
        return self._append(request, digest)

    def _append(self, request: httpx.Request, digest: str) -> httpx.Response:
        offset, size = int(request.url.params["offset"]), int(request.url.params["size"])
        if offset != len(self.parts.get(digest, b"")):
            return httpx.Response(409, json={"detail": "the upload continues at another offset"})
        left = self.breaks.pop(0) if self.breaks else None
        for chunk in request.stream:  # type: ignore[union-attr]
            kept = chunk if left is None else chunk[:left]
            self.parts[digest] = self.parts.get(digest, b"") + kept
            if left is not None and len(chunk) >= left:
                raise httpx.WriteError("broken pipe")
            left = None if left is None else left - len(chunk)
        if left is not None:
            raise httpx.ReadError("no answer")
        body = self.parts.get(digest, b"")
        if len(body) == size:
            self.parts.pop(digest, None)
            if hashlib.sha256(body).hexdigest() != digest:
                return httpx.Response(422, json={"detail": "other bytes than those of the digest"})
            self.whole[digest] = body
        return httpx.Response(200, json={"received": len(body)})

    def _bytes(self, request: httpx.Request, body: bytes) -> httpx.Response:
        start, status = 0, 200
        wanted = request.headers.get("Range")
        if wanted and self.ranges:
            start, status = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]), 206  # type: ignore[index]
        left = self.breaks.pop(0) if self.breaks else None
        return httpx.Response(status, content=broken_off(body[start:], left))


def broken_off(body: bytes, left: int | None) -> Iterator[bytes]:
    yield body[:left]
    if left is not None:
        raise httpx.ReadError("connection reset")
