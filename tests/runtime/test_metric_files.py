"""Metric files: lines wait while the disk is full, and training does not depend on them."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest
from local_cluster import Formed
from training_cases import image_loaders

from ravnest.runtime.control import metric_files
from ravnest.runtime.control.metric_files import MetricFile


class Disk:
    """A file on a disk with room for some more bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.content = b""
        self.closed = False

    def opened(self, path: Path) -> Disk:
        return self

    def write(self, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = data[: self.room]
        self.room -= len(written)
        self.content += written
        return len(written)

    def close(self) -> None:
        self.closed = True


def append_all(file: MetricFile, *values: float) -> None:
    for value in values:
        file.append(value)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_lines_are_in_the_file_at_once_and_an_earlier_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "losses.txt"
    path.parent.mkdir()
    path.write_text("of another run\n")
    file = MetricFile(path)
    append_all(file, 1.5, 0.25)
    assert path.read_text() == "1.5\n0.25\n"
    assert (tmp_path / "new" / "losses.1.txt").read_text() == "of another run\n"
    assert file.close() == ""


@pytest.mark.parametrize("room", range(9))
def test_a_disk_that_is_full_for_a_while_costs_no_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    disk = Disk(room)
    file = MetricFile(tmp_path / "losses.txt", disk.opened)
    append_all(file, 0.5, 0.25, 0.125)
    (message,) = warnings(caplog)
    assert "losses.txt cannot be written: [Errno 28] No space left on device. Training" in message
    disk.room = 1000
    append_all(file, 2.0)
    assert disk.content == b"0.5\n0.25\n0.125\n2\n"
    disk.room = 0
    append_all(file, 3.0)
    assert len(warnings(caplog)) == 2, "it was written in between, so it is said again"
    disk.room = 1000
    assert file.close() == ""
    assert disk.content == b"0.5\n0.25\n0.125\n2\n3\n"
    assert disk.closed


def test_a_disk_that_stays_full_is_an_error_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(6)
    file = MetricFile(tmp_path / "losses.txt", disk.opened)
    append_all(file, 0.5, 0.25, 0.125)
    problem = file.close()
    assert f"the last 2 lines of {tmp_path / 'losses.txt'} are missing: [Errno 28]" in problem
    assert "make room on that disk" in problem
    assert len(warnings(caplog)) == 1, "it is said once"


def test_memory_is_bounded_and_line_numbers_stay_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_files, "MOST_WAITING", 10)
    disk = Disk(0)
    file = MetricFile(tmp_path / "losses.txt", disk.opened)
    append_all(file, 1.5, 2.5, 3.5, 4.5, 5.5)
    disk.room = 1000
    append_all(file, 6.5, 7.5)
    assert disk.content.split() == [b"1.5", b"2.5", b"nan", b"nan", b"nan", b"nan", b"7.5"]
    assert file.close() == ""


def test_a_folder_that_cannot_be_made_is_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.write_text("a file is in the way")
    file = MetricFile(folder / "losses.txt")
    append_all(file, 0.5)
    folder.unlink()
    append_all(file, 0.25)
    assert (folder / "losses.txt").read_text() == "0.5\n0.25\n"


def test_a_run_that_continues_cuts_the_file_without_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "losses.txt"
    path.write_text("1\n2\n3\n4\n")
    number = path.stat().st_ino
    file = MetricFile(path)
    file.resume(2)
    append_all(file, 9.0)
    assert path.read_text() == "1\n2\n9\n"
    assert path.stat().st_ino == number
    assert file.close() == ""
    assert not (tmp_path / "losses.1.txt").exists()


def test_training_ends_with_its_model_although_no_metric_can_be_written(
    cluster: Formed, caplog: pytest.LogCaptureFixture
) -> None:
    local = cluster("digits-cnn", 2, schedule="sync")
    blocked = local.folder / "metrics"
    blocked.write_text("a file where the folder should be")
    outcomes = local.train(
        image_loaders, node={"loss_filename": blocked / "losses.txt"}, epochs=1, save=True
    )
    assert len({outcome.result for outcome in outcomes.values()}) == 1
    assert local.fused()
    errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert all(name in error for name, error in zip(("losses.txt", "val_acc"), errors, strict=True))
    assert len([text for text in warnings(caplog) if "cannot be written" in text]) == 2, "once per file"
