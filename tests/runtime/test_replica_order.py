"""Replicas of a node: a newer checkpoint and a node that leaves do not wait for an older replica."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from node_files import node_file

from ravnest.runtime.control import checkpoints
from ravnest.runtime.control.checkpoints import Checkpoints
from ravnest.runtime.control.rendezvous import Links
from ravnest.runtime.control.state_blocks import BLOCK
from ravnest.runtime.stage.execution import StageExecution
from ravnest.transport.base import Link, LinkDelay
from ravnest.types import CheckpointId
from ravnest.wire.messages import (
    CheckpointComplete,
    CheckpointStored,
    Message,
    ReplicaStored,
    StateBlock,
)

SECONDS = 20.0
FIRST, SECOND, THIRD = (CheckpointId(update, 0) for update in (1, 2, 3))


class HeldLink:
    """Link to the previous stage; what is sent arrives when the test says so."""

    def __init__(self) -> None:
        self.peer = SimpleNamespace(stage=1, node=1)
        self.sent_bytes = 0
        self.sent: SimpleQueue[Any] = SimpleQueue()
        self.arrives = threading.Event()

    def send(self, message: Message) -> None:
        self.sent.put(message.head)

    def flush(self, timeout: float) -> bool:
        return self.arrives.wait(timeout)

    def wait_written(self, timeout: float) -> bool:
        del timeout
        return True

    def delay(self) -> LinkDelay:
        return LinkDelay(0.0, 0.0)

    def until_last_block(self) -> list[Any]:
        """Return what was sent, up to the last block of a replica."""
        found: list[Any] = []
        while not (found and isinstance(found[-1], StateBlock) and found[-1].is_last):
            found.append(self.sent.get(timeout=SECONDS))
        return found


@pytest.fixture
def link() -> HeldLink:
    return HeldLink()


@pytest.fixture
def leaf(tmp_path: Path, link: HeldLink, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkpoints]:
    state = SimpleNamespace(updates={}, tensors={"state/a": torch.zeros(BLOCK)})
    monkeypatch.setattr(checkpoints, "capture", lambda _execution: state)
    monkeypatch.setattr(checkpoints, "stored_tensors", lambda _spec: {})
    execution = cast(StageExecution, SimpleNamespace(module=SimpleNamespace(spec=None)))
    made = Checkpoints(
        tmp_path / "checkpoints",
        tmp_path / "seed",
        node_file(2, stages=3),
        execution,
        lambda _report: None,
        lambda _checkpoint, _seconds: None,
    )
    made.connect(Links(previous=cast(Link, link)))
    made.start()
    yield made
    link.arrives.set()
    made.close()


def test_a_newer_checkpoint_ends_the_replica_of_the_one_before(
    leaf: Checkpoints, link: HeldLink
) -> None:
    leaf.save("run", FIRST, {})
    begun = link.sent.get(timeout=SECONDS)
    assert (begun.checkpoint, begun.is_last) == (FIRST, False)
    leaf.save("run", SECOND, {})
    link.arrives.set()
    found = link.until_last_block()
    settled = [each for each in found if isinstance(each, CheckpointStored)]
    assert [(each.checkpoint, each.stored) for each in settled] == [(FIRST, True)]
    assert found[-1].checkpoint == SECOND
    assert {each.checkpoint for each in found if isinstance(each, StateBlock)} == {SECOND}


def test_a_node_that_leaves_waits_for_its_newest_checkpoint_only(
    leaf: Checkpoints, link: HeldLink
) -> None:
    leaf.save("run", FIRST, {})
    link.sent.get(timeout=SECONDS)
    outcome: SimpleQueue[bool] = SimpleQueue()
    asked = threading.Event()
    waiting = threading.Thread(target=lambda: outcome.put(leaf.wait_for_next(asked.set, SECONDS, 1)))
    waiting.start()
    assert asked.wait(SECONDS)
    neighbour = cast(Link, link)
    leaf.on_message(neighbour, Message(ReplicaStored(2, FIRST)))
    leaf.save("run", SECOND, {})
    link.arrives.set()
    sent = [each for each in link.until_last_block() if isinstance(each, StateBlock)]
    assert sent[-1].checkpoint == SECOND
    assert len([each for each in sent if each.checkpoint == SECOND]) == 5, "whole blocks: no pauses"
    assert outcome.empty(), "the one before does not contain the last updates"
    leaf.on_message(neighbour, Message(ReplicaStored(2, SECOND)))
    waiting.join(0.05)
    assert outcome.empty(), "the others have not stored it: they would drop it"
    leaf.on_message(neighbour, Message(CheckpointComplete(SECOND)))
    assert outcome.get(timeout=SECONDS)
    asked.clear()
    assert leaf.wait_for_next(asked.set, SECONDS, 2)
    assert not asked.is_set(), "nothing has changed since"
    assert not leaf.wait_for_next(asked.set, 0.0, 3)
    assert asked.is_set()


def test_after_a_problem_the_whole_state_is_sent_again(leaf: Checkpoints, link: HeldLink) -> None:
    """The copy that the neighbour has may be damaged."""
    link.arrives.set()
    neighbour = cast(Link, link)
    same = []
    for checkpoint, problem in ((FIRST, ""), (SECOND, "its digest is wrong"), (THIRD, "")):
        leaf.save("run", checkpoint, {})
        sent = [each for each in link.until_last_block() if isinstance(each, StateBlock)]
        same.append(sum(each.same for each in sent) > 0)
        leaf.on_message(neighbour, Message(ReplicaStored(2, checkpoint, problem)))
    assert same == [False, True, False]


def test_a_replica_that_does_not_leave_settles_the_checkpoint(
    leaf: Checkpoints,
    link: HeldLink,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The Root would wait for it before the next checkpoint."""
    monkeypatch.setattr(link, "flush", lambda _timeout: False)
    leaf.save("run", FIRST, {})
    outcome = link.sent.get(timeout=SECONDS)
    while not isinstance(outcome, CheckpointStored):
        outcome = link.sent.get(timeout=SECONDS)
    assert (outcome.checkpoint, outcome.stored) == (FIRST, True)
    assert "no replica of update 1: node_1 does not receive it" in caplog.text
