"""Files of spot checks at a provider: which one is uploaded next, and which are never uploaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ravnest.errors import StageFormatError
from ravnest.provider import check_upload
from ravnest.provider.check_upload import CheckUpload, CheckUploads
from ravnest.provider.job_dir import JobDir
from ravnest.schemas.base import Artifact
from ravnest.schemas.spot_checks import MOST_CHECKS, CheckEvidence
from ravnest.store.forward_evidence import check_path
from ravnest.telemetry import CheckRecord, WarningRecord


def record(check: str, part: Any = "stated") -> CheckRecord:
    return CheckRecord(check, part, phase=1, index=2, seconds=0.1)


def evidence(check: str) -> CheckEvidence:
    file = Artifact(sha256="0" * 64, size=1)
    return CheckEvidence(check=check, part="stated", phase=1, index=2, file=file)


def test_files_are_uploaded_one_at_a_time_and_the_newest_are_reported() -> None:
    uploads = CheckUploads()
    assert uploads.begin() is None
    uploads.note([WarningRecord("x"), record("a"), record("b", "received")])
    assert uploads.begin() == record("a")
    assert uploads.begin() is None, "one is under way"
    uploads.end(None)
    assert uploads.uploaded == ()
    assert uploads.begin() == record("b", "received")
    uploads.end(evidence("b"))
    assert uploads.uploaded == (evidence("b"),)


def test_a_worker_that_names_many_files_has_few_of_them_uploaded() -> None:
    uploads = CheckUploads()
    uploads.note(record(f"c{number}") for number in range(1000))
    for number in range(1000 - MOST_CHECKS, 1000):
        assert uploads.begin() == record(f"c{number}")
        uploads.end(evidence(f"c{number}"))
    assert uploads.begin() is None
    assert len(uploads.uploaded) == MOST_CHECKS


class Folder(JobDir):
    """Folder of an assignment whose node is ``node_0``."""

    def read_assignment(self) -> Any:
        class Spec:
            name = "node_0"

        class Own:
            node_spec = Spec()

        return Own()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    found: list[bytes] = []

    def upload(_api: object, files: dict[str, Path], _progress: object, *, paced: bool) -> None:
        assert paced, "training goes on"
        found.extend(path.read_bytes() for path in files.values())

    monkeypatch.setattr(check_upload, "upload", upload)
    return found


def test_the_file_of_a_record_is_uploaded(tmp_path: Path, sent: list[bytes]) -> None:
    job_dir: Any = Folder(tmp_path)
    path = check_path(job_dir.checkpoints / "node_0", "abc", "stated")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"weights")
    api: Any = None
    found = CheckUpload(api, job_dir, lambda: None).run(record("abc"))
    assert (found.check, found.part, found.file.size) == ("abc", "stated", 7)
    assert sent == [b"weights"]
    assert not job_dir.check_uploads.exists()


@pytest.mark.parametrize("check", ["../../../secret", "", "a/b", "a" * 40, "abc"])
def test_no_other_file_is_uploaded(tmp_path: Path, sent: list[bytes], check: str) -> None:
    """The last one is a link to a file of the owner's."""
    job_dir: Any = Folder(tmp_path)
    path = check_path(job_dir.checkpoints / "node_0", "abc", "stated")
    path.parent.mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"secret")
    path.symlink_to(tmp_path / "secret")
    api: Any = None
    with pytest.raises(StageFormatError):
        CheckUpload(api, job_dir, lambda: None).run(record(check))
    assert not sent
