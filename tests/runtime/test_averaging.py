"""Averaging between clusters in one process, over the in-memory network."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import DEADLINE
from many_clusters import Clusters, form_clusters, raise_errors
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from training_cases import SMALL_MODELS, SmallCNN, small_model, token_loaders, token_loss

import ravnest
from ravnest import Trainer
from ravnest.averaging.events import ClusterJoined
from ravnest.averaging.member import Member, MemberAction, MemberEvent
from ravnest.errors import SettingsError


@pytest.fixture(autouse=True)
def _work_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def points_data(count: int = 96) -> TensorDataset:
    made = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 4, generator=made)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def shards(data: Any, folder: Path, size: int = 4) -> Any:
    """Return loaders of a cluster's share, shuffled in the same order on all its nodes."""

    def loaders(name: str) -> tuple[DataLoader, None]:
        order = torch.Generator().manual_seed(9)
        share = ravnest.shard(data, name, folder=folder / "node_data")
        return DataLoader(share, size, shuffle=True, generator=order), None

    return loaders


def in_order(data: Any, folder: Path, size: int) -> Any:
    """Return loaders of a cluster's share, not shuffled."""
    return lambda name: (
        DataLoader(ravnest.shard(data, name, folder=folder / "node_data"), size),
        None,
    )


def mlp_clusters(folder: Path, sizes: Sequence[int] = (3, 2), **options: Any) -> Clusters:
    return form_clusters(folder, small_model("mlp"), SMALL_MODELS["mlp"][1], sizes, **options)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return list(first) == list(second) and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [
        ((3, 2), "async"),
        ((3, 2), "sync"),
        ((4, 1), "async"),
        ((1, 1), "sync"),
        ((2, 1, 3), "async"),
        pytest.param((1, 1), "async", marks=pytest.mark.full),
        pytest.param((2, 2), "async", marks=pytest.mark.full),
        pytest.param((2, 2), "sync", marks=pytest.mark.full),
        pytest.param((4, 1), "sync", marks=pytest.mark.full),
        pytest.param((2, 1, 3), "sync", marks=pytest.mark.full),
    ],
)
def test_clusters_end_with_the_same_model(tmp_path: Path, sizes: tuple[int, ...], schedule: str) -> None:
    clusters = mlp_clusters(tmp_path, sizes, schedule=schedule, reduce_factor=3)
    raise_errors(clusters.train(shards(points_data(), tmp_path), epochs=2, save=True))
    models = [clusters.fused(c) for c in range(len(sizes))]
    assert all(same(models[0], model) for model in models[1:])
    assert not same(models[0], small_model("mlp").state_dict())


def test_a_second_training_ends_with_the_same_model_too(tmp_path: Path) -> None:
    """The end of training counts as a phase: validations and checkpoints after it are numbered right."""
    clusters = mlp_clusters(tmp_path, (2, 1), schedule="sync", reduce_factor=3)
    first: dict[str, dict[str, torch.Tensor]] = {}

    def again(name: str, trainer: Trainer) -> None:
        if name == clusters.names[0][0]:
            first["model"] = clusters.fused(0)
        trainer.evaluate()
        trainer.train()

    data = points_data()
    share = shards(data, tmp_path)
    raise_errors(
        clusters.train(
            lambda name: (share(name)[0], DataLoader(data, 8)), then=again, epochs=1, save=True
        )
    )
    models = [clusters.fused(c) for c in range(2)]
    assert same(models[0], models[1])
    assert not same(models[0], first["model"])


def test_blocking_rounds_at_every_update_equal_large_batches(tmp_path: Path) -> None:
    clusters = mlp_clusters(
        tmp_path,
        (2, 1, 1),
        schedule="sync",
        averaging="blocking",
        reduce_factor=1,
        optimizer_params={"lr": 0.1, "momentum": 0.9},
    )
    data = points_data()
    loaders = in_order(data, tmp_path, size=4)
    raise_errors(clusters.train(loaders, epochs=2, save=True))
    model = small_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    own = [loaders(names[0])[0] for names in clusters.names]
    for _ in range(2):
        for parts in zip(*own, strict=True):
            inputs, labels = (torch.cat([part[i] for part in parts]) for i in range(2))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    expected = model.state_dict()
    for cluster in range(3):
        fused = clusters.fused(cluster)
        assert all(torch.allclose(fused[k], expected[k], rtol=0, atol=1e-6) for k in expected)


def test_buffers_are_averaged_and_counts_are_not(tmp_path: Path) -> None:
    images = torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(images, torch.arange(40) % 10)
    model = SmallCNN()
    clusters = form_clusters(tmp_path, model, (images[:4],), (2, 1))
    sizes = {0: 4, 1: 2}  # different batch counts per cluster

    def loaders(name: str) -> tuple[DataLoader, None]:
        share = ravnest.shard(data, name, folder=tmp_path / "node_data")
        return DataLoader(share, sizes[clusters.of(name)]), None

    raise_errors(clusters.train(loaders, epochs=1, save=True))
    first, second = clusters.fused(0), clusters.fused(1)
    assert torch.equal(first["norm1.running_mean"], second["norm1.running_mean"])
    assert torch.equal(first["norm2.running_var"], second["norm2.running_var"])
    assert not torch.equal(first["norm1.running_mean"], torch.zeros(8))
    assert int(first["norm1.num_batches_tracked"]) == 5
    assert int(second["norm1.num_batches_tracked"]) == 10
    assert all(torch.equal(first[k], second[k]) for k in first if "num_batches" not in k)


