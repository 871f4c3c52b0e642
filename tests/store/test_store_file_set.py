"""A set of files is replaced as a whole, and a forged journal cannot change files outside its folder."""

import json
from pathlib import Path

import pytest

from ravnest.errors import StageFormatError
from ravnest.store.file_set import Replacement, finish_replacement


def put(folder: Path, name: str, content: str = "new") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content)


def listing(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a/kept", "a/obsolete", "b/obsolete", "mine"):
        put(tmp_path / "folder", name, "old")
    return tmp_path / "folder"


def test_commit_replaces_and_removes(folder: Path) -> None:
    replacement = Replacement(folder)
    put(replacement.staging, "a/kept")
    put(replacement.staging, "c/d/added")
    before = listing(folder)
    assert before["a/kept"] == "old", "staging changed the old files"
    replacement.commit(["a/kept", "a/obsolete", "b/obsolete", "b/gone already"])
    assert listing(folder) == {"a/kept": "new", "c/d/added": "new", "mine": "old"}
    assert not (folder / "b").exists(), "an empty folder is left"


def test_discard_leaves_the_old_files(folder: Path) -> None:
    before = listing(folder)
    replacement = Replacement(folder)
    put(replacement.staging, "a/kept")
    replacement.discard()
    assert listing(folder) == before
    assert not list(folder.glob(".*"))


def test_leftovers_of_a_killed_call_are_removed(folder: Path) -> None:
    put(Replacement(folder).staging, "a/kept", "never committed")
    replacement = Replacement(folder)
    put(replacement.staging, "a/kept")
    replacement.commit([])
    assert listing(folder)["a/kept"] == "new"
    assert not list(folder.glob(".*"))


def test_without_a_journal_nothing_changes(folder: Path) -> None:
    before = listing(folder)
    finish_replacement(folder)
    assert listing(folder) == before


@pytest.mark.parametrize(
    "change",
    [
        {"obsolete": ["../outside"]},
        {"obsolete": ["a/../../outside"]},
        {"new": ["../outside"]},
        {"obsolete": "outside"},
        {"new": None},
        {"staging": 5},
        {"unknown": []},
        {"staging": ""},
        {"staging": "."},
        {"staging": ".."},
        {"staging": "a"},
        {"staging": "../folder"},
        {"staging": ".ravnest-staging-x/../a"},
    ],
    ids=str,
)
def test_a_forged_journal_changes_nothing(folder: Path, change: dict[str, object]) -> None:
    put(folder.parent, "outside", "not ours")
    (folder / ".ravnest-staging-x").mkdir()
    journal = {"staging": ".ravnest-staging-x", "new": [], "obsolete": []} | change
    (folder / ".replacing.json").write_text(json.dumps(journal))
    before = listing(folder.parent)
    with pytest.raises(StageFormatError):
        finish_replacement(folder)
    assert listing(folder.parent) == before


def test_an_absolute_path_in_a_journal_is_refused(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.write_text("not ours")
    journal = {"staging": ".ravnest-staging-x", "new": [], "obsolete": [str(outside)]}
    (folder / ".replacing.json").write_text(json.dumps(journal))
    with pytest.raises(StageFormatError, match="leads out of its folder"):
        finish_replacement(folder)
    assert outside.read_text() == "not ours"
