"""Bytes to measure a connection with."""

from __future__ import annotations

import os
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from ravnest.errors import ServerRefusedError
from ravnest.server.auth.dependencies import Anybody, ServerHere

router = APIRouter(prefix="/api/probe", tags=["server"])


@router.get("", response_class=Response)
def download(
    _: Anybody, server: ServerHere, size: Annotated[int, Query(ge=0, alias="bytes")] = 1 << 20
) -> Response:
    """Random bytes, which nothing on the way can compress."""
    if size > server.settings.probe_bytes:
        raise ServerRefusedError(f"at most {server.settings.probe_bytes} bytes are sent at once", 422)
    return Response(os.urandom(size), media_type="application/octet-stream")


@router.post("")
async def upload(_: Anybody, request: Request) -> dict[str, int]:
    """Swallow a body; how many bytes it had."""
    count = 0
    async for chunk in request.stream():
        count += len(chunk)
    return {"received": count}
