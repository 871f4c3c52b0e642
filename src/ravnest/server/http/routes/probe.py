"""Routes that measure the bandwidth of a connection."""

from __future__ import annotations

import os
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from ravnest.errors import ServerRefusedError
from ravnest.server.auth.dependencies import AnyMember, CurrentServer

router = APIRouter(prefix="/api/probe", tags=["server"])


@router.get("", response_class=Response)
def download(
    _: AnyMember, server: CurrentServer, size: Annotated[int, Query(ge=0, alias="bytes")] = 1 << 20
) -> Response:
    """Return random bytes, which cannot be compressed."""
    if size > server.settings.probe_bytes:
        raise ServerRefusedError(f"a probe has {server.settings.probe_bytes} bytes at most", 422)
    return Response(os.urandom(size), media_type="application/octet-stream")


@router.post("")
async def upload(_: AnyMember, request: Request) -> dict[str, int]:
    """Discard the body; return its size."""
    count = 0
    async for chunk in request.stream():
        count += len(chunk)
    return {"received": count}
