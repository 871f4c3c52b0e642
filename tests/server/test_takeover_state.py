"""State that a cluster continues from after a takeover. No server."""

from dataclasses import replace

import pytest
from server_cases import artifact

from ravnest.schemas.checkpoints import SeedCheckpoint
from ravnest.server.complete_checkpoints import CompleteCheckpoint
from ravnest.server.db.records import StageCheckpointRecord
from ravnest.server.scheduling.takeover_state import TakeoverState, replica_stage
from ravnest.types import CheckpointId

FILE = artifact("weights")


def saved(update: int, stages: int = 3) -> CompleteCheckpoint:
    first = StageCheckpointRecord(
        "job", "plan", "run", "", CheckpointId(update, 0), 0, 0, stages, 0, 0.0, FILE, FILE
    )
    return CompleteCheckpoint(tuple(replace(first, stage=stage) for stage in range(stages)))


def state(*keeping: int, **fields: object) -> TakeoverState:
    return TakeoverState(3, frozenset(keeping), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keeping", "complete"),
    [
        ((0, 1, 2), True),
        ((0, 1), True),  # the replica of the Leaf is at the Stem
        ((1, 2), True),  # the Root's too
        ((0, 2), True),  # the Stem's is at the Root
        ((1,), True),
        ((0,), False),
        ((2,), False),
        ((), False),
    ],
)
def test_the_state_is_complete_if_every_stage_or_its_replica_is_there(
    keeping: tuple[int, ...], complete: bool
) -> None:
    assert state(*keeping).is_complete is complete
    assert [replica_stage(stage) for stage in range(3)] == [1, 0, 1]


def test_nodes_that_are_there_begin_again_if_only_the_server_has_the_state() -> None:
    assert state(0, saved=saved(50), is_unseeded=True).begins_again
    assert not state(0, 1, saved=saved(50), is_unseeded=True).begins_again, "replicas are newer"
    assert not state(0, is_unseeded=True).begins_again, "the server has nothing either"
    assert not state(0, saved=saved(50)).begins_again, "all who are there have it"


def test_a_seed_is_given_unless_the_nodes_have_a_newer_state() -> None:
    seed = state(saved=saved(50)).seed(1)
    assert seed == SeedCheckpoint(update=50, phase=0, tensors=FILE, manifest=FILE)
    assert state(1, saved=saved(50), is_held=True).seed(0) is None
    assert state(0, saved=saved(50), is_held=True).seed(1) == seed, "the Leaf's state is lost"
    assert state(1, saved=saved(50)).seed(0) == seed, "a disk that returns may be empty"
    assert state().seed(0) is None


def test_the_words_name_the_source_and_its_age() -> None:
    start = "training continues from "
    assert str(state(1, common=70, saved=saved(50))) == start + "update 70"
    assert str(state(saved=saved(50), common=70, age=90.0)) == (
        start + "update 50, the newest checkpoint at the server (90 s old)"
    )
    assert "(7 minutes old)" in str(state(saved=saved(50), age=420.0))
    shipped = SeedCheckpoint(update=30, phase=0, tensors=FILE, manifest=FILE)
    assert str(state(shipped=shipped)) == start + "update 30, with which this plan began"
    assert str(state(common=70)) == start + "the start", "nobody has it any more"
