"""Requests to an intermediary server, as typed values and with errors that say what to do."""

from __future__ import annotations

import ipaddress
import logging
import ssl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from ravnest.errors import ServerError, ServerRefusedError, ServerUnreachableError
from ravnest.http.retry import IMPATIENT, PATIENT, RetryPolicy
from ravnest.schemas.base import Schema

T = TypeVar("T")
Params = Mapping[str, str | int | float]

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
_BUSY = (429, 502, 503, 504)
"""Answers of a server, or of a proxy before it, that is not able to answer now."""
_log = logging.getLogger(__name__)


class ApiClient:
    """The HTTP interface of one server.

    ``get`` and ``delete`` are tried again while nothing answers; ``post`` only if it is said to be
    idempotent. ``ServerUnreachableError`` if nothing answers, ``ServerRefusedError`` with the
    server's own sentence if it says no.
    """

    def __init__(
        self,
        url: str,
        credential: str | None = None,
        authority: str | None = None,
        *,
        patience: RetryPolicy = PATIENT,
        tls: ssl.SSLContext | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """``authority`` is the PEM certificate of the only authority that is trusted.

        ``tls`` takes its place, ``transport`` that of the network.
        """
        self.url = url.rstrip("/")
        self.patience = patience
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {credential}"} if credential else {},
            verify=tls or trusting(authority),
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            trust_env=not is_loopback(self.url),  # a proxy does not lead to this machine
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def get(
        self,
        path: str,
        answer: type[T],
        *,
        params: Params | None = None,
        wait: float = 0.0,
        patience: RetryPolicy | None = None,
    ) -> T:
        """What is at ``path``; the server may take ``wait`` seconds longer to answer."""
        return self._ask("GET", path, None, answer, params, wait, patience or self.patience)

    def post(
        self,
        path: str,
        body: Schema | None,
        answer: type[T],
        *,
        params: Params | None = None,
        wait: float = 0.0,
        idempotent: bool = False,
    ) -> T:
        """Send ``body``; ``object`` as the ``answer`` takes anything."""
        patience = self.patience if idempotent else IMPATIENT
        return self._ask("POST", path, body, answer, params, wait, patience)

    def delete(self, path: str, *, params: Params | None = None) -> None:
        """Delete what is at ``path``."""
        self._ask("DELETE", path, None, object, params, 0.0, self.patience)

    def put_bytes(
        self, path: str, content: Iterable[bytes], size: int, *, params: Params | None = None
    ) -> None:
        """Send ``size`` bytes, once: whoever sends them knows where to go on."""
        with self._translated():
            answer = self._client.put(
                path, content=content, params=params, headers={"Content-Length": str(size)}
            )
            _check(answer)

    @contextmanager
    def stream(
        self, path: str, *, params: Params | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[httpx.Response]:
        """The answer to a GET, whose bytes are still to be read; asked for once."""
        with (
            self._translated(),
            self._client.stream("GET", path, params=params, headers=headers) as answer,
        ):
            if not answer.is_success:
                answer.read()
            _check(answer)
            yield answer

    def _ask(
        self,
        method: str,
        path: str,
        body: Schema | None,
        answer: type[T],
        params: Params | None,
        wait: float,
        patience: RetryPolicy,
    ) -> T:
        pauses = patience.pauses()
        while True:
            try:
                return self._ask_once(method, path, body, answer, params, wait)
            except (ServerUnreachableError, ServerRefusedError) as error:
                pause = next(pauses, None)
                if pause is None or not may_pass(error):
                    raise
                _log.info("%s; trying again in %.1f s", error, pause)
            patience.sleep(pause)

    def _ask_once(
        self,
        method: str,
        path: str,
        body: Schema | None,
        answer: type[T],
        params: Params | None,
        wait: float,
    ) -> T:
        with self._translated():
            response = self._client.request(
                method,
                path,
                params=params,
                content=body.model_dump_json() if body is not None else None,
                headers={"Content-Type": "application/json"} if body is not None else None,
                timeout=httpx.Timeout(ANSWER_SECONDS + wait, connect=CONNECT_SECONDS),
            )
            _check(response)
        try:
            return TypeAdapter(answer).validate_json(response.content or b"null")
        except ValidationError as error:
            raise ServerError(
                f"the answer of {self.url} to {method} {path} is not understood; is it a Ravnest server "
                f"of the same version? {error.error_count()} fields differ"
            ) from error

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise _unreachable(self.url, error) from error
        except httpx.InvalidURL as error:
            raise ServerUnreachableError(
                f"{self.url} is not the address of a server: {error}"
            ) from error


class NotAServerError(ServerUnreachableError):
    """The address is none, or whoever answers is not the server: asking again would not help."""


def may_pass(error: ServerError) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, ServerRefusedError):
        return error.status in _BUSY
    return isinstance(error, ServerUnreachableError) and not isinstance(error, NotAServerError)


def trusting(authority: str | None) -> ssl.SSLContext:
    """A TLS context that trusts this authority and no other, and checks the host's name.

    Without one it trusts nobody at all.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if authority is not None:
        context.load_verify_locations(cadata=authority)
    return context


def parsed(url: str) -> httpx.URL:
    """A server's address; ``NotAServerError`` if it cannot be one."""
    try:
        found = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise NotAServerError(f"{url} is not the address of a server: {error}") from error
    if found.scheme not in ("http", "https") or not found.host:
        raise NotAServerError(
            f"{url} is not the address of a server: it begins with http:// or https://"
        )
    return found


def is_loopback(url: str) -> bool:
    """Whether an address leads to this machine only."""
    host = parsed(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check(response: httpx.Response) -> None:
    if not response.is_success:
        raise ServerRefusedError(_sentence(response), response.status_code)


def _sentence(response: httpx.Response) -> str:
    """What the server says about a refusal."""
    try:
        detail = response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        detail = None
    if isinstance(detail, str) and detail:
        return detail
    if isinstance(detail, list) and all(isinstance(item, dict) for item in detail):  # of FastAPI
        fields = [f"{'.'.join(map(str, item.get('loc', [])))}: {item.get('msg')}" for item in detail]
        return "the server does not accept this: " + "; ".join(fields)
    request = response.request
    return f"{request.method} {request.url} was answered with {response.status_code}"


def _unreachable(url: str, error: httpx.TransportError) -> ServerUnreachableError:
    reason = next((cause for cause in _causes(error) if isinstance(cause, ssl.SSLError)), None)
    if isinstance(reason, ssl.SSLCertVerificationError):
        return NotAServerError(_distrusted(url, reason))
    if reason is not None and "WRONG_VERSION_NUMBER" in str(reason):
        return NotAServerError(f"what answers at {url} does not speak HTTPS; is it http:// there?")
    if isinstance(error, httpx.UnsupportedProtocol):
        return NotAServerError(
            f"{url} is not the address of a server; it begins with http:// or https://"
        )
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ServerUnreachableError(f"nothing answers at {url}: is `ravnest serve` running there?")
    if isinstance(error, httpx.TimeoutException):
        return ServerUnreachableError(f"{url} takes too long to answer")
    return ServerUnreachableError(f"the connection to {url} broke: {error or type(error).__name__}")


def _distrusted(url: str, reason: ssl.SSLCertVerificationError) -> str:
    host = httpx.URL(url).host
    if reason.verify_code in (62, 64):  # a host's name or address that the certificate lacks
        return (
            f"the certificate of {url} is not for the name {host}; use a name that it has, or start "
            f"the server with `--public-name {host}`"
        )
    if reason.verify_code in (9, 10):
        return (
            f"the certificate of {url} is not valid now ({reason.verify_message}); are the clocks right?"
        )
    return f"the certificate of {url} is not the one that the token names: it is another server"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
