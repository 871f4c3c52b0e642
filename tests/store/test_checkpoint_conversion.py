"""Checkpoints cut anew: any old cut gives any new cut the state that it would have written itself."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from whole_state import RANDOM, RECENT, ROOT, WholeState, prepared_variants, random_stages

from ravnest.errors import StageFormatError
from ravnest.jobs.model import pack_model, read_units
from ravnest.plan.profiler import profile_model
from ravnest.plan.row_cuts import row_cut_models
from ravnest.split import PreparedModel
from ravnest.split.graph import StageSpec
from ravnest.store.checkpoint import CheckpointFolder, CheckpointManifest, StoredTensor, read_manifest
from ravnest.store.checkpoint_conversion import NewStage, convert_checkpoints
from ravnest.store.checkpoint_progress import EpochStart
from ravnest.store.checkpoint_sets import StageCheckpoint, checkpoint_set
from ravnest.store.plain_data import decode, encode
from ravnest.types import CheckpointId


@pytest.fixture(scope="module")
def variants() -> list[PreparedModel]:
    return prepared_variants((2, 3, 5))


def stages_of(model: PreparedModel, *cuts: int) -> list[StageSpec]:
    return [stage.spec for stage in model.cut([model.cuts[cut] for cut in cuts]).stages]


def new_stages(folder: Path, specs: list[StageSpec]) -> list[NewStage]:
    return [NewStage("new", 10 + s.index, 3, s, folder / f"new_{s.index}") for s in specs]


def write_all(folder: Path, state: WholeState, specs: list[StageSpec]) -> list[StageCheckpoint]:
    return [state.checkpoint(folder / f"old_{spec.index}", spec, node=spec.index) for spec in specs]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_any_cut_becomes_any_other(
    variants: list[PreparedModel], tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    choice = random.Random(seed)
    state = WholeState.at_random(variants[0], seed)
    old, new = (random_stages(choice.choice(variants), choice) for _ in range(2))
    folder = tmp_path_factory.mktemp("conversion")
    stored = write_all(folder, state, old)
    choice.shuffle(stored)
    stages = new_stages(folder, new)
    for stage, manifest in zip(stages, convert_checkpoints(checkpoint_set(stored), stages), strict=True):
        expected = state.checkpoint(folder / f"expected_{stage.spec.index}", stage.spec)
        converted = CheckpointFolder(stage.folder)
        assert converted.usable() == [manifest]
        found, wanted = (
            load_file(path) for path in (converted.tensors_path(manifest.id), expected.tensors)
        )
        assert sorted(found) == sorted(wanted)
        for name, tensor in wanted.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(found[name], tensor), name
        assert manifest == msgspec.structs.replace(
            expected.manifest, plan="new", node=10 + stage.spec.index, cluster=3, sha256=manifest.sha256
        )


def test_the_cuts_above_include_blocks_of_rows_and_stages_that_train_nothing(
    variants: list[PreparedModel],
) -> None:
    assert len(variants) >= 3
    cut = stages_of(variants[-1], *range(len(variants[-1].cuts)))
    entries = [entry for spec in cut for entry in spec.state]
    assert sum(entry.rows is not None for entry in entries) >= 8
    assert any(not any(entry.trainable for entry in spec.state) for spec in cut)
    shared = [entry for entry in entries if entry.kind == "buffer" and len(entry.stages) > 1]
    assert shared, "a buffer is in several stages"


def test_the_epoch_can_begin_anew(variants: list[PreparedModel], tmp_path: Path) -> None:
    state = WholeState.at_random(variants[0], 1)
    old = checkpoint_set(write_all(tmp_path, state, stages_of(variants[0], 2)))
    stages = new_stages(tmp_path, stages_of(variants[0], 1, 3))
    first, *_, last = convert_checkpoints(old, stages, start=EpochStart())
    begin = {"batches": 0, "microbatches": 0, "samples": 0, "data": ""}
    assert decode(first.progress)["root"] == ROOT | begin
    assert decode(last.progress)["leaf"] == RANDOM
    for manifest in (first, last):
        updates = decode(manifest.progress)["updates"]
        # The 4.5 steps of the epoch so far are not made again.
        assert (updates["scheduler_due"], updates["epoch_steps"]) == (0.25 - 4.5, 0.0)
    later, *_ = convert_checkpoints(old, stages, start=EpochStart(2, 3))
    updates = decode(later.progress)["updates"]
    assert (updates["scheduler_due"], updates["epoch_steps"]) == (0.25, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"scheduler_due": 1e18},
        {"scheduler_due": math.nan},
        {"epoch_steps": math.inf},
        {"epoch_steps": ""},
    ],
)
def test_a_wrong_progress_of_the_scheduler_is_refused(
    variants: list[PreparedModel], tmp_path: Path, wrong: dict[str, Any]
) -> None:
    stored = WholeState.at_random(variants[0], 1).checkpoint(
        tmp_path / "old", stages_of(variants[0])[0], **wrong
    )
    with pytest.raises(StageFormatError, match="stage 0 is damaged: its scheduler"):
        convert_checkpoints(checkpoint_set([stored]), new_stages(tmp_path, stages_of(variants[0], 1)))


def test_another_job_does_not_report_the_results_again(
    variants: list[PreparedModel], tmp_path: Path
) -> None:
    state = WholeState.at_random(variants[0], 1)
    old = checkpoint_set(write_all(tmp_path, state, stages_of(variants[0], 2)))
    stages = new_stages(tmp_path, stages_of(variants[0], 1, 3))
    recent = [
        [decode(each.progress)["recent"] for each in convert_checkpoints(old, stages, same_job=same)]
        for same in (True, False)
    ]
    assert recent == [[RECENT, None, None], [None, None, None]]


Change = Callable[[WholeState], WholeState]


def _with(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda state: replace(state, tensors={**state.tensors, name: change(state.tensors[name])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with("first.weight", lambda t: t[:, :5]), r"first.weight with another shape.*\[6, 5\]"),
        (_with("first.weight", lambda t: t[:5]), "first.weight with another number of rows"),
        (_with("first.weight", lambda t: t.double()), "first.weight with another shape or dtype"),
        (_with("gain", lambda t: t.reshape(1)), "gain with another shape"),
    ],
)
def test_another_model_is_refused(
    variants: list[PreparedModel], tmp_path: Path, change: Change, message: str
) -> None:
    state = change(WholeState.at_random(variants[0], 1))
    old = checkpoint_set(write_all(tmp_path, state, stages_of(variants[0], 2)))
    stages = new_stages(tmp_path, stages_of(variants[0], 1, 3))
    with pytest.raises(StageFormatError, match=message):
        convert_checkpoints(old, stages)
    assert not any(stage.folder.exists() for stage in stages)


@pytest.mark.parametrize(
    ("where", "message"), [("old", "lacks wide.bias, which the model trains"), ("new", "has wide.bias")]
)
def test_weights_must_be_trained_in_both_plans(
    variants: list[PreparedModel], tmp_path: Path, where: str, message: str
) -> None:
    def freeze(specs: list[StageSpec]) -> list[StageSpec]:
        return [
            msgspec.structs.replace(
                spec,
                state=tuple(
                    msgspec.structs.replace(
                        entry, trainable=entry.trainable and entry.key != "wide.bias"
                    )
                    for entry in spec.state
                ),
            )
            for spec in specs
        ]

    old, new = stages_of(variants[0], 2), stages_of(variants[0], 1, 3)
    old, new = (freeze(old), new) if where == "old" else (old, freeze(new))
    stored = checkpoint_set(write_all(tmp_path, WholeState.at_random(variants[0], 1), old))
    with pytest.raises(StageFormatError, match=message):
        convert_checkpoints(stored, new_stages(tmp_path, new))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
            "stages 0 and 1 differ in the parameter groups",
        ),
        ({"scheduler": {"last_epoch": 6}}, "stages 0 and 1 differ in the state of the learning rate"),
        ({"scheduler_steps": 11}, "stages 0 and 1 differ in the steps of the learning rate"),
        ({"done": 11}, "stages 0 and 1 differ in the number of updates"),
    ],
)
def test_stages_that_disagree_are_refused(
    variants: list[PreparedModel], tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    state = WholeState.at_random(variants[0], 1)
    first, second = stages_of(variants[0], 2)
    stored = [
        state.checkpoint(tmp_path / "old_0", first),
        state.checkpoint(tmp_path / "old_1", second, **changed),
    ]
    with pytest.raises(StageFormatError, match=message):
        convert_checkpoints(checkpoint_set(stored), new_stages(tmp_path, stages_of(variants[0], 1, 3)))


def test_names_of_parameters_in_groups_are_not_settings(
    variants: list[PreparedModel], tmp_path: Path
) -> None:
    state = WholeState.at_random(variants[0], 1)
    stored = [
        state.checkpoint(
            tmp_path / f"old_{spec.index}", spec, groups=[{"lr": 0.1, "param_names": [str(spec.index)]}]
        )
        for spec in stages_of(variants[0], 2)
    ]
    (manifest,) = convert_checkpoints(
        checkpoint_set(stored), new_stages(tmp_path, stages_of(variants[0]))
    )
    assert decode(manifest.progress)["updates"]["groups"] == [{"lr": 0.1}]


@pytest.mark.parametrize(
    ("optimizer_state", "message"),
    [
        ({"factor": torch.rand(6)}, "cannot be cut along rows"),
        ({"factor": torch.rand(1)}, "cannot be cut along rows"),
    ],
)
def test_state_of_the_optimizer_that_has_no_rows_is_not_cut(
    variants: list[PreparedModel], tmp_path: Path, optimizer_state: dict[str, Any], message: str
) -> None:
    state = WholeState.at_random(variants[0], 1)
    state = replace(state, optimizer={**state.optimizer, "embed.weight": optimizer_state})
    old = checkpoint_set(write_all(tmp_path, state, stages_of(variants[0], 2)))
    whole = new_stages(tmp_path / "whole", stages_of(variants[0], 1, 3))
    convert_checkpoints(old, whole)
    cut = new_stages(tmp_path / "cut", stages_of(variants[1]))
    with pytest.raises(StageFormatError, match=message):
        convert_checkpoints(old, cut)
    assert not (tmp_path / "cut").exists()


def test_blocks_with_other_numbers_of_steps_are_not_joined(
    variants: list[PreparedModel], tmp_path: Path
) -> None:
    states = [WholeState.at_random(variants[0], 1) for _ in range(2)]
    states[1].optimizer["embed.weight"]["step"].add_(1)  # type: ignore[index]
    specs = stages_of(variants[1], *range(len(variants[1].cuts)))
    holders = [
        spec.index
        for spec in specs
        for entry in spec.state
        if entry.model_names[0] == "embed.weight" and entry.stages[0] == spec.index
    ]
    stored = [
        states[spec.index == holders[-1]].checkpoint(tmp_path / f"old_{spec.index}", spec)
        for spec in specs
    ]
    with pytest.raises(StageFormatError, match=r"embed.weight .* differ in the optimizer's state"):
        convert_checkpoints(checkpoint_set(stored), new_stages(tmp_path, stages_of(variants[0], 2)))


def test_a_damaged_file_is_refused(variants: list[PreparedModel], tmp_path: Path) -> None:
    stored = write_all(tmp_path, WholeState.at_random(variants[0], 1), stages_of(variants[0], 2))
    data = bytearray(stored[1].tensors.read_bytes())
    data[-1] ^= 1
    stored[1].tensors.write_bytes(data)
    with pytest.raises(StageFormatError, match="another digest"):
        checkpoint_set(stored)
    stored[1].tensors.write_bytes(data[:-1])
    with pytest.raises(StageFormatError, match="bytes, not"):
        checkpoint_set(stored)


HOSTILE: dict[str, Callable[[CheckpointManifest], dict[str, Any]]] = {
    "no progress": lambda m: {"progress": [1]},
    "an unknown type": lambda m: {"progress": {"$code": "exit()"}},
    "no position": lambda m: {"progress": encode({"root": None, "updates": {"done": 1}})},
    "no updates": lambda m: {"progress": encode({"root": ROOT})},
    "groups are a number": lambda m: {"progress": encode({"root": ROOT, "updates": {"groups": 1}})},
    "done is text": lambda m: {"progress": encode({"root": ROOT, "updates": {"done": "x"}})},
    "an unknown tensor": lambda m: {"tensors": {**m.tensors, "other": StoredTensor("other")}},
    "negative rows": lambda m: {
        "tensors": {k: StoredTensor(t.name, -4, 4) for k, t in m.tensors.items()}
    },
    "too many rows": lambda m: {
        "tensors": {k: StoredTensor(t.name, 0, 99) for k, t in m.tensors.items()}
    },
    "no tensors": lambda m: {"tensors": {}},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_forged_manifest_is_refused(
    variants: list[PreparedModel],
    tmp_path: Path,
    change: Callable[[CheckpointManifest], dict[str, Any]],
) -> None:
    (whole,) = write_all(tmp_path, WholeState.at_random(variants[0], 1), stages_of(variants[0]))
    forged = msgspec.structs.replace(whole.manifest, **change(whole.manifest))
    old = checkpoint_set([StageCheckpoint(forged, whole.tensors)])
    stages = new_stages(tmp_path, stages_of(variants[0], 2))
    with pytest.raises(StageFormatError):
        convert_checkpoints(old, stages)
    assert not any(stage.folder.exists() for stage in stages)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"run": "other"}, "one update of one plan and run"),
        ({"plan": "other"}, "one update of one plan and run"),
        ({"id": CheckpointId(8, 1)}, "one update of one plan and run"),
        ({"stage": 0}, "lacks the checkpoint of stage 1 of 2"),
        ({"stage": 2}, "stage 2 of 2 does not exist"),
    ],
)
def test_checkpoints_of_a_set_belong_together(
    variants: list[PreparedModel], tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    first, second = write_all(tmp_path, WholeState.at_random(variants[0], 1), stages_of(variants[0], 2))
    other = msgspec.structs.replace(second.manifest, **changed)
    with pytest.raises(StageFormatError, match=message):
        checkpoint_set([first, StageCheckpoint(other, second.tensors)])
    with pytest.raises(StageFormatError, match="not none"):
        checkpoint_set([])


def test_all_stages_of_the_new_cluster_are_needed(variants: list[PreparedModel], tmp_path: Path) -> None:
    old = checkpoint_set(
        write_all(tmp_path, WholeState.at_random(variants[0], 1), stages_of(variants[0], 2))
    )
    with pytest.raises(StageFormatError, match="all stages of the new cluster"):
        convert_checkpoints(old, new_stages(tmp_path, stages_of(variants[0], 1, 3))[:2])


def test_files_of_any_name_become_checkpoints_of_a_plan_without_the_models_code(
    variants: list[PreparedModel], tmp_path: Path
) -> None:
    """The server has artifacts, whose names are digests, and the units of a model."""
    whole = variants[0]
    profile = profile_model(whole)
    packed = pack_model(whole, profile, tmp_path / "model", row_cut_models(whole, profile, counts=(2,)))
    model = read_units(packed.units)
    state = WholeState.at_random(whole, 5)
    artifacts = []
    for spec in model.row_cut[0].stages([2, 3, 6]):
        stored = state.checkpoint(tmp_path / f"old_{spec.index}", spec)
        manifest = CheckpointFolder(stored.tensors.parent).manifest_path(state.id)
        artifacts.append((manifest.rename(tmp_path / f"{spec.index}"), stored.tensors))
    old = checkpoint_set(StageCheckpoint(read_manifest(m), tensors) for m, tensors in artifacts)
    stages = new_stages(tmp_path, list(model.stages([1, 4])))
    for stage, manifest in zip(stages, convert_checkpoints(old, stages), strict=True):
        expected = state.checkpoint(tmp_path / f"expected_{stage.spec.index}", stage.spec)
        found = load_file(CheckpointFolder(stage.folder).tensors_path(manifest.id))
        wanted = load_file(expected.tensors)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_buffer_of_several_stages_is_that_of_the_first(
    variants: list[PreparedModel], tmp_path: Path
) -> None:
    states = [WholeState.at_random(variants[0], 1) for _ in range(3)]
    specs = stages_of(variants[0], 3, 7)
    holders = [spec.index for spec in specs for entry in spec.state if entry.key == "scale"]
    assert len(holders) > 1
    for index, state in enumerate(states):
        state.tensors["scale"].fill_(index)
    stored = [states[s.index].checkpoint(tmp_path / f"old_{s.index}", s) for s in specs]
    stages = new_stages(tmp_path, stages_of(variants[0], 1))
    (first, second) = convert_checkpoints(checkpoint_set(stored), stages)
    found = [
        load_file(CheckpointFolder(stage.folder).tensors_path(manifest.id)).get("state/scale")
        for stage, manifest in zip(stages, (first, second), strict=True)
    ]
    assert {float(each) for each in found if each is not None} == {holders[0]}
