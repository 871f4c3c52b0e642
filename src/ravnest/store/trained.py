"""Trained stages on disk, and their fusion into one ``state_dict``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ravnest.errors import FusionError, RavnestError, StageFormatError
from ravnest.split.chain import fuse
from ravnest.split.encoding import stage_from_json, stage_to_json
from ravnest.split.graph import StageSpec
from ravnest.split.module import StageModule
from ravnest.store.files import read_json, sha256_of, write_atomically, write_json
from ravnest.store.node_spec import NodeSpec
from ravnest.store.weights import load_weights, save_weights

FORMAT = "ravnest-trained-stage"
VERSION = 1
FUSED_FILE = "trained_state_dict.pt"
_LIMIT = 512 << 20


@dataclass(frozen=True)
class _Saved:
    path: Path
    node: int
    plan: str
    run: str
    spec: StageSpec
    sha256: str


def save_trained(folder: Path, node: NodeSpec, module: StageModule, run: str) -> str:
    """Write a trained stage to ``folder/cluster_<c>/node_<i>.safetensors`` with its manifest.

    ``run`` names the training run: stages of different runs do not make one model. Returns the
    manifest, with which ``receive_trained`` writes the same files elsewhere.
    """
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "plan": node.plan,
        "run": run,
        "node": node.node,
        "stage": stage_to_json(module.spec),
    }
    _write(_weights_path(folder, node.cluster, node.node), module.state_tensors(), manifest)
    return json.dumps(manifest)


def receive_trained(
    folder: Path, root: NodeSpec, node: int, manifest: str, tensors: Mapping[str, torch.Tensor]
) -> int:
    """Write the trained stage of another node of ``root``'s cluster; the number of the stage.

    ``FusionError`` if it is not what a node of this plan would send.
    """
    try:
        data = json.loads(manifest)
        spec = stage_from_json(data["stage"])
        sent = (data["format"], data["version"], data["plan"], data["node"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FusionError(f"the manifest of node_{node} is malformed: {error}") from error
    if sent != (FORMAT, VERSION, root.plan, node):
        raise FusionError(f"what node_{node} sent is not a trained stage of this plan")
    wrong = [
        entry.key
        for entry in spec.state
        if entry.key not in tensors
        or (tuple(tensors[entry.key].shape), tensors[entry.key].dtype) != (entry.shape, entry.dtype)
    ]
    if wrong or len(tensors) != len(spec.state):
        raise FusionError(f"the trained stage of node_{node} does not hold the tensors that it lists")
    _write(_weights_path(folder, root.cluster, node), tensors, data)
    return spec.index


def _write(path: Path, tensors: Mapping[str, torch.Tensor], manifest: dict[str, Any]) -> None:
    save_weights(path, tensors)
    write_json(path.with_suffix(".json"), {**manifest, "sha256": sha256_of(path)}, compact=True)


def _weights_path(folder: Path, cluster: int, node: int) -> Path:
    return folder / f"cluster_{cluster}" / f"node_{node}.safetensors"


def model_fusion(cluster_id: int = 0, *, folder: str | Path = "trained") -> Path:
    """Combine a cluster's trained stages into ``<folder>/trained_state_dict.pt``.

    The file holds the state_dict of the original model and loads with ``weights_only=True``.
    ``FusionError`` says which stages are missing or do not belong together.
    """
    top = Path(folder)
    source = top / f"cluster_{cluster_id}"
    saved = _read_all(source, cluster_id)
    _check_complete(source, saved)
    stages = []
    for stage in sorted(saved, key=lambda s: s.spec.index):
        weights = stage.path.with_suffix(".safetensors")
        try:
            tensors = load_weights(weights, stage.spec.state)
        except StageFormatError as error:
            raise FusionError(str(error)) from error
        if sha256_of(weights) != stage.sha256:
            raise FusionError(f"{weights} is not the file that {stage.path.name} describes")
        stages.append((stage.spec, tensors))
    state_dict = fuse(stages)
    target = top / FUSED_FILE
    write_atomically(target, lambda path: torch.save(state_dict, path))
    return target


def _read_all(source: Path, cluster_id: int) -> list[_Saved]:
    paths = [p for p in source.glob("node_*.json") if re.fullmatch(r"node_\d+", p.stem)]
    if not paths:
        raise FusionError(
            f"{source} holds no trained stage of cluster {cluster_id}: train with Trainer(save=True), "
            "or name the folder with the providers' files with folder="
        )
    return [_read(path) for path in sorted(paths)]


def _read(path: Path) -> _Saved:
    try:
        data: Any = read_json(path, _LIMIT)
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
            raise FusionError(f"{path} is not the manifest of a trained stage")
        spec = stage_from_json(data["stage"])
        return _Saved(path, data["node"], data["plan"], data["run"], spec, data["sha256"])
    except KeyError as error:
        raise FusionError(f"{path} lacks {error}") from error
    except RavnestError as error:
        raise FusionError(f"{path}: {error}") from error


def _check_complete(source: Path, saved: list[_Saved]) -> None:
    first = saved[0]
    for other in saved[1:]:
        if (other.plan, other.run, other.spec.count) != (first.plan, first.run, first.spec.count):
            raise FusionError(
                f"{source} mixes stages of different trainings: node_{first.node} is of run "
                f"{first.run} and plan {first.plan}, node_{other.node} of run {other.run} and plan "
                f"{other.plan}; keep the files of one run"
            )
    by_index: dict[int, list[_Saved]] = {}
    for stage in saved:
        by_index.setdefault(stage.spec.index, []).append(stage)
    missing = [str(index) for index in range(first.spec.count) if index not in by_index]
    if missing:
        raise FusionError(
            f"{source} lacks stage {', '.join(missing)} of {first.spec.count}: it has "
            + ", ".join(f"stage {s.spec.index} (node_{s.node})" for s in saved)
            + "; copy the missing files from their providers"
        )
    double = next((stages for stages in by_index.values() if len(stages) > 1), None)
    if double is not None:
        names = " and ".join(f"node_{stage.node}" for stage in double)
        raise FusionError(f"{source} has stage {double[0].spec.index} twice: {names}")
    places = sorted(place for stage in saved for place in _owned_places(stage.spec))
    if places != list(range(len(places))):
        raise FusionError(f"the stages in {source} do not add up to one state_dict: names are lost")


def _owned_places(spec: StageSpec) -> Iterator[int]:
    """Where the tensors that a stage owns stand in the model's ``state_dict``."""
    for entry in spec.state:
        if entry.persistent and entry.stages[0] == spec.index:
            yield from (place for place in entry.positions if place >= 0)
