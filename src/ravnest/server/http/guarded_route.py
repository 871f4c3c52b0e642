"""Routes that check the caller before they read the body, with a limit of size and time for each body.

FastAPI reads and parses a body before it evaluates the dependencies of a route. ``GuardedRoute`` checks
the credential and the role first, so that a stranger's body is never read.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar
from weakref import WeakValueDictionary

from fastapi import HTTPException, Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.types import Message, Receive, Scope, Send

from ravnest.errors import ServerRefusedError
from ravnest.schemas.base import LARGEST_NUMBER
from ravnest.server.auth.dependencies import Allow, server_of
from ravnest.server.db.records import MemberRecord
from ravnest.server.http.connections import CONNECTION, LimitedProtocol

Position = Annotated[int, Query(ge=0, lt=LARGEST_NUMBER)]
"""Number in a query: a position, an offset or a size."""
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])
_RULE = "body_rule"
_PARSED_ON_LOOP = 64 << 10
"""Bytes of a body that are parsed on the event loop; larger ones are parsed in a thread."""
_SHOWN_ERRORS = 10
_MOST_THREADS = 8
"""Requests of one member that are answered in threads at the same time; the server has 40 threads."""
_TOO_LONG = "the body of this request may have {} bytes at most"
_TOO_SLOW = "the body of the request did not arrive within {:.0f} seconds"


@dataclass(frozen=True)
class BodyRule:
    """Limits of the body of a route."""

    most: int | None = 64 << 10
    """Bytes; ``None``: the route reads the body in pieces, and limits it itself."""
    seconds: float = 30.0
    """Time for the whole body; without ``most``, for each piece of it."""


_DEFAULT = BodyRule()
_LARGE = BodyRule(most=4 << 20)
_STREAM = BodyRule(most=None, seconds=60.0)


def large_body(endpoint: _Endpoint) -> _Endpoint:
    """Mark a route whose messages may be long: a submission, or a report."""
    setattr(endpoint, _RULE, _LARGE)
    return endpoint


def streamed_body(endpoint: _Endpoint) -> _Endpoint:
    """Mark a route that reads its body in pieces and limits it itself."""
    setattr(endpoint, _RULE, _STREAM)
    return endpoint


class GuardedRoute(APIRoute):
    """Route that checks the caller first, then the size of the body, and only then reads it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request."""
        handle = super().get_route_handler()
        allow = _allow_of(self.dependant)
        rule: BodyRule = getattr(self.endpoint, _RULE, _DEFAULT)
        kind = self.body_field.field_info.annotation if self.body_field is not None else None

        needs_thread = not inspect.iscoroutinefunction(self.endpoint)

        async def guarded(request: Request) -> Response:
            member = None if allow is None else await _check_caller(request, allow)
            receive = _limited_receive(request, rule, member)
            guarded_request = _GuardedRequest(request.scope, receive, kind)
            if member is None or not needs_thread:
                return await handle(guarded_request)
            await guarded_request.body()  # a slow sender takes no turn
            async with _turns_of(request, member):
                return await handle(guarded_request)

        return guarded


class DirectRoute(GuardedRoute):
    """Route of requests that are many: it calls its endpoint without FastAPI's work for each request.

    The endpoint takes the parameters of its path, ``body``, ``request``, ``member`` and ``server``, and
    returns a response. The checks are those of ``GuardedRoute``, in the same order, and the description
    of the API is the same.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if self.methods and scope["method"] not in self.methods:
            await super().handle(scope, receive, send)
            return
        request = Request(scope, receive, send)
        response = await self._response(request)
        await response(scope, receive, send)

    async def _response(self, request: Request) -> Response:
        allow = _allow_of(self.dependant)
        assert allow is not None
        assert self.body_field is not None
        member = await _check_caller(request, allow)
        rule: BodyRule = getattr(self.endpoint, _RULE, _DEFAULT)
        content = await Request(request.scope, _limited_receive(request, rule, member)).body()
        kind = self.body_field.field_info.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, BaseModel)
        is_short = len(content) <= _PARSED_ON_LOOP
        body = _read(kind, content) if is_short else await run_in_threadpool(_read, kind, content)
        given = {"body": body, "request": request, "member": member, "server": server_of(request)}
        response = await self.endpoint(**request.path_params, **given)
        assert isinstance(response, Response)
        return response


