"""Folders of assignments: one is taken over by the next assignment of the same node."""

import os
from pathlib import Path

import pytest

from ravnest.errors import StageFormatError
from ravnest.provider.job_dir import JobsDir
from ravnest.provider.outcome import Outcome
from ravnest.provider.provide import earlier_work


def test_the_next_assignment_of_a_node_takes_the_folder_with_its_checkpoints(tmp_path: Path) -> None:
    jobs = JobsDir(tmp_path)
    checkpoint = jobs.job_dir("j-1").checkpoints / "node_1" / "a.json"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("{}")
    jobs.adopt("j-1", "j-1-g1")
    assert (jobs.job_dir("j-1-g1").checkpoints / "node_1" / "a.json").is_file()
    assert list(jobs.assignments()) == ["j-1-g1"]
    jobs.adopt("j-1", "j-1-g1")  # as after an interrupted fetch
    jobs.adopt("unknown", "j-2")
    assert list(jobs.assignments()) == ["j-1-g1"]
    with pytest.raises(StageFormatError):
        jobs.adopt("../j-1-g1", "j-3")


def test_folders_of_an_earlier_process_are_continued_or_hold_results(tmp_path: Path) -> None:
    jobs = JobsDir(tmp_path)
    outcome = Outcome(provider="me", is_root=True, title="node_0")
    for name in ("begun", "mine", "theirs"):
        jobs.job_dir(name).folder.mkdir()
    jobs.job_dir("mine").write_outcome(outcome)
    jobs.job_dir("theirs").write_outcome(outcome.model_copy(update={"provider": "another"}))
    assert earlier_work(jobs, "me") == (["begun"], {"mine": outcome})
    assert sorted(jobs.assignments()) == ["begun", "mine", "theirs"], "nothing is removed yet"


def test_a_folder_of_many_nested_folders_is_removed(tmp_path: Path) -> None:
    """A worker can make more of them than Python removes by recursion."""
    jobs = JobsDir(tmp_path)
    folder = jobs.job_dir("deep").folder
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("inner", mode=0o300, dir_fd=descriptor)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
        inner = os.open("inner", os.O_PATH, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    jobs.discard("deep")
    assert not folder.exists()
