"""Shared clusters: models are split once and trained in a folder of each test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from local_cluster import Formed, LocalCluster, Splits, form
from provider_processes import ForkServer, Provider, Start, watching
from training_cases import SMALL_MODELS, small_model


@pytest.fixture(scope="session")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Splits:
    """Factory ``splits(case, nodes)``: a folder with ``node_data``, and node names, Root first."""
    made: dict[tuple[str, int], tuple[Path, list[str]]] = {}

    def split(case: str, nodes: int) -> tuple[Path, list[str]]:
        if (case, nodes) not in made:
            folder = tmp_path_factory.mktemp(f"{case}-{nodes}")
            made[case, nodes] = folder, form(folder, small_model(case), SMALL_MODELS[case][1], nodes)
        return made[case, nodes]

    return split


@pytest.fixture
def cluster(splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Formed:
    """Factory ``cluster(case, nodes, **options of Node)``; results are written to ``tmp_path``."""
    monkeypatch.chdir(tmp_path)

    def make(case: str = "mlp", nodes: int = 2, **options: Any) -> LocalCluster:
        folder, names = splits(case, nodes)
        return LocalCluster(tmp_path, names, options, node_data=folder / "node_data")

    return make


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


@pytest.fixture
def start(fork_server: ForkServer) -> Iterator[Start]:
    """Factory that starts nodes in the given order; remaining processes are ended after the test."""
    running: dict[str, Provider] = {}

    def begin(folder: Path, names: Sequence[str], **settings: Any) -> dict[str, Provider]:
        own = {"connect_timeout": 60.0} | settings
        started = {name: fork_server.start(name, folder, own) for name in names}
        running.update({f"{folder}/{name}": provider for name, provider in started.items()})
        return started

    with watching(running):
        yield begin
