"""A model as two files, from which stages are created without its code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ravnest.errors import RavnestError, SplitError, StageFormatError
from ravnest.jobs.model import PackedModel, check_weights, pack_model, read_units, write_stage
from ravnest.plan.profiler import profile_model
from ravnest.plan.row_cuts import row_cut_models
from ravnest.split import Chain, PreparedModel, StageModule, prepare
from ravnest.split.self_check import verify
from ravnest.split.split_stage import SplitStage
from ravnest.store.bundle import load_stage


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.middle(self.norm(self.embed(tokens)))))


@pytest.fixture(scope="module")
def prepared() -> PreparedModel:
    torch.manual_seed(0)
    return prepare(Tied(), (torch.randint(0, 11, (6,)),))


@pytest.fixture(scope="module")
def packed(prepared: PreparedModel, tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    return pack_model(prepared, profile_model(prepared), tmp_path_factory.mktemp("packed"))


@pytest.mark.parametrize("starts", [[], [1], [2, 4], [1, 2, 3, 4]])
def test_stages_from_the_files_equal_the_model(
    prepared: PreparedModel, packed: PackedModel, tmp_path: Path, starts: list[int]
) -> None:
    model = read_units(packed.units)
    check_weights(model, packed.weights)
    stages: list[SplitStage] = []
    for spec in model.stages(starts):
        digest = write_stage(tmp_path / str(spec.index), spec, packed.weights)
        stages.append(load_stage(tmp_path / str(spec.index), digest.sha256))
    assert verify(prepared.capture, [stages]).bitwise
    chain = Chain(StageModule(stage.spec, stage.tensors) for stage in stages)
    expected = prepared.capture.model.state_dict()
    assert list(chain.state_dict()) == list(expected)
    assert all(torch.equal(expected[key], value) for key, value in chain.state_dict().items())


def test_the_profile_round_trips(prepared: PreparedModel, packed: PackedModel) -> None:
    assert read_units(packed.units).profile == profile_model(prepared)


@pytest.mark.parametrize("starts", [[3, 2], [2, 2], [99], [-1]])
def test_a_stage_that_begins_at_an_unknown_unit_is_refused(
    packed: PackedModel, starts: list[int]
) -> None:
    with pytest.raises(SplitError, match="cannot begin at"):
        read_units(packed.units).stages(starts)


Change = Callable[[dict[str, Any]], object]


def _graph(data: dict[str, Any], unit: int) -> dict[str, Any]:
    graph: dict[str, Any] = data["units"][unit]["graphs"]["train"]
    return graph


HOSTILE: dict[str, tuple[Change, str]] = {
    "format": (lambda d: d.update(format="ravnest-stage"), "not a model"),
    "version": (lambda d: d.update(version=2), "not a model"),
    "no units": (lambda d: d.update(units=[]), "does not list the units"),
    "units are not a list": (lambda d: d.update(units={"0": {}}), "does not list the units"),
    "a unit is missing": (lambda d: d["units"].pop(), "wrong position"),
    "units are swapped": (lambda d: d["units"].reverse(), "wrong position"),
    "another signature": (lambda d: d["units"][1]["signature"].pop(), "other inputs"),
    "no profile": (lambda d: d.pop("profile"), "profile of the model is malformed"),
    "a profile of other units": (
        lambda d: d["profile"]["units"].pop(),
        "profile has 5 units, the model 6",
    ),
    "a negative cost": (lambda d: d["profile"]["units"][0].update(work=-1.0), "cost -1"),
    "a huge cost": (lambda d: d["profile"].update(input_bytes=2**70), "cost 118"),
    "an empty batch": (lambda d: d["profile"].update(batch_size=0), "batch size of the profile"),
    "micro-batches of no samples": (lambda d: d["profile"].update(smallest_rows=0), "of 0 samples"),
    "too large micro-batches": (lambda d: d["profile"].update(smallest_rows=10**6), "micro-batches of"),
    "an endless reason": (lambda d: d["profile"].update(unsplit_reason="x" * 10**5), "reason of 100000"),
    "an unknown unit": (lambda d: d["profile"]["state"][0].update(units=[99]), "invalid units"),
    "a missing state tensor": (lambda d: d["profile"]["state"].pop(0), "lacks"),
    "another size": (lambda d: d["profile"]["state"][0].update(bytes=1), "differ in the size"),
    "a forbidden operator": (
        lambda d: _graph(d, 0)["operations"][0].update(target="aten::from_file.default"),
        "not on the list",
    ),
    "an undefined input": (
        lambda d: _graph(d, 0).update(outputs=[["other", 1]]),
        "is not an output",
    ),
    "units that disagree on a tensor": (
        lambda d: d["units"][0]["state"][0].update(trainable=False),
        "disagree on",
    ),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_forged_model_is_refused(packed: PackedModel, tmp_path: Path, name: str) -> None:
    change, message = HOSTILE[name]
    data = json.loads(packed.units.read_text())
    change(data)
    path = tmp_path / "units.json"
    path.write_text(json.dumps(data))
    with pytest.raises(RavnestError, match=message) as refusal:
        read_units(path)
    assert isinstance(refusal.value, ValueError)


def test_a_list_that_grows_from_unit_to_unit_is_refused(packed: PackedModel, tmp_path: Path) -> None:
    data = json.loads(packed.units.read_text())
    output = _graph(data, 0)["outputs"][0]
    output[1] = [output[1], output[1]]
    path = tmp_path / "units.json"
    path.write_text(json.dumps(data))
    with pytest.raises(StageFormatError, match="is a list"):
        read_units(path).stages([])


@pytest.mark.parametrize("damage", ["truncated", "empty", "header", "missing"])
def test_damaged_weights_are_refused(packed: PackedModel, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "weights.safetensors"
    whole = packed.weights.read_bytes()
    if damage != "missing":
        length = int.from_bytes(whole[:8], "little")
        huge = (2**40).to_bytes(8, "little")
        path.write_bytes(
            {"truncated": whole[: length + 20], "empty": b"", "header": huge + whole[8:]}[damage]
        )
    model = read_units(packed.units)
    with pytest.raises(StageFormatError):
        check_weights(model, path)
    with pytest.raises(StageFormatError):
        write_stage(tmp_path / "stage", model.stages([])[0], path)
    assert not (tmp_path / "stage" / "stage.json").exists()


def test_weights_of_another_model_are_refused(packed: PackedModel, tmp_path: Path) -> None:
    other = prepare(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 4),))
    theirs = pack_model(other, profile_model(other), tmp_path)
    with pytest.raises(StageFormatError, match="lacks"):
        check_weights(read_units(packed.units), theirs.weights)


def test_stages_with_cut_tensors_take_their_rows_from_the_same_weights(
    prepared: PreparedModel, tmp_path: Path
) -> None:
    profile = profile_model(prepared)
    cut = list(row_cut_models(prepared, profile, counts=(2, 3)))
    packed = pack_model(prepared, profile, tmp_path / "packed", cut)
    model = read_units(packed.units)
    check_weights(model, packed.weights)
    assert [variant.profile.row_cuts[0].blocks for variant in model.row_cut] == [2, 3]
    assert len(model.variants) == 3
    expected = prepared.capture.model.state_dict()
    for number, (variant, source) in enumerate(zip(model.row_cut, cut, strict=True)):
        stages: list[SplitStage] = []
        for spec in variant.stages([2, 4, 6]):
            folder = tmp_path / str(number) / str(spec.index)
            digest = write_stage(folder, spec, packed.weights)
            stages.append(load_stage(folder, digest.sha256))
        assert max(verify(source.prepared.capture, [stages]).differences.values(), default=0) < 1e-5
        fused = Chain(StageModule(stage.spec, stage.tensors) for stage in stages).state_dict()
        assert list(fused) == list(expected)
        assert all(torch.equal(fused[name], expected[name]) for name in expected)


def test_rows_outside_of_the_model_are_refused(prepared: PreparedModel, tmp_path: Path) -> None:
    profile = profile_model(prepared)
    packed = pack_model(prepared, profile, tmp_path, row_cut_models(prepared, profile, counts=(2,)))
    data = json.loads(packed.units.read_text())
    for unit in data["row_cut"][0]["units"]:
        for entry in unit["state"]:
            if "rows" in entry:
                entry["rows"][2] += 1
    packed.units.write_text(json.dumps(data))
    with pytest.raises(StageFormatError, match="not a part of the model's tensor"):
        check_weights(read_units(packed.units), packed.weights)
    packed.units.write_text(json.dumps(data | {"row_cut": 7}))
    with pytest.raises(StageFormatError, match="models with cut tensors"):
        read_units(packed.units)
