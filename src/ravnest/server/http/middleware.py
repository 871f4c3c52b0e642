"""What happens to every request: a log without secrets, a limit on bodies, errors as sentences."""

from __future__ import annotations

import logging
import time

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ravnest.errors import ServerRefusedError
from ravnest.server.lifecycle import TransitionError

_access = logging.getLogger("ravnest.server.auth.dependencies")
_log = logging.getLogger(__name__)

_STRANGER_BYTES = 64 << 10
"""Of a body from somebody who shows no credential: enough to join with."""


class AccessLog:
    """One line a request: method, path, status, time. No query: a login link has its token there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
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
            _access.info(
                "%s %s %s %d %.0f ms", client, scope["method"], scope["path"], status, milliseconds
            )


class BodyLimit:
    """Refuses bodies that are too long, before they are in memory. Uploads have their own limit."""

    def __init__(self, app: ASGIApp, largest: int) -> None:
        self._app = app
        self._largest = largest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        if scope["type"] != "http" or _is_upload(scope):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        limit = self._largest if b"authorization" in headers else _STRANGER_BYTES
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


_TOO_LONG = "a request may have {} bytes here at most"


def _too_long(limit: int) -> JSONResponse:
    return JSONResponse({"detail": _TOO_LONG.format(limit)}, 413, headers={"Connection": "close"})


def _is_upload(scope: Scope) -> bool:
    return bool(scope["method"] == "PUT" and scope["path"].endswith("/upload"))


def explain_errors(app: FastAPI) -> None:
    """Every error is ``{"detail": "<sentence>"}``; what was sent is not repeated in it."""

    @app.exception_handler(ServerRefusedError)
    async def _refused(_request: Request, error: ServerRefusedError) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
        return JSONResponse({"detail": str(error)}, error.status, headers=headers)

    @app.exception_handler(TransitionError)
    async def _wrong_state(_request: Request, error: TransitionError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 409)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        found = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:10]]
        return JSONResponse({"detail": f"the request is not understood: {'; '.join(found)}"}, 422)

    @app.exception_handler(Exception)
    async def _broken(_request: Request, _error: Exception) -> JSONResponse:
        detail = "the server made a mistake; its log says more"
        return JSONResponse({"detail": detail}, 500)
