"""Download of the weights of a job that is not done, from the newest checkpoints at the server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ravnest.client.progress_text import duration
from ravnest.client.results import Progress, download_files, load_trained
from ravnest.errors import StageFormatError
from ravnest.http.api import ApiClient
from ravnest.jobs.adapter import ADAPTER_FILE, read_adapter, save_adapter
from ravnest.jobs.model import UNITS_FILE, read_units
from ravnest.schemas.base import Artifact
from ravnest.schemas.partial_results import ClusterCheckpoint, PartialResult
from ravnest.split.chain import fuse
from ravnest.split.graph import StageSpec
from ravnest.store.checkpoint import CheckpointManifest, read_manifest
from ravnest.store.checkpoint_conversion import stored_weights
from ravnest.store.checkpoint_mean import WeightedSet, sample_weights
from ravnest.store.checkpoint_progress import cluster_progress
from ravnest.store.checkpoint_sets import CheckpointSet, StageCheckpoint, checkpoint_set
from ravnest.store.files import write_atomically
from ravnest.store.weights import load_model_weights

PARTIAL_FILE = "partial_state_dict.pt"
_CHECKPOINTS = ".checkpoints"
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class PartialModel:
    """Newest weights of a job at the server, and the point of the training that they are from."""

    state_dict: dict[str, torch.Tensor]
    update: int
    """Updates that the weights have."""
    epoch: int
    """Epoch of these updates, from 1."""
    epochs: int
    """Epochs that the job asks for."""
    age: float
    """Seconds since the server got them."""
    clusters: tuple[int, ...]
    """Clusters whose mean the weights are; or the one whose weights they are."""
    path: Path
    """File with the weights; if no folder was given, it is not there any more."""

    def __str__(self) -> str:
        numbers = " and ".join(map(str, self.clusters))
        mean = f", mean of the clusters {numbers}" if len(self.clusters) > 1 else ""
        epoch = f"epoch {self.epoch} of {self.epochs}"
        return f"update {self.update} in {epoch}, {duration(self.age)} old{mean}"


def fetch_partial(
    api: ApiClient,
    job: str,
    folder: Path,
    progress: Progress | None = None,
    *,
    into: torch.nn.Module | None = None,
    whole: bool = False,
) -> PartialModel:
    """Download the newest checkpoints of a job and write ``folder/partial_state_dict.pt``.

    If the job trains an adapter, write the files of ``peft`` instead, unless ``whole``. Of several
    clusters the mean is taken, as new plans start from it. Frozen weights are downloaded for a whole
    model only. The weights are loaded ``into`` a model if one is given.
    """
    found = api.get(f"/api/jobs/{job}/partial", PartialResult)
    files = _Downloads(api, found, folder / _CHECKPOINTS / job)
    units = files.folder / UNITS_FILE
    used = [each for each in found.clusters if each.averaged]
    listed = [(found.units, units), *(file for each in used for file in files.of_cluster(each))]
    download_files(api, listed, progress, job=job)
    sets = [files.checkpoints(each) for each in used]
    model = read_units(units).stages(())[0]
    tensors = stored_weights(_weighted(sets, robust=found.robust), model, robust=found.robust)
    if found.adapter is not None and not whole:
        description = files.folder / ADAPTER_FILE
        download_files(api, [(found.adapter, description)], progress, job=job)
        trained = {
            name: tensors[e.key] for e in model.state if e.key in tensors for name in e.model_names
        }
        path = save_adapter(read_adapter(description), trained, folder)
    else:
        path = folder / PARTIAL_FILE
        state = fuse([(model, tensors | files.frozen(model, tensors, progress))])
        write_atomically(path, lambda target: torch.save(state, target))
    shutil.rmtree(folder / _CHECKPOINTS)
    return PartialModel(
        load_trained(path, into),
        found.update,
        _epoch(sets[0]),
        found.epochs,
        found.age,
        tuple(sorted(each.cluster for each in used)),
        path,
    )


@dataclass(frozen=True)
class _Downloads:
    """Files of the checkpoints of a job, below a folder."""

    api: ApiClient
    partial: PartialResult
    folder: Path

    def of_cluster(self, cluster: ClusterCheckpoint) -> Iterator[tuple[Artifact, Path]]:
        """Yield the files of a cluster, and where they come."""
        for number, stage in enumerate(cluster.stages):
            tensors, manifest = self._paths(cluster, number)
            yield stage.tensors, tensors
            yield stage.manifest, manifest

    def checkpoints(self, cluster: ClusterCheckpoint) -> CheckpointSet:
        """Return the checkpoints of a cluster; ``StageFormatError`` if one is damaged."""
        paths = (self._paths(cluster, number) for number in range(len(cluster.stages)))
        return checkpoint_set(StageCheckpoint(read_manifest(m), tensors) for tensors, m in paths)

    def frozen(
        self, model: StageSpec, found: dict[str, torch.Tensor], progress: Progress | None
    ) -> dict[str, torch.Tensor]:
        """Return the tensors that no checkpoint has, as they were before training."""
        missing = [entry for entry in model.state if entry.persistent and entry.key not in found]
        if not missing:
            return {}
        path = self.folder / _WEIGHTS
        download_files(self.api, [(self.partial.weights, path)], progress, job=self.partial.job)
        return load_model_weights(path, missing)

    def _paths(self, cluster: ClusterCheckpoint, number: int) -> tuple[Path, Path]:
        own = self.folder / f"cluster_{cluster.cluster}"
        return own / f"stage_{number}.safetensors", own / f"stage_{number}.json"


def _weighted(sets: Sequence[CheckpointSet], *, robust: bool) -> list[WeightedSet]:
    """Return the checkpoints with the weights of an averaging round."""
    samples = [cluster_progress(_manifests(each)).averaging_samples for each in sets]
    weights = sample_weights(samples, robust=robust)
    return [WeightedSet(each, weight) for each, weight in zip(sets, weights, strict=True)]


def _epoch(checkpoints: CheckpointSet) -> int:
    """Return the number of the epoch in which checkpoints were taken, from 1."""
    position = cluster_progress(_manifests(checkpoints)).root
    epoch, batches = position.get("epoch"), position.get("batches")
    if not isinstance(epoch, int) or not isinstance(batches, int):
        raise StageFormatError("a checkpoint has no position in the data")
    return max(epoch + bool(batches), 1)


def _manifests(checkpoints: CheckpointSet) -> list[CheckpointManifest]:
    return [each.manifest for each in checkpoints.stages]
