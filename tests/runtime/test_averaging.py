"""Clusters that learn together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from many_clusters import Clusters, form_clusters, raise_errors
from torch.utils.data import DataLoader, TensorDataset
from training_cases import SMALL_MODELS, small_model

import ravnest


@pytest.fixture(autouse=True)
def _work_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def points_data(count: int = 96) -> TensorDataset:
    made = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 4, generator=made)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def shards(data: Any, folder: Path, size: int = 4) -> Any:
    """Loaders of a node: its cluster's share, in an order that its nodes share."""

    def loaders(name: str) -> tuple[DataLoader, None]:
        order = torch.Generator().manual_seed(9)
        share = ravnest.shard(data, name, folder=folder / "node_data")
        return DataLoader(share, size, shuffle=True, generator=order), None

    return loaders


def mlp_clusters(folder: Path, sizes: Sequence[int] = (3, 2), **options: Any) -> Clusters:
    return form_clusters(folder, small_model("mlp"), SMALL_MODELS["mlp"][1], sizes, **options)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return list(first) == list(second) and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("schedule", ["async", "sync"])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (4, 1), (1, 1), (2, 1, 3)])
def test_clusters_end_with_the_same_model(tmp_path: Path, sizes: tuple[int, ...], schedule: str) -> None:
    clusters = mlp_clusters(tmp_path, sizes, schedule=schedule, reduce_factor=3)
    raise_errors(clusters.train(shards(points_data(), tmp_path), epochs=2, save=True))
    models = [clusters.fused(c) for c in range(len(sizes))]
    assert all(same(models[0], model) for model in models[1:])
    assert not same(models[0], small_model("mlp").state_dict())
