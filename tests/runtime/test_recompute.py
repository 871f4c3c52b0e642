"""Recomputed activations: the same results to the last bit, for any number that is kept."""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import LocalCluster, Splits
from scripted_pipeline import ScriptedPipeline
from test_async import RULE, SEED, _data, _loss, _modules
from torch import nn
from training_cases import points

from ravnest.errors import SettingsError
from ravnest.runtime.schedule.machine import ScheduleMachine
from ravnest.runtime.schedule.progress import StageTraits
from ravnest.runtime.settings import NodeSettings
from ravnest.runtime.stage.execution import LossPart, StageExecution
from ravnest.runtime.stage.forward_passes import ForwardPasses
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.split import prepare
from ravnest.split.module import StageModule
from ravnest.split.split_stage import SplitStage
from ravnest.split.splitter import balanced_cuts
from ravnest.store.node_spec import read_node, write_node
from ravnest.types import MicrobatchId, Schedule
from ravnest.wire.messages import LossSplit

STAGES = 3
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def kept_all(splits: Splits) -> Callable[[str, Schedule], list[dict[str, torch.Tensor]]]:
    """Factory of the weights of pipelines that recompute nothing; each is trained once."""
    return functools.cache(lambda case, schedule: _trained(splits, case, schedule, None, 1))


def _trained(
    splits: Splits,
    case: str,
    schedule: Schedule,
    kept: int | None,
    order: int,
    *,
    interrupts: bool = False,
) -> list[dict[str, torch.Tensor]]:
    """Train a pipeline in a random order of events; return the weights of its stages."""
    executions = [
        StageExecution(
            module,
            RULE,
            seed=SEED,
            stash=schedule == "async" and at < STAGES - 1,
            kept=kept,
            defer=at > 0,
        )
        for at, module in enumerate(_modules(splits, case, STAGES))
    ]
    machines = [
        ScheduleMachine(
            at, STAGES, schedule=schedule, window=5, traits=StageTraits(defers=execution.defers)
        )
        for at, execution in enumerate(executions)
    ]
    data = _data(_modules(splits, case, STAGES), 20)
    pipeline = ScriptedPipeline(machines, executions, data, _loss, update_size=5, interrupts=interrupts)
    pipeline.train(random.Random(order))
    return [
        {key: weight.detach().clone() for key, weight in e.module.parameters_by_key().items()}
        for e in executions
    ]


@pytest.mark.parametrize("kept", [0, 1, *(pytest.param(kept, marks=FULL) for kept in (2, 3, 4)), 5])
@pytest.mark.parametrize(("case", "schedule"), [("mlp", "sync"), ("dropout", "sync"), ("mlp", "async")])
def test_the_number_that_is_kept_changes_no_bit(
    splits: Splits,
    kept_all: Callable[[str, Schedule], list[dict[str, torch.Tensor]]],
    case: str,
    schedule: Schedule,
    kept: int,
) -> None:
    expected = kept_all(case, schedule)
    for stage, found in zip(expected, _trained(splits, case, schedule, kept, 1), strict=True):
        assert all(torch.equal(found[key], weight) for key, weight in stage.items())


@pytest.mark.parametrize("case", ["mlp", "dropout"])
@pytest.mark.parametrize("kept", [None, 1, 5])
def test_interrupted_weight_gradients_change_no_bit(
    splits: Splits,
    kept_all: Callable[[str, Schedule], list[dict[str, torch.Tensor]]],
    case: str,
    kept: int | None,
) -> None:
    for order in range(3):
        trained = _trained(splits, case, "sync", kept, order, interrupts=True)
        for stage, found in zip(kept_all(case, "sync"), trained, strict=True):
            assert all(torch.equal(found[key], weight) for key, weight in stage.items())


