"""The mark of the end of training on the Root's disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from ravnest.runtime.control.ended_training import EndedTraining


def test_the_mark_is_found_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "node_0" / "ended.json"
    assert not EndedTraining(path).covers("run", 3)
    EndedTraining(path).write("run", 3)
    assert EndedTraining(path).covers("run", 3)
    assert not EndedTraining(path).covers("run", 4), "a later call of the script"
    assert not EndedTraining(path).covers("another run", 3)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": "run"}', "\udcff"])
def test_a_damaged_mark_does_not_count(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ended.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert not EndedTraining(path).covers("run", 3)


def test_training_ends_without_room_for_the_mark(tmp_path: Path) -> None:
    (tmp_path / "node_0").write_text("a file where the folder should be")
    ended = EndedTraining(tmp_path / "node_0" / "ended.json")
    ended.write("run", 3)
    assert not ended.covers("run", 3)
