"""Order of the data at Root and Leaf: the same, or the run ends with an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from local_cluster import Formed, LocalCluster
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_cases import points, small_model

from ravnest import Trainer
from ravnest.errors import RunError

Loaders = tuple[Any, Any]


def _shuffled(seed: int = 3, size: int = 5, count: int = 22) -> Loaders:
    """Return training and validation data, shuffled by one generator; the last batch is smaller."""
    order = torch.Generator().manual_seed(seed)
    return (
        points(count, size, shuffle=True, generator=order),
        points(17, size, seed=9, shuffle=True, generator=order),
    )


def _run(local: LocalCluster, root: Callable[[], Loaders], leaf: Callable[[], Loaders]) -> list[Any]:
    def script(name: str) -> Any:
        train, validation = root()
        labels, test_labels = leaf()
        with local.node(name, labels=labels, test_labels=test_labels) as own:
            trainer = Trainer(own, train_loader=train, val_loader=validation, epochs=3, save=True)
            trainer.train()
            return trainer.evaluate()

    outcomes = local.run(script)
    return [outcomes[name].error or outcomes[name].result for name in local.names]


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_shuffling_and_validation_keep_the_order(cluster: Formed, schedule: str) -> None:
    """Every batch is compared, so a successful run had the same order; in sync weights are equal."""
    local = cluster(nodes=3, schedule=schedule)
    results = _run(local, _shuffled, _shuffled)
    assert all(isinstance(figure, float) for figure in results), results
    if schedule == "async":
        return
    model = small_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train, validation = _shuffled()
    for _ in range(3):
        for x, y in train:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        list(validation)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in local.fused().items())


def test_a_loop_that_stops_early_keeps_the_order(cluster: Formed) -> None:
    """Later epochs are shuffled as in a single process that stops at the same batch."""

    class Short(Trainer):
        def train(self) -> None:
            self.prelim_checks()
            for _ in range(3):
                for number, (x, _) in enumerate(self.train_loader):
                    self.node.forward_compute(x)
                    if number == 2:
                        break
                self.node.wait_for_backwards()

    local = cluster()

    def script(name: str) -> None:
        with local.node(name, labels=_shuffled()[0]) as own:
            Short(own, train_loader=_shuffled()[0]).train()

    local.results(script)


DIFFERENT: dict[str, tuple[Callable[[], Loaders], Callable[[], Loaders], str]] = {
    "another seed": (_shuffled, lambda: _shuffled(seed=4), "micro-batch 0 has different targets"),
    "another batch size": (
        _shuffled,
        lambda: _shuffled(size=4),
        "micro-batch 0 has 5 samples at the Root, 4 at the Leaf",
    ),
    "a shuffle without generator": (
        lambda: (points(shuffle=True), None),
        lambda: (points(shuffle=True), None),
        "micro-batch 0 has different targets",
    ),
    "a shorter loader": (
        lambda: (points(20), None),
        lambda: (list(points(20))[:3], None),
        "the Root sent micro-batch 3, but labels at the Leaf ends before it",
    ),
    "a longer loader": (
        lambda: (list(points(20))[:3], None),
        lambda: (points(20), None),
        "the Root's loader has ended after 3 micro-batches, but labels at the Leaf has more",
    ),
    "shorter labels in a tensor": (
        lambda: (points(20), None),
        lambda: (torch.cat([y for _, y in points(20)])[:10], None),
        "the Root sent micro-batch 2, but labels at the Leaf ends before it",
    ),
    "another order later on": (
        lambda: (points(20), None),
        lambda: ([b for i in (0, 1, 3, 2) for b in [list(points(20))[i]]], None),
        "micro-batch 2 has different targets",
    ),
    "another validation": (
        lambda: (points(), points()),
        lambda: (points(), points(seed=2)),
        "micro-batch 0 has different targets",
    ),
    "shorter validation": (
        lambda: (points(), points()),
        lambda: (points(), list(points())[:2]),
        "the Root sent micro-batch 2, but test_labels at the Leaf ends before it",
    ),
    "labels of another type": (
        lambda: (points(), None),
        lambda: ([(x, y.int()) for x, y in points()], None),
        "micro-batch 0 has different targets",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_data_end_the_run_on_all_nodes(cluster: Formed, case: str) -> None:
    root, leaf, expected = DIFFERENT[case]
    local = cluster(nodes=3)
    for found in _run(local, root, leaf):
        assert isinstance(found, RunError)
        text = str(found)
        assert text.startswith("node_2: "), "the error names the node that found the difference"
        assert expected in text
        assert "check that both use the same dataset, batch size and set_seed()" in text
        assert "\n" not in text


def test_inputs_are_compared_if_the_root_has_no_targets(cluster: Formed) -> None:
    def inputs_only() -> list[Any]:
        return [{"x": x} for x, _ in points()]

    def reversed_() -> list[Any]:
        return [{"x": x.flip(0), "labels": y.flip(0)} for x, y in points()]

    for found in _run(cluster(), lambda: (inputs_only(), None), lambda: (reversed_(), None)):
        assert isinstance(found, RunError)
        assert "micro-batch 0 has different inputs" in str(found)


def test_a_warning_if_nothing_can_be_compared(cluster: Formed, caplog: pytest.LogCaptureFixture) -> None:
    def labels() -> list[Any]:
        return [y for _, y in points()]

    local = cluster()
    with caplog.at_level("WARNING"):
        local.results(lambda name: _train(local, name, [x for x, _ in points()], labels()))
    expected = [r for r in caplog.records if "only the number and size of micro-batches" in r.message]
    assert len(expected) == 1


def _train(local: LocalCluster, name: str, train: Any, labels: Any) -> None:
    with local.node(name, labels=labels) as own:
        Trainer(own, train_loader=train, epochs=2).train()


def test_the_loader_may_draw_at_its_end(cluster: Formed) -> None:
    """A sampler that draws a random number at its end does so on both sides."""

    class Drawing:
        def __init__(self, generator: torch.Generator) -> None:
            self._generator = generator

        def __iter__(self) -> Any:
            yield from torch.randperm(22, generator=self._generator).tolist()
            torch.rand(1, generator=self._generator)

        def __len__(self) -> int:
            return 22

    def loader() -> DataLoader:
        base = points()
        generator = torch.Generator().manual_seed(5)
        dataset = base.dataset
        assert isinstance(dataset, TensorDataset)
        return DataLoader(dataset, 5, sampler=Drawing(generator), generator=generator)

    local = cluster()

    def script(name: str) -> None:
        with local.node(name, labels=loader()) as own:
            Trainer(own, train_loader=loader(), epochs=4).train()

    local.results(script)
