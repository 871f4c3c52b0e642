"""Folders of assignments: one is taken over by the next assignment of the same node."""

import os
import queue
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ravnest.errors import StageFormatError
from ravnest.provider.job_dir import JobDir, JobsDir
from ravnest.provider.outcome import Outcome
from ravnest.provider.provide import earlier_work
from ravnest.provider.training import excluding
from ravnest.runtime.node import Node
from ravnest.schemas.providers import ExcludedNode


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


def test_a_worker_follows_the_nodes_that_are_excluded(tmp_path: Path) -> None:
    told: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    node = SimpleNamespace(name="node_0", exclude=lambda *each: told.put(each))
    job_dir = JobDir(tmp_path)
    one, other = ExcludedNode(node=1, generation=0), ExcludedNode(node=2, generation=3)
    job_dir.write_excluded([one])
    with excluding(cast(Node, node), job_dir, pause=0.01):
        assert told.get(timeout=30) == (1, 0), "also if it was written before the worker started"
        job_dir.write_excluded([one, other])
        assert told.get(timeout=30) == (2, 3)
        (tmp_path / "excluded.json").write_text("[")
        time.sleep(0.05)
        job_dir.write_excluded([one, other])
    assert told.empty()
