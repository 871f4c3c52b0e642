"""Trained stages on disk, and their fusion into one ``state_dict``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch

from ravnest.errors import FusionError, RavnestError, StageFormatError
from ravnest.split.chain import fuse
from ravnest.split.encoding import stage_from_json, stage_to_json
from ravnest.split.graph import StageSpec, StateSpec
from ravnest.split.module import StageModule
from ravnest.split.written_state import changing_state
from ravnest.store.files import convert, has_format, read_json, sha256_of, write_atomically, write_json
from ravnest.store.node_spec import NodeSpec
from ravnest.store.weights import load_model_weights, load_weights, save_weights

FORMAT = "ravnest-trained-stage"
VERSION = 1
FUSED_FILE = "trained_state_dict.pt"
RAW_FILE = "raw_state_dict.pt"
_LIMIT = 512 << 20


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``node_<i>.json`` of a trained stage; the same is sent to the Root, without the digest."""

    format: str
    version: int
    plan: str
    run: str
    node: int
    stage: Any
    """JSON of the stage, which ``stage_from_json`` reads."""
    sha256: str = ""
    """Digest of the weights file."""
    changed_only: bool = False
    """The file has only the state that training may change (``changing_state``)."""
    raw: bool = False
    """The trained weights are moving averages; the file has the weights themselves too (``raw_key``)."""


@dataclass(frozen=True)
class _TrainedStage:
    """A trained stage whose manifest has been read, and whose weights have not."""

    path: Path
    manifest: _Manifest
    spec: StageSpec


def save_trained(
    folder: Path,
    node: NodeSpec,
    module: StageModule,
    run: str,
    *,
    changed_only: bool = False,
    averages: Mapping[str, torch.Tensor] = MappingProxyType({}),
    raw: bool = False,
) -> tuple[str, dict[str, torch.Tensor]]:
    """Write a trained stage to ``folder/cluster_<c>/node_<i>.safetensors`` with its manifest.

    ``run`` names the training run, because stages of different runs do not form one model.
    ``changed_only`` leaves out frozen weights, for a reader that has them. ``averages``: moving averages
    by key, which take the place of their weights; ``raw``: the weights are written too. Returns the
    manifest as JSON and the tensors, with which ``receive_trained`` writes the same files elsewhere.
    """
    manifest = _manifest(node, module, run, changed_only=changed_only, raw=raw)
    own = module.state_tensors()
    named = {**own, **{raw_key(key): own[key] for key in averages}, **averages}
    tensors = {entry.key: named[entry.key] for entry in _written_state(manifest, module.spec)}
    _write(_weights_path(folder, node.cluster, node.node), tensors, manifest)
    return json.dumps(msgspec.to_builtins(manifest)), tensors


def _written_state(manifest: _Manifest, spec: StageSpec) -> tuple[StateSpec, ...]:
    """Return the state whose tensors are in the file of a trained stage."""
    state = changing_state(spec) if manifest.changed_only else spec.state
    return (*state, *raw_state(spec)) if manifest.raw else state


def raw_key(key: str) -> str:
    """Return the name of a weight itself in a file that has its moving average under its own name."""
    return f"raw/{key}"


def raw_state(spec: StageSpec) -> tuple[StateSpec, ...]:
    """Return the weights that a stage trains, as they are named beside their moving averages."""
    return tuple(
        msgspec.structs.replace(entry, key=raw_key(entry.key))
        for entry in spec.state
        if entry.kind == "parameter" and entry.trainable and entry.stages[0] == spec.index
    )


def trained_manifest(node: NodeSpec, module: StageModule, run: str) -> str:
    """Return the manifest of a trained stage as JSON, without writing anything."""
    return json.dumps(msgspec.to_builtins(_manifest(node, module, run)))


def _manifest(
    node: NodeSpec, module: StageModule, run: str, *, changed_only: bool = False, raw: bool = False
) -> _Manifest:
    stage = stage_to_json(module.spec)
    return _Manifest(
        FORMAT, VERSION, node.plan, run, node.node, stage, changed_only=changed_only, raw=raw
    )


