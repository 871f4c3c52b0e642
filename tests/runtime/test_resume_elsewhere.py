"""Training continues on another number of nodes and stages as if it had never moved."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import LocalCluster, form
from many_clusters import Clusters, form_clusters, raise_errors
from test_checkpoints import SCHEDULERS, StoppedError, StoppingLoader, assert_same_result
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_cases import (
    SmallCNN,
    TiedGPT,
    image_loaders,
    points,
    small_model,
    token_loaders,
    token_loss,
)
from workloads import GPT

from ravnest import Trainer, set_seed, shard
from ravnest.errors import StageFormatError
from ravnest.store.checkpoint import SEED, CheckpointFolder, read_manifest
from ravnest.store.checkpoint_sets import find_checkpoint_sets
from ravnest.store.plain_data import decode

EPOCHS = 3
VOCABULARY = 4096
Loaders = Callable[[], tuple[DataLoader[Any], DataLoader[Any] | None]]


class Case:
    """A model with its data, and the folders of its plans."""

    def __init__(
        self,
        folder: Path,
        make: Callable[[], nn.Module],
        example: tuple[Any, ...],
        loaders: Loaders,
        criterion: Callable[..., Any],
        **node: Any,
    ) -> None:
        self.folder = folder
        self._make = make
        self._example = example
        self._loaders = loaders
        self._options = {
            "schedule": "sync",
            "micro_batches": 1,
            "optimizer": torch.optim.AdamW,
            "optimizer_params": {"lr": 1e-2},
            "checkpoint_updates": 4,
            "criterion": criterion,
            **node,
        }

    def form(self, nodes: int, resume_from: Path | None = None, **given: Any) -> tuple[Path, list[str]]:
        """Split the model; return the folder of the stages and the names of the nodes."""
        folder = self.folder / f"{nodes}-{'again' if resume_from else 'first'}"
        set_seed(7)
        return folder, form(folder, self._make(), self._example, nodes, resume_from=resume_from, **given)

    def train(
        self, folder: Path, formed: tuple[Path, list[str]], *, stop: int | None = None, **given: Any
    ) -> list[BaseException | None]:
        """Train with files in ``folder``; the Root's script ends after batch ``stop``."""
        source, names = formed
        cluster = LocalCluster(folder, names, node_data=source / "node_data")
        resume = given.pop("resume", False)

        def script(name: str) -> None:
            train_loader, val_loader = self._loaders()
            labels = {"labels": train_loader, "test_labels": val_loader}
            with cluster.node(name, **(labels | self._options | given)) as own:
                data: Any = train_loader
                if stop is not None and own.is_root:
                    data = StoppingLoader(train_loader, stop)
                Trainer(
                    own,
                    train_loader=data,
                    val_loader=val_loader,
                    epochs=EPOCHS,
                    save=True,
                    resume=resume,
                ).train()

        return cluster.errors(script)


def make_gpt() -> nn.Module:
    return GPT(VOCABULARY, 32, 2, 4, heads=2)


def gpt_loaders() -> tuple[DataLoader[Any], None]:
    tokens = torch.randint(0, VOCABULARY, (12, 4), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens, tokens.flip(1)), 2), None


def make_case(name: str, folder: Path) -> Case:
    cross_entropy = nn.functional.cross_entropy
    match name:
        case "cnn":
            example: tuple[Any, ...] = (torch.rand(8, 1, 8, 8),)
            options = SCHEDULERS["updates"]
            return Case(folder, SmallCNN, example, image_loaders, cross_entropy, **options)
        case "tied-gpt":
            example = (torch.randint(0, 16, (4, 8)),)
            options = {"micro_batches": 2, "clip_grad_norm": 0.5, **SCHEDULERS["epochs"]}
            return Case(folder, TiedGPT, example, token_loaders, token_loss, **options)
    example = (torch.rand(5, 4),)

    def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
        order = torch.Generator().manual_seed(3)
        return points(50, shuffle=True, generator=order), points(shuffle=True, generator=order)

    options = {**SCHEDULERS["updates"], "optimizer_params": {"lr": 1e-2, "amsgrad": True}}
    return Case(folder, lambda: small_model(name), example, loaders, cross_entropy, **options)