@pytest.mark.parametrize("schedule", ["async", "sync"])
def test_tied_weights_stay_tied(tmp_path: Path, schedule: str) -> None:
    example = SMALL_MODELS["tied-gpt"][1]
    options = {"schedule": schedule, "criterion": token_loss, "reduce_factor": 2}
    clusters = form_clusters(tmp_path, small_model("tied-gpt"), example, (3, 2), **options)
    raise_errors(clusters.train(lambda _: token_loaders(8), epochs=1, save=True))
    first, second = clusters.fused(0), clusters.fused(1)
    assert same(first, second)
    assert torch.equal(first["embed.weight"], first["head.weight"])


def test_optimizer_state_is_averaged_on_request(tmp_path: Path) -> None:
    adam = {"optimizer": torch.optim.AdamW, "optimizer_params": {"lr": 1e-2}}
    states: dict[str, dict[str, Any]] = {}

    def then(name: str, trainer: Any) -> None:
        optimizer = trainer.node._ensure_started().execution.updates.optimizer
        states[name] = next(iter(optimizer.state.values()))

    clusters = mlp_clusters(tmp_path, (1, 1), average_optim=True, reduce_factor=4, **adam)
    raise_errors(clusters.train(shards(points_data(), tmp_path), epochs=1, then=then))
    first, second = states["node_0"], states["node_1"]
    assert torch.equal(first["exp_avg"], second["exp_avg"])
    assert torch.equal(first["exp_avg_sq"], second["exp_avg_sq"])
    assert bool((first["exp_avg_sq"] >= 0).all())
    assert float(first["step"]) == 12

    states.clear()
    clusters.nodes.options["average_optim"] = False
    raise_errors(clusters.train(shards(points_data(), tmp_path), epochs=1, then=then))
    assert not torch.equal(states["node_0"]["exp_avg"], states["node_1"]["exp_avg"])


def test_clusters_train_with_a_trimmed_mean(tmp_path: Path) -> None:
    found: dict[str, dict[str, torch.Tensor]] = {}
    rounds: list[int] = []

    def then(name: str, trainer: Any) -> None:
        runtime = trainer.node._ensure_started()
        found[name] = {
            key: value.clone() for key, value in runtime.execution.module.state_dict().items()
        }
        rounds.extend(outcome.trimmed for outcome in runtime.outcomes if outcome.committed)

    options = {"robust_mean": "trimmed", "averaging": "blocking", "reduce_factor": 4}
    clusters = mlp_clusters(tmp_path, (1, 1, 1), **options)
    raise_errors(clusters.train(shards(points_data(), tmp_path), epochs=1, then=then))
    assert same(found["node_0"], found["node_1"])
    assert same(found["node_0"], found["node_2"])
    assert len(rounds) >= 2
    assert set(rounds) == {1}


@pytest.mark.parametrize(("sizes", "wish"), [((1, 1), "trimmed"), ((1, 1, 1), "median")])
def test_a_robust_mean_that_is_not_possible_is_refused(
    tmp_path: Path, sizes: tuple[int, ...], wish: str
) -> None:
    clusters = mlp_clusters(tmp_path, sizes, robust_mean=wish)
    words = "plan has 2: of two, nobody can tell" if wish == "trimmed" else "None or 'trimmed'"
    with pytest.raises(SettingsError, match=words):
        clusters.nodes.node("node_0")


