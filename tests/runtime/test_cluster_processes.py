"""Several clusters as users run them: processes that communicate over gRPC."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from many_clusters import Clusters, form_clusters
from provider_processes import Start, await_line, ended_well
from training_cases import SMALL_MODELS, small_model


def clusters_in(folder: Path) -> Clusters:
    return form_clusters(folder, small_model("mlp"), SMALL_MODELS["mlp"][1], (2, 1))


def test_two_clusters_train_and_end_with_the_same_model(tmp_path: Path, start: Start) -> None:
    clusters = clusters_in(tmp_path)
    providers = start(tmp_path, clusters.nodes.names, reduce_factor=2)
    ended_well(providers)
    root = providers[clusters.names[0][0]].output
    assert "each of 2 clusters trains on all data" in root
    assert "averaged clusters 0, 1 (weights" in root
    first, second = clusters.fused(0), clusters.fused(1)
    assert all(first[name].equal(second[name]) for name in first)


@pytest.mark.parametrize("victim", ["node_0", pytest.param("node_1", marks=pytest.mark.full), "node_2"])
def test_the_other_cluster_trains_on_after_a_death(tmp_path: Path, start: Start, victim: str) -> None:
    clusters = clusters_in(tmp_path)
    settings = {"announced": 1500, "evaluate": False, "rejoin_timeout": 0.0}
    providers = start(tmp_path, clusters.nodes.names, reduce_factor=5, **settings)
    await_line(providers["node_0"], "under way")
    await_line(providers["node_2"], "under way")
    providers[victim].kill(signal.SIGKILL)
    for name, provider in providers.items():
        code = provider.wait()
        if clusters.of(name) == clusters.of(victim):
            assert code != 0, f"{name}:\n{provider.output}"
        else:
            assert code == 0, f"{name}:\n{provider.output}"
    survivor = providers["node_2" if clusters.of(victim) == 0 else "node_0"].output
    gone = clusters.of(victim)
    assert f"cluster {gone} is gone" in survivor
    assert f"cluster {1 - gone} trains on" in survivor
    assert len(clusters.fused(1 - gone)) == 8


def test_clusters_that_average_differently_refuse_each_other(tmp_path: Path, start: Start) -> None:
    clusters = clusters_in(tmp_path)
    first = start(tmp_path, clusters.names[0], averaging="blocking", connect_timeout=6.0)
    second = start(tmp_path, clusters.names[1], connect_timeout=6.0)
    said = "node_2 runs with averaging=background, node_0 with averaging=blocking"
    await_line(second["node_2"], said)
    ended_well(first | second)
