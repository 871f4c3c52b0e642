"""HTTP client of the server's API: typed requests and replies, and errors that say what to do."""

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

from ravnest.deadlines import HTTP_ANSWER, HTTP_CONNECT
from ravnest.errors import ServerError, ServerRefusedError, ServerUnreachableError
from ravnest.http.retry import DEFAULT_RETRY, NO_RETRY, RetryPolicy
from ravnest.schemas.base import Schema

T = TypeVar("T")
Params = Mapping[str, str | int | float]

DISK_FULL = 507
_BUSY = (408, 425, 429, 500, 502, 503, 504, DISK_FULL)
"""Statuses of a server, or of a proxy in front of it, that is overloaded, restarting or in trouble."""
LONGEST_RETRY_AFTER = 60.0
"""Longest wait that a server can ask for, in seconds."""
_log = logging.getLogger(__name__)


class ApiClient:
    """Client of one server.

    ``get`` and ``delete`` are retried while nothing answers, ``post`` only with ``idempotent=True``.
    Raises ``ServerUnreachableError`` if nothing answers, and ``ServerRefusedError`` with the message of
    the server if it refuses.
    """

    def __init__(
        self,
        url: str,
        credential: str | None = None,
        authority: str | None = None,
        *,
        retry: RetryPolicy = DEFAULT_RETRY,
        tls: ssl.SSLContext | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """``authority`` is the PEM certificate of the only authority to trust.

        ``tls`` replaces the TLS context made from it, ``transport`` the connections of httpx.
        """
        self.url = url.rstrip("/")
        self.retry = retry
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {credential}"} if credential else {},
            verify=tls or tls_context(authority),
            timeout=httpx.Timeout(HTTP_ANSWER, connect=HTTP_CONNECT),
            trust_env=not is_loopback(self.url),  # no proxy for this machine
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
        retry: RetryPolicy | None = None,
    ) -> T:
        """Send a GET request; the server may take ``wait`` seconds longer to answer."""
        return self._send("GET", path, None, answer, params, wait + HTTP_ANSWER, retry or self.retry)

    def post(
        self,
        path: str,
        body: Schema | None,
        answer: type[T],
        *,
        params: Params | None = None,
        wait: float = 0.0,
        within: float = HTTP_ANSWER,
        idempotent: bool = False,
        retry: RetryPolicy | None = None,
    ) -> T:
        """Send a POST request; with ``object`` as ``answer``, any answer is accepted.

        The server may take ``wait`` seconds on purpose and ``within`` seconds more. ``retry`` is for
        requests that may be sent twice, as ``idempotent`` is.
        """
        policy = retry or (self.retry if idempotent else NO_RETRY)
        return self._send("POST", path, body, answer, params, wait + within, policy)

    def delete(self, path: str, *, params: Params | None = None) -> None:
        """Send a DELETE request."""
        self._send("DELETE", path, None, object, params, HTTP_ANSWER, self.retry)

    def put_bytes(
        self, path: str, content: Iterable[bytes], size: int, *, params: Params | None = None
    ) -> None:
        """Send ``size`` bytes with a PUT request; it is not retried."""
        with self._translated():
            answer = self._client.put(
                path, content=content, params=params, headers={"Content-Length": str(size)}
            )
            _check(answer)

    @contextmanager
    def stream(
        self, path: str, *, params: Params | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[httpx.Response]:
        """Send a GET request and yield the response before its body is read; it is not retried."""
        with (
            self._translated(),
            self._client.stream("GET", path, params=params, headers=headers) as answer,
        ):
            if not answer.is_success:
                answer.read()
            _check(answer)
            yield answer

    def _send(
        self,
        method: str,
        path: str,
        body: Schema | None,
        answer: type[T],
        params: Params | None,
        within: float,
        retry: RetryPolicy,
    ) -> T:
        pauses = retry.pauses()
        while True:
            try:
                return self._send_once(method, path, body, answer, params, within)
            except (ServerUnreachableError, ServerRefusedError) as error:
                pause = next(pauses, None)
                if pause is None or not is_temporary(error):
                    raise
                pause = pause_after(error, pause)
                _log.info("%s; trying again in %.1f s", error, pause)
            retry.sleep(pause)

    def _send_once(
        self,
        method: str,
        path: str,
        body: Schema | None,
        answer: type[T],
        params: Params | None,
        within: float,
    ) -> T:
        with self._translated():
            response = self._client.request(
                method,
                path,
                params=params,
                content=body.model_dump_json() if body is not None else None,
                headers={"Content-Type": "application/json"} if body is not None else None,
                timeout=httpx.Timeout(within, connect=HTTP_CONNECT),
            )
            _check(response)
        try:
            return TypeAdapter(answer).validate_json(response.content or b"null")
        except ValidationError as error:
            raise ServerError(
                f"the answer of {self.url} to {method} {path} has another format; is it a Ravnest "
                f"server of the same version? {error.error_count()} fields differ"
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
    """Invalid URL, or not a Ravnest server; do not retry."""


def is_temporary(error: ServerError) -> bool:
    """Return ``True`` if the same request may succeed a little later."""
    if isinstance(error, ServerRefusedError):
        return is_passing(error.status)
    return isinstance(error, ServerUnreachableError) and not isinstance(error, NotAServerError)


def pause_after(error: ServerError, pause: float) -> float:
    """Return the seconds to wait after an error: ``pause``, or longer if the server asks for it."""
    asked = error.retry_after if isinstance(error, ServerRefusedError) else None
    return pause if asked is None else max(pause, asked)


def is_passing(status: int) -> bool:
    """Return ``True`` if a server that answers with this HTTP status may answer otherwise later."""
    return status in _BUSY


def tls_context(authority: str | None) -> ssl.SSLContext:
    """Return a TLS context that trusts only ``authority`` and checks the host name.

    Without an authority it trusts no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if authority is not None:
        context.load_verify_locations(cadata=authority)
    return context


def parsed(url: str) -> httpx.URL:
    """Parse a server's address; ``NotAServerError`` if it is invalid."""
    try:
        found = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise NotAServerError(f"{url} is not the address of a server: {error}") from error
    if found.scheme not in ("http", "https") or not found.host:
        raise NotAServerError(
            f"{url} is not the address of a server: it must begin with http:// or https://"
        )
    return found


def is_loopback(url: str) -> bool:
    """Return ``True`` if an address leads to this machine only."""
    host = parsed(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check(response: httpx.Response) -> None:
    if not response.is_success:
        raise ServerRefusedError(_message(response), response.status_code, _retry_after(response))


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds that the server asks to wait; dates, which proxies may send, are ignored."""
    text = response.headers.get("Retry-After", "")
    return min(float(text), LONGEST_RETRY_AFTER) if text.isascii() and text.isdigit() else None


def _message(response: httpx.Response) -> str:
    """Return the server's explanation of a refusal."""
    try:
        detail = response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        detail = None
    if isinstance(detail, str) and detail:
        return detail
    if isinstance(detail, list) and all(isinstance(item, dict) for item in detail):  # FastAPI
        fields = [f"{'.'.join(map(str, item.get('loc', [])))}: {item.get('msg')}" for item in detail]
        return "the server does not accept the request: " + "; ".join(fields)
    request = response.request
    return f"{request.method} {request.url} was answered with {response.status_code}"


def _unreachable(url: str, error: httpx.TransportError) -> ServerUnreachableError:
    reason = next((cause for cause in _causes(error) if isinstance(cause, ssl.SSLError)), None)
    if isinstance(reason, ssl.SSLCertVerificationError):
        return NotAServerError(_distrusted(url, reason))
    if reason is not None and "WRONG_VERSION_NUMBER" in str(reason):
        return NotAServerError(f"the server at {url} does not use HTTPS; try http://")
    if isinstance(error, httpx.UnsupportedProtocol):
        return NotAServerError(
            f"{url} is not the address of a server; it must begin with http:// or https://"
        )
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ServerUnreachableError(f"nothing answers at {url}: is `ravnest serve` running there?")
    if isinstance(error, httpx.TimeoutException):
        return ServerUnreachableError(f"{url} did not answer in time")
    return ServerUnreachableError(f"the connection to {url} broke: {error or type(error).__name__}")


def _distrusted(url: str, reason: ssl.SSLCertVerificationError) -> str:
    host = httpx.URL(url).host
    if reason.verify_code in (62, 64):  # the certificate lacks the host name or address
        return (
            f"the certificate of {url} does not cover the name {host}; use a name that it covers, or "
            f"start the server with `--public-name {host}`"
        )
    if reason.verify_code in (9, 10):
        return (
            f"the certificate of {url} is not valid now ({reason.verify_message}); check the clocks of "
            "both machines"
        )
    return f"the certificate of {url} is not the one that the token names: it is another server"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
