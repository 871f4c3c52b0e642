"""Seed checkpoints: the state of an earlier plan, cut for the stages of a new one."""

from pathlib import Path

import pytest
import torch
from seed_cases import ROOT, World

from ravnest.errors import StageFormatError
from ravnest.schemas.jobs import NamedComponent
from ravnest.server.scheduling.job_start import JobStart
from ravnest.store.plain_data import decode


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 1), (1, 2)])
def test_every_node_gets_its_part_of_the_state(world: World, before: int, after: int) -> None:
    old = world.checkpoint(world.ship(world.planned(before)))
    seeds = world.seeded(after, JobStart((old,)))
    assert len(seeds) == after
    found: dict[str, torch.Tensor] = {}
    for manifest, tensors in seeds:
        for key, stored in manifest.tensors.items():
            found[stored.name] = tensors[f"state/{key}"]
            momentum = tensors[f"optimizer/{key}/momentum_buffer"]
            assert torch.equal(momentum, 2 * found[stored.name])
    expected = {name: tensor + 1 for name, tensor in world.model.state_dict().items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    progress = decode(seeds[0][0].progress)
    assert progress["root"] == ROOT, "the position in the epoch continues"


def test_the_epoch_can_begin_anew(world: World) -> None:
    old = world.checkpoint(world.ship(world.planned(2)))
    ((manifest, _),) = world.seeded(1, JobStart((old,), restart_epoch=True))
    assert decode(manifest.progress)["root"]["batches"] == 0


def test_other_parameters_of_the_optimizer_replace_those_of_the_checkpoint(world: World) -> None:
    old = world.checkpoint(world.ship(world.planned(2)))
    optimizer = NamedComponent(name="SGD", params={"lr": 0.5, "unknown": 1})
    ((manifest, _),) = world.seeded(1, JobStart((old,), optimizer=optimizer))
    groups = decode(manifest.progress)["updates"]["groups"]
    assert groups == [{"lr": 0.5, "momentum": 0.9}]


def test_a_damaged_checkpoint_is_refused(world: World) -> None:
    old = world.checkpoint(world.ship(world.planned(2)))
    path = world.artifacts.path(old.stages[1].tensors.sha256)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StageFormatError, match="damaged"):
        world.seeded(1, JobStart((old,)))
