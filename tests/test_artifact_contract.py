"""Contract of the artifact routes: the same tests on the real server and on the in-memory one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import count

import httpx
import pytest
from fake_files import FakeFiles
from job_server import JobServer

_numbers = count()


def new_body() -> bytes:
    """Return bytes that no other test uploads: the real server is shared."""
    return f"artifact {next(_numbers)} ".encode() * 100


@pytest.fixture(params=["real", "in memory"])
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    if request.param == "in memory":
        made = httpx.Client(base_url="http://127.0.0.1:1", transport=FakeFiles().transport())
    else:
        server: JobServer = request.getfixturevalue("shared_server")
        headers = {"Authorization": f"Bearer {server.requester.credential}"}
        made = httpx.Client(base_url=server.url, headers=headers, trust_env=False)
    with made:
        yield made


def path_of(body: bytes) -> str:
    return f"/api/artifacts/{hashlib.sha256(body).hexdigest()}"


def put(client: httpx.Client, path: str, part: bytes, offset: int, size: int) -> httpx.Response:
    params = {"offset": offset, "size": size}
    return client.put(f"{path}/upload", content=part, params=params)


def received(client: httpx.Client, path: str) -> int:
    reply = client.get(f"{path}/upload")
    assert reply.status_code == 200
    number: int = reply.json()["received"]
    return number


def test_missing_lists_the_unknown_digests_in_order(client: httpx.Client) -> None:
    bodies = [new_body() for _ in range(3)]
    digests = [hashlib.sha256(body).hexdigest() for body in bodies]
    assert put(client, path_of(bodies[1]), bodies[1], 0, len(bodies[1])).status_code == 200
    reply = client.post("/api/artifacts/missing", json={"digests": digests})
    assert (reply.status_code, reply.json()) == (200, {"digests": [digests[0], digests[2]]})


def test_an_upload_continues_at_the_number_of_received_bytes(client: httpx.Client) -> None:
    body = new_body()
    path = path_of(body)
    assert received(client, path) == 0
    assert put(client, path, body[:100], 0, len(body)).json() == {"received": 100}
    assert received(client, path) == 100
    wrong = put(client, path, body[50:], 50, len(body))
    assert wrong.status_code == 409
    assert isinstance(wrong.json()["detail"], str)
    assert put(client, path, body[100:], 100, len(body)).json() == {"received": len(body)}
    assert received(client, path) == len(body)
    assert put(client, path, b"", len(body), len(body)).status_code == 409, "it is complete"
    assert put(client, path, body, 0, len(body)).json() == {"received": len(body)}


def test_an_empty_artifact_needs_one_empty_request(client: httpx.Client) -> None:
    path = path_of(b"")
    if received(client, path) == 0:
        assert put(client, path, b"", 0, 0).json() == {"received": 0}
    assert client.get(path).content == b""


def test_bytes_with_another_digest_are_refused(client: httpx.Client) -> None:
    body = new_body()
    path = path_of(body)
    refused = put(client, path, body[::-1], 0, len(body))
    assert refused.status_code == 422
    assert "other bytes" in refused.json()["detail"] or "digest" in refused.json()["detail"]
    assert received(client, path) == 0
    assert put(client, path, body, 0, len(body)).json() == {"received": len(body)}


def test_an_artifact_is_downloaded_whole_or_from_an_offset(client: httpx.Client) -> None:
    body = new_body()
    path = path_of(body)
    put(client, path, body, 0, len(body))
    whole = client.get(path)
    assert (whole.status_code, whole.content) == (200, body)
    rest = client.get(path, headers={"Range": "bytes=100-"})
    assert (rest.status_code, rest.content) == (206, body[100:])
