"""Moving average of the weights: the values of ``torch.optim.swa_utils`` in one process, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import LocalCluster, form
from many_clusters import form_clusters, raise_errors
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from training_cases import (
    MLP,
    TiedGPT,
    small_model,
    token_loaders,
    token_loss,
    train_alone,
)

from ravnest import Trainer, model_fusion, set_seed
from ravnest.errors import FusionError, SettingsError, StageFormatError
from ravnest.formation import form_clusters as plan_clusters
from ravnest.plan.memory import averaging_copies
from ravnest.plan.node_configs import NodeConfig
from ravnest.runtime.settings import NodeSettings
from ravnest.runtime.stage.updates import UpdateRule, Updates
from ravnest.runtime.stage.weight_average import WeightAverage
from ravnest.store.checkpoint import EMA, OPTIMIZER, LazyTensor
from ravnest.store.checkpoint_mean import StageContents, mean_contents
from ravnest.types import Address

DECAY = 0.9
EPOCHS = 3


def _tokens() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return token_loaders()[0], token_loaders(batches=3, seed=9)[0]


def _points() -> tuple[DataLoader[Any], DataLoader[Any]]:
    made = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(40, 4, generator=made), torch.randint(0, 3, (40,), generator=made))
    return DataLoader(data, 8), DataLoader(data, 8)


class FrozenNormMLP(MLP):
    """Model with a frozen layer and with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = self.norm(self.second(x))
        return self.last(torch.tanh(self.third(x)))


def _labelled(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[-1])


Loss = Callable[[torch.Tensor, Any], torch.Tensor]
CASES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[], Any], Loss]] = {
    "tied-gpt": (TiedGPT, torch.randint(0, 16, (4, 8)), _tokens, token_loss),
    "mlp": (FrozenNormMLP, torch.rand(8, 4), _points, _labelled),
}


def _alone(case: str) -> tuple[nn.Module, nn.Module, list[float]]:
    """Train in one process; return the model, its average, and the losses of the validations."""
    make, _, loaders, loss_of = CASES[case]
    set_seed(7)
    model = make()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: averaged.update_parameters(model))
    train_loader, val_loader = loaders()
    validations: list[float] = []

    def validate() -> None:
        averaged.eval()
        with torch.no_grad():
            found = [(float(loss_of(averaged(b[0]), b)), len(b[0])) for b in val_loader]
        validations.append(sum(loss * n for loss, n in found) / sum(n for _, n in found))

    train_alone(model, train_loader, loss_of, optimizer, epochs=EPOCHS, after_epoch=validate)
    return model, averaged.module, validations


def _formed(folder: Path, case: str, nodes: int) -> LocalCluster:
    make, example, _, loss_of = CASES[case]
    set_seed(7)
    names = form(folder, make(), (example,), nodes)
    options = {
        "schedule": "sync",
        "micro_batches": 1,
        "optimizer": torch.optim.AdamW,
        "optimizer_params": {"lr": 1e-2},
        "criterion": loss_of,
        "metrics": ["loss"],
        "ema": DECAY,
    }
    return LocalCluster(folder, names, options)


def _train(local: LocalCluster, case: str, *, epochs: int = EPOCHS, **node: Any) -> list[Any]:
    loaders = CASES[case][2]

    def script(name: str) -> list[float]:
        train_loader, val_loader = loaders()
        labels = {"labels": train_loader, "test_labels": val_loader}
        with local.node(name, **labels, **node) as own:
            trainer = Trainer(
                own,
                train_loader=train_loader,
                val_loader=val_loader,
                epochs=epochs,
                save=True,
                keep_best="loss",
            )
            trainer.train()
            return [result.metrics["loss"] for result in trainer._results]

    return local.results(script)


