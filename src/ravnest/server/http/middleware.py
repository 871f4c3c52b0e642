"""Middleware: access log without secrets, size limit of bodies, errors as sentences."""

from __future__ import annotations

import errno
import logging
import time

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import OperationalError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ravnest.errors import ServerRefusedError
from ravnest.server.lifecycle import TransitionError

_access = logging.getLogger("ravnest.server.access")
_log = logging.getLogger(__name__)

_ANONYMOUS_BYTES = 64 << 10
"""Size limit of a body without a credential: enough for a request to join."""


class AccessLog:
    """Logs method, path, status and time of each request; no query, as login links have tokens there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        begin = time.monotonic()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            client = (scope.get("client") or ("?",))[0]
            milliseconds = (time.monotonic() - begin) * 1e3
            path = scope["path"].encode("unicode_escape").decode()  # a line break would forge a line
            _access.info("%s %s %s %d %.0f ms", client, scope["method"], path, status, milliseconds)


class BodyLimit:
    """Refuses too long bodies before they are in memory. Uploads have their own limit."""

    def __init__(self, app: ASGIApp, largest: int) -> None:
        self._app = app
        self._largest = largest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] != "http" or _is_upload(scope):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        limit = self._largest if b"authorization" in headers else _ANONYMOUS_BYTES
        announced = headers.get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > limit:
            await _too_long(limit)(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise HTTPException(413, _TOO_LONG.format(limit))
            return message

        await self._app(scope, counted, send)


_DISK_FULL = "the server's disk is full; the request succeeds once its operator frees some space"
_TOO_LONG = "a request may have {} bytes at most"


def _too_long(limit: int) -> JSONResponse:
    return JSONResponse({"detail": _TOO_LONG.format(limit)}, 413, headers={"Connection": "close"})


def _is_upload(scope: Scope) -> bool:
    return bool(scope["method"] == "PUT" and scope["path"].endswith("/upload"))


def explain_errors(app: FastAPI) -> None:
    """Answer every error with ``{"detail": "<sentence>"}``; it does not repeat the input."""

    @app.exception_handler(ServerRefusedError)
    async def _refused(_request: Request, error: ServerRefusedError) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
        return JSONResponse({"detail": str(error)}, error.status, headers=headers)

    @app.exception_handler(OSError)
    async def _full(_request: Request, error: OSError) -> JSONResponse:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise error
        return JSONResponse({"detail": _DISK_FULL}, 507)

    @app.exception_handler(OperationalError)
    async def _database_full(_request: Request, error: OperationalError) -> JSONResponse:
        if "disk is full" not in str(error.orig):
            raise error
        return JSONResponse({"detail": _DISK_FULL}, 507)

    @app.exception_handler(TransitionError)
    async def _wrong_state(_request: Request, error: TransitionError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 409)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        found = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:10]]
        return JSONResponse({"detail": f"the request is not valid: {'; '.join(found)}"}, 422)

    @app.exception_handler(Exception)
    async def _broken(_request: Request, _error: Exception) -> JSONResponse:
        detail = "internal error of the server; see its log"
        return JSONResponse({"detail": detail}, 500)
