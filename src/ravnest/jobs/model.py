"""A model as two files: its graph in the smallest pieces it can be cut into, and its weights.

The server joins the pieces into the stages that its plan asks for, and copies each stage's weights
out of the file. It needs neither the model's code nor the memory that the model takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from ravnest.errors import JobError, RavnestError, StageFormatError
from ravnest.jobs.tensor_file import TensorFile
from ravnest.plan.profile import ModelProfile
from ravnest.split.encoding import stage_from_json, stage_to_json
from ravnest.split.graph import MAX_STAGES, StageSpec
from ravnest.split.merge import check_chain, merge_units
from ravnest.split.splitter import PreparedModel
from ravnest.store.bundle import STAGE_FILE, STAGE_LIMIT, WEIGHTS_FILE, BundleDigest
from ravnest.store.files import read_json, sha256_of, size_of, write_atomically, write_json
from ravnest.store.weights import save_weights

FORMAT = "ravnest-units"
VERSION = 1
UNITS_FILE = "units.json"
_LARGEST = 2**60
"""No cost and no size is more than this; sums of some of them stay whole numbers of 64 bits."""


@dataclass(frozen=True)
class PackedModel:
    """A model on disk."""

    units: Path
    weights: Path


@dataclass(frozen=True)
class UnitModel:
    """A model as the server knows it."""

    profile: ModelProfile
    units: tuple[StageSpec, ...]

    def stages(self, starts: Sequence[int]) -> tuple[StageSpec, ...]:
        """Stages that begin at unit 0 and at each of ``starts``, as ``StagePlan.start`` counts."""
        return merge_units(self.units, starts)


def pack_model(prepared: PreparedModel, profile: ModelProfile, folder: Path) -> PackedModel:
    """Write a prepared model and its profile below ``folder``."""
    count = len(prepared.cuts) + 1
    if count > MAX_STAGES:
        raise JobError(
            f"the model can be cut into {count} pieces, more than the {MAX_STAGES} that a job may have: "
            "a loop in its forward is unrolled; use fewer rounds of it, or one operation on all of them"
        )
    stages = prepared.cut(prepared.cuts).stages
    packed = PackedModel(folder / UNITS_FILE, folder / WEIGHTS_FILE)
    data = {
        "format": FORMAT,
        "version": VERSION,
        "profile": asdict(profile),
        "units": [stage_to_json(stage.spec) for stage in stages],
    }
    write_json(packed.units, data, compact=True)
    if (size := size_of(packed.units)) > STAGE_LIMIT:
        raise JobError(
            f"the graph of the model takes {size / 1e6:.0f} MB as data, more than the "
            f"{STAGE_LIMIT / 1e6:.0f} MB that a job may have"
        )
    save_weights(packed.weights, {key: t for stage in stages for key, t in stage.tensors.items()})
    return packed


def read_units(path: Path) -> UnitModel:
    """Read what ``pack_model`` wrote; ``StageFormatError`` or ``OperatorError`` for anything else."""
    data = read_json(path, STAGE_LIMIT)
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise StageFormatError(f"{path} is not a model of this version of Ravnest")
    units = data.get("units")
    if not isinstance(units, list) or not 0 < len(units) <= MAX_STAGES:
        raise StageFormatError(f"{path} does not hold the pieces of a model")
    try:
        model = UnitModel(_profile(data.get("profile")), tuple(stage_from_json(unit) for unit in units))
        check_chain(model.units)
        _check_profile(model)
    except RavnestError as error:
        raise type(error)(f"{path}: {error}") from error
    return model


def write_stage(folder: Path, spec: StageSpec, weights: Path) -> BundleDigest:
    """Write a stage as ``store.bundle`` does, its tensors copied out of the model's weights.

    ``StageFormatError`` if the weights are not those of the stage's model.
    """
    file = TensorFile.read(weights)
    _check_tensors(file, spec)
    target = folder / WEIGHTS_FILE
    write_atomically(target, lambda path: file.copy([entry.key for entry in spec.state], path))
    data = stage_to_json(spec)
    data["weights"] = {"file": WEIGHTS_FILE, "sha256": sha256_of(target)}
    write_json(folder / STAGE_FILE, data, compact=True)
    return BundleDigest(sha256_of(folder / STAGE_FILE))


def check_weights(model: UnitModel, weights: Path) -> None:
    """``StageFormatError`` if a file does not hold the tensors of a model; dtypes show at loading."""
    file = TensorFile.read(weights)
    for unit in model.units:
        _check_tensors(file, unit)


def _check_tensors(file: TensorFile, spec: StageSpec) -> None:
    for entry in spec.state:
        found = file.tensors.get(entry.key)
        if found is None:
            raise StageFormatError(f"{file.path} lacks {entry.key}")
        if found.shape != entry.shape or found.size != entry.nbytes:
            raise StageFormatError(f"{file.path}: {entry.key} is not the tensor that the model has")


def _profile(data: object) -> ModelProfile:
    try:
        return msgspec.convert(data, ModelProfile)
    except msgspec.ValidationError as error:
        raise StageFormatError(f"the profile of the model is malformed: {error}") from error


def _check_profile(model: UnitModel) -> None:
    profile, count = model.profile, len(model.units)
    if len(profile.units) != count:
        raise StageFormatError(f"the profile is of {len(profile.units)} units, there are {count}")
    _check_numbers(asdict(profile))
    if profile.batch_size < 1:
        raise StageFormatError("the profile is of an empty batch")
    names = [tensor.name for tensor in profile.state]
    if len(set(names)) != len(names):
        raise StageFormatError("the profile lists a state tensor twice")
    for tensor in profile.state:
        ascends = list(tensor.units) == sorted(set(tensor.units))
        if not tensor.units or not ascends or tensor.units[-1] >= count:
            raise StageFormatError(f"the profile has no such units of {tensor.name!r}")
    held = {entry.key: entry for unit in model.units for entry in unit.state}
    if missing := held.keys() - set(names):
        raise StageFormatError(f"the profile lacks {min(missing)!r}")
    for tensor in profile.state:
        entry = held.get(tensor.name)
        if entry is None and (tensor.trainable or tensor.averaged):
            raise StageFormatError(f"no unit holds {tensor.name!r}, which the profile trains")
        if entry is not None and entry.nbytes != tensor.bytes:
            raise StageFormatError(f"the profile and the units do not agree on {tensor.name!r}")


def _check_numbers(value: Any) -> None:
    match value:
        case dict():
            for item in value.values():
                _check_numbers(item)
        case list() | tuple():
            for item in value:
                _check_numbers(item)
        case int() | float():
            if not 0 <= value <= _LARGEST:
                raise StageFormatError(f"the profile has a cost of {value}")
