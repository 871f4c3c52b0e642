"""Routes that measure the bandwidth of a connection."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from ravnest.errors import ServerRefusedError
from ravnest.server.auth.dependencies import AnyMember, CurrentServer
from ravnest.server.http.guarded_route import GuardedRoute, streamed_body

router = APIRouter(prefix="/api/probe", tags=["server"], route_class=GuardedRoute)

_BLOCK = 64 << 10
"""Random bytes that are in memory at once."""


@router.get("", response_class=Response)
def download(
    _: AnyMember, server: CurrentServer, size: Annotated[int, Query(ge=0, alias="bytes")] = 1 << 20
) -> Response:
    """Return random bytes, which cannot be compressed."""
    if size > server.settings.probe_bytes:
        raise ServerRefusedError(f"a probe has {server.settings.probe_bytes} bytes at most", 422)
    headers = {"Content-Length": str(size)}
    return StreamingResponse(_random(size), media_type="application/octet-stream", headers=headers)


async def _random(size: int) -> AsyncIterator[bytes]:
    for start in range(0, size, _BLOCK):
        yield os.urandom(min(_BLOCK, size - start))


@router.post("")
@streamed_body
async def upload(_: AnyMember, request: Request, server: CurrentServer) -> dict[str, int]:
    """Discard the body; return its size."""
    most = server.settings.probe_bytes
    count = 0
    async for chunk in request.stream():
        count += len(chunk)
        if count > most:
            raise ServerRefusedError(f"a probe has {most} bytes at most", 413)
    return {"received": count}
