"""Middleware: access log without secrets, errors as sentences."""

from __future__ import annotations

import errno
import logging
import math
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import OperationalError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ravnest.errors import ServerRefusedError
from ravnest.schemas.base import ErrorReply
from ravnest.server.auth.dependencies import MEMBER
from ravnest.server.lifecycle import TransitionError
from ravnest.server.server import Server

_access = logging.getLogger("ravnest.server.access")
_log = logging.getLogger(__name__)


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


class StrangerLimit:
    """Refuses requests without a valid credential (429) while their address has sent too many.

    A member whose credential is known is not affected by others at its address. One whose credential
    was not used since the server started may have to try again.
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        source = (scope.get("client") or ("?",))[0]
        wait = self._server.stranger_wait(source)
        if wait > 0 and not self._is_known(scope):
            detail = "too many requests without a valid credential came from this address"
            headers = {"Retry-After": str(math.ceil(wait))}
            await JSONResponse({"detail": detail}, 429, headers=headers)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if MEMBER not in scope:
                self._server.count_stranger(source)

    def _is_known(self, scope: Scope) -> bool:
        scheme, _, credential = Headers(scope=scope).get("authorization", "").partition(" ")
        known = self._server.auth.known_member
        return scheme.lower() == "bearer" and known(credential.strip()) is not None


DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": words}
    for status, words in {
        400: "The body cannot be read.",
        401: "The credential or token is missing or not valid.",
        403: "Not allowed for this member.",
        404: "There is no such thing.",
        408: "The body did not arrive in time.",
        409: "Not possible in the present state.",
        413: "The body, or what it declares, is too large.",
        422: "The request is not valid.",
        429: "Too many requests, connections or jobs; Retry-After says when to try again.",
        507: "The disk of the server is full.",
    }.items()
}
"""Statuses of refusals that every route may answer with, for the description of the API."""
_DISK_FULL = "the server's disk is full; the request succeeds once its operator frees some space"


def explain_errors(app: FastAPI) -> None:
    """Answer every error with ``{"detail": "<sentence>"}``; it does not repeat the input."""

    @app.exception_handler(ServerRefusedError)
    async def _refused(_request: Request, error: ServerRefusedError) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        if error.retry_after is not None:
            headers["Retry-After"] = str(max(math.ceil(error.retry_after), 1))
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
