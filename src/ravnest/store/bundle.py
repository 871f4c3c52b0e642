"""A stage on disk: ``stage.json`` and ``weights.safetensors`` in a folder of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ravnest.errors import RavnestError, StageFormatError
from ravnest.split.encoding import stage_from_json, stage_to_json
from ravnest.split.graph import StageSpec
from ravnest.split.module import StageModule
from ravnest.split.splitter import SplitStage
from ravnest.store.files import read_json, sha256_of, write_json
from ravnest.store.weights import load_weights, save_weights

STAGE_FILE = "stage.json"
WEIGHTS_FILE = "weights.safetensors"
STAGE_LIMIT = 256 << 20
"""Bytes of JSON that a stage may have: a graph of a million operations fits."""


@dataclass(frozen=True)
class BundleDigest:
    """The sha256 of a bundle's ``stage.json``, which holds that of the weights."""

    sha256: str


def save_stage(folder: Path, stage: SplitStage) -> BundleDigest:
    """Write a stage; its digest names graph and weights."""
    save_weights(folder / WEIGHTS_FILE, stage.tensors)
    data = stage_to_json(stage.spec)
    data["weights"] = {"file": WEIGHTS_FILE, "sha256": sha256_of(folder / WEIGHTS_FILE)}
    write_json(folder / STAGE_FILE, data, compact=True)
    return BundleDigest(sha256_of(folder / STAGE_FILE))


def load_stage(folder: Path, sha256: str | None = None) -> SplitStage:
    """Read a stage and check all of it: digests, sizes, operators, shapes.

    ``StageFormatError`` or ``OperatorError`` says what is wrong; nothing of a bad stage runs.
    """
    path = folder / STAGE_FILE
    data = read_json(path, STAGE_LIMIT)
    if sha256 is not None and sha256_of(path) != sha256:
        raise StageFormatError(
            f"{path} is not the file that the plan describes: its sha256 differs. Copy it again, or "
            "run clusterize again and copy all of node_data"
        )
    try:
        spec = stage_from_json(data)
    except RavnestError as error:
        raise type(error)(f"{path}: {error}") from error
    tensors = _load_checked_weights(folder, data, spec)
    return SplitStage(spec, tensors)


def load_module(
    folder: Path, sha256: str | None = None, device: torch.device | str = "cpu"
) -> StageModule:
    """A stage from disk as a module that trains."""
    stage = load_stage(folder, sha256)
    return StageModule(stage.spec, stage.tensors, device)


def _load_checked_weights(
    folder: Path, data: dict[str, object], spec: StageSpec
) -> dict[str, torch.Tensor]:
    weights = data.get("weights")
    if not isinstance(weights, dict) or weights.get("file") != WEIGHTS_FILE:
        raise StageFormatError(f"{folder / STAGE_FILE} does not name its weights")
    path = folder / WEIGHTS_FILE
    tensors = load_weights(path, spec.state)
    if sha256_of(path) != weights.get("sha256"):
        raise StageFormatError(f"{path} was changed or damaged: its sha256 is not the stage's")
    return tensors
