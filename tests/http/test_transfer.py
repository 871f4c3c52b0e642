"""File transfer with the real server: interrupted transfers are resumed, nothing is sent twice."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from loopback_server import LoopbackServer, loopback_server

from ravnest.errors import ServerError, ServerRefusedError, ServerUnreachableError
from ravnest.http import transfer
from ravnest.http.api import ApiClient
from ravnest.http.credentials import join
from ravnest.http.retry import RetryPolicy
from ravnest.http.transfer import artifact_of, download, upload
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.base import Artifact

BODY = bytes(range(256)) * 40
DIGEST = hashlib.sha256(BODY).hexdigest()
ARTIFACT = Artifact(sha256=DIGEST, size=len(BODY))


class BreakingWire(httpx.BaseTransport):
    """A connection to the server that breaks where a test says."""

    def __init__(self) -> None:
        self.breaks: list[int] = []
        """Bytes of the body after which the connection breaks, one for each request with a body."""
        self.requests: list[str] = []
        self.ranges = True
        """Pass on requests for a range; otherwise the server sends the whole file."""
        self.body: bytes | None = None
        """Bytes that come instead of the file."""
        self._network = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        name = f"{request.method} {request.url.path}"
        self.requests.append(name)
        if name == f"PUT /api/artifacts/{DIGEST}/upload" and self.breaks:
            return self._cut_upload(request, self.breaks.pop(0))
        if name != f"GET /api/artifacts/{DIGEST}":
            return self._network.handle_request(request)
        if not self.ranges and "Range" in request.headers:
            del request.headers["Range"]
        response = self._network.handle_request(request)
        body = response.read() if self.body is None else self.body
        response.close()
        left = self.breaks.pop(0) if self.breaks else None
        return httpx.Response(response.status_code, content=cut(body, left))

    def _cut_upload(self, request: httpx.Request, left: int) -> httpx.Response:
        """Send the first bytes of the body, as if the rest had not arrived."""
        body = b"".join(request.stream)[:left]  # type: ignore[arg-type]
        headers = httpx.Headers(request.headers)
        headers["Content-Length"] = str(len(body))
        sent = httpx.Request(request.method, request.url, headers=headers, content=body)
        self._network.handle_request(sent).close()
        raise httpx.WriteError("broken pipe")

    def close(self) -> None:
        self._network.close()


def cut(body: bytes, left: int | None) -> Iterator[bytes]:
    yield body[:left]
    if left is not None:
        raise httpx.ReadError("connection reset")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackServer]:
    with loopback_server(tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def wire() -> BreakingWire:
    return BreakingWire()


@pytest.fixture
def api(server: LoopbackServer, wire: BreakingWire, pauses: list[float]) -> Iterator[ApiClient]:
    """A new member: the server keeps uploads by member."""
    retry = RetryPolicy(tries=3, sleep=pauses.append, chance=lambda: 1.0)
    member = join(server.url, server.running.token(ApiRole.REQUESTER), "me")
    with member.api(retry=retry, transport=wire) as found:
        yield found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(BODY)
    return path


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_PART", 4000)
    monkeypatch.setattr(transfer, "_CHUNK", 700)


@pytest.fixture(autouse=True)
def no_sleep(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    retry = RetryPolicy(tries=3, sleep=pauses.append, chance=lambda: 1.0)
    for function in (upload, download):
        *others, _ = function.__defaults__ or ()
        monkeypatch.setattr(function, "__defaults__", (*others, retry))


def stored(server: LoopbackServer, digest: str = DIGEST) -> bytes:
    return server.running.server.artifacts.path(digest).read_bytes()


def received(api: ApiClient, digest: str = DIGEST) -> int:
    """Return the bytes that the server has of this member."""
    return api.get(f"/api/artifacts/{digest}/upload", dict[str, int])["received"]


def puts(wire: BreakingWire) -> int:
    return sum(name.startswith("PUT") for name in wire.requests)


def test_only_missing_files_are_sent(
    server: LoopbackServer, wire: BreakingWire, api: ApiClient, file: Path, tmp_path: Path
) -> None:
    known, empty = tmp_path / "known", tmp_path / "empty"
    known.write_bytes(b"known")
    empty.touch()
    files = {artifact_of(path).sha256: path for path in (known, file, empty)}
    upload(api, {artifact_of(known).sha256: known})
    before = puts(wire)
    shown: list[tuple[int, int]] = []
    upload(api, files, lambda done, total: shown.append((done, total)))
    assert {digest: stored(server, digest) for digest in files} == {
        digest: path.read_bytes() for digest, path in files.items()
    }
    assert puts(wire) - before == 4, "three parts of one file, and an empty file"
    assert shown[0] == (0, len(BODY))
    assert shown[-1] == (len(BODY), len(BODY))
    assert [done for done, _ in shown] == sorted(done for done, _ in shown)


@pytest.mark.parametrize("breaks", [[1], [700], [3999], [4000], [0, 0], [2500, 2500, 10, 1, 1]])
def test_an_interrupted_upload_is_resumed(
    wire: BreakingWire, api: ApiClient, file: Path, pauses: list[float], breaks: list[int]
) -> None:
    wire.breaks = list(breaks)
    upload(api, {DIGEST: file})
    assert received(api) == len(BODY)
    assert len(pauses) == len(breaks)


def test_a_lost_answer_to_the_last_part_is_no_failure(
    wire: BreakingWire, api: ApiClient, file: Path
) -> None:
    wire.breaks = [4000, 4000, 4000]  # all parts arrive, and no answer to them
    upload(api, {DIGEST: file})
    assert received(api) == len(BODY)
    assert puts(wire) == 4, "three parts, and an empty one that asks for the result"


def test_an_upload_gives_up_if_nothing_arrives(wire: BreakingWire, api: ApiClient, file: Path) -> None:
    wire.breaks = [100, 0, 0, 0]
    with pytest.raises(ServerUnreachableError, match="broke"):
        upload(api, {DIGEST: file})
    assert received(api) == 100
    upload(api, {DIGEST: file})
    assert received(api) == len(BODY)


def test_a_file_that_arrived_meanwhile_is_not_sent_again(
    wire: BreakingWire, api: ApiClient, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(api, {DIGEST: file})
    before = puts(wire)
    monkeypatch.setattr(transfer, "missing_of", lambda _api, files: list(files))
    upload(api, {DIGEST: file})
    assert puts(wire) - before == 1, "an empty part"


def test_a_file_with_another_digest_is_refused(api: ApiClient, file: Path) -> None:
    with pytest.raises(ServerRefusedError) as refused:
        upload(api, {"0" * 64: file})
    assert refused.value.status == 422


def test_a_download_is_complete_and_not_repeated(
    wire: BreakingWire, api: ApiClient, file: Path, tmp_path: Path
) -> None:
    upload(api, {DIGEST: file})
    path = tmp_path / "deep" / "got"
    shown: list[tuple[int, int]] = []
    for _ in range(2):
        download(api, ARTIFACT, path, lambda d, t: shown.append((d, t)))
        assert shown[-1] == (len(BODY), len(BODY))
    assert path.read_bytes() == BODY
    assert list(path.parent.iterdir()) == [path]
    assert wire.requests.count(f"GET /api/artifacts/{DIGEST}") == 1


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("breaks", [[0], [1], [5000, 5000], [len(BODY)]])
def test_an_interrupted_download_is_resumed(
    wire: BreakingWire, api: ApiClient, file: Path, tmp_path: Path, breaks: list[int], ranges: bool
) -> None:
    upload(api, {DIGEST: file})
    wire.breaks = list(breaks)
    wire.ranges = ranges
    download(api, ARTIFACT, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == BODY


def test_another_call_resumes_a_download(
    wire: BreakingWire, api: ApiClient, file: Path, tmp_path: Path
) -> None:
    upload(api, {DIGEST: file})
    wire.breaks = [5000, 0, 0]
    with pytest.raises(ServerUnreachableError):
        download(api, ARTIFACT, tmp_path / "got")
    assert (tmp_path / "got.part").read_bytes() == BODY[:5000]
    assert not (tmp_path / "got").exists()
    download(api, ARTIFACT, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == BODY


def test_the_part_of_another_file_is_replaced(api: ApiClient, file: Path, tmp_path: Path) -> None:
    upload(api, {DIGEST: file})
    for rest in (b"x" * 100, b"x" * len(BODY), b"x" * (len(BODY) + 1)):
        (tmp_path / "got.part").write_bytes(rest)
        (tmp_path / "got").unlink(missing_ok=True)
        download(api, ARTIFACT, tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == BODY


@pytest.mark.parametrize("body", [b"x" * len(BODY), BODY + b"more"])
def test_other_bytes_than_requested_are_an_error(
    wire: BreakingWire, api: ApiClient, file: Path, tmp_path: Path, body: bytes
) -> None:
    upload(api, {DIGEST: file})
    wire.body = body
    with pytest.raises(ServerError, match=r"sent other bytes|sends more than"):
        download(api, ARTIFACT, tmp_path / "got")
    assert not (tmp_path / "got").exists()


def test_a_paced_upload_has_pauses_between_small_parts(
    server: LoopbackServer,
    wire: BreakingWire,
    api: ApiClient,
    pauses: list[float],
    tmp_path: Path,
) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(700_000))
    artifact = artifact_of(path)
    upload(api, {artifact.sha256: path}, paced=True)
    assert stored(server, artifact.sha256) == path.read_bytes()
    assert len(pauses) == puts(wire) > 1
    assert all(pause > 0 for pause in pauses[:-1])
    assert pauses[-1] == 0.0, "nothing follows"