def test_nan_of_one_cluster_is_left_out_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clusters = mlp_clusters(tmp_path, (2, 1), reduce_factor=4, stop_on_nan=None)
    loaders = shards(points_data(), tmp_path)
    spoilt = threading.Event()

    def broken(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(outputs, batch[-1])
        if spoilt.is_set():
            return loss
        spoilt.set()
        return loss * float("nan")

    def node(name: str) -> dict[str, Any]:
        return {"criterion": broken} if clusters.of(name) == 1 else {}

    with caplog.at_level("INFO", logger="ravnest"):
        raise_errors(clusters.train(loaders, node=node, epochs=3, save=True))
    assert any("NaN or Inf in first.weight" in record.getMessage() for record in caplog.records)
    first, second = clusters.fused(0), clusters.fused(1)
    assert same(first, second)
    assert all(bool(tensor.isfinite().all()) for tensor in first.values())


def test_a_fast_cluster_does_not_wait_for_a_slow_one_and_weighs_more(tmp_path: Path) -> None:
    clusters = mlp_clusters(tmp_path, (1, 1), reduce_factor=4)
    release = threading.Event()
    weights: list[dict[int, float]] = []

    def slow(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        assert release.wait(DEADLINE), "the fast cluster has not read all its data"
        return nn.functional.cross_entropy(outputs, batch[-1])

    class Fast:
        """A loader that releases the slow cluster at its end."""

        def __init__(self, loader: DataLoader) -> None:
            self.dataset = loader.dataset
            self._loader = loader

        def __len__(self) -> int:
            return len(self._loader)

        def __iter__(self) -> Iterator[Any]:
            yield from self._loader
            release.set()

    def loaders(name: str) -> tuple[Any, None]:
        loader, _ = shards(points_data(), tmp_path)(name)
        if clusters.of(name) == 0:
            return Fast(loader), None
        # Fewer samples than the fast cluster has before any round, whenever that is.
        return DataLoader(Subset(loader.dataset, range(12)), 4), None

    def node(name: str) -> dict[str, Any]:
        return {"criterion": slow, "labels": loaders("node_1")[0]} if clusters.of(name) else {}

    def then(name: str, trainer: Any) -> None:
        if name == "node_0":
            weights.extend(dict(outcome.weights) for outcome in trainer.node._ensure_started().outcomes)

    raise_errors(clusters.train(loaders, node=node, epochs=1, then=then, save=True))
    assert same(clusters.fused(0), clusters.fused(1))
    assert weights[0][0] > weights[0][1], "the cluster with more samples weighs more"


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_compressed_rounds_end_with_the_same_model(tmp_path: Path, codec: str) -> None:
    data = points_data(192)
    example = (torch.rand(4, 4),)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    options = {"reduce_factor": 2, "averaging": "blocking", "schedule": "sync"}
    sent: dict[str, list[int]] = {}

    def train(folder: Path, compression: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        clusters = form_clusters(folder, model, example, (2, 1), compression=compression, **options)

        def then(name: str, trainer: Any) -> None:
            if name == "node_0":
                sent[str(compression)] = [o.sent_bytes for o in trainer.node._ensure_started().outcomes]

        raise_errors(clusters.train(shards(data, folder), epochs=1, save=True, then=then))
        first, second = clusters.fused(0), clusters.fused(1)
        assert same(first, second)
        return first

    exact, lossy = train(tmp_path / "exact", False), train(tmp_path / "lossy", codec)
    moved = torch.cat([(exact[k] - model.state_dict()[k]).flatten() for k in exact]).norm()
    off = torch.cat([(exact[k] - lossy[k]).flatten() for k in exact]).norm()
    assert off < 0.05 * moved
    plain, small = sent["False"], sent[codec]
    assert small[0] == plain[0], "the first round has no base"
    assert small[-1] == plain[-1], "the final round is exact"
    assert small[1] * (1.9 if codec != "int8" else 3.0) < plain[1]


@pytest.mark.parametrize("late", [0, 1])
def test_a_cluster_that_connects_late_takes_part(
    tmp_path: Path, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = mlp_clusters(tmp_path, (1, 1), reduce_factor=2)
    early_trains, late_trains, late_joined = threading.Event(), threading.Event(), threading.Event()
    handle = Member.handle

    def watched(member: Member, event: MemberEvent, now: float) -> list[MemberAction]:
        actions = handle(member, event, now)
        if event == ClusterJoined(late):  # at the early cluster
            late_joined.set()
        return actions

    monkeypatch.setattr(Member, "handle", watched)

    def early(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        if early_trains.is_set():
            assert late_trains.wait(DEADLINE)
            assert late_joined.wait(DEADLINE)
        early_trains.set()
        return nn.functional.cross_entropy(outputs, batch[-1])

    def coming(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        late_trains.set()
        return nn.functional.cross_entropy(outputs, batch[-1])

    def loaders(name: str) -> Any:
        assert clusters.of(name) != late or early_trains.wait(DEADLINE)
        return shards(points_data(), tmp_path)(name)

    def node(name: str) -> dict[str, Any]:
        if clusters.of(name) == late:
            return {"criterion": coming}
        return {"criterion": early, "connect_timeout": 0.2}

    raise_errors(clusters.train(loaders, node=node, epochs=1, save=True))
    assert same(clusters.fused(0), clusters.fused(1))


def test_a_root_that_waits_for_other_clusters_notices_a_failure_of_its_own(tmp_path: Path) -> None:
    # Far longer than the nodes may take: a Root that waited for the other cluster would hang.
    clusters = mlp_clusters(tmp_path, (2, 1), connect_timeout=10 * DEADLINE)
    loaders = shards(points_data(), tmp_path)
    clusters.nodes.names = clusters.names[0]  # the other cluster never connects

    def script(name: str) -> None:
        train_loader, _ = loaders(name)
        with clusters.nodes.node(name, labels=train_loader) as own:
            own.start()
            if not own.is_root:
                own.close("the Leaf's disk is full")
            else:
                Trainer(own, train_loader=train_loader).train()

    root, _ = clusters.nodes.errors(script)
    assert "the Leaf's disk is full" in str(root)


def test_an_unexpected_error_in_averaging_ends_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = mlp_clusters(tmp_path, (1, 1))

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(Member, "handle", broken)
    outcomes = clusters.train(shards(points_data(), tmp_path), epochs=1)
    assert all("ZeroDivisionError: a bug of ours" in str(o.error) for o in outcomes.values())
