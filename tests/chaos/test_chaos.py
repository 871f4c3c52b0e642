"""Training of real processes under faults: it ends, with the result of an undisturbed run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from chaos import plan_kills
from chaos_node import CLASSES
from chaos_run import run
from chaos_values import ChaosRun, RunResult, fused
from fault_plan import FaultPlan
from fork_server import ForkServer

ONE = ChaosRun(clusters=1, nodes=3, updates=200, pace=0.02, checkpoint_updates=20)
THREE = ChaosRun(updates=300, pace=0.03)
KILLS = 10


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(("chaos_node",)) as started:
        yield started


@dataclass(frozen=True)
class Undisturbed:
    result: RunResult
    weights: dict[str, torch.Tensor]
    losses: str


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    result = run(ONE, FaultPlan(0, ()), folder, server)
    assert result.good, result
    return Undisturbed(result, fused(folder), (folder / "losses.txt").read_text())


def same_result(folder: Path, undisturbed: Undisturbed) -> None:
    assert (folder / "losses.txt").read_text() == undisturbed.losses
    weights = fused(folder)
    assert [name for name in weights if not torch.equal(weights[name], undisturbed.weights[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "restarts"),
    [
        ("kill node_1 @60.0u; kill node_0 @110.0u; kill node_2 @150.0u", 3),
        pytest.param(  # test_rejoin has a shorter one
            "kill node_0 @70.0u; kill node_1 @70.0u; kill node_2 @70.0u", 3, marks=pytest.mark.full
        ),
        ("stop node_1 @80.0u for 9.0s", 0),  # longer than a connection may be silent
        ("full_disk node_1 @50.0u for 60.0s; kill node_1 @130.0u", 1),
        ("out_of_memory node_1 @80.0u for 3.0s", 1),
    ],
    ids=["kills", "all-killed", "stop", "full-disk", "out-of-memory"],
)
def test_a_cluster_ends_with_the_same_bits(
    tmp_path: Path, server: ForkServer, undisturbed: Undisturbed, line: str, restarts: int
) -> None:
    plan = FaultPlan.parse(f"seed=1 | {line}")
    result = run(ONE, plan, tmp_path / "run", server)
    assert result.good, result
    assert len(result.recoveries) == len(plan.faults)
    assert (result.restarts >= restarts) if restarts else (result.restarts == 0)
    same_result(tmp_path / "run", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "outage"),
    [
        ("one_way node_0>node_1 @60.0u for 9.0s", None),  # longer than a connection may be silent
        # test_link_faults has it without processes
        pytest.param("one_way node_2>node_1 @60.0u for 9.0s", None, marks=pytest.mark.full),
        ("partition node_1>node_2 @60.0u for 9.0s", 1.0),  # longer than links wait: the nodes rejoin
        (
            "delay node_0>node_1 @40.0u for 2.0s by 0.3; corrupt node_1>node_2 @60.0u; "
            "corrupt node_2>node_1 @90.0u; delay node_2>node_1 @120.0u for 2.0s by 0.3",
            None,
        ),
    ],
    ids=["to-the-next", "to-the-previous", "both-ways", "late-and-wrong"],
)
def test_faults_of_links_between_processes_that_live_cost_no_restart(
    tmp_path: Path, server: ForkServer, undisturbed: Undisturbed, line: str, outage: float | None
) -> None:
    plan = FaultPlan.parse(f"seed=1 | {line}")
    settings = replace(ONE, proxied=True, settings={"outage": outage})
    result = run(settings, plan, tmp_path / "run", server)
    assert result.good, result
    assert (len(result.recoveries), result.restarts) == (len(plan.faults), 0)
    same_result(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_three_clusters_survive_ten_kills(tmp_path: Path, server: ForkServer) -> None:
    """The clusters agree at the end, and each update was made once; ``make chaos`` has 300 kills."""
    plan = plan_kills(THREE, KILLS, seed=4, until=0.8)
    result = run(THREE, plan, tmp_path / "run", server)
    assert result.good, result
    assert len(result.recoveries) == KILLS
    assert result.restarts >= KILLS - 2, "on a busy machine a kill may meet a node that is down"
    assert result.updates == (THREE.updates,) * THREE.clusters
    assert result.loss is not None
    assert result.loss < 0.75 * math.log(CLASSES), "the loss of the first model, which guesses"


@pytest.mark.slow
def test_clusters_that_lose_nodes_at_the_end_have_the_same_model(
    tmp_path: Path, server: ForkServer
) -> None:
    """One node is killed in the last updates, the others when all updates are made."""
    settings = replace(THREE, updates=100, epoch=50)
    plan = FaultPlan.parse("seed=1 | kill node_0 @290.0u; kill node_1 @300.0u; kill node_4 @300.0u")
    result = run(settings, plan, tmp_path / "run", server)
    assert result.good, result
    assert result.updates == (100, 100, 100)