def receive_trained(
    folder: Path, root: NodeSpec, node: int, manifest: str, tensors: Mapping[str, torch.Tensor]
) -> int:
    """Write the trained stage of another node of ``root``'s cluster and return the stage's number.

    ``FusionError`` if it is not what a node of this plan would send.
    """
    try:
        sent = convert(json.loads(manifest), _Manifest, f"the manifest of node_{node}")
        spec = stage_from_json(sent.stage)
    except (ValueError, RecursionError) as error:
        raise FusionError(f"the manifest of node_{node} is not usable: {error}") from error
    if (sent.format, sent.version, sent.plan, sent.node) != (FORMAT, VERSION, root.plan, node):
        raise FusionError(f"node_{node} sent something else than a trained stage of this plan")
    state = _written_state(sent, spec)
    wrong = [
        entry.key
        for entry in state
        if entry.key not in tensors
        or (tuple(tensors[entry.key].shape), tensors[entry.key].dtype) != (entry.shape, entry.dtype)
    ]
    if wrong or len(tensors) != len(state):
        raise FusionError(
            f"the tensors of node_{node}'s trained stage are not the ones that its manifest lists"
        )
    _write(_weights_path(folder, root.cluster, node), tensors, sent)
    return spec.index


def _write(path: Path, tensors: Mapping[str, torch.Tensor], manifest: _Manifest) -> None:
    save_weights(path, tensors)
    signed = msgspec.structs.replace(manifest, sha256=sha256_of(path))
    write_json(path.with_suffix(".json"), msgspec.to_builtins(signed), compact=True)


def _weights_path(folder: Path, cluster: int, node: int) -> Path:
    return folder / f"cluster_{cluster}" / f"node_{node}.safetensors"


def model_fusion(cluster_id: int = 0, *, folder: str | Path = "trained", raw: bool = False) -> Path:
    """Combine a cluster's trained stages into ``<folder>/trained_state_dict.pt``.

    The file holds the state_dict of the original model and loads with ``weights_only=True``. After
    training with ``ema`` it has the moving averages of the weights; with ``raw`` the weights themselves
    are written, to ``<folder>/raw_state_dict.pt``. ``FusionError`` says which stages are missing or do
    not belong together.
    """
    top = Path(folder)
    state_dict = fuse_trained(top / f"cluster_{cluster_id}", None, raw=raw)
    target = top / (RAW_FILE if raw else FUSED_FILE)
    write_atomically(target, lambda path: torch.save(state_dict, path))
    return target


def fuse_trained(source: Path, weights: Path | None, *, raw: bool = False) -> dict[str, torch.Tensor]:
    """Return the state_dict of the trained stages in a folder.

    ``weights`` is a file with all tensors of the model before training, for stages that were saved
    without their frozen weights. ``raw``: the weights themselves instead of their moving averages.
    Raises ``FusionError``.
    """
    saved = _read_all(source)
    _check_complete(source, saved)
    try:
        return fuse(
            (stage.spec, _all_tensors(stage, weights, raw=raw))
            for stage in sorted(saved, key=lambda s: s.spec.index)
        )
    except StageFormatError as error:
        raise FusionError(str(error)) from error


def trained_tensors(source: Path, *, raw: bool = False) -> dict[str, torch.Tensor]:
    """Return the trained parameters and the buffers of the stages in a folder, by name in the model.

    ``raw``: the parameters themselves instead of their moving averages.
    """
    found: dict[str, torch.Tensor] = {}
    blocks: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for stage in _read_all(source):
        tensors = _own_tensors(stage, raw=raw)
        for entry in changing_state(stage.spec):
            if entry.stages[0] != stage.spec.index:
                continue
            for name in entry.model_names:
                if entry.rows is None:
                    found[name] = tensors[entry.key]
                else:
                    blocks.setdefault(name, []).append((entry.rows.first, tensors[entry.key]))
    for name, parts in blocks.items():
        found[name] = torch.cat([tensor for _, tensor in sorted(parts, key=lambda part: part[0])])
    return found


def lacks_frozen_weights(source: Path) -> bool:
    """Return whether stages in a folder were saved without frozen weights that the model has."""
    return any(stage.manifest.changed_only and _frozen_state(stage.spec) for stage in _read_all(source))


def _frozen_state(spec: StageSpec) -> list[StateSpec]:
    changing = {entry.key for entry in changing_state(spec)}
    return [entry for entry in spec.state if entry.persistent and entry.key not in changing]


