"""Artifacts are complete and verified, or absent."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ravnest.errors import ServerRefusedError
from ravnest.server.artifacts import ArtifactFolder

CONTENT = bytes(range(256)) * 40
SHA = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> ArtifactFolder:
    return ArtifactFolder(tmp_path / "artifacts")


def refused(status: int, folder: ArtifactFolder, *args: object, **more: object) -> None:
    with pytest.raises(ServerRefusedError) as caught:
        folder.append(*args, **more)  # type: ignore[arg-type]
    assert caught.value.status == status


def test_a_file_is_uploaded_in_several_requests(folder: ArtifactFolder) -> None:
    assert not folder.append(SHA, len(CONTENT), 0, [CONTENT[:100], CONTENT[100:1000]])
    assert folder.received(SHA) == 1000
    assert not folder.has(SHA)
    assert folder.append(SHA, len(CONTENT), 1000, [CONTENT[1000:]])
    assert folder.path(SHA).read_bytes() == CONTENT
    assert folder.received(SHA) == 0


def test_an_upload_continues_after_a_restart(folder: ArtifactFolder, tmp_path: Path) -> None:
    folder.append(SHA, len(CONTENT), 0, [CONTENT[:1000]])
    restarted = ArtifactFolder(tmp_path / "artifacts")
    assert restarted.received(SHA) == 1000
    assert restarted.append(SHA, len(CONTENT), 1000, [CONTENT[1000:]])


def test_wrong_bytes_are_discarded(folder: ArtifactFolder) -> None:
    refused(422, folder, SHA, len(CONTENT), 0, [CONTENT[:-1] + b"?"])
    assert folder.received(SHA) == 0
    assert folder.append(SHA, len(CONTENT), 0, [CONTENT])


def test_an_upload_at_a_wrong_offset_is_refused(folder: ArtifactFolder) -> None:
    folder.append(SHA, len(CONTENT), 0, [CONTENT[:1000]])
    refused(409, folder, SHA, len(CONTENT), 0, [CONTENT])
    refused(409, folder, SHA, len(CONTENT), 2000, [CONTENT])


def test_an_upload_beyond_its_size_or_the_limit_is_refused(tmp_path: Path) -> None:
    folder = ArtifactFolder(tmp_path, largest=1000)
    refused(413, folder, SHA, 500, 0, [CONTENT[:501]])
    refused(413, folder, SHA, 1001, 0, [CONTENT])
    refused(507, ArtifactFolder(tmp_path, reserve=1 << 60), SHA, 10, 0, [b""])


def test_received_bytes_are_kept_after_a_broken_connection(folder: ArtifactFolder) -> None:
    def broken() -> object:
        yield CONTENT[:700]
        raise ConnectionError

    with pytest.raises(ConnectionError):
        folder.append(SHA, len(CONTENT), 0, broken())  # type: ignore[arg-type]
    assert folder.append(SHA, len(CONTENT), 700, [CONTENT[700:]])


def test_concurrent_uploads_do_not_mix(folder: ArtifactFolder) -> None:
    with folder.upload(SHA, len(CONTENT), 0) as first:
        first.write(CONTENT[:10])
        refused(409, folder, SHA, len(CONTENT), 0, [CONTENT])
        assert folder.append(SHA, len(CONTENT), 0, [CONTENT], owner="another")
        first.write(CONTENT[10:])
        assert first.finish()
    assert folder.path(SHA).read_bytes() == CONTENT


def test_an_owner_cannot_complete_the_upload_of_another(folder: ArtifactFolder) -> None:
    folder.append(SHA, len(CONTENT), 0, [CONTENT[:-1]], owner="one")
    assert folder.received(SHA, "another") == 0
    refused(409, folder, SHA, len(CONTENT), len(CONTENT) - 1, [CONTENT[-1:]], owner="another")


def test_many_owners_upload_one_digest_concurrently(folder: ArtifactFolder) -> None:
    def send(number: int) -> bool:
        halves = [(0, CONTENT[:5000]), (5000, CONTENT[5000:])]
        done = [folder.append(SHA, len(CONTENT), at, [half], owner=str(number)) for at, half in halves]
        return done[-1]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(send, range(24)))
    assert folder.path(SHA).read_bytes() == CONTENT


def test_an_empty_file(folder: ArtifactFolder) -> None:
    empty = hashlib.sha256().hexdigest()
    assert folder.append(empty, 0, 0, [])
    assert folder.has(empty)


def test_a_local_file_is_moved_into_the_folder(folder: ArtifactFolder, tmp_path: Path) -> None:
    (tmp_path / "stage").write_bytes(CONTENT)
    assert folder.add(tmp_path / "stage").model_dump() == {"sha256": SHA, "size": len(CONTENT)}
    assert folder.has(SHA)
    assert not (tmp_path / "stage").exists()


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_a_name_that_is_not_a_digest_is_refused(folder: ArtifactFolder, name: str) -> None:
    with pytest.raises(ServerRefusedError):
        folder.path(name)


def test_artifacts_without_an_owner_are_swept(folder: ArtifactFolder) -> None:
    folder.append(SHA, len(CONTENT), 0, [CONTENT])
    folder.append(SHA, len(CONTENT), 0, [CONTENT[:10]], owner="another")
    assert folder.sweep({SHA}) == 0
    assert folder.sweep(set()) == 1
    assert not folder.has(SHA)
    assert folder.received(SHA, "another") == 10
    assert folder.sweep_partial(begun_before=0.0) == 0
    assert folder.sweep_partial(begun_before=float("inf")) == 1
    assert folder.received(SHA, "another") == 0