def _load(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return state


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def test_a_pipeline_has_the_average_of_one_process(tmp_path: Path) -> None:
    model, averaged, validations = _alone("mlp")
    local = _formed(tmp_path, "mlp", 3)
    found = _train(local, "mlp")[0]
    assert found == pytest.approx(validations, rel=1e-6), "the average is validated"
    _same(local.fused(), averaged.state_dict())
    _same(_load(model_fusion(0, folder=tmp_path / "trained", raw=True)), model.state_dict())
    assert found[-1] == min(found), "the last model is the best one"
    _same(_load(model_fusion(0, folder=tmp_path / "trained" / "best")), averaged.state_dict())


def test_a_resumed_run_ends_with_the_same_average(tmp_path: Path) -> None:
    model, averaged, validations = _alone("tied-gpt")
    local = _formed(tmp_path, "tied-gpt", 2)
    _train(local, "tied-gpt", epochs=1, checkpoint_updates=4)
    found = _train(local, "tied-gpt", checkpoint_updates=4, resume=True)[0]
    assert found == pytest.approx(validations, rel=1e-6)
    _same(local.fused(), averaged.state_dict())
    _same(_load(model_fusion(0, folder=tmp_path / "trained", raw=True)), model.state_dict())


def test_late_gradients_leave_the_average_of_the_weights(tmp_path: Path) -> None:
    local = _formed(tmp_path, "mlp", 3)
    local.options["schedule"] = "async"
    losses = _train(local, "mlp")[0]
    raw = _load(model_fusion(0, folder=tmp_path / "trained", raw=True))
    averaged = local.fused()
    assert losses[-1] < losses[0]
    for name in ("second.weight", "last.weight"):
        assert not torch.equal(raw[name], averaged[name])
        torch.testing.assert_close(raw[name], averaged[name], atol=0.1, rtol=0)


def test_clusters_end_with_one_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    clusters = form_clusters(
        tmp_path,
        small_model("mlp"),
        (torch.rand(5, 4),),
        (1, 2),
        optimizer_params={"lr": 0.5},
        ema=DECAY,
    )
    outcomes = clusters.train(lambda name: _points(), epochs=2, save=True)
    raise_errors(outcomes)
    _same(clusters.fused(0), clusters.fused(1))
    folder = tmp_path / "trained"
    raw = [_load(model_fusion(cluster, folder=folder, raw=True)) for cluster in (0, 1)]
    _same(raw[0], raw[1])
    assert not torch.equal(raw[0]["first.weight"], clusters.fused(0)["first.weight"])


def test_a_result_without_an_average_has_no_other_weights(tmp_path: Path) -> None:
    local = _formed(tmp_path, "mlp", 1)
    _train(local, "mlp", epochs=1, ema=None)
    with pytest.raises(FusionError, match="one set of weights only"):
        model_fusion(0, folder=tmp_path / "trained", raw=True)


@pytest.mark.parametrize("decay", [1.0, -0.1, "0.9", True])
def test_a_decay_is_a_number_below_one(decay: object) -> None:
    with pytest.raises(SettingsError, match="ema must be the decay"):
        NodeSettings.of({"ema": decay})


def _updates(ema: float | None) -> tuple[Updates, nn.Parameter]:
    weight = nn.Parameter(torch.ones(2))
    rule = UpdateRule(torch.optim.SGD, {"lr": 1.0, "momentum": 0.5}, ema=ema)
    return Updates(rule, {"w": weight}), weight


def _step(updates: Updates) -> None:
    updates.add("w", torch.ones(2), set())
    updates.step(1)
    updates.average_weights()


def test_a_checkpoint_without_an_average_begins_one() -> None:
    before, _ = _updates(None)
    _step(before)
    after, weight = _updates(DECAY)
    with torch.no_grad():
        weight.fill_(0.0)  # as the checkpoint has it
    after.restore(*before.capture())
    assert after.average is not None
    assert after.average.tensors["w"].tolist() == [0.0, 0.0]
    _step(after)
    assert after.average.tensors["w"].tolist() == pytest.approx([-0.15, -0.15])


def test_a_run_without_an_average_ignores_a_stored_one() -> None:
    before, _ = _updates(DECAY)
    _step(before)
    tensors, plain = before.capture()
    assert f"w/{EMA}" in tensors
    after, weight = _updates(None)
    after.restore(tensors, plain)
    assert after.optimizer is not None
    assert list(after.optimizer.state[weight]) == ["momentum_buffer"]


def test_an_average_of_another_shape_is_refused() -> None:
    average = WeightAverage(DECAY, {"w": torch.ones(2)})
    with pytest.raises(StageFormatError, match="average of w that does not fit"):
        average.restore({"w": torch.ones(3)})
    with pytest.raises(StageFormatError, match="average of v that does not fit"):
        average.restore({"v": torch.ones(2)})


def test_the_mean_of_checkpoints_has_the_mean_of_the_averages() -> None:
    def contents(value: float) -> StageContents:
        def lazy(number: float) -> LazyTensor:
            return LazyTensor(torch.float32, (2,), lambda: torch.full((2,), number))

        names = {"state/w": value, f"{OPTIMIZER}w/{EMA}": value + 1, f"{OPTIMIZER}w/exp_avg": value}
        return StageContents({name: lazy(number) for name, number in names.items()}, {})

    sets = [(contents(0.0), 0.5), (contents(4.0), 0.5)]
    found = mean_contents(sets[0][0], sets, optimizer=False)
    values = {name: float(tensor.load()[0]) for name, tensor in found.tensors.items()}
    assert values == {"state/w": 2.0, f"{OPTIMIZER}w/{EMA}": 3.0, f"{OPTIMIZER}w/exp_avg": 0.0}


def test_the_average_is_part_of_the_plan() -> None:
    nodes = [NodeConfig(0, Address.parse("127.0.0.1:1"), 4.0, 1000.0)]
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    example = (torch.rand(2, 64),)
    found = [
        plan_clusters(copy.deepcopy(model), example, {}, nodes=nodes, ema=ema) for ema in (None, DECAY)
    ]
    plain, averaged = (each.profile.optimizer_bytes_per_parameter_byte for each in found)
    assert averaged == plain + 1
    assert averaging_copies(ema=True) == 2 * averaging_copies()
