"""Folders of assignments: one is taken over by the next assignment of the same node."""

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
