"""Quotas of members, a full disk, and the retention of files."""

import hashlib
import os
import shutil
import sqlite3
import time as clock
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import training_pair, upload
from server_cases import FILES, Caller, Case, Time, artifact, opened, spec
from sqlalchemy import event

from ravnest.errors import ServerRefusedError
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import JobSpec
from ravnest.server import retention_service
from ravnest.server.artifacts import ArtifactFolder, FileTotals, StoredFile
from ravnest.server.assignments import needed_files
from ravnest.server.disk_ballast import DiskBallast
from ravnest.server.retention_service import expired
from ravnest.server.settings import ServerSettings

DAY = 86400.0
Usage = namedtuple("Usage", "total used free")


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Free bytes of the disk, as the server sees it."""
    free = [1 << 40]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 41, 0, free[0]))
    return free


# Quotas and reservations


def refused(status: int, folder: ArtifactFolder, content: bytes, size: int, owner: str = "a") -> None:
    with pytest.raises(ServerRefusedError) as caught:
        folder.append(sha(content), size, 0, [content], owner)
    assert caught.value.status == status


def test_declared_sizes_count_against_the_quota(tmp_path: Path) -> None:
    complete = {"a": FileTotals(0, 0), "b": FileTotals(900, 5)}
    folder = ArtifactFolder(tmp_path, quota=FileTotals(1000, 10), complete=complete.__getitem__)
    folder.append(sha(b"one"), 600, 0, [b"o"], "a")
    refused(413, folder, b"two", 401)
    folder.append(sha(b"two"), 400, 0, [b"t"], "a")
    folder.append(sha(b"one"), 600, 1, [b"n"], "a")  # the same upload goes on
    refused(413, folder, b"three", 101, "b")
    folder.append(sha(b"three"), 100, 0, [b"t"], "b")


def test_the_number_of_files_is_limited(tmp_path: Path) -> None:
    folder = ArtifactFolder(tmp_path, quota=FileTotals(1 << 40, 3), complete=lambda _: FileTotals(10, 1))
    for name in (b"one", b"two"):
        folder.append(sha(name), 10, 0, [name], "a")
    refused(413, folder, b"three", 10)


def test_uploads_in_progress_reserve_their_space(tmp_path: Path, disk: list[int]) -> None:
    folder = ArtifactFolder(tmp_path, reserve=1000)
    disk[0] = 2000
    with folder.upload(sha(b"one"), 400, 0, "a"):
        refused(507, folder, b"two", 601, "b")
        folder.append(sha(b"two"), 600, 0, [b"t"], "b")
    folder.append(sha(b"three"), 1000, 0, [b"t"], "c")
    refused(507, folder, b"four", 1001, "d")


def test_members_that_declare_all_of_the_disk_leave_half_of_it(tmp_path: Path, disk: list[int]) -> None:
    """One connection that declared all free space had everybody else refused."""
    time = Time()
    folder = ArtifactFolder(tmp_path, reserve=1000, clock=lambda: time.now)
    disk[0] = 2000
    with folder.upload(sha(b"one"), 1000, 0, "mallory") as one:
        refused(507, folder, b"more", 1, "mallory")
        folder.append(sha(b"two"), 500, 0, [b"t"], "b")
        with folder.upload(sha(b"three"), 500, 0, "mallet"):
            folder.append(sha(b"two"), 500, 1, [b"w"], "b")
        refused(507, folder, b"four", 501, "b")
        time.now += 59
        one.write(b"x")
        time.now += 59
        refused(507, folder, b"four", 501, "b")
        time.now += 2  # a minute without progress
        folder.append(sha(b"four"), 501, 0, [b"t"], "b")


def test_incomplete_uploads_of_others_are_not_counted_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ArtifactFolder(tmp_path, quota=FileTotals(1000, 10))
    folder.append(sha(b"one"), 600, 0, [b"o"], "a")
    again = ArtifactFolder(tmp_path, quota=FileTotals(1000, 10))
    refused(413, again, b"two", 1000)
    monkeypatch.setattr(Path, "glob", lambda *_: pytest.fail("all partial files are listed"))
    again.append(sha(b"three"), 999, 0, [b"t"], "a")
    refused(413, again, b"four", 2)


def test_the_disk_is_checked_at_each_block(tmp_path: Path, disk: list[int]) -> None:
    folder = ArtifactFolder(tmp_path, reserve=1000)
    with folder.upload(sha(b"one"), 500, 0) as one:
        one.write(b"x" * 100)
        disk[0] = 999  # another program fills the disk
        with pytest.raises(ServerRefusedError) as caught:
            one.write(b"x" * 100)
        assert caught.value.status == 507
    assert folder.received(sha(b"one")) == 100, "it continues there"


def test_a_member_has_a_quota(tmp_path: Path) -> None:
    size = sum(map(len, FILES.values()))
    with opened(tmp_path, settings=ServerSettings(member_bytes=size + 100)) as case:
        rita = case.requester()
        rita.upload(b"x" * 101, 413)
        rita.upload(b"x" * 100)
        case.requester("another").upload(b"x" * 100)
        path = f"/api/artifacts/{sha(b'y')}/upload"
        rita.call("PUT", path, 422, content=b"y", params={"offset": 0})  # no size


# A full disk


@pytest.fixture
def full(case: Case) -> Any:
    """Function that makes the database as small as it is now, or lets it grow again."""

    def limit(pages: int) -> None:
        engine = case.server.db._engine
        engine.dispose()

        @event.listens_for(engine, "connect")
        def _limit(connection: sqlite3.Connection, _: object) -> None:
            connection.execute(f"PRAGMA max_page_count={pages}")

    return limit


def test_a_full_database_leaves_the_server_answering(case: Case, full: Any, disk: list[int]) -> None:
    rita, alice = case.requester(), case.provider()
    case.submit(rita)
    full(1)  # no page more than there are
    long = [spec(name=f"{number:0>100}", clusters=1).model_dump(mode="json") for number in range(40)]
    answers = [
        case.client.post("/api/jobs", json=body, headers={"Authorization": f"Bearer {rita.credential}"})
        for body in long
    ]
    assert answers[-1].status_code == 507
    assert alice.heartbeat()["assignment"] is None, "what needs no room works"
    rita.get("/api/jobs")
    alice.get("/api/jobs", 403)  # a refusal stands, although it cannot be recorded
    health = case.client.get("/api/health").json()
    assert health["status"] == "trouble"
    assert "database or disk is full" in health["problems"][0]
    full(1 << 30)
    case.submit(rita)
    case.time.now += 61
    assert case.client.get("/api/health").json()["status"] == "ok"


def test_a_full_disk_is_part_of_the_health(case: Case, disk: list[int]) -> None:
    assert case.client.get("/api/health").json()["status"] == "ok"
    disk[0] = 1 << 20
    health = case.client.get("/api/health").json()
    assert health["status"] == "trouble"
    assert "the disk is full" in health["problems"][0]
    case.member(ApiRole.REQUESTER).upload(b"x", 507)


def test_the_ballast_makes_room_for_a_start(tmp_path: Path, disk: list[int]) -> None:
    ballast = DiskBallast(tmp_path / "ballast", 1 << 20)
    ballast.restore()
    assert (tmp_path / "ballast").stat().st_size == 1 << 20
    ballast.release()
    assert (tmp_path / "ballast").exists()
    disk[0] = 1000
    ballast.release()
    assert not (tmp_path / "ballast").exists()
    ballast.restore()
    assert not (tmp_path / "ballast").exists()
    folder = tmp_path / "server"
    with opened(folder) as case:
        disk[0] = 1 << 40
        case.server.clean_up()
        assert (folder / "ballast").exists()
    disk[0] = 1000
    with opened(folder):
        assert not (folder / "ballast").exists()


# Retention


def test_files_expire_by_age_and_by_size() -> None:
    files = [
        StoredFile(name, 10, modified) for name, modified in (("c", 30.0), ("a", 10.0), ("b", 20.0))
    ]

    def names(needed: set[str], **limits: Any) -> list[str]:
        usual = {"kept": 1e9, "most": 1 << 60, "least_age": 0.0}
        return [each.sha256 for each in expired(files, needed, 100.0, **(usual | limits))]

    assert names(set()) == []
    assert names(set(), kept=75.0) == ["a", "b"]
    assert names({"a"}, kept=75.0) == ["b"]
    assert names(set(), most=20) == ["a"]
    assert names(set(), most=19) == ["a", "b"]
    assert names({"a"}, most=20) == ["b"]
    assert names(set(), most=0, least_age=75.0) == ["a", "b"], "the newest is too new"


def aged(case: Case, digest: str, days: float) -> None:
    """Change the age of a file."""
    then = case.time.now - days * DAY
    os.utime(case.server.artifacts.path(digest), (then, then))


@pytest.fixture
def now(tmp_path: Path) -> Any:
    with opened(tmp_path / "server", time=Time(clock.time())) as case:
        yield case


def exists(case: Case, name: str) -> bool:
    return case.server.artifacts.has(artifact(name).sha256)


def test_old_uploads_are_deleted_while_the_server_runs(now: Case) -> None:
    rita = now.requester()
    for name in ("units", "weights"):
        aged(now, artifact(name).sha256, 31)
    now.server.clean_up()
    assert [exists(now, name) for name in ("units", "weights", "inputs")] == [False, False, True]
    missing = rita.post("/api/artifacts/missing", {"digests": [artifact("units").sha256]})["digests"]
    assert missing == [artifact("units").sha256], "the requester uploads it again"
    assert "2 files of members" in now.events()[-1]["reason"]


def test_files_of_jobs_that_have_not_ended_or_can_be_resumed_stay(now: Case) -> None:
    rita, job, alice, bob = training_pair(now)
    for name in FILES:
        aged(now, artifact(name).sha256, 100)
    now.server.clean_up()
    assert all(exists(now, name) for name in FILES)
    for stage, caller in enumerate((alice, bob)):
        upload(caller, stage, 4)
    rita.post(f"/api/jobs/{job}/cancel")
    now.server.clean_up()
    assert all(exists(now, name) for name in FILES), "the job can be resumed"
    rita.post(f"/api/jobs/{job}/resume", None, 201)
    for name in FILES:
        aged(now, artifact(name).sha256, 100)
    now.server.clean_up()
    assert all(exists(now, name) for name in FILES)


def test_the_jobs_that_need_files_are_read_once(now: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The specifications of all jobs were read for each 50 deleted files, while everybody waited."""
    training_pair(now)
    read: list[object] = []

    def files(found: JobSpec) -> list[Artifact]:
        read.append(found)
        return needed_files(found)

    monkeypatch.setattr(retention_service, "needed_files", files)
    rob = now.requester("rob")
    for number in range(120):
        aged(now, rob.upload(b"%d" % number), 31)
    now.server.clean_up()
    now.server.clean_up()
    assert len(read) == 1