async def _check_caller(request: Request, allow: Allow) -> MemberRecord:
    """Return the calling member; refuse one that may not call, or calls too often."""
    member = await allow(request)
    server_of(request).count_request(member)
    connection = request.scope.get(CONNECTION)
    if isinstance(connection, LimitedProtocol) and not connection.identify(member.id):
        raise ServerRefusedError("this member has too many open connections", 429, 5.0)
    return member


def _turns_of(request: Request, member: MemberRecord) -> asyncio.Semaphore:
    """Return the turns of a member to use a thread: the threads of the server are for all members."""
    turns: WeakValueDictionary[str, asyncio.Semaphore] = request.app.state.turns
    found = turns.get(member.id)
    if found is None:
        found = turns[member.id] = asyncio.Semaphore(_MOST_THREADS)
    return found


def _allow_of(dependant: Dependant) -> Allow | None:
    """Return the permission that a route declares; ``None`` for a public route."""
    found = [each.call for each in dependant.dependencies if isinstance(each.call, Allow)]
    assert len(found) <= 1, f"{dependant.path} declares several permissions"
    return found[0] if found else None


def _limited_receive(request: Request, rule: BodyRule, member: MemberRecord | None) -> Receive:
    """Return what receives the body within the limits of a route; refuse a longer one (413).

    A message counts as several requests of its member if it is long.
    """
    if rule.most is None:
        return _limited(request.receive, None, rule.seconds)
    server = server_of(request)
    most = min(rule.most, server.settings.largest_message)
    _check_announced(request, most)
    if member is None:
        return _limited(request.receive, most, rule.seconds)
    return _limited(request.receive, most, rule.seconds, partial(server.count_bytes, member))


def _check_announced(request: Request, most: int) -> None:
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > most:
        raise HTTPException(413, _TOO_LONG.format(most))


def _limited(
    receive: Receive,
    most: int | None,
    seconds: float,
    count: Callable[[int], None] = lambda _: None,
) -> Receive:
    """Return ``receive`` with limits until the body is complete; ``count`` is told of its bytes."""
    received, is_complete = 0, False
    deadline: float | None = None

    async def limited() -> Message:
        nonlocal received, is_complete, deadline
        if is_complete:
            return await receive()
        if deadline is None or most is None:
            deadline = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise HTTPException(408, _TOO_SLOW.format(seconds)) from None
        received += len(message.get("body", b""))
        count(len(message.get("body", b"")))
        is_complete = not message.get("more_body", False)
        if most is not None and received > most:
            raise HTTPException(413, _TOO_LONG.format(most))
        return message

    return limited


class _GuardedRequest(Request):
    """Request that parses and checks long bodies in a thread."""

    def __init__(self, scope: Any, receive: Receive, kind: Any) -> None:
        super().__init__(scope, receive)
        self._kind = kind

    async def json(self) -> Any:
        """Return the parsed body; a long one is returned as the message that the route expects."""
        body = await self.body()
        if len(body) <= _PARSED_ON_LOOP or not _is_model(self._kind):
            return json.loads(body)
        return await run_in_threadpool(_read, self._kind, body)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _read(kind: type[BaseModel], body: bytes) -> BaseModel:
    """Return a message from JSON; refuse (422) what is neither JSON nor valid.

    FastAPI accepts it as it is, and does not check it a second time.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _not_valid(error) from None


def _not_valid(error: ValidationError) -> HTTPException:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    found = [f"{'.'.join(('body', *map(str, e['loc'])))}: {e['msg']}" for e in errors[:_SHOWN_ERRORS]]
    return HTTPException(422, f"the request is not valid: {'; '.join(found)}")
