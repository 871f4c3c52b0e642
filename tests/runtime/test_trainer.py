"""Trainer: parameters, calls, data and subclasses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import Formed
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader
from training_cases import points, small_model

import ravnest
from ravnest import Node, Trainer
from ravnest.errors import RunError, SettingsError


def _lines(name: str) -> list[float]:
    path = Path(name)
    return [float(line) for line in path.read_text().split()] if path.exists() else []


def _rates(node: Node) -> list[float]:
    return node._ensure_started().execution.updates.learning_rates


def _accuracy(model: nn.Module, loader: Any) -> float:
    right = [(model(x).argmax(1) == y) for x, y in loader]
    return float(torch.cat(right).float().mean())


def _trained_alone(epochs: int, loader: Any = None, rate: float = 0.1) -> nn.Module:
    model = small_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(epochs):
        for x, y in loader or points():
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


# Parameters


@pytest.mark.parametrize(("val_freq", "validations"), [(1, 4), (2, 2), (3, 1), (5, 0)])
def test_val_freq(cluster: Formed, val_freq: int, validations: int) -> None:
    local = cluster()

    def script(name: str) -> None:
        with local.node(name, labels=points(), test_labels=points()) as own:
            Trainer(own, train_loader=points(), val_loader=points(), val_freq=val_freq, epochs=4).train()

    local.results(script)
    assert len(_lines("val_accuracies.txt")) == validations
    assert len(_lines("losses.txt")) == 4 * 5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"batch_size": 4}, "batch_size=4, but train_loader has batches of 5"),
        ({"batch_size": 0}, "batch_size must be a whole number from 1"),
        ({"epochs": 0}, "epochs must be a whole number from 1"),
        ({"val_freq": 1.5}, "val_freq must be a whole number from 1"),
        ({"node": None}, "Trainer needs the node"),
        ({"epoch": 3}, "Trainer has no keyword 'epoch': did you mean epochs?"),
    ],
)
def test_invalid_arguments_are_refused(cluster: Formed, given: dict[str, Any], expected: str) -> None:
    settings: dict[str, Any] = {"node": cluster().node("node_0"), "train_loader": points()} | given
    with pytest.raises(SettingsError) as refused:
        Trainer(**settings)
    assert expected in str(refused.value)


def test_batch_size_may_equal_the_loaders(cluster: Formed) -> None:
    node = cluster().node("node_0")
    assert Trainer(node, train_loader=points(), batch_size=5).batch_size == 5
    assert Trainer(node, train_loader=[(torch.rand(5, 4), torch.ones(5))], batch_size=9)


def test_the_root_needs_data(cluster: Formed) -> None:
    local = cluster()

    def script(name: str) -> None:
        with local.node(name) as own:
            Trainer(own).train()

    root, leaf = local.errors(script)
    assert isinstance(root, SettingsError)
    assert "the Root needs data to train: Trainer(train_loader=...)" in str(root)
    assert isinstance(leaf, RunError)


def test_step_size_is_passed_to_the_scheduler(cluster: Formed) -> None:
    local = cluster()

    def script(name: str) -> list[list[float]]:
        with local.node(name, labels=points()) as own:
            trainer = Trainer(
                own,
                lr_scheduler=StepLR,
                lr_scheduler_params={"gamma": 0.5},
                step_size=2,
                train_loader=points(),
                epochs=5,
            )
            trainer.train()
            return [_rates(own)]

    assert local.results(script) == [[[0.025]], [[0.025]]]


def test_a_scheduler_on_both_is_refused(cluster: Formed) -> None:
    node = cluster().node("node_0", lr_scheduler=StepLR)
    with pytest.raises(SettingsError, match="Node and Trainer both have an lr_scheduler"):
        Trainer(node, lr_scheduler=ConstantLR, train_loader=points())


def test_a_scheduler_may_step_with_each_update(cluster: Formed) -> None:
    local = cluster(
        lr_scheduler=StepLR,
        lr_scheduler_params={"step_size": 4, "gamma": 0.5},
        lr_step_on_epoch_change=False,
        update_frequency=2,
    )

    def script(name: str) -> list[float]:
        with local.node(name, labels=points()) as own:
            Trainer(own, train_loader=points(), epochs=3).train()
            return _rates(own)

    assert local.results(script) == [[0.025], [0.025]], "nine updates"


def test_a_plateau_scheduler_gets_the_validation_result(cluster: Formed) -> None:
    figures: dict[str, list[float]] = {}

    class Seen(ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            figures.setdefault(str(len(self.optimizer.param_groups[0]["params"])), []).append(metrics)
            super().step(metrics)

    local = cluster(nodes=3, lr_scheduler=Seen, lr_scheduler_params={"patience": 0, "mode": "min"})

    def script(name: str) -> float:
        with local.node(name, labels=points(), test_labels=points()) as own:
            Trainer(own, train_loader=points(), val_loader=points(), epochs=3).train()
            return _rates(own)[0]

    rates = local.results(script)
    assert len(set(rates)) == 1, "all stages have the same rate"
    written = _lines("val_accuracies.txt")
    assert [len(seen) % 3 for seen in figures.values()] == [0] * len(figures)
    for seen in figures.values():
        assert sorted(set(seen)) == pytest.approx(sorted(set(written)), rel=1e-6)


def test_inputs_dtype(cluster: Formed) -> None:
    data = [(x.double(), y) for x, y in points()]
    local = cluster(schedule="sync")
    local.train(lambda: (data, None), node={}, inputs_dtype=torch.float32, save=True)
    expected = _trained_alone(1).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in local.fused().items())


def test_inputs_dtype_converts_integers_if_all_inputs_are_integers(cluster: Formed) -> None:
    data = [((10 * x).to(torch.int16), y) for x, y in points()]
    local = cluster(schedule="sync")
    local.train(lambda: (data, None), node={}, inputs_dtype=torch.float32, save=True)
    expected = _trained_alone(1, [(x.float(), y) for x, y in data]).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in local.fused().items())


# Calls


def test_evaluate_returns_the_result_on_every_node_and_the_root_records_it(
    cluster: Formed, capsys: pytest.CaptureFixture[str]
) -> None:
    local = cluster(nodes=3, schedule="sync")
    outcomes = local.train(lambda: (points(), points()), node={}, val_freq=9, epochs=2)
    expected = _accuracy(_trained_alone(2), points())
    figures = [outcomes[name].result for name in local.names]
    assert figures == [pytest.approx(expected)] * 3
    assert _lines("val_accuracies.txt") == [pytest.approx(expected)]
    assert f"accuracy {expected:.4f}" in capsys.readouterr().out


def test_files_of_an_earlier_run_are_renamed(cluster: Formed) -> None:
    Path("losses.txt").write_text("1\n2\n")
    Path("losses.1.txt").write_text("3\n")
    Path("val_accuracies.txt").write_text("4\n")
    cluster().train(lambda: (points(), points()), node={}, val_freq=9)
    assert Path("losses.1.txt").read_text() == "3\n"
    assert Path("losses.2.txt").read_text() == "1\n2\n"
    assert Path("val_accuracies.1.txt").read_text() == "4\n"
    assert len(_lines("losses.txt")) == 5
    assert len(_lines("val_accuracies.txt")) == 1


def test_pred_returns_the_output_at_the_root(cluster: Formed) -> None:
    local = cluster(schedule="sync")
    inputs = torch.rand(3, 4)

    def script(name: str) -> Any:
        with local.node(name, labels=points()) as own:
            trainer = Trainer(own, train_loader=points())
            before = trainer.pred(inputs)
            trainer.train()
            return before, trainer.pred({"x": inputs})

    (before, after), leaf = local.results(script)
    assert torch.equal(before, small_model("mlp")(inputs))
    assert torch.equal(after, _trained_alone(1)(inputs))
    assert leaf == (None, None)


def test_train_twice_on_the_same_node(cluster: Formed) -> None:
    local = cluster(schedule="sync", lr_scheduler=StepLR, lr_scheduler_params={"gamma": 1.0})

    def script(name: str) -> None:
        with local.node(name, labels=points()) as own:
            first = Trainer(own, train_loader=points(), epochs=1)
            first.train()
            first.train()
            Trainer(own, train_loader=points(), epochs=2, save=True).train()

    local.results(script)
    expected = _trained_alone(4).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in local.fused().items())
    assert len(_lines("losses.txt")) == 20


def test_every_node_returns_without_evaluate(cluster: Formed) -> None:
    local = cluster(nodes=3)
    nodes: list[Node] = []

    def script(name: str) -> None:
        own = local.node(name, labels=points())
        nodes.append(own)
        Trainer(own, train_loader=points(), epochs=2).train()

    local.results(script)
    for node in nodes:
        node.close()


def test_a_node_whose_script_ends_early_is_named(cluster: Formed) -> None:
    local = cluster(nodes=2)

    def script(name: str) -> None:
        with local.node(name, labels=points(), test_labels=points()) as own:
            trainer = Trainer(own, train_loader=points(), val_loader=points(), val_freq=9)
            trainer.train()
            if own.is_root:
                own._ensure_started().status.wait(
                    lambda: own._ensure_started().status.departed is not None, stall=30
                )
                trainer.evaluate()

    root, leaf = local.errors(script)
    assert leaf is None
    assert isinstance(root, RunError)
    assert "node_1 has left the run: its script has ended" in str(root)


# Data


def _as_lists() -> list[Any]:
    return [[x, y] for x, y in points()]


def _as_dicts() -> list[Any]:
    return [{"x": x, "labels": y, "number": 7} for x, y in points()]


def _inputs_only() -> list[Any]:
    return [x for x, _ in points()]


def _in_one_tuple() -> list[Any]:
    return [(x,) for x, _ in points()]


def _labels() -> torch.Tensor:
    return torch.cat([y for _, y in points()])


def _labels_only() -> list[Any]:
    return [y for _, y in points()]


@pytest.mark.parametrize(
    ("inputs", "labels"),
    [
        (points, points),
        (_as_lists, _as_lists),
        (_as_dicts, _as_dicts),
        (_as_dicts, points),
        (points, _labels),
        (_inputs_only, _labels),
        (_inputs_only, _labels_only),
        (_in_one_tuple, points),
    ],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_supported_loaders(
    cluster: Formed, inputs: Callable[[], Any], labels: Callable[[], Any], nodes: int
) -> None:
    local = cluster(nodes=nodes, schedule="sync")

    def script(name: str) -> float:
        with local.node(name, labels=labels(), test_labels=labels()) as own:
            trainer = Trainer(own, train_loader=inputs(), val_loader=inputs(), epochs=2, save=True)
            trainer.train()
            return trainer.evaluate()

    figures = local.results(script)
    model = _trained_alone(2)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in local.fused().items())
    assert figures == [pytest.approx(_accuracy(model, points()))] * nodes


def test_a_cluster_of_one_needs_no_labels(cluster: Formed) -> None:
    local = cluster(nodes=1)

    def script(name: str) -> Any:
        with local.node(name) as own:
            trainer = Trainer(own, train_loader=points(), val_loader=points(), epochs=2, save=True)
            trainer.train()
            return trainer.evaluate()

    assert local.results(script) == [pytest.approx(_accuracy(_trained_alone(2), points()))]
    expected = _trained_alone(2).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in local.fused().items())


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_stage_without_trainable_parameters(cluster: Formed, schedule: str) -> None:
    local = cluster("half-frozen", 2, schedule=schedule)
    local.train(lambda: (points(), None), node={"clip_grad_norm": 1.0}, epochs=3, save=True, val_freq=9)
    fused, before = local.fused(), small_model("half-frozen").state_dict()
    same = {name for name in before if torch.equal(fused[name], before[name])}
    assert same == {"first.weight", "first.bias", "second.weight", "second.bias"}


def test_accuracy_with_one_hot_labels(cluster: Formed) -> None:
    def loader() -> list[Any]:
        return [(x, nn.functional.one_hot(y, 3).float()) for x, y in points()]

    local = cluster(schedule="sync")
    outcomes = local.train(lambda: (loader(), loader()), node={}, val_freq=9)
    figure = outcomes["node_0"].result
    answers = 22
    assert figure * answers == pytest.approx(round(figure * answers))
    assert 0 <= figure <= 1


def test_a_regression_reports_its_loss(cluster: Formed, capsys: pytest.CaptureFixture[str]) -> None:
    def loader() -> list[Any]:
        return [(x, x[:, :3] * 2) for x, _ in points()]

    local = cluster(schedule="sync", criterion=nn.MSELoss(), optimizer_params={"lr": 1e-9})
    outcomes = local.train(lambda: (loader(), loader()), node={}, val_freq=9)
    model = small_model("mlp")
    x, y = (torch.cat(parts) for parts in zip(*loader(), strict=True))
    assert outcomes["node_1"].result == pytest.approx(nn.functional.mse_loss(model(x), y).item())
    assert "loss " in capsys.readouterr().out


# Subclasses

DONE: list[str] = []


class BERT_Trainer(ravnest.Trainer):  # noqa: N801 - as in the documentation
    def __init__(self, node=None, train_loader=None, epochs=1):
        super().__init__(node=node, train_loader=train_loader, epochs=epochs)

    def train(self):
        self.prelim_checks()  # Mandatory function call
        for epoch in range(self.epochs):  # noqa: B007 - as in the documentation
            data_id = 0
            for batch in self.train_loader:
                self.node.forward_compute(
                    data_id=data_id,
                    tensors=batch["input_ids"],
                    l_token_type_ids_=batch["token_type_ids"],
                    l_attention_mask_=batch["attention_mask"],
                )
                data_id += 1  # noqa: SIM113 - Increments at every batch

            self.node.wait_for_backwards()  # To be called at end of every epoch

        DONE.append("BERT Training Done!")


def _sentences() -> DataLoader:
    made = torch.Generator().manual_seed(2)
    rows = []
    for _ in range(22):
        ids = torch.randint(0, 16, (5,), generator=made)
        rows.append(
            {
                "input_ids": ids,
                "token_type_ids": ids % 2,
                "attention_mask": (torch.arange(5) < 2 + int(ids[0]) % 4).long(),
                "labels": ids.flip(0),
            }
        )
    return DataLoader(rows, 4, shuffle=True, generator=torch.Generator().manual_seed(4))


def _bert_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_the_documented_bert_trainer(cluster: Formed, nodes: int) -> None:
    local = cluster("encoder", nodes, schedule="sync", criterion=_bert_loss)
    DONE.clear()

    def script(name: str) -> None:
        with local.node(name, labels=_sentences()) as own:
            trainer = BERT_Trainer(node=own, train_loader=_sentences(), epochs=2)
            trainer.save = True
            trainer.train()

    local.results(script)
    assert len(DONE) == nodes
    model = small_model("encoder")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = _sentences()
    for _ in range(2):
        for batch in loader:
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            _bert_loss(model(**inputs), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    fused = local.fused()
    assert all(torch.equal(fused[name], value) for name, value in model.state_dict().items())


class _OwnValidation(Trainer):
    """Trainer with its own evaluate, which averages over batches."""

    def evaluate(self) -> float:
        accuracies = [
            self.node.no_grad_forward_compute(tensors=x, output_type="val_accuracy")
            for x, _ in self.val_loader
        ]
        return sum(accuracies) / len(accuracies)


def test_a_subclass_with_its_own_evaluate(cluster: Formed) -> None:
    local = cluster(nodes=3, schedule="sync")

    def script(name: str) -> Any:
        with local.node(name, labels=points(), test_labels=points()) as own:
            trainer = _OwnValidation(own, train_loader=points(), val_loader=points(), val_freq=9)
            trainer.train()
            return trainer.evaluate()

    model = _trained_alone(1)
    root, *others = local.results(script)
    by_batch = [_accuracy(model, [batch]) for batch in points()]
    assert root == pytest.approx(sum(by_batch) / len(by_batch))
    assert others == [pytest.approx(_accuracy(model, points()))] * 2, "the figure, on every node"


class _Wrapped(Trainer):
    """Trainer that extends the inherited methods."""

    def train(self) -> None:
        super().train()
        self.done = True

    def evaluate(self) -> float | None:
        return super().evaluate()


def test_a_subclass_may_call_what_it_overrides(cluster: Formed) -> None:
    local = cluster(nodes=2, schedule="sync")

    def script(name: str) -> Any:
        with local.node(name, labels=points(), test_labels=points()) as own:
            trainer = _Wrapped(own, train_loader=points(), val_loader=points(), val_freq=9, save=True)
            trainer.train()
            return trainer.done, trainer.evaluate()

    model = _trained_alone(1)
    assert local.results(script) == [(True, pytest.approx(_accuracy(model, points())))] * 2
    expected = copy.deepcopy(model.state_dict())
    assert all(torch.equal(value, expected[name]) for name, value in local.fused().items())
