"""A server on a small disk that another program fills: a real file system, for root on Linux only."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_cases import Caller, Case, opened, spec

from ravnest.server.settings import ServerSettings

SIZE = 32 << 20
SETTINGS = ServerSettings(disk_ballast=2 << 20, disk_reserve=4 << 20, lost_after=1e9, restart_grace=1e9)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Folder with a file system of its own."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "ravnest-test", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr}")
    try:
        yield folder
    finally:  # lazily: a failed test may have files open
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Write a file until there is no space left."""
    with (disk / "other").open("ab", buffering=0) as file:
        for block in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * block)
            except OSError:
                continue


def submitted(case: Case, rita: Caller, number: int) -> int:
    """Submit a job that takes some space; return the status."""
    body = spec(name=f"{number:0>100}").model_dump(mode="json")
    headers = {"Authorization": f"Bearer {rita.credential}"}
    return case.client.post("/api/jobs", json=body, headers=headers).status_code


def health(case: Case) -> str:
    return str(case.client.get("/api/health").json())


def test_a_server_on_a_full_disk_answers_says_so_and_starts_again(disk: Path) -> None:
    folder = disk / "server"
    with opened(folder, settings=SETTINGS) as case:
        rita, alice = case.requester(), case.provider()
        job = case.submit(rita)
        case.server.clean_up()
        assert (folder / "ballast").exists()
        fill(disk)
        statuses = [submitted(case, rita, number) for number in range(80)]
        assert statuses[-1] == 507
        assert set(statuses) <= {201, 507}
        rita.upload(b"more", 507)
        assert alice.heartbeat()["assignment"] is None, "what needs no room works"
        assert {each["id"] for each in rita.get("/api/jobs")} >= {job}
        assert "the disk is full" in health(case)
        assert "could not be stored" in health(case)
        case.server.run_due()
        assert not (folder / "ballast").exists()
        assert submitted(case, rita, 0) == 201, "the ballast makes room for the database"
    os.truncate(disk / "other", (disk / "other").stat().st_size - (3 << 20))
    (folder / "ballast").write_bytes(b"x" * SETTINGS.disk_ballast)
    fill(disk)
    with opened(folder, settings=SETTINGS) as case:
        assert not (folder / "ballast").exists(), "a start frees it"
        assert case.admin().get(f"/api/jobs/{job}")["id"] == job
        assert "the disk is full" in health(case)
        (disk / "other").unlink()
        case.time.now += 61
        assert "the disk is full" not in health(case)
        case.server.clean_up()
        assert (folder / "ballast").exists()
