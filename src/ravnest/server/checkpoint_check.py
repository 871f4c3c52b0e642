"""Checks of a checkpoint that a provider has uploaded: nothing that it says is believed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ravnest.errors import StageFormatError
from ravnest.schemas.checkpoints import UploadedCheckpoint
from ravnest.store.checkpoint import FORMAT, VERSION, CheckpointManifest
from ravnest.store.files import convert, has_format, read_json
from ravnest.store.node_spec import NodeSpec
from ravnest.store.plain_data import NotPlainError, decode

ManifestCheck = Callable[[Path, UploadedCheckpoint, int], str]
"""Function of an uploaded manifest, what its provider says of it, and the number of stages; returns what
is wrong."""
LARGEST_MANIFEST = 4 << 20
_COPIES = 5
"""Size of a checkpoint in terms of the weights: AdamW stores two or three further tensors for each
weight, and a moving average is another one."""
_SLACK = 16 << 20


@dataclass(frozen=True)
class DataPosition:
    """Position in the data at which a checkpoint was taken."""

    epoch: int
    """Epochs that are over."""
    batches: int
    """Batches of the next epoch that it contains."""


def misfit_of(uploaded: UploadedCheckpoint, own: NodeSpec, weights: Mapping[int, int]) -> str:
    """Return why a checkpoint is not one of a node or of its neighbours; empty if it may be.

    ``weights``: bytes of the stages' weights, by stage.
    """
    if (uploaded.plan, uploaded.cluster) != (own.plan, own.cluster):
        return "it is of another plan or cluster"
    if abs(uploaded.stage - own.stage) > 1 or uploaded.stage not in weights:
        return f"stage {uploaded.stage} is neither its own nor a neighbour's"
    most = _COPIES * weights[uploaded.stage] + _SLACK
    if uploaded.tensors.size > most:
        return f"it has {uploaded.tensors.size} bytes; stage {uploaded.stage} has {most} at most"
    if uploaded.manifest.size > LARGEST_MANIFEST:
        return f"its manifest has {uploaded.manifest.size} bytes; {LARGEST_MANIFEST} are allowed"
    return ""


def manifest_misfit(path: Path, uploaded: UploadedCheckpoint, stages: int) -> str:
    """Return why a file is not the manifest of this checkpoint; empty if it is."""
    try:
        manifest = read_uploaded_manifest(path)
    except StageFormatError as error:
        return str(error)
    described = (manifest.plan, manifest.run, manifest.attempt, manifest.cluster, manifest.stage)
    named = (uploaded.plan, uploaded.run, uploaded.taken, uploaded.cluster, uploaded.stage)
    if described != named or (manifest.id, manifest.stages) != (uploaded.id, stages):
        return "its manifest describes another checkpoint"
    if (manifest.sha256, manifest.size) != (uploaded.tensors.sha256, uploaded.tensors.size):
        return "its manifest describes other tensors"
    return ""


def read_uploaded_manifest(path: Path) -> CheckpointManifest:
    """Read an uploaded manifest of limited size."""
    data = read_json(path, LARGEST_MANIFEST)
    if not has_format(data, FORMAT, VERSION):
        raise StageFormatError("it has no valid manifest")
    plain = {name: value for name, value in data.items() if name not in ("format", "version")}
    return convert(plain, CheckpointManifest, "the manifest")


def read_position(path: Path) -> DataPosition:
    """Read the position in the data from the manifest of a Root; ``StageFormatError`` if it has none."""
    try:
        root = decode(read_uploaded_manifest(path).progress)["root"]
        position = DataPosition(root["epoch"], root["batches"])
    except (NotPlainError, RecursionError, KeyError, TypeError) as error:
        raise StageFormatError("its manifest has no position in the data") from error
    for number in (position.epoch, position.batches):
        if not isinstance(number, int) or number < 0:
            raise StageFormatError("its manifest has a wrong position in the data")
    return position
