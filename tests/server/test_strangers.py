"""Attacks of strangers on a real listener: they cost the server nothing that members notice."""

import contextlib
import functools
import json
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_cases import Case, offer, opened

from ravnest.relay.sockets import network_of
from ravnest.schemas.auth import ApiRole, JoinToken
from ravnest.server.connection_table import ConnectionTable
from ravnest.server.http.runner import RunningServer, serve
from ravnest.server.rate_limits import Rate
from ravnest.server.settings import ConnectionLimits, ServerSettings

LONG = 30.0
SOON = 5.0
"""Generous for a busy machine: without the limits a heartbeat waited for the whole attack."""
BIG = 32 << 20
LIMITS = ConnectionLimits(header_seconds=1.0, linger_seconds=1.0, strangers_per_address=32)


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def running(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    settings = ServerSettings(connections=LIMITS)
    with serve(tmp_path / "server", tls=request.param, settings=settings) as found:
        yield found


@functools.cache  # it reads the certificates of all authorities
def unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def client(running: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=running.url, timeout=LONG, trust_env=False, verify=unverified())


@pytest.fixture
def provider(running: RunningServer) -> Iterator[tuple[httpx.Client, str]]:
    token = JoinToken.parse(running.token("provider"))
    with client(running) as http:
        joined = http.post("/api/join", json={"secret": token.secret, "name": "alice"}).json()
        http.headers["Authorization"] = f"Bearer {joined['credential']}"
        http.post("/api/providers", json=offer().model_dump()).raise_for_status()
        yield http, joined["id"]


def dialled(running: RunningServer) -> socket.socket:
    url = httpx.URL(running.url)
    return socket.create_connection((url.host, url.port or 0), timeout=LONG)


def connected(running: RunningServer) -> socket.socket:
    """Return a connection, after its handshake with TLS."""
    found = dialled(running)
    return unverified().wrap_socket(found) if running.fingerprint else found


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
            with contextlib.suppress(OSError):  # closed already, perhaps before its handshake
                one = opened_sockets.enter_context(connected(running))
                one.sendall(
                    b"POST /api/join HTTP/1.1\r\nHo" if number % 2 else header("/api/jobs", 1000) + b"{"
                )
        assert heartbeat_seconds(provider) < SOON
        with client(running) as other:
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


def test_handshakes_that_do_not_begin_are_few(
    running: RunningServer, provider: tuple[httpx.Client, str]
) -> None:
    """With TLS, connections were counted after their handshake, for which there are ten seconds."""
    with contextlib.ExitStack() as sockets:
        opened_here = [sockets.enter_context(dialled(running)) for _ in range(40)]
        opened_here[0].settimeout(LIMITS.header_seconds / 2)
        with contextlib.suppress(ConnectionError):
            assert opened_here[0].recv(1) == b"", "the oldest one was closed, before its time was over"
        assert running.server.connections.strangers <= LIMITS.strangers_per_address
        assert heartbeat_seconds(provider) < SOON
        with connected(running) as another:
            another.sendall(b"GET /api/health HTTP/1.1\r\nHost: server\r\n\r\n")
            assert status_of(another) == 200
    deadline = time.monotonic() + LONG
    while running.server.connections.strangers > 1 and time.monotonic() < deadline:
        with contextlib.suppress(OSError), connected(running):
            time.sleep(0.05)
    assert running.server.connections.strangers <= 2, "failed handshakes have no place"


def test_an_upload_of_a_member_ends_when_it_is_revoked(running: RunningServer) -> None:
    """An upload or a download went on to its end, after hours if it was long."""
    secret = JoinToken.parse(running.token("requester")).secret
    with client(running) as http:
        joined = http.post("/api/join", json={"secret": secret, "name": "rita"}).json()
    path = f"/api/artifacts/{'0' * 64}/upload?offset=0&size={BIG}"
    with connected(running) as upload:
        upload.sendall(header(path, BIG, joined["credential"], "PUT") + bytes(1 << 20))
        deadline = time.monotonic() + LONG
        while not running.server.artifacts.received("0" * 64, joined["id"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.server.revoke(joined["id"])
        with contextlib.suppress(ConnectionError):
            while upload.recv(4096):
                pass
    with client(running) as http:
        http.headers["Authorization"] = f"Bearer {joined['credential']}"
        assert http.get("/api/jobs").status_code == 401


def test_requests_without_a_credential_have_a_rate(tmp_path: Path) -> None:
    settings = ServerSettings(strangers=Rate(burst=10, per_second=0.5))
    with opened(tmp_path, settings=settings) as case:
        alice = case.member(ApiRole.VIEWER)  # a join has no credential
        alice.get("/api/jobs")
        for path in ("/api/health", "/api/authority", "/") * 3:
            assert case.client.get(path).status_code in (200, 401)  # a login page is no error
        refused = case.client.get("/api/health")
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "2")
        wrong = case.client.get("/api/jobs", headers={"Authorization": "Bearer nonsense"})
        assert wrong.status_code == 429
        alice.get("/api/jobs")
        case.time.now += 2
        assert case.client.get("/api/health").status_code == 200


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("an unknown host", "an unknown host"),
    ],
)
def test_a_network_of_ipv6_counts_as_one_address(host: str, key: str) -> None:
    """Who has one IPv6 address has 2^64 of them."""
    assert network_of(host) == key


def test_places_of_strangers_and_members() -> None:
    table = ConnectionTable(ConnectionLimits(strangers=3, strangers_per_address=2, per_member=2))
    assert table.open("a1", "a") == []
    assert table.open("a2", "a") == []
    assert table.open("a3", "a") == ["a1"], "the oldest of the same address"
    assert table.open("b1", "b") == []
    assert table.open("c1", "c") == ["a2"], "the oldest of all"
    assert not table.replace("a2", "A2"), "it has lost its place"
    assert table.replace("a3", "A3")
    assert table.identify("A3", "alice")
    assert table.strangers == 2
    assert table.identify("A3", "alice"), "its next request"
    assert table.identify("b1", "alice")
    assert not table.identify("c1", "alice"), "one member has few places, too"
    table.close("A3")
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
        admin.call("POST", "/api/artifacts/missing", 422, content=nested, headers=headers)
