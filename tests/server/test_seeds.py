"""Seed checkpoints: the state of an earlier plan, cut for the stages of a new one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ravnest.errors import StageFormatError
from ravnest.jobs.model import UnitModel, pack_model, read_units
from ravnest.plan.profiler import profile_model
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import (
    DataFile,
    DatasetFiles,
    JobSpec,
    ModelFiles,
    NamedComponent,
    TrainingSpec,
)
from ravnest.schemas.providers import Assignment, ProviderOffer
from ravnest.server.artifacts import ArtifactFolder
from ravnest.server.checkpoint_check import read_uploaded_manifest
from ravnest.server.complete_checkpoints import CompleteCheckpoint
from ravnest.server.db.records import StageCheckpointRecord
from ravnest.server.scheduling.job_start import JobStart
from ravnest.server.scheduling.planning import PlannedJob, plan_job
from ravnest.server.scheduling.seeds import with_seeds
from ravnest.server.scheduling.shipping import ship
from ravnest.split.splitter import prepare
from ravnest.store.checkpoint import CheckpointFolder, CheckpointManifest
from ravnest.store.checkpoint_state import stored_entries, stored_tensors
from ravnest.store.plain_data import decode, encode
from ravnest.types import CheckpointId

CUT = CheckpointId(5, 0)
ROOT = {"epoch": 0, "batches": 5, "microbatches": 5, "samples": 20, "data": "d", "random": None}
FILE = Artifact(sha256="0" * 64, size=1)


class World:
    """A model, its artifacts, and plans of a job for it."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3))
        prepared = prepare(self.model, (torch.zeros(4, 6),))
        files = pack_model(prepared, profile_model(prepared), folder / "packed")
        self.units: UnitModel = read_units(files.units)
        self.weights = files.weights
        self.artifacts = ArtifactFolder(folder / "artifacts")
        self.scratch = folder / "scratch"
        self.scratch.mkdir()

    def planned(self, providers: int, **changes: Any) -> PlannedJob:
        data = DatasetFiles(
            samples=40,
            inputs=(DataFile(artifact=FILE, rows=40),),
            labels=(DataFile(artifact=FILE, rows=40),),
        )
        spec = JobSpec(
            name="job",
            model=ModelFiles(units=FILE, weights=FILE),
            train=data,
            training=TrainingSpec(
                optimizer=NamedComponent(name="SGD"), loss=NamedComponent(name="MSELoss"), batch_size=4
            ),
            clusters=1,
            min_providers=providers,
        )
        offers = [(f"p{number}", _offer(number)) for number in range(providers)]
        found = plan_job(spec, self.units.profile, offers)
        assert isinstance(found, PlannedJob)
        assert len(found.providers) == providers
        return replace(found, **changes)

    def ship(self, planned: PlannedJob) -> tuple[Assignment, ...]:
        add = self.artifacts.add
        return ship("job-1", planned, self.units, self.weights, add, self.scratch)

    def checkpoint(self, assignments: tuple[Assignment, ...]) -> CompleteCheckpoint:
        """Return a checkpoint of these nodes in which each weight has changed by 1."""
        changed = {name: tensor + 1 for name, tensor in self.model.state_dict().items()}
        ordered = sorted(assignments, key=lambda each: each.node_spec.stage)
        starts = [each.start for each in self.planned(len(ordered)).plan.clusters[0].stages[1:]]
        stages = []
        for each, spec in zip(ordered, self.units.stages(starts), strict=True):
            node = each.node_spec
            entries = stored_entries(spec)
            tensors = {f"state/{entry.key}": changed[entry.model_names[0]] for entry in entries}
            tensors |= {
                f"optimizer/{entry.key}/momentum_buffer": changed[entry.model_names[0]] * 2
                for entry in entries
            }
            progress = {
                "root": ROOT if node.stage == 0 else None,
                "leaf": None,
                "validations": {},
                "updates": {
                    "done": 5,
                    "scheduler_steps": 0,
                    "fields": {},
                    "groups": [{"lr": 0.1, "momentum": 0.9}],
                    "scheduler": None,
                },
            }
            folder = CheckpointFolder(self.folder / "old" / str(each.node))
            manifest = CheckpointManifest(
                plan=node.plan,
                run="run",
                node=node.node,
                cluster=0,
                stage=node.stage,
                stages=node.stages,
                id=CUT,
                tensors=stored_tensors(spec),
                progress=encode(progress),
            )
            folder.commit(folder.write_tensors(CUT, tensors), manifest)
            stages.append(
                StageCheckpointRecord(
                    job="job-1",
                    plan=node.plan,
                    run="run",
                    taken="",
                    id=CUT,
                    cluster=0,
                    stage=node.stage,
                    stages=node.stages,
                    attempt=0,
                    time=0.0,
                    tensors=self.artifacts.add(folder.tensors_path(CUT)),
                    manifest=self.artifacts.add(folder.manifest_path(CUT)),
                )
            )
        return CompleteCheckpoint(tuple(stages))

    def seeded(self, providers: int, start: JobStart) -> list[tuple[CheckpointManifest, Any]]:
        """Ship a new plan; return manifest and tensors of the seeds, by stage."""
        planned = self.planned(providers, attempt=1, start=start)
        found = with_seeds(self.ship(planned), planned, self.units, self.artifacts, self.scratch)
        seeds = []
        for each in sorted(found, key=lambda each: each.node_spec.stage):
            assert each.resume
            assert each.seed is not None
            assert (each.seed.id, each.id) == (CUT, f"job-1-p1-{each.node}")
            manifest = read_uploaded_manifest(self.artifacts.path(each.seed.manifest.sha256))
            assert manifest.plan == each.node_spec.plan
            seeds.append((manifest, load_file(self.artifacts.path(each.seed.tensors.sha256))))
        return seeds


def _offer(number: int) -> ProviderOffer:
    address = f"127.0.0.1:{9000 + number}"
    return ProviderOffer(
        name=address,
        address=address,
        ram=1.0,
        cores=1,
        compute=50.0,
        bandwidth=100.0,
        round_trip=0.01,
        version="0",
        torch="0",
    )


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