def _own_tensors(stage: _TrainedStage, *, raw: bool) -> dict[str, torch.Tensor]:
    path = stage.path.with_suffix(".safetensors")
    tensors = load_weights(path, _written_state(stage.manifest, stage.spec))
    if sha256_of(path) != stage.manifest.sha256:
        raise FusionError(f"{path} is not the file that {stage.path.name} describes")
    trained = raw_state(stage.spec) if raw else ()
    if trained and not stage.manifest.raw:
        raise FusionError(
            f"{path} has one set of weights only: there are other ones besides the result if training "
            "kept a moving average, with ema="
        )
    return tensors | {entry.names[0]: tensors[entry.key] for entry in trained}


def _all_tensors(stage: _TrainedStage, weights: Path | None, *, raw: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a stage; frozen ones that its file lacks come from ``weights``."""
    tensors = _own_tensors(stage, raw=raw)
    missing = [entry for entry in _frozen_state(stage.spec) if entry.key not in tensors]
    if missing and weights is None:
        raise FusionError(
            f"{stage.path.name} has no frozen weights, such as {missing[0].key}: they are those of the "
            "model before training"
        )
    return tensors if weights is None else tensors | load_model_weights(weights, missing)


def _read_all(source: Path) -> list[_TrainedStage]:
    paths = [p for p in source.glob("node_*.json") if re.fullmatch(r"node_\d+", p.stem)]
    if not paths:
        raise FusionError(
            f"{source} holds no trained stage of {source.name.replace('_', ' ')}: train with "
            "Trainer(save=True), or name the folder of the trained files with folder="
        )
    return [_read(path) for path in sorted(paths)]


def _read(path: Path) -> _TrainedStage:
    try:
        data = read_json(path, _LIMIT)
        if not has_format(data, FORMAT, VERSION):
            raise FusionError(f"{path} is not the manifest of a trained stage")
        manifest = convert(data, _Manifest, path)
    except StageFormatError as error:
        raise FusionError(str(error)) from error
    try:
        return _TrainedStage(path, manifest, stage_from_json(manifest.stage))
    except RavnestError as error:
        raise FusionError(f"{path}: {error}") from error


def _check_complete(source: Path, saved: list[_TrainedStage]) -> None:
    _check_same_run(source, saved)
    count = saved[0].spec.count
    by_index: dict[int, list[_TrainedStage]] = {}
    for stage in saved:
        by_index.setdefault(stage.spec.index, []).append(stage)
    missing = [str(index) for index in range(count) if index not in by_index]
    if missing:
        raise FusionError(
            f"{source} lacks stage {', '.join(missing)} of {count}: it has "
            + ", ".join(f"stage {s.spec.index} (node_{s.manifest.node})" for s in saved)
            + "; copy the missing files from their providers"
        )
    double = next((stages for stages in by_index.values() if len(stages) > 1), None)
    if double is not None:
        names = " and ".join(f"node_{stage.manifest.node}" for stage in double)
        raise FusionError(f"{source} has stage {double[0].spec.index} twice: {names}")
    positions = sorted(position for stage in saved for position in _owned_positions(stage.spec))
    if positions != list(range(len(positions))):
        raise FusionError(f"the stages in {source} do not form one state_dict: names are missing")


def _check_same_run(source: Path, saved: list[_TrainedStage]) -> None:
    first = saved[0].manifest
    for stage in saved[1:]:
        other = stage.manifest
        same_count = stage.spec.count == saved[0].spec.count
        if (other.plan, other.run) != (first.plan, first.run) or not same_count:
            raise FusionError(
                f"{source} mixes stages of different trainings: node_{first.node} is of run "
                f"{first.run} and plan {first.plan}, node_{other.node} of run {other.run} and plan "
                f"{other.plan}; keep the files of one run"
            )


def _owned_positions(spec: StageSpec) -> Iterator[int]:
    """Yield the positions in the model's ``state_dict`` of the tensors that a stage owns.

    A tensor that is cut along its rows counts where its first block is; ``fuse`` checks the others.
    """
    for entry in spec.state:
        first = entry.rows is None or entry.rows.first == 0
        if first and entry.persistent and entry.stages[0] == spec.index:
            yield from (position for position in entry.positions if position >= 0)