def test_results_are_deleted_after_some_time(now: Case) -> None:
    rita, alice = now.requester(), now.provider()
    job = now.submit(rita)
    now.match()
    result = alice.upload(b"trained")
    files = [{"name": "node_0.json", "artifact": {"sha256": result, "size": 7}}]
    alice.report("training")
    alice.report("finished", result=files)
    rita.get(f"/api/jobs/{job}/result")
    now.server.clean_up()
    assert rita.get(f"/api/artifacts/{result}") == b"trained"
    aged(now, result, 31)
    now.server.clean_up()
    assert not now.server.artifacts.has(result)
    assert "too old" in rita.get(f"/api/jobs/{job}/result", 409)["detail"]


def test_a_submission_renews_its_files(now: Case) -> None:
    rita = now.requester()
    for name in FILES:
        aged(now, artifact(name).sha256, 29)
    job = now.submit(rita)
    rita.post(f"/api/jobs/{job}/cancel")
    now.time.now += 20 * DAY
    now.server.clean_up()
    assert all(exists(now, name) for name in FILES)
    now.time.now += 20 * DAY
    now.server.clean_up()
    assert not any(exists(now, name) for name in FILES)


def test_old_parts_of_uploads_are_deleted_while_the_server_runs(now: Case) -> None:
    rita: Caller = now.member(ApiRole.REQUESTER)
    path = f"/api/artifacts/{sha(b'xy')}/upload"
    rita.call("PUT", path, content=b"x", params={"offset": 0, "size": 2})
    now.server.clean_up()
    assert rita.get(path) == {"received": 1}
    now.time.now += 8 * DAY
    now.server.clean_up()
    assert rita.get(path) == {"received": 0}
