"""A model with its artifacts, plans of a job for it, and checkpoints of their clusters."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

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
from ravnest.store.plain_data import encode
from ravnest.types import CheckpointId

CUT = CheckpointId(5, 0)
ROOT = {"epoch": 0, "batches": 5, "microbatches": 5, "samples": 20, "data": "d", "random": None}
FILE = Artifact(sha256="0" * 64, size=1)
DATA = DatasetFiles(
    samples=40,
    inputs=(DataFile(artifact=FILE, rows=40),),
    labels=(DataFile(artifact=FILE, rows=40),),
)
TRAINING = TrainingSpec(
    optimizer=NamedComponent(name="SGD"), loss=NamedComponent(name="MSELoss"), batch_size=4, epochs=3
)


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

    def planned(
        self, providers: int, clusters: int = 1, data: DatasetFiles = DATA, **changes: Any
    ) -> PlannedJob:
        spec = JobSpec(
            name="job",
            model=ModelFiles(units=FILE, weights=FILE),
            train=data,
            training=TRAINING,
            clusters=clusters,
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

    def checkpoint(
        self,
        assignments: tuple[Assignment, ...],
        *,
        change: float = 1.0,
        cut: CheckpointId = CUT,
        root: Mapping[str, Any] = ROOT,
        samples: int = 0,
    ) -> CompleteCheckpoint:
        """Return a checkpoint of a cluster in which each weight has changed by ``change``.

        ``samples``: those since the last average.
        """
        changed = {name: tensor + change for name, tensor in self.model.state_dict().items()}
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
                "root": dict(root) if node.stage == 0 else None,
                "leaf": None,
                "validations": {},
                "averaging_samples": samples,
                "updates": {
                    "done": cut.update,
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
                cluster=node.cluster,
                stage=node.stage,
                stages=node.stages,
                id=cut,
                tensors=stored_tensors(spec),
                progress=encode(progress),
            )
            folder.commit(folder.write_tensors(cut, tensors), manifest)
            stages.append(
                StageCheckpointRecord(
                    job="job-1",
                    plan=node.plan,
                    run="run",
                    taken="",
                    id=cut,
                    cluster=node.cluster,
                    stage=node.stage,
                    stages=node.stages,
                    attempt=0,
                    time=0.0,
                    tensors=self.artifacts.add(folder.tensors_path(cut)),
                    manifest=self.artifacts.add(folder.manifest_path(cut)),
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