@pytest.mark.parametrize(
    ("case", "before", "after"),
    [
        ("cnn", 3, (1, 2, 4)),
        ("cnn", 1, (3,)),
        # One stage sums the gradients of a tied weight in another order than several stages do.
        ("tied-gpt", 3, (2, 4)),
        ("half-frozen", 3, (1, 2, 4)),
    ],
)
def test_training_continues_with_another_number_of_stages(
    tmp_path: Path, case: str, before: int, after: tuple[int, ...]
) -> None:
    model = make_case(case, tmp_path)
    first = model.form(before)
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert not any(model.train(whole, first))
    errors = model.train(moved, first, stop=14)
    assert isinstance(errors[0], StoppedError)
    for nodes in after:
        folder = tmp_path / f"to-{nodes}"
        shutil.copytree(moved, folder)
        second = model.form(nodes, folder / "checkpoints")
        assert len(second[1]) == nodes
        assert not any(model.train(folder, second, resume=True))
        assert_same_result(whole, folder)


def test_blocks_of_rows_become_whole_tensors_and_blocks_again(tmp_path: Path) -> None:
    """Another number of blocks sums in another order, so that results agree within rounding."""
    example = (torch.randint(0, VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(0)),)
    options = {"optimizer_params": {"lr": 1e-2, "eps": 1e-4}, "checkpoint_updates": 2}
    model = Case(tmp_path, make_gpt, example, gpt_loaders, token_loss, **options)
    ram = {"ram": 0.002, "optimizer": torch.optim.AdamW}
    first = model.form(4, **ram)
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert not any(model.train(whole, first))
    assert any(model.train(moved, first, stop=8))
    second = model.form(2, moved / "checkpoints")
    assert any(model.train(moved, second, stop=14, resume=True))
    third = model.form(5, moved / "checkpoints", **ram)
    assert [is_cut(*formed) for formed in (first, second, third)] == [True, False, True]
    assert not any(model.train(moved, third, resume=True))
    losses = [
        [float(line) for line in (folder / "losses.txt").read_text().split()]
        for folder in (whole, moved)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert len(losses[0]) == 18


def is_cut(folder: Path, names: list[str]) -> bool:
    """Return whether the plan cuts tensors along their rows."""
    stages = (folder / "node_data").glob("cluster_0/*/stage.json")
    return any('"rows"' in path.read_text() for path in stages)


def test_a_node_that_lost_its_disk_continues_with_replicas(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_case("cnn", tmp_path)
    first = model.form(3)
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert not any(model.train(whole, first))
    assert any(model.train(moved, first, stop=14))
    lost = CheckpointFolder(moved / "checkpoints" / first[1][2])
    for checkpoint in lost.ids():
        lost.remove(checkpoint)
    damaged = CheckpointFolder(moved / "checkpoints" / first[1][0])
    newest = damaged.tensors_path(damaged.ids()[-1])
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    second = model.form(2, moved / "checkpoints")
    assert "damaged" in caplog.text
    assert not any(model.train(moved, second, resume=True))
    assert_same_result(whole, moved)


def test_the_shipped_checkpoint_is_used_only_by_the_run_that_wants_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_case("cnn", tmp_path)
    first = model.form(3)
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert not any(model.train(whole, first))
    assert any(model.train(moved, first, stop=14))
    second = model.form(2, moved / "checkpoints")
    # Without resume, training begins with the original weights, and its own checkpoints count.
    anew = tmp_path / "anew"
    assert any(model.train(anew, second, stop=14))
    assert "begins without it: Trainer(resume=True)" in caplog.text
    assert not any(model.train(anew, second, resume=True))
    assert_same_result(whole, anew)
    # With it, all of it is used again after everything else was lost.
    assert any(model.train(moved, second, stop=22, resume=True))
    shutil.rmtree(moved / "checkpoints" / second[1][1])
    shutil.rmtree(moved / "checkpoints" / second[1][0] / "replica_of_stage_1")
    assert not any(model.train(moved, second, resume=True))
    assert_same_result(whole, moved)


def test_a_plan_without_resume_from_ships_no_checkpoint(tmp_path: Path) -> None:
    model = make_case("half-frozen", tmp_path)
    first = model.form(3)
    moved = tmp_path / "moved"
    assert any(model.train(moved, first, stop=14))
    folder, _ = second = model.form(2, moved / "checkpoints")
    shipped = list((folder / "node_data").glob(f"cluster_*/*/{SEED}/*.json"))
    assert len(shipped) == 2
    set_seed(7)
    form(folder, small_model("half-frozen"), (torch.rand(5, 4),), 2)
    assert not list((folder / "node_data").glob(f"cluster_*/*/{SEED}"))
    assert not any(model.train(tmp_path / "anew", second, resume=True))


def test_training_that_stops_at_once_can_move_again(tmp_path: Path) -> None:
    model = make_case("half-frozen", tmp_path)
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    first = model.form(3)
    assert not any(model.train(whole, first))
    assert any(model.train(moved, first, stop=14))
    second = model.form(2, moved / "checkpoints")
    before = find_checkpoint_sets(moved / "checkpoints")[0].id
    assert any(model.train(moved, second, stop=0, resume=True))
    assert find_checkpoint_sets(moved / "checkpoints")[0].id == before
    third = model.form(4, moved / "checkpoints")
    assert not any(model.train(moved, third, resume=True))
    assert_same_result(whole, moved)


def test_a_folder_without_all_stages_is_refused(tmp_path: Path) -> None:
    model = make_case("half-frozen", tmp_path)
    first = model.form(3)
    moved = tmp_path / "moved"
    with pytest.raises(StageFormatError, match="holds no checkpoints"):
        model.form(2, moved)
    assert any(model.train(moved, first, stop=14))
    checkpoints = moved / "checkpoints"
    shutil.rmtree(checkpoints / first[1][2])
    shutil.rmtree(checkpoints / first[1][1] / "replica_of_stage_2")
    with pytest.raises(StageFormatError, match="lacks stage 2 of 3"):
        model.form(2, checkpoints)
    assert not (tmp_path / "2-again" / "node_data" / "plan.json").exists()


def clusters_of(folder: Path, sizes: list[int], resume_from: Path | None = None) -> Clusters:
    """Split a model for clusters of these sizes; each cluster has its share of the data."""
    set_seed(7)
    options = {"schedule": "sync", "checkpoint_updates": 4, "reduce_factor": 3}
    example = (torch.rand(5, 4),)
    return form_clusters(folder, small_model("mlp"), example, sizes, resume_from, **options)


def train_clusters(clusters: Clusters, **trainer: Any) -> None:
    def loaders(name: str) -> tuple[DataLoader[Any], None]:
        data = points(60).dataset
        share = shard(data, name, folder=clusters.nodes.folder / "node_data")
        return DataLoader(share, 5, shuffle=True, generator=torch.Generator().manual_seed(3)), None

    raise_errors(clusters.train(loaders, save=True, **trainer))


def test_a_cluster_becomes_two_that_average(tmp_path: Path) -> None:
    train_clusters(clusters_of(tmp_path / "one", [2]), epochs=1)
    two = clusters_of(tmp_path / "two", [1, 1], tmp_path / "one" / "checkpoints")
    train_clusters(two, epochs=2, resume=True)
    found = find_checkpoint_sets(tmp_path / "two" / "checkpoints")
    # 12 updates of one cluster, then an epoch of 30 samples in each of two.
    assert [each.id.update for each in found.values()] == [12 + 6] * 2
    one, other = two.fused(0), two.fused(1)
    assert all(torch.equal(one[key], other[key]) for key in one), "the final round averages both"


def positions(folder: Path) -> list[tuple[int, str, int]]:
    """Return cluster, run and batches of the epoch of the checkpoints that Roots are shipped with."""
    found = []
    for path in sorted((folder / "node_data").glob(f"cluster_*/node_*/{SEED}/*.json")):
        manifest = read_manifest(path)
        if manifest.stage == 0:
            found.append((manifest.cluster, manifest.run, decode(manifest.progress)["root"]["batches"]))
    return found


def test_clusters_continue_with_their_own_data_or_begin_the_epoch_anew(tmp_path: Path) -> None:
    first = clusters_of(tmp_path / "first", [2, 2])
    train_clusters(first, epochs=1)
    checkpoints = tmp_path / "first" / "checkpoints"
    # An epoch has 6 batches per cluster. The last checkpoint is of its end: use the one before.
    for path in checkpoints.rglob("update_6_*"):
        path.unlink()
    before = find_checkpoint_sets(checkpoints)
    updates = [before[cluster].id.update for cluster in range(2)]
    assert all(2 <= each < 6 for each in updates), "the next one waits until one is stored"
    clusters_of(tmp_path / "same", [1, 3], checkpoints)
    assert positions(tmp_path / "same") == [(c, before[c].run, updates[c]) for c in range(2)]
    clusters_of(tmp_path / "more", [1, 1, 1], checkpoints)
    assert positions(tmp_path / "more") == [(c, before[0].run, 0) for c in range(3)]
    one = clusters_of(tmp_path / "one", [2], checkpoints)
    assert positions(tmp_path / "one") == [(0, before[0].run, 0)]
    train_clusters(one, epochs=1, resume=True)
    # The losses before are in the file of the first plan; the epoch of one cluster has 12 batches.
    assert len((tmp_path / "one" / "losses.txt").read_text().split()) == 12
    newest = find_checkpoint_sets(tmp_path / "one" / "checkpoints")[0]
    assert (newest.id.update, newest.run) == (updates[0] + 12, before[0].run)
