"""Training over links with faults from a plan, in memory: it ends with the same bits.

A failing seed is printed as the line of its plan; ``FaultPlan.parse`` reads it.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_plan import FaultKind, FaultPlan
from local_cluster import LocalCluster, Splits
from memory_faults import MemoryFaults
from training_cases import image_loaders, token_loaders, token_loss

CASES = {
    "tied-gpt": (token_loaders, token_loss),
    "digits-cnn": (image_loaders, torch.nn.functional.cross_entropy),
}
NODES, EPOCHS, BATCHES = 3, 4, 10
UPDATES = EPOCHS * BATCHES
CHAIN = [(0, 1), (1, 2)]
LINK_FAULTS = (
    FaultKind.PARTITION,
    FaultKind.ONE_WAY,
    FaultKind.DELAY,
    FaultKind.CORRUPT,
    FaultKind.DUPLICATE,
    FaultKind.REORDER,
)
GOLDEN = Path(__file__).with_name("golden_losses.json")
"""Losses of the undisturbed runs, by case. A change that is meant to change them writes them anew:
``RAVNEST_WRITE_GOLDEN=1 python -m pytest tests/runtime/test_link_faults.py -k golden``."""
TOLERANCE = 1e-3
"""Relative difference of a loss by which processors with other instructions may sum."""
Undisturbed = Callable[[str], tuple[dict[str, torch.Tensor], str]]
"""Type of the fixture ``undisturbed``."""


def trained(
    folder: Path, splits: Splits, case: str, plan: FaultPlan
) -> tuple[dict[str, torch.Tensor], str, MemoryFaults]:
    source, names = splits(case, NODES)
    faults = MemoryFaults(plan)
    loaders, criterion = CASES[case]
    cluster = LocalCluster(folder, names, network=faults.network, node_data=source / "node_data")
    settings: dict[str, Any] = {
        "schedule": "sync",
        "micro_batches": 2 if case == "tied-gpt" else 1,
        "optimizer": torch.optim.AdamW,
        "optimizer_params": {"lr": 1e-2},
        "criterion": criterion,
        "checkpoint_updates": 3,
        "checkpoint_folder": folder / "checkpoints",
        "record_sink": faults,
    }
    try:
        cluster.train(lambda: loaders(BATCHES), node=settings, epochs=EPOCHS, save=True)
    except BaseException as error:
        error.add_note(str(plan))
        raise
    finally:
        faults.close()
    return cluster.fused(), (folder / "losses.txt").read_text(), faults


@pytest.fixture(scope="module")
def undisturbed(splits: Splits, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Factory of the weights and losses of a run without faults; each is trained once."""

    @functools.cache
    def train(case: str) -> tuple[dict[str, torch.Tensor], str]:
        folder = tmp_path_factory.mktemp("undisturbed")
        weights, losses, _ = trained(folder, splits, case, FaultPlan(0, ()))
        return weights, losses

    return train


def check(
    folder: Path, splits: Splits, undisturbed: Undisturbed, case: str, seeds: range
) -> set[FaultKind]:
    weights, losses = undisturbed(case)
    assert falls(numbers(losses)), losses
    seen: set[FaultKind] = set()
    for seed in seeds:
        plan = FaultPlan.random(
            seed,
            range(NODES),
            5,
            end=UPDATES - 2,
            kinds=LINK_FAULTS,
            links=CHAIN,
            longest=0.3,
            in_updates=True,
        )
        found, trace, faults = trained(folder / str(seed), splits, case, plan)
        seen |= {fault.kind for fault in faults.happened}
        assert trace == losses, str(plan)
        assert [name for name in weights if not torch.equal(weights[name], found[name])] == [], str(plan)
    return seen


def numbers(losses: str) -> list[float]:
    return [float(line) for line in losses.split()]


def falls(losses: list[float]) -> bool:
    """Return whether each epoch has a lower mean loss than the one before."""
    means = [statistics.fmean(losses[at : at + BATCHES]) for at in range(0, len(losses), BATCHES)]
    return sorted(means, reverse=True) == means


@pytest.mark.parametrize("case", CASES)
def test_the_losses_are_the_golden_ones(
    tmp_path: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """A pipeline that trains something else, in each run alike, differs from what it was."""
    monkeypatch.chdir(tmp_path)
    losses = numbers(undisturbed(case)[1])
    golden = json.loads(GOLDEN.read_text())
    if os.environ.get("RAVNEST_WRITE_GOLDEN"):
        golden[case] = losses
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    assert len(losses) == UPDATES
    assert falls(losses)
    assert losses == pytest.approx(golden[case], rel=TOLERANCE)


@pytest.mark.parametrize("case", ["tied-gpt", pytest.param("digits-cnn", marks=pytest.mark.full)])
def test_faults_of_links_do_not_change_a_bit(
    tmp_path: Path,
    splits: Splits,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check(tmp_path, splits, undisturbed, case, range(6)) == set(LINK_FAULTS)


@pytest.mark.parametrize(
    "line",
    [
        "one_way node_0>node_1 @8.0u for 9.0s",  # longer than a connection may be silent
        "one_way node_2>node_1 @8.0u for 9.0s",
        "partition node_1>node_2 @8.0u for 9.0s",
    ],
)
def test_long_partitions_do_not_change_a_bit(
    tmp_path: Path,
    splits: Splits,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    weights, losses = undisturbed("tied-gpt")
    plan = FaultPlan.parse(f"seed=1 | {line}")
    found, trace, faults = trained(tmp_path / "parted", splits, "tied-gpt", plan)
    assert faults.happened == list(plan.faults)
    assert trace == losses
    assert all(torch.equal(weights[name], found[name]) for name in weights)


@pytest.mark.full
@pytest.mark.parametrize("part", range(20))
def test_many_plans_of_link_faults(
    tmp_path: Path,
    splits: Splits,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
    part: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    case = list(CASES)[part % len(CASES)]
    check(tmp_path, splits, undisturbed, case, range(100 * (part + 1), 100 * (part + 1) + 25))
