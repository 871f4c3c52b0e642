"""Checkpoints on disk: what is damaged is not used, what is old is removed, what all have stays."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ravnest.errors import StageFormatError
from ravnest.store import checkpoint as module
from ravnest.store.checkpoint import CheckpointFolder, CheckpointManifest, StoredTensor, surplus
from ravnest.types import CheckpointId

TENSORS = {
    "state/a": torch.arange(6.0).reshape(2, 3),
    "state/n": torch.tensor(3),
    "state/empty": torch.zeros(0, 4),
    "state/half": torch.ones(3, dtype=torch.bfloat16),
    "state/view": torch.arange(12.0).reshape(3, 4).T,
    "optimizer/a/exp_avg": torch.full((2, 3), 0.5),
}


def manifest(update: int, phase: int = 0) -> CheckpointManifest:
    stored = {"a": StoredTensor("model.a")}
    return CheckpointManifest("plan", "run", 1, 0, 1, 3, CheckpointId(update, phase), stored, {"x": 1})


def write(
    folder: CheckpointFolder, update: int, phase: int = 0, complete: CheckpointId | None = None
) -> CheckpointManifest:
    temporary = folder.write_tensors(CheckpointId(update, phase), TENSORS)
    found = folder.finish(temporary, manifest(update, phase))
    folder.add(temporary, found, complete)
    return found


def updates(folder: CheckpointFolder) -> list[int]:
    return [each.update for each in folder.ids()]


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "node_1")


def test_tensors_come_back_as_they_were(folder: CheckpointFolder) -> None:
    found = write(folder, 5)
    assert folder.usable() == [found]
    loaded = dict(folder.load(found))
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_the_newest_two_are_kept_and_the_one_that_all_have(folder: CheckpointFolder) -> None:
    for update in (1, 2, 3):
        write(folder, update)
    assert updates(folder) == [2, 3]
    for update in (4, 5, 6):
        write(folder, update, complete=CheckpointId(2, 0))
    assert updates(folder) == [2, 5, 6]
    write(folder, 7, complete=CheckpointId(6, 0))
    assert updates(folder) == [6, 7]
    assert len(list(folder.path.iterdir())) == 4


def test_a_checkpoint_that_is_restored_is_kept_though_it_is_old(folder: CheckpointFolder) -> None:
    for update in (5, 6):
        write(folder, update)
    write(folder, 4)
    assert updates(folder) == [4, 5, 6]


def test_checkpoints_of_an_update_and_of_the_end_of_its_phase_are_two(folder: CheckpointFolder) -> None:
    write(folder, 5, 0)
    write(folder, 5, 1)
    assert folder.ids() == [CheckpointId(5, 0), CheckpointId(5, 1)]


def test_surplus_names_what_is_neither_new_nor_protected() -> None:
    ids = [CheckpointId(update, 0) for update in (4, 1, 3, 2)]
    assert surplus(ids, {CheckpointId(1, 0), None}) == [CheckpointId(2, 0)]
    assert surplus(ids[:2], set()) == []


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def rename(folder: CheckpointFolder, to: CheckpointId) -> None:
    other = CheckpointId(to.update - 1, to.phase)
    folder.manifest_path(other).replace(folder.manifest_path(to))
    folder.tensors_path(other).replace(folder.tensors_path(to))


def add_field(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "code": "import os"}))


DAMAGES: dict[str, Any] = {
    "a flipped bit": lambda folder, at: flip(folder.tensors_path(at), -1),
    "a flipped bit in the header": lambda folder, at: flip(folder.tensors_path(at), 10),
    "truncated tensors": lambda folder, at: truncate(folder.tensors_path(at)),
    "no tensors": lambda folder, at: folder.tensors_path(at).unlink(),
    "tensors that are a folder": lambda folder, at: replace_by_folder(folder.tensors_path(at)),
    "a truncated manifest": lambda folder, at: truncate(folder.manifest_path(at)),
    "an empty manifest": lambda folder, at: folder.manifest_path(at).write_text(""),
    "another format": lambda folder, at: folder.manifest_path(at).write_text('{"format": "other"}'),
    "another id": rename,
    "unknown fields": lambda folder, at: add_field(folder.manifest_path(at)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_not_used_and_reported_once(
    folder: CheckpointFolder, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    write(folder, 1)
    write(folder, 2)
    DAMAGES[damage](folder, CheckpointId(2, 0))
    before = [] if damage == "another id" else [1]
    for _ in range(2):
        assert [each.id.update for each in folder.usable()] == before
    assert caplog.text.count("a checkpoint is damaged and not used") == 1


def test_tensors_without_a_manifest_are_no_checkpoint(folder: CheckpointFolder) -> None:
    write(folder, 1)
    folder.manifest_path(CheckpointId(1, 0)).unlink()
    assert folder.ids() == []


def test_the_digest_is_checked_even_if_the_tensors_can_be_read(folder: CheckpointFolder) -> None:
    found = write(folder, 1)
    flip(folder.tensors_path(found.id), -1)
    assert dict(folder.load(found)).keys() == TENSORS.keys()
    assert folder.usable() == []


def test_a_torn_file_cannot_be_loaded(folder: CheckpointFolder) -> None:
    found = write(folder, 1)
    truncate(folder.tensors_path(found.id))
    with pytest.raises(StageFormatError, match="damaged"):
        list(folder.load(found))


def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_file(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, 1)
    before = sorted(folder.path.iterdir())
    original = Path.open

    class FullDisk:
        def __init__(self, file: Any) -> None:
            self.file, self.left = file, 300

        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: Any) -> None:
            self.left -= len(data)
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.file.write(data)

    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = original(path, mode, *args, **kwargs)
        return FullDisk(file) if "w" in mode else file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        with pytest.raises(OSError, match="No space"):
            folder.write_tensors(CheckpointId(2, 0), TENSORS)
    assert sorted(folder.path.iterdir()) == before
    assert [each.id.update for each in folder.usable()] == [1]


def test_a_checkpoint_exists_only_once_its_manifest_does(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, 1)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_json", fails)
        with pytest.raises(OSError, match="full"):
            write(folder, 2)
    assert [each.id.update for each in folder.usable()] == [1]


def test_what_a_killed_process_left_behind_is_removed(folder: CheckpointFolder) -> None:
    write(folder, 1)
    kept = sorted(folder.path.iterdir())
    folder.write_tensors(CheckpointId(2, 0), TENSORS)
    (folder.path / ".update_3_phase_0.incoming").touch()
    (folder.path / ".update_3_phase_0.json.0011223344556677").touch()
    (folder.path / "update_4_phase_0.safetensors").touch()
    (folder.path / "replica_of_stage_0").mkdir()
    folder.clean()
    assert sorted(folder.path.iterdir()) == sorted([*kept, folder.path / "replica_of_stage_0"])


def test_two_attempts_write_to_files_of_their_own(folder: CheckpointFolder) -> None:
    first, second = (folder.write_tensors(CheckpointId(2, 0), TENSORS) for _ in range(2))
    assert first != second


def test_a_type_that_has_no_name_in_the_file_is_refused(folder: CheckpointFolder) -> None:
    with pytest.raises(StageFormatError, match="complex128"):
        folder.write_tensors(CheckpointId(1, 0), {"state/c": torch.zeros(1, dtype=torch.complex128)})
    assert list(folder.path.iterdir()) == []


def test_a_new_run_sets_checkpoints_aside_once(folder: CheckpointFolder) -> None:
    previous = CheckpointFolder(folder.path.with_name("node_1.previous"))
    folder.set_aside()
    assert not previous.path.exists()
    for update in (1, 2):
        write(folder, update)
        folder.set_aside()
        assert folder.ids() == []
        assert updates(previous) == [update]


def test_the_manifest_is_part_of_the_protocol(folder: CheckpointFolder) -> None:
    found = write(folder, 1)
    stored = json.loads(folder.manifest_path(found.id).read_text())
    assert (stored.pop("format"), stored.pop("version")) == (module.FORMAT, module.VERSION)
    assert msgspec.convert(stored, CheckpointManifest) == found
