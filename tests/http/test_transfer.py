"""Files travel whole, whatever breaks, and what arrived is not sent again."""

import hashlib
from pathlib import Path

import pytest
from fake_files import FakeFiles

from ravnest.errors import ServerError, ServerRefusedError, ServerUnreachableError
from ravnest.http import transfer
from ravnest.http.api import ApiClient
from ravnest.http.retry import RetryPolicy
from ravnest.http.transfer import artifact_of, download, upload
from ravnest.schemas.base import Artifact

BODY = bytes(range(256)) * 40
DIGEST = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def server() -> FakeFiles:
    return FakeFiles()


@pytest.fixture
def api(server: FakeFiles) -> ApiClient:
    patience = RetryPolicy(tries=3, sleep=server.pauses.append, chance=lambda: 1.0)
    return ApiClient("http://127.0.0.1:1", transport=server.transport(), patience=patience)


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
def no_sleep(server: FakeFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    patience = RetryPolicy(tries=3, sleep=server.pauses.append, chance=lambda: 1.0)
    for function in (upload, download):
        *others, _ = function.__defaults__ or ()
        monkeypatch.setattr(function, "__defaults__", (*others, patience))


def sent(server: FakeFiles) -> int:
    return sum(line.startswith("PUT") for line in server.asked)


def test_only_what_is_missing_is_sent(
    server: FakeFiles, api: ApiClient, file: Path, tmp_path: Path
) -> None:
    known, empty = tmp_path / "known", tmp_path / "empty"
    known.write_bytes(b"known")
    empty.touch()
    files = {artifact_of(path).sha256: path for path in (known, file, empty)}
    server.whole[artifact_of(known).sha256] = b"known"
    shown: list[tuple[int, int]] = []
    upload(api, files, lambda done, total: shown.append((done, total)))
    assert server.whole == {artifact_of(path).sha256: path.read_bytes() for path in files.values()}
    assert sent(server) == 4, "three parts of one file, and an empty one"
    assert shown[0] == (0, len(BODY))
    assert shown[-1] == (len(BODY), len(BODY))
    assert [done for done, _ in shown] == sorted(done for done, _ in shown)


@pytest.mark.parametrize("breaks", [[1], [700], [3999], [4000], [0, 0], [2500, 2500, 10, 1, 1]])
def test_an_upload_goes_on_where_the_connection_broke(
    server: FakeFiles, api: ApiClient, file: Path, breaks: list[int]
) -> None:
    server.breaks = list(breaks)
    upload(api, {DIGEST: file})
    assert server.whole == {DIGEST: BODY}
    assert len(server.pauses) == len(breaks)


def test_a_lost_answer_to_the_last_part_is_asked_for_again(
    server: FakeFiles, api: ApiClient, file: Path
) -> None:
    server.parts[DIGEST] = BODY  # all of it came, and the server died before it looked at the digest
    upload(api, {DIGEST: file})
    assert server.whole == {DIGEST: BODY}
    assert sent(server) == 1


def test_an_upload_gives_up_where_nothing_gets_through(
    server: FakeFiles, api: ApiClient, file: Path
) -> None:
    server.breaks = [100, 0, 0, 0]
    with pytest.raises(ServerUnreachableError, match="broke"):
        upload(api, {DIGEST: file})
    assert server.parts[DIGEST] == BODY[:100]
    upload(api, {DIGEST: file})
    assert server.whole == {DIGEST: BODY}


def test_what_another_sent_meanwhile_is_not_sent_again(
    server: FakeFiles, api: ApiClient, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "missing_of", lambda _api, files: list(files))
    server.whole[DIGEST] = BODY
    upload(api, {DIGEST: file})
    assert server.parts == {}


def test_a_file_that_is_not_what_its_digest_says_is_refused(
    server: FakeFiles, api: ApiClient, file: Path
) -> None:
    with pytest.raises(ServerRefusedError, match="other bytes") as refused:
        upload(api, {"0" * 64: file})
    assert refused.value.status == 422


def test_a_download_is_whole_and_not_repeated(server: FakeFiles, api: ApiClient, tmp_path: Path) -> None:
    server.whole[DIGEST] = BODY
    path = tmp_path / "deep" / "got"
    shown: list[tuple[int, int]] = []
    for _ in range(2):
        download(api, Artifact(sha256=DIGEST, size=len(BODY)), path, lambda d, t: shown.append((d, t)))
        assert shown[-1] == (len(BODY), len(BODY))
    assert path.read_bytes() == BODY
    assert list(path.parent.iterdir()) == [path]
    assert len(server.asked) == 1


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("breaks", [[0], [1], [5000, 5000], [len(BODY)]])
def test_a_download_goes_on_where_the_connection_broke(
    server: FakeFiles, api: ApiClient, tmp_path: Path, breaks: list[int], ranges: bool
) -> None:
    server.whole[DIGEST] = BODY
    server.breaks = list(breaks)
    server.ranges = ranges
    download(api, Artifact(sha256=DIGEST, size=len(BODY)), tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == BODY


def test_a_download_goes_on_in_the_next_call(server: FakeFiles, api: ApiClient, tmp_path: Path) -> None:
    server.whole[DIGEST] = BODY
    server.breaks = [5000, 0, 0]
    artifact = Artifact(sha256=DIGEST, size=len(BODY))
    with pytest.raises(ServerUnreachableError):
        download(api, artifact, tmp_path / "got")
    assert (tmp_path / "got.part").read_bytes() == BODY[:5000]
    assert not (tmp_path / "got").exists()
    download(api, artifact, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == BODY


def test_a_part_of_something_else_is_fetched_anew(
    server: FakeFiles, api: ApiClient, tmp_path: Path
) -> None:
    server.whole[DIGEST] = BODY
    for rest in (b"x" * 100, b"x" * len(BODY), b"x" * (len(BODY) + 1)):
        (tmp_path / "got.part").write_bytes(rest)
        (tmp_path / "got").unlink(missing_ok=True)
        download(api, Artifact(sha256=DIGEST, size=len(BODY)), tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == BODY


@pytest.mark.parametrize("body", [b"x" * len(BODY), BODY + b"more"])
def test_other_bytes_than_asked_for_are_an_error(
    server: FakeFiles, api: ApiClient, tmp_path: Path, body: bytes
) -> None:
    server.whole[DIGEST] = body
    with pytest.raises(ServerError, match=r"sent other bytes|sends more than"):
        download(api, Artifact(sha256=DIGEST, size=len(BODY)), tmp_path / "got")
    assert not (tmp_path / "got").exists()
