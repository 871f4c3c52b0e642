"""Search for the newest checkpoint that all stages of a cluster have."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from whole_state import WholeState, prepared_variants

from ravnest.errors import StageFormatError
from ravnest.split import PreparedModel
from ravnest.split.graph import StageSpec
from ravnest.store.checkpoint import CheckpointFolder
from ravnest.store.checkpoint_sets import find_checkpoint_sets
from ravnest.types import CheckpointId

OLDER, NEWER, NEWEST = CheckpointId(4, 0), CheckpointId(8, 1), CheckpointId(12, 2)


@pytest.fixture(scope="module")
def model() -> PreparedModel:
    return prepared_variants(())[0]


@pytest.fixture(scope="module")
def stages(model: PreparedModel) -> list[StageSpec]:
    return [stage.spec for stage in model.cut([model.cuts[1], model.cuts[4]]).stages]


@pytest.fixture
def state(model: PreparedModel) -> WholeState:
    return WholeState.at_random(model, 1)


def write(
    folder: Path, state: WholeState, stages: list[StageSpec], *ids: CheckpointId, first: int = 0
) -> None:
    """Write checkpoints of all stages as the nodes from number ``first`` do, with their replicas."""
    for checkpoint in ids:
        for spec in stages:
            at = replace(state, id=checkpoint)
            node = folder / f"node_{first + spec.index}"
            at.checkpoint(node, spec)
            neighbour = first + (spec.index - 1 if spec.index else 1)
            shutil.copytree(
                node,
                folder / f"node_{neighbour}" / f"replica_of_stage_{spec.index}",
                ignore=shutil.ignore_patterns("replica_*"),
                dirs_exist_ok=True,
            )


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_newest_complete_checkpoint_is_found(
    tmp_path: Path, state: WholeState, stages: list[StageSpec]
) -> None:
    write(tmp_path, state, stages, OLDER, NEWER)
    replace(state, id=NEWEST).checkpoint(tmp_path / "node_0", stages[0])
    found = find_checkpoint_sets(tmp_path)
    assert list(found) == [0]
    assert (found[0].id, found[0].run) == (NEWER, "run")
    assert [each.tensors.parent.name for each in found[0].stages] == ["node_0", "node_1", "node_2"]


def test_replicas_and_earlier_checkpoints_replace_damaged_ones(
    tmp_path: Path, state: WholeState, stages: list[StageSpec], caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, state, stages, OLDER, NEWER)
    own = CheckpointFolder(tmp_path / "node_1")
    damage(own.tensors_path(NEWER))
    found = find_checkpoint_sets(tmp_path)[0]
    assert found.id == NEWER
    assert found.stages[1].tensors.parent == tmp_path / "node_0" / "replica_of_stage_1"
    assert "damaged and not used" in caplog.text
    replica = CheckpointFolder(tmp_path / "node_0" / "replica_of_stage_1")
    replica.manifest_path(NEWER).write_text("{")
    assert find_checkpoint_sets(tmp_path)[0].id == OLDER
    for folder in (own, replica):
        damage(folder.tensors_path(OLDER))
    with pytest.raises(StageFormatError, match="is undamaged for all stages"):
        find_checkpoint_sets(tmp_path)


def test_a_run_that_went_on_with_another_plan_is_one_run(
    tmp_path: Path, state: WholeState, stages: list[StageSpec], model: PreparedModel
) -> None:
    write(tmp_path, state, stages, OLDER, NEWER)
    later = [stage.spec for stage in model.cut([model.cuts[2]]).stages]
    for spec in later:
        replace(state, id=NEWEST).checkpoint(tmp_path / f"node_{spec.index}", spec, plan="later")
    found = find_checkpoint_sets(tmp_path)[0]
    assert (found.id, len(found.stages)) == (NEWEST, 2)


def test_several_runs_are_refused(tmp_path: Path, state: WholeState, stages: list[StageSpec]) -> None:
    write(tmp_path, state, stages, OLDER)
    write(tmp_path, replace(state, run="another"), stages, NEWER, first=3)
    with pytest.raises(StageFormatError, match=r"several runs of cluster 0: another \(update 8\), run"):
        find_checkpoint_sets(tmp_path)
    for node in (3, 4, 5):
        (tmp_path / f"node_{node}").rename(tmp_path / f"node_{node}.previous")
    assert find_checkpoint_sets(tmp_path)[0].id == OLDER


def test_each_cluster_has_its_own(tmp_path: Path, state: WholeState, stages: list[StageSpec]) -> None:
    write(tmp_path, state, stages, OLDER, NEWER)
    write(tmp_path, replace(state, run="second", cluster=1), stages, OLDER, first=3)
    found = find_checkpoint_sets(tmp_path)
    assert {cluster: (each.run, each.id) for cluster, each in found.items()} == {
        0: ("run", NEWER),
        1: ("second", OLDER),
    }


def test_what_is_missing_is_said(tmp_path: Path, state: WholeState, stages: list[StageSpec]) -> None:
    with pytest.raises(StageFormatError, match="holds no checkpoints"):
        find_checkpoint_sets(tmp_path / "nothing")
    state.checkpoint(tmp_path / "node_7", stages[1])
    with pytest.raises(StageFormatError, match="lacks stage 0, 2 of 3 for update 12 of run"):
        find_checkpoint_sets(tmp_path)
