"""Download of a trained model."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from ravnest.http.api import ApiClient
from ravnest.http.transfer import download
from ravnest.jobs.adapter import ADAPTER_FILE, WEIGHTS_FILE, read_adapter, save_adapter
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import JobResult
from ravnest.store.files import write_atomically
from ravnest.store.trained import (
    FUSED_FILE,
    RAW_FILE,
    fuse_trained,
    lacks_frozen_weights,
    trained_tensors,
)

_STAGES = ".stages"
_MODEL_WEIGHTS = "model.safetensors"
BEST_FILE = "best_state_dict.pt"
Progress = Callable[[int, int], None]


def fetch_trained(
    api: ApiClient,
    job: str,
    folder: Path,
    progress: Progress | None = None,
    *,
    whole: bool = False,
    raw: bool = False,
) -> Path:
    """Download the trained stages of a job and fuse them into ``folder/trained_state_dict.pt``.

    If the job trains an adapter, write the files of ``peft`` instead, unless ``whole``. ``raw``: if the
    result is a moving average of the weights, write the weights themselves, as ``raw_state_dict.pt``.
    Frozen weights are downloaded for a whole model only. After an interruption the next call resumes
    with the files that are already in ``folder``. ``progress`` is called with the bytes done and the
    total.
    """
    result = api.get(f"/api/jobs/{job}/result", JobResult)
    downloads = folder / _STAGES / job
    stages, files = _stages(result, downloads)
    if result.adapter is not None and not whole:
        description = downloads / ADAPTER_FILE
        download_files(api, [*files, (result.adapter, description)], progress)
        path = save_adapter(read_adapter(description), trained_tensors(stages, raw=raw), folder)
    else:
        download_files(api, files, progress)
        weights = None
        if result.weights is not None and lacks_frozen_weights(stages):
            weights = downloads / _MODEL_WEIGHTS
            download_files(api, [(result.weights, weights)], progress)
        path = _write_fused(folder / (RAW_FILE if raw else FUSED_FILE), stages, weights, raw=raw)
    shutil.rmtree(folder / _STAGES)
    return path


def fetch_best(api: ApiClient, job: str, folder: Path, progress: Progress | None = None) -> Path:
    """Download the best model of a job so far to ``folder/best_state_dict.pt`` and return the path."""
    result = api.get(f"/api/jobs/{job}/best", JobResult)
    stages, files = _stages(result, folder / _STAGES / f"{job}-best")
    download_files(api, files, progress)
    path = _write_fused(folder / BEST_FILE, stages)
    shutil.rmtree(folder / _STAGES)
    return path


def _stages(result: JobResult, downloads: Path) -> tuple[Path, list[tuple[Artifact, Path]]]:
    """Return the folder of the trained stages, and which file comes where."""
    stages = downloads / f"cluster_{result.cluster}"
    return stages, [(file.artifact, stages / file.name) for file in result.files]


def _write_fused(path: Path, stages: Path, weights: Path | None = None, *, raw: bool = False) -> Path:
    state = fuse_trained(stages, weights, raw=raw)
    write_atomically(path, lambda target: torch.save(state, target))
    return path


def download_files(
    api: ApiClient,
    files: Sequence[tuple[Artifact, Path]],
    progress: Progress | None,
    *,
    job: str | None = None,
) -> None:
    """Download artifacts to their paths; ``job``: they are of the checkpoints of that job."""
    total = sum(artifact.size for artifact, _ in files)
    before = 0
    for artifact, path in files:
        start = before

        def report(done: int, _size: int, start: int = start) -> None:
            if progress is not None:
                progress(start + done, total)

        download(api, artifact, path, report, job=job)
        before += artifact.size


def load_trained(path: Path, into: torch.nn.Module | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors in a file and load them ``into`` the model if one is given.

    The tensors of an adapter have the names that ``peft`` gives them, and ``into`` is its model.
    """
    if path.name == WEIGHTS_FILE:
        adapter: dict[str, torch.Tensor] = load_file(path)
        if into is not None:
            importlib.import_module("peft").set_peft_model_state_dict(into, adapter)
        return adapter
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    if into is not None:
        into.load_state_dict(state)
    return state
