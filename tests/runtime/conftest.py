"""Clusters that many tests use: split once, trained in a folder of each test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_cluster import LocalCluster, form
from torch import nn
from training_cases import SMALL_MODELS

from ravnest import set_seed

Formed = Callable[..., LocalCluster]
Splits = Callable[[str, int], tuple[Path, list[str]]]


def small_model(case: str) -> nn.Module:
    """A model of ``training_cases``, always with the same weights."""
    set_seed(7)
    return SMALL_MODELS[case][0]()


@pytest.fixture(scope="session")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Splits:
    """``splits(case, nodes)``: a folder with ``node_data``, and the nodes' names, Root first."""
    made: dict[tuple[str, int], tuple[Path, list[str]]] = {}

    def split(case: str, nodes: int) -> tuple[Path, list[str]]:
        if (case, nodes) not in made:
            folder = tmp_path_factory.mktemp(f"{case}-{nodes}")
            made[case, nodes] = folder, form(folder, small_model(case), SMALL_MODELS[case][1], nodes)
        return made[case, nodes]

    return split


@pytest.fixture
def cluster(splits: Splits, tmp_path: Path, monkeypatch: Any) -> Formed:
    """``cluster(case, nodes, **options of Node)``; results go to ``tmp_path``, the working folder."""
    monkeypatch.chdir(tmp_path)

    def make(case: str = "mlp", nodes: int = 2, **options: Any) -> LocalCluster:
        folder, names = splits(case, nodes)
        return LocalCluster(tmp_path, names, options, node_data=folder / "node_data")

    return make
