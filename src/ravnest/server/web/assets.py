"""Scripts, styles and font of the page, from the package; nothing is loaded from elsewhere."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request, Response

from ravnest.errors import ServerRefusedError

router = APIRouter(include_in_schema=False)
_KINDS = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
_FOLDERS = ("", "vendor/")


@dataclass(frozen=True)
class PageAsset:
    """A file of the page."""

    content: bytes
    kind: str
    digest: str


@router.get("/static/{path:path}")
def static(path: str, request: Request) -> Response:
    """Return a file of the page; a browser that has it already gets 304."""
    found = assets().get(path)
    if found is None:
        raise ServerRefusedError("there is no such file of the page", 404)
    tag = f'"{found.digest}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.kind, headers=headers)


@functools.cache
def assets() -> dict[str, PageAsset]:
    """Return all files of the page by their paths below ``static``."""
    found = {}
    for folder in _FOLDERS:
        for file in files("ravnest.server.web").joinpath("static", folder).iterdir():
            kind = _KINDS.get(f".{file.name.rpartition('.')[2]}")
            if kind is not None and file.is_file():
                content = file.read_bytes()
                digest = hashlib.sha256(content).hexdigest()[:32]
                found[f"{folder}{file.name}"] = PageAsset(content, kind, digest)
    return found
