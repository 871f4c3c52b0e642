"""A stage on disk: a folder with ``stage.json`` and ``weights.safetensors``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import torch

from ravnest.errors import RavnestError, StageFormatError
from ravnest.split.encoding import stage_from_json, stage_to_json
from ravnest.split.graph import StageSpec
from ravnest.split.limits import MAX_STAGE_BYTES
from ravnest.split.module import StageModule
from ravnest.split.split_stage import SplitStage
from ravnest.store.files import convert, read_json, sha256_of, write_json
from ravnest.store.weights import load_weights, save_weights

STAGE_FILE = "stage.json"
WEIGHTS_FILE = "weights.safetensors"


@dataclass(frozen=True)
class BundleDigest:
    """SHA-256 digest of a bundle's ``stage.json``, which contains the digest of the weights."""

    sha256: str


class _WeightsEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Entry ``weights`` of ``stage.json``."""

    file: Literal["weights.safetensors"]
    sha256: str


class _StageManifest(msgspec.Struct, frozen=True):
    """Fields of ``stage.json`` beside the graph, which ``stage_from_json`` reads."""

    weights: _WeightsEntry


def save_stage(folder: Path, stage: SplitStage) -> BundleDigest:
    """Write a stage and return the digest that identifies its graph and weights."""
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
    data = read_json(path, MAX_STAGE_BYTES)
    if sha256 is not None and sha256_of(path) != sha256:
        raise StageFormatError(
            f"{path} is not the file that the plan describes: its sha256 differs. Copy it again, or "
            "run clusterize again and copy all of node_data"
        )
    try:
        spec = stage_from_json(data)
    except RavnestError as error:
        raise type(error)(f"{path}: {error}") from error
    manifest = convert(data, _StageManifest, path)
    return SplitStage(spec, _load_checked_weights(folder, manifest.weights, spec))


def load_module(
    folder: Path, sha256: str | None = None, device: torch.device | str = "cpu"
) -> StageModule:
    """Read a stage from disk as a module that can be trained."""
    stage = load_stage(folder, sha256)
    return StageModule(stage.spec, stage.tensors, device)


def _load_checked_weights(
    folder: Path, entry: _WeightsEntry, spec: StageSpec
) -> dict[str, torch.Tensor]:
    path = folder / WEIGHTS_FILE
    tensors = load_weights(path, spec.state)
    if sha256_of(path) != entry.sha256:
        raise StageFormatError(
            f"{path} was changed or damaged: its sha256 is not the one in {STAGE_FILE}. Copy both again"
        )
    return tensors
