"""Checkpoints that a Root asks for, and its wait for a node that leaves; without links."""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ravnest.errors import RunInterruptedError
from ravnest.runtime.batch_parts import BatchSplit
from ravnest.runtime.control import root_controller
from ravnest.runtime.control.checkpoint_policy import CheckpointPolicy
from ravnest.runtime.control.root_controller import BlockingAverages, RootController
from ravnest.runtime.control.run_status import RunStatus
from ravnest.runtime.stage.worker import Worker
from ravnest.wire.messages import LossSplit

SECONDS = 30.0
LONG = 10_000.0


class Case:
    """A Root whose worker keeps what is submitted and computes nothing."""

    def __init__(self, averages: BlockingAverages | None = None) -> None:
        self.status = RunStatus()
        self.status.loss_split = LossSplit(False, "")
        self.status.admitted = 1000
        self.microbatches: list[Any] = []
        self.ends: list[Any] = []
        self.policy = CheckpointPolicy(None, math.inf, 0, 0.0)
        worker = SimpleNamespace(
            post=lambda call: call(),
            begin_phase=lambda _begin: None,
            submit=self._submit,
            end_phase=lambda end, _cut: self.ends.append(end),
        )
        self.root = RootController(
            cast(Worker, worker),
            self.status,
            stages=2,
            stall=SECONDS,
            update_frequency=1,
            choose_split=lambda _answer: BatchSplit(),
            tuner=None,
            averages=averages,
            policy=self.policy,
        )

    def _submit(self, microbatch: Any) -> None:
        self.microbatches.append(microbatch)
        with self.status.writing():
            self.status.updates += 1

    def epoch(self, batches: int) -> bool:
        """Train an epoch; return whether a checkpoint follows its end."""
        self.root.begin("train", 0)
        for _ in range(batches):
            self.root.submit({}, 4, {}, None)
        self.root.end(exhausted=True)
        return bool(self.ends[-1].checkpoint)

    @property
    def marked(self) -> list[int]:
        """Updates that a checkpoint follows."""
        return [number for number, each in enumerate(self.microbatches) if each.checkpoint]

    def want_checkpoint(self) -> None:
        with self.status.writing():
            self.status.checkpoint_wanted = True


def test_a_wish_is_granted_at_the_end_of_an_epoch_too() -> None:
    case = Case()
    case.policy.last_time = LONG**3  # no checkpoint is due because of the time
    assert not case.epoch(2)
    case.root.begin("train", 1)
    case.root.submit({}, 4, {}, None)
    case.want_checkpoint()
    case.root.end(exhausted=True)
    assert case.ends[-1].checkpoint
    assert case.marked == []


def test_a_checkpoint_that_gives_way_to_a_round_is_not_waited_for() -> None:
    """With one round per epoch, the checkpoint of the end of an epoch follows the next update."""

    def ask(**_: object) -> None:
        with case.status.writing():
            case.status.rounds += 1

    case = Case(BlockingAverages(blocking=True, reduce_factor=None, ask=ask))
    assert not case.epoch(2)
    assert case.policy.taken == 0
    assert not case.epoch(2)
    assert case.marked == [2]
    assert case.policy.taken == 1


def test_the_root_waits_for_a_node_that_leaves_and_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(root_controller, "LAST_CHECKPOINT", LONG)
    case = Case()
    case.policy.last_time = LONG**3
    case.root.begin("train", 0)
    case.root.submit({}, 4, {}, None)
    found: list[int] = []

    def train() -> None:
        with suppress(RunInterruptedError):
            while True:
                case.root.submit({}, 4, {}, None)
                if case.microbatches[-1].checkpoint:
                    found.append(len(case.microbatches))

    case.want_checkpoint()
    training = threading.Thread(target=train, daemon=True)
    training.start()
    assert case.status.wait_for(lambda: case.status.updates >= 2, SECONDS)
    with case.status.writing():
        case.status.checkpoints_settled = 1
    case.want_checkpoint()  # of a second node, while the Root waits for the first one
    assert case.status.wait_for(lambda: case.status.updates >= 3, SECONDS)
    case.status.fail("node_1 has left", interrupted=True)
    training.join(SECONDS)
    assert not training.is_alive()
    assert found == [2, 3]
    assert len(case.microbatches) == 3, "nothing was submitted that would be repeated"