class Drifting(nn.Module):
    """A model with a buffer that every training forward changes and uses, with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x))
        if self.training:
            self.scale.mul_(1.5)
        return self.last(hidden + self.scale)


@functools.cache
def _drifting_stage() -> SplitStage:
    torch.manual_seed(0)
    prepared = prepare(Drifting(), (torch.randn(6, 4),), {})
    (stage,) = prepared.cut(balanced_cuts(prepared, [1.0])).stages
    return stage


def _drifting(kept: int | None) -> StageExecution:
    stage = _drifting_stage()
    module = StageModule(stage.spec, {key: t.clone() for key, t in stage.tensors.items()})
    return StageExecution(
        module, UpdateRule(torch.optim.SGD, {"lr": 0.1}), seed=0, stash=False, kept=kept
    )


def _train_drifting(execution: StageExecution) -> dict[str, torch.Tensor]:
    (name,) = [spec.name for spec in execution.module.graph.inputs]
    generator = torch.Generator().manual_seed(3)
    for update in range(2):
        numbers = [MicrobatchId(0, 4 * update + part) for part in range(4)]
        for number in numbers:
            x = torch.randn(6, 4, generator=generator)
            execution.forward(number, update, {name: x}, LossPart(lambda out: out[0].square().mean()))
        for number in numbers:
            execution.backward(number, {})
        execution.step(4)
    return {key: tensor.detach() for key, tensor in execution.module.state_tensors().items()}


@pytest.mark.parametrize("kept", range(4))
def test_a_recomputation_sees_the_buffers_of_its_forward_and_changes_none(kept: int) -> None:
    expected = _train_drifting(_drifting(None))
    for key, tensor in _train_drifting(_drifting(kept)).items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_never_more_than_the_given_number_is_kept(
    splits: Splits, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = [0]
    run = ForwardPasses.run
    forward, backward = StageExecution.forward, StageExecution.backward
    current: list[StageExecution] = []

    def entered(method: Callable[..., object]) -> Callable[..., object]:
        def call(self: StageExecution, *args: object, **kwargs: object) -> object:
            current[:] = [self]
            return method(self, *args, **kwargs)

        return call

    def counted(self: ForwardPasses, *args: object, **kwargs: object) -> object:
        (execution,) = current
        held = sum(saved.stage_pass is not None for saved in execution._saved.values())
        most.append(held + len(execution._deferred) + torch.is_grad_enabled())
        return run(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(StageExecution, "forward", entered(forward))
    monkeypatch.setattr(StageExecution, "backward", entered(backward))
    monkeypatch.setattr(ForwardPasses, "run", counted)
    for order in range(3):
        _trained(splits, "mlp", "sync", kept, order)
    assert max(most) == kept


def _limit(folder: Path, names: list[str], kept: int) -> None:
    """Tell every node to keep this number of micro-batches, as a plan with little memory would."""
    for name in names:
        spec = read_node(folder / "node_data", name)
        write_node(
            folder / "node_data",
            replace(spec, kept=kept, in_flight=4, microbatches=4, microbatch_rows=2),
        )


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("nodes", [1, 3])
def test_nodes_with_little_memory_train_to_the_same_weights(
    tmp_path: Path, splits: Splits, nodes: int, kept: int
) -> None:
    found = []
    for recompute in (False, "auto"):
        here = tmp_path / str(recompute)
        folder, names = splits("dropout", nodes)
        shutil.copytree(folder / "node_data", here / "node_data")
        _limit(here, names, kept)
        options = {"schedule": "sync", "micro_batches": 4, "seed": SEED, "recompute": recompute}
        local = LocalCluster(here, names, options)
        local.train(lambda: (points(), None), node={}, epochs=2, save=True)
        found.append(local.fused())
    assert all(torch.equal(value, found[0][name]) for name, value in found[1].items())


def test_recompute_is_checked() -> None:
    with pytest.raises(SettingsError, match="recompute must be True, False or 'auto', not 'some'"):
        NodeSettings.of({"recompute": "some"})
    assert NodeSettings.of({}).recompute == "auto"


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, 4),
        ({"recompute": True}, 0),
        ({"recompute": False}, None),
        ({"micro_batches": 4}, 2),
        ({"micro_batches": 1}, 1),
    ],
    ids=str,
)
def test_the_number_kept_follows_the_users_settings(
    tmp_path: Path, splits: Splits, settings: dict[str, Any], kept: int | None
) -> None:
    folder, names = splits("mlp", 2)
    shutil.copytree(folder / "node_data", tmp_path / "node_data")
    spec = read_node(tmp_path / "node_data", names[0])
    planned = replace(spec, kept=4, in_flight=8, microbatches=8, microbatch_rows=2)
    write_node(tmp_path / "node_data", planned)
    assert LocalCluster(tmp_path, names, settings).node(names[0])._config.kept == kept


@pytest.mark.parametrize(("parts", "warned"), [(8, False), (4, False), (2, True)])
def test_micro_batches_beyond_the_planned_memory_are_warned_of(
    tmp_path: Path, splits: Splits, parts: int, warned: bool
) -> None:
    folder, names = splits("mlp", 2)
    shutil.copytree(folder / "node_data", tmp_path / "node_data")
    spec = read_node(tmp_path / "node_data", names[0])
    planned = replace(
        spec, in_flight=8, microbatches=8, microbatch_rows=2, batch_size=16, largest_rows=4
    )
    write_node(tmp_path / "node_data", planned)
    config = LocalCluster(tmp_path, names, {"micro_batches": parts}).node(names[0])._config
    warning = config.memory_warning(config.batch_split(LossSplit(True, "")))
    assert warning == (
        "micro-batches of 8 samples may need more memory than the nodes offer, which was planned for at"
        " most 4 samples at a time: set micro_batches to 4 or more, or plan with more RAM or a smaller"
        " batch"
        if warned
        else ""
    )
