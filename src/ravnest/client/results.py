"""Download of a trained model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from ravnest.http.api import ApiClient
from ravnest.http.transfer import download
from ravnest.schemas.jobs import JobResult
from ravnest.store.trained import FUSED_FILE, model_fusion

_STAGES = ".stages"


def fetch_trained(
    api: ApiClient, job: str, folder: Path, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Download the trained stages of a job and fuse them into ``folder/trained_state_dict.pt``.

    After an interruption the next call resumes with the files that are already in ``folder``.
    ``progress`` is called with the bytes done and the total.
    """
    result = api.get(f"/api/jobs/{job}/result", JobResult)
    stages = folder / _STAGES / job
    total = sum(file.artifact.size for file in result.files)
    before = 0
    for file in result.files:
        start = before

        def report(done: int, _size: int, start: int = start) -> None:
            if progress is not None:
                progress(start + done, total)

        download(api, file.artifact, stages / f"cluster_{result.cluster}" / file.name, report)
        before += file.artifact.size
    fused = model_fusion(result.cluster, folder=stages).replace(folder / FUSED_FILE)
    shutil.rmtree(folder / _STAGES)
    return fused


def load_trained(path: Path, into: torch.nn.Module | None = None) -> dict[str, torch.Tensor]:
    """Return the ``state_dict`` in a file and load it ``into`` the model if one is given."""
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    if into is not None:
        into.load_state_dict(state)
    return state
