"""A node that is killed and started again takes its place, and training ends with the same bits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from local_cluster import Splits
from provider_processes import DEADLINE, ENVIRONMENT, SCRIPT, Provider, Start, ended_well

from ravnest import model_fusion
from ravnest.store.checkpoint import CheckpointFolder

OUTPUT = "output.txt"
SETTINGS: dict[str, Any] = {
    "case": "tied-gpt",
    "epochs": 30,
    "schedule": "sync",
    "micro_batches": 2,
    "checkpoint_updates": 10,
    "evaluate": False,
}


def copy(splits: Splits, folder: Path, case: str = "tied-gpt") -> list[str]:
    source, names = splits(case, 3)
    shutil.copytree(source / "node_data", folder / "node_data")
    return names


def fused(folder: Path) -> dict[str, torch.Tensor]:
    path = model_fusion(0, folder=folder / "trained")
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return state


@pytest.fixture(scope="module")
def undisturbed(splits: Splits, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"folder": tmp_path_factory.mktemp("undisturbed")}


@pytest.fixture
def expected(undisturbed: dict[str, Any], splits: Splits, start: Start) -> tuple[str, Any]:
    """Losses and model of a run in which nothing happens; made once."""
    if "result" not in undisturbed:
        folder = undisturbed["folder"]
        ended_well(start(folder, copy(splits, folder), **SETTINGS))
        undisturbed["result"] = (folder / "losses.txt").read_text(), fused(folder)
    result: tuple[str, Any] = undisturbed["result"]
    return result


def await_checkpoint(folder: Path, name: str, after: int, provider: Provider) -> int:
    """Wait until a node has a checkpoint of more than ``after`` updates; return its updates."""
    own = CheckpointFolder(folder / "checkpoints" / name)
    deadline = time.monotonic() + DEADLINE
    while not (ids := own.ids()) or ids[-1].update <= after:
        assert time.monotonic() < deadline, provider.output
        assert not provider.ended.wait(0.02), provider.output
    return ids[-1].update


def await_update(folder: Path, name: str, after: int, launcher: subprocess.Popen[bytes]) -> int:
    """Wait until a node of a launcher has a checkpoint of more than ``after`` updates."""
    own = CheckpointFolder(folder / "checkpoints" / name)
    deadline = time.monotonic() + DEADLINE
    while not (ids := own.ids()) or ids[-1].update <= after:
        assert time.monotonic() < deadline, (folder / OUTPUT).read_text()
        assert launcher.poll() is None, (folder / OUTPUT).read_text()
        time.sleep(0.02)
    return ids[-1].update


def assert_same(folder: Path, expected: tuple[str, Any]) -> None:
    assert (folder / "losses.txt").read_text() == expected[0]
    found = fused(folder)
    assert [name for name in expected[1] if not torch.equal(found[name], expected[1][name])] == []


# The chaos test kills a Stem too.
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.full), 2])
def test_a_killed_node_that_is_started_again_rejoins(
    splits: Splits, tmp_path: Path, start: Start, expected: tuple[str, Any], stage: int
) -> None:
    names = copy(splits, tmp_path)
    providers = start(tmp_path, names, **SETTINGS)
    victim, update = names[stage], 0
    for _ in range(2):
        update = await_checkpoint(tmp_path, victim, update, providers[victim])
        providers[victim].kill(signal.SIGKILL)
        providers[victim].wait()
        providers |= start(tmp_path, [victim], **SETTINGS)
    ended_well(providers)
    assert_same(tmp_path, expected)


def test_two_nodes_are_lost_at_once_and_one_of_them_with_its_disk(
    splits: Splits, tmp_path: Path, start: Start, expected: tuple[str, Any]
) -> None:
    names = copy(splits, tmp_path)
    providers = start(tmp_path, names, **SETTINGS)
    await_checkpoint(tmp_path, names[2], 10, providers[names[2]])
    lost = names[0], names[2]
    for name in lost:
        providers[name].kill(signal.SIGKILL)
    for name in lost:
        providers[name].wait()
    shutil.rmtree(tmp_path / "checkpoints" / names[2])
    providers |= start(tmp_path, lost, **SETTINGS)
    ended_well(providers)
    assert_same(tmp_path, expected)


def test_all_nodes_are_lost(
    splits: Splits, tmp_path: Path, start: Start, expected: tuple[str, Any]
) -> None:
    names = copy(splits, tmp_path)
    providers = start(tmp_path, names, **SETTINGS)
    await_checkpoint(tmp_path, names[0], 10, providers[names[0]])
    for provider in providers.values():
        provider.kill(signal.SIGKILL)
    for provider in providers.values():
        provider.wait()
    ended_well(start(tmp_path, names, **SETTINGS, resume=True))
    assert_same(tmp_path, expected)


def test_launch_starts_a_killed_node_again(
    splits: Splits, tmp_path: Path, expected: tuple[str, Any]
) -> None:
    names = copy(splits, tmp_path)
    with (tmp_path / OUTPUT).open("w") as output:
        launcher = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ravnest.cli.app",
                "launch",
                "--restart",
                SCRIPT,
                json.dumps(SETTINGS),
            ],
            cwd=tmp_path,
            env=os.environ | ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        update = 0
        for name in (names[1], names[0]):
            update = await_update(tmp_path, name, update, launcher)
            children = psutil.Process(launcher.pid).children()
            next(each for each in children if name in each.cmdline()).kill()
        assert launcher.wait(2 * DEADLINE) == 0, (tmp_path / OUTPUT).read_text()
    finally:
        launcher.terminate()
        launcher.wait(DEADLINE)
    assert (tmp_path / OUTPUT).read_text().count("started again (1)") == 2
    assert_same(tmp_path, expected)


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_training_loop_of_the_user_is_repeated_without_what_is_done(
    splits: Splits, tmp_path: Path, start: Start, stage: int
) -> None:
    settings = {"announced": 400, "evaluate": False, "schedule": "sync", "micro_batches": 1}
    whole, disturbed = tmp_path / "whole", tmp_path / "disturbed"
    names = copy(splits, whole, "mlp")
    ended_well(start(whole, names, **settings))
    copy(splits, disturbed, "mlp")
    settings["checkpoint_updates"] = 20
    providers = start(disturbed, names, **settings)
    victim = names[stage]
    await_checkpoint(disturbed, victim, 0, providers[victim])
    providers[victim].kill(signal.SIGKILL)
    providers[victim].wait()
    providers |= start(disturbed, [victim], **settings)
    ended_well(providers)
    assert_same(disturbed, ((whole / "losses.txt").read_text(), fused(whole)))
