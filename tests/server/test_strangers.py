"""Attacks of strangers on a real listener: they cost the server nothing that members notice."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_cases import Case, offer, opened

from ravnest.schemas.auth import ApiRole, JoinToken
from ravnest.server.http.connections import ConnectionTable
from ravnest.server.http.runner import RunningServer, serve
from ravnest.server.settings import ConnectionLimits, ServerSettings

LONG = 30.0
SOON = 5.0
"""Generous for a busy machine: without the limits a heartbeat waited for the whole attack."""
BIG = 32 << 20
LIMITS = ConnectionLimits(header_seconds=1.0, linger_seconds=1.0, strangers_per_address=32)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningServer]:
    with serve(tmp_path / "server", settings=ServerSettings(connections=LIMITS)) as found:
        yield found


@pytest.fixture
def provider(running: RunningServer) -> Iterator[tuple[httpx.Client, str]]:
    token = JoinToken.parse(running.token("provider"))
    with httpx.Client(base_url=running.url, timeout=LONG, trust_env=False) as http:
        joined = http.post("/api/join", json={"secret": token.secret, "name": "alice"}).json()
        http.headers["Authorization"] = f"Bearer {joined['credential']}"
        http.post("/api/providers", json=offer().model_dump()).raise_for_status()
        yield http, joined["id"]


def connected(running: RunningServer) -> socket.socket:
    url = httpx.URL(running.url)
    return socket.create_connection((url.host, url.port or 0), timeout=LONG)


def header(path: str, length: int, credential: str = "nonsense", method: str = "POST") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: server\r\nAuthorization: Bearer {credential}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def heartbeat_seconds(provider: tuple[httpx.Client, str]) -> float:
    http, name = provider
    begin = time.monotonic()
    http.post(f"/api/providers/{name}/heartbeat", json={"wait": 0}).raise_for_status()
    return time.monotonic() - begin


def status_of(connection: socket.socket) -> int:
    received = b""
    while b"\r\n" not in received:
        chunk = connection.recv(4096)
        assert chunk, "closed without an answer"
        received += chunk
    return int(received.split(b" ")[1])


def test_half_open_requests_do_not_matter(
    running: RunningServer, provider: tuple[httpx.Client, str]
) -> None:
    with contextlib.ExitStack() as opened_sockets:
        for number in range(300):
            one = opened_sockets.enter_context(connected(running))
            with contextlib.suppress(OSError):  # closed already, for a later one
                one.sendall(
                    b"POST /api/join HTTP/1.1\r\nHo" if number % 2 else header("/api/jobs", 1000) + b"{"
                )
        assert heartbeat_seconds(provider) < SOON
        with httpx.Client(base_url=running.url, timeout=LONG, trust_env=False) as other:
            other.headers["Authorization"] = provider[0].headers["Authorization"]
            assert other.get("/api/providers").status_code == 200, "a new connection is accepted, too"


def test_the_bodies_of_strangers_are_not_read(
    running: RunningServer, provider: tuple[httpx.Client, str]
) -> None:
    body = json.dumps({"digests": ["0" * 64] * (BIG // 67)}).encode()
    path = f"/api/providers/{provider[1]}/heartbeat"
    for _ in range(13):
        with connected(running) as stranger:
            stranger.sendall(header(path, len(body)))
            assert status_of(stranger) == 401, "answered before any byte of the body"
            with contextlib.suppress(OSError):
                stranger.sendall(body)
                pytest.fail("the server read all of the body")
        assert heartbeat_seconds(provider) < SOON


def test_a_request_that_does_not_end_is_closed(running: RunningServer) -> None:
    with connected(running) as silent, connected(running) as slow, connected(running) as refused:
        slow.sendall(b"GET /api/health HTTP/1.1\r\nX: ")
        refused.sendall(header("/api/jobs", BIG) + b"[")
        assert status_of(refused) == 401
        for each in (silent, slow, refused):
            with contextlib.suppress(ConnectionError):
                while each.recv(4096):
                    pass


def test_connections_without_a_credential_are_few(running: RunningServer) -> None:
    with contextlib.ExitStack() as sockets:
        opened_here = [sockets.enter_context(connected(running)) for _ in range(40)]
        with contextlib.suppress(ConnectionError):
            assert opened_here[0].recv(1) == b"", "the oldest one was closed"
        opened_here[-1].sendall(b"GET /api/health HTTP/1.1\r\nHost: server\r\n\r\n")
        assert status_of(opened_here[-1]) == 200


def test_places_of_strangers_and_members() -> None:
    table = ConnectionTable(ConnectionLimits(strangers=3, strangers_per_address=2, per_member=2))
    assert table.open("a1", "a") == []
    assert table.open("a2", "a") == []
    assert table.open("a3", "a") == ["a1"], "the oldest of the same address"
    assert table.open("b1", "b") == []
    assert table.open("c1", "c") == ["a2"], "the oldest of all"
    assert table.identify("a3", "alice")
    assert table.strangers == 2
    assert table.identify("a3", "alice"), "its next request"
    assert table.identify("b1", "alice")
    assert not table.identify("c1", "alice"), "one member has few places, too"
    table.close("a3")
    assert table.identify("c1", "alice")
    for each in ("a1", "b1", "c1"):
        table.close(each)
    assert table.strangers == 0


def test_wrong_credentials_do_not_fill_the_events(case: Case) -> None:
    for _ in range(100):
        answer = case.client.get("/api/jobs", headers={"Authorization": "Bearer nonsense"})
        assert answer.status_code == 401
    assert len(case.refusals()) == 30
    case.requester().get("/api/jobs")


def test_wrong_tokens_are_slowed_down(case: Case) -> None:
    body = {"secret": "nonsense", "name": "mallory"}
    answers = [case.client.post("/api/join", json=body) for _ in range(40)]
    assert [each.status_code for each in answers] == [401] * 30 + [429] * 10
    assert answers[-1].headers["Retry-After"] == "2"
    case.time.now += 2
    case.member(ApiRole.VIEWER)


@pytest.mark.parametrize(
    ("route", "most"), [("providers", 64 << 10), ("jobs", 4 << 20), ("artifacts/missing", 4 << 20)]
)
def test_each_route_has_its_limit(case: Case, route: str, most: int) -> None:
    admin, headers = case.admin(), {"Content-Type": "application/json"}
    for size, status in ((most + 1, 413), (most, 422)):
        content = b"[" + b" " * (size - 1)
        admin.call("POST", f"/api/{route}", status, content=content, headers=headers)


def test_a_long_message_is_checked_like_a_short_one(tmp_path: Path) -> None:
    with opened(tmp_path) as case:
        admin = case.admin()
        digests: list[Any] = ["0" * 64] * 5000
        assert len(admin.post("/api/artifacts/missing", {"digests": digests})["digests"]) == 1
        for wrong in ({"digests": [*digests, 7]}, {"digests": digests, "more": 1}):
            assert "not valid: body." in admin.post("/api/artifacts/missing", wrong, 422)["detail"]
        nested = b'{"digests": ' + b"[" * 200_000
        headers = {"Content-Type": "application/json"}
        admin.call("POST", "/api/artifacts/missing", 400, content=nested, headers=headers)
