"""A model as two files: its graph, cut into units, and its weights.

The server merges the units into the stages of its plan and copies the weights of each stage out of the
file. It needs neither the model's code nor memory for the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ravnest.errors import JobError, RavnestError, StageFormatError
from ravnest.jobs.tensor_file import TensorBytes, TensorFile
from ravnest.plan.profile import ModelProfile
from ravnest.plan.row_cuts import RowCutModel
from ravnest.split.encoding import stage_from_json, stage_to_json
from ravnest.split.graph import MAX_STAGES, StageSpec, StateSpec
from ravnest.split.limits import MAX_OPERATIONS
from ravnest.split.merge import check_chain, merge_units
from ravnest.split.splitter import PreparedModel
from ravnest.store.bundle import STAGE_FILE, WEIGHTS_FILE, BundleDigest
from ravnest.store.files import read_json, sha256_of, size_of, write_atomically, write_json
from ravnest.store.weights import save_weights
from ravnest.types import convert_checked

FORMAT = "ravnest-units"
VERSION = 1
UNITS_FILE = "units.json"
UNITS_LIMIT = 64 << 20
"""Bytes of the graph of a model; a server takes some 30 times as much memory to read it."""
_LARGEST = 2**60
"""Upper bound of costs and sizes; sums of a few of them fit into 64 bits."""
_MOST_ROW_CUTS = 16
"""Most models with tensors cut along their rows that a file may hold."""
_LONGEST_REASON = 2000
"""Most characters of the sentence that explains why batches are not split."""


@dataclass(frozen=True)
class PackedModel:
    """Files of a model."""

    units: Path
    weights: Path


@dataclass(frozen=True)
class UnitModel:
    """A model as units with their costs, as the server reads it."""

    profile: ModelProfile
    units: tuple[StageSpec, ...]
    row_cut: tuple[UnitModel, ...] = ()
    """The same model with its largest tensors cut along their rows, into ever more blocks."""

    @property
    def variants(self) -> tuple[UnitModel, ...]:
        """The model with whole tensors, then those with cut ones."""
        return (self, *self.row_cut)

    def stages(self, starts: Sequence[int]) -> tuple[StageSpec, ...]:
        """Return the stages that begin at unit 0 and at each of ``starts`` (see ``StagePlan.start``)."""
        return merge_units(self.units, starts)


def pack_model(
    prepared: PreparedModel,
    profile: ModelProfile,
    folder: Path,
    row_cut: Iterable[RowCutModel] = (),
) -> PackedModel:
    """Write a prepared model and its profile below ``folder``.

    ``row_cut`` are the same model with tensors cut along their rows, for providers that cannot hold
    them whole. Their weights are rows of the same file.
    """
    count = len(prepared.cuts) + 1
    if count > MAX_STAGES:
        raise JobError(
            f"the model has {count} units, more than the {MAX_STAGES} that a job may have: a loop in "
            "its forward is unrolled; use fewer iterations, or one operation on all of them"
        )
    operations = max(len(layout.operations) for layout in prepared.layouts.values())
    if operations > MAX_OPERATIONS:
        raise JobError(
            f"the model has {operations} operations, more than the {MAX_OPERATIONS} that a job may "
            "have: a loop in its forward is unrolled; use fewer iterations, or one operation on all"
        )
    packed = PackedModel(folder / UNITS_FILE, folder / WEIGHTS_FILE)
    write_units(packed, prepared, profile, row_cut)
    stages = prepared.cut(prepared.cuts).stages
    save_weights(packed.weights, {key: t for stage in stages for key, t in stage.tensors.items()})
    return packed


def write_units(
    packed: PackedModel,
    prepared: PreparedModel,
    profile: ModelProfile,
    row_cut: Iterable[RowCutModel] = (),
) -> None:
    """Write the units and the profile of a packed model, or replace them; its weights stay."""
    stages = prepared.cut(prepared.cuts).stages
    data = {
        "format": FORMAT,
        "version": VERSION,
        "profile": asdict(profile),
        "units": [stage_to_json(stage.spec) for stage in stages],
        "row_cut": [_row_cut_to_json(model) for model in row_cut],
    }
    write_json(packed.units, data, compact=True)
    if (size := size_of(packed.units)) > UNITS_LIMIT and data["row_cut"]:
        write_json(packed.units, data | {"row_cut": []}, compact=True)
        size = size_of(packed.units)
    if size > UNITS_LIMIT:
        raise JobError(
            f"the graph of the model takes {size / 1e6:.0f} MB, more than the "
            f"{UNITS_LIMIT / 1e6:.0f} MB that a job may have: use fewer operations, such as fewer "
            "iterations of a loop in forward"
        )


def _row_cut_to_json(model: RowCutModel) -> dict[str, Any]:
    stages = model.prepared.cut(model.prepared.cuts).stages
    units = [stage_to_json(stage.spec) for stage in stages]
    return {"profile": asdict(model.profile), "units": units}


def read_units(path: Path) -> UnitModel:
    """Read a file that ``pack_model`` wrote.

    Raises ``StageFormatError`` or ``OperatorError`` for any other file.
    """
    data = read_json(path, UNITS_LIMIT)
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise StageFormatError(f"{path} is not a model of this version of Ravnest")
    cut = data.get("row_cut", [])
    if not isinstance(cut, list) or len(cut) > _MOST_ROW_CUTS:
        raise StageFormatError(f"{path} does not list the models with cut tensors")
    try:
        whole = _unit_model(data)
        return replace(whole, row_cut=tuple(map(_unit_model, cut)))
    except RavnestError as error:
        raise type(error)(f"{path}: {error}") from error


def _unit_model(data: object) -> UnitModel:
    units = data.get("units") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(units, list) or not 0 < len(units) <= MAX_STAGES:
        raise StageFormatError("it does not list the units of a model")
    model = UnitModel(_profile(data.get("profile")), tuple(stage_from_json(unit) for unit in units))
    check_chain(model.units)
    _check_profile(model)
    return model


def write_stage(folder: Path, spec: StageSpec, weights: Path) -> BundleDigest:
    """Write a stage in the format of ``store.bundle``; copy its tensors out of the model's weights.

    Raises ``StageFormatError`` if the weights belong to another model.
    """
    file = TensorFile.read(weights)
    _check_tensors(file, spec)
    target = folder / WEIGHTS_FILE
    tensors = {entry.key: bytes_of(file, entry) for entry in spec.state}
    write_atomically(target, lambda path: file.copy(tensors, path))
    data = stage_to_json(spec)
    data["weights"] = {"file": WEIGHTS_FILE, "sha256": sha256_of(target)}
    write_json(folder / STAGE_FILE, data, compact=True)
    return BundleDigest(sha256_of(folder / STAGE_FILE))


def check_weights(model: UnitModel, weights: Path) -> None:
    """Raise ``StageFormatError`` if a file lacks tensors of a model; loading checks the dtypes."""
    file = TensorFile.read(weights)
    for variant in model.variants:
        for unit in variant.units:
            _check_tensors(file, unit)


def _check_tensors(file: TensorFile, spec: StageSpec) -> None:
    for entry in spec.state:
        found = bytes_of(file, entry)
        if found.shape != entry.shape or found.size != entry.nbytes:
            raise StageFormatError(
                f"{file.path}: {entry.key} differs in shape or size from the model's tensor"
            )


def bytes_of(file: TensorFile, entry: StateSpec) -> TensorBytes:
    """Return where a tensor, or the whole tensor that has its rows, is in the file."""
    whole = file.tensors.get(entry.model_names[0])
    if whole is None:
        raise StageFormatError(f"{file.path} lacks {entry.model_names[0]}")
    if entry.rows is None:
        return whole
    if whole.shape[:1] != (entry.rows.total,):
        raise StageFormatError(f"{file.path}: {entry.key} is not a part of the model's tensor")
    return whole.row_bytes(entry.rows.first, entry.rows.stop)


def profiles_to_json(profiles: Iterable[ModelProfile]) -> str:
    """Return profiles of a model as JSON, for an estimate."""
    return msgspec.json.encode([asdict(profile) for profile in profiles]).decode()


def read_profiles(text: str) -> tuple[ModelProfile, ...]:
    """Read what ``profiles_to_json`` returned; raise ``StageFormatError`` for anything else."""
    try:
        data = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise StageFormatError(f"the profiles of the model are not JSON: {error}") from error
    if not isinstance(data, list) or not 0 < len(data) <= 1 + _MOST_ROW_CUTS:
        raise StageFormatError("there is no list of the profiles of a model")
    profiles = tuple(map(_profile, data))
    for profile in profiles:
        if not 0 < len(profile.units) <= MAX_STAGES:
            raise StageFormatError(f"the profile of the model has {len(profile.units)} units")
        _check_costs(profile)
    return profiles


def _profile(data: object) -> ModelProfile:
    try:
        return convert_checked(data, ModelProfile)
    except msgspec.ValidationError as error:
        raise StageFormatError(f"the profile of the model is malformed: {error}") from error


def _check_profile(model: UnitModel) -> None:
    profile, count = model.profile, len(model.units)
    if len(profile.units) != count:
        raise StageFormatError(f"the profile has {len(profile.units)} units, the model {count}")
    _check_costs(profile)
    names = [tensor.name for tensor in profile.state]
    held = {entry.key: entry for unit in model.units for entry in unit.state}
    if missing := held.keys() - set(names):
        raise StageFormatError(f"the profile lacks {min(missing)!r}")
    for tensor in profile.state:
        entry = held.get(tensor.name)
        if entry is None and (tensor.trainable or tensor.averaged):
            raise StageFormatError(f"the profile trains {tensor.name!r}, which no unit has")
        if entry is not None and entry.nbytes != tensor.bytes:
            raise StageFormatError(f"the profile and the units differ in the size of {tensor.name!r}")


def _check_costs(profile: ModelProfile) -> None:
    """Raise ``StageFormatError`` if the numbers of a profile contradict each other."""
    count = len(profile.units)
    _check_numbers(asdict(profile))
    _check_batch(profile)
    if profile.chunkable is not None and profile.chunkable.unit >= count:
        raise StageFormatError(f"the profile has its last layer in unit {profile.chunkable.unit}")
    names = [tensor.name for tensor in profile.state]
    if len(set(names)) != len(names):
        raise StageFormatError("the profile lists a state tensor twice")
    for tensor in profile.state:
        ascends = list(tensor.units) == sorted(set(tensor.units))
        if not tensor.units or not ascends or tensor.units[-1] >= count:
            raise StageFormatError(f"the profile has invalid units for {tensor.name!r}")


def _check_batch(profile: ModelProfile) -> None:
    if profile.batch_size < 1:
        raise StageFormatError("the batch size of the profile is not positive")
    if profile.smallest_rows is not None and not 1 <= profile.smallest_rows <= profile.batch_size:
        raise StageFormatError(
            f"the profile has micro-batches of {profile.smallest_rows} samples in a batch of"
            f" {profile.batch_size}"
        )
    for reason in (profile.unsplit_reason, profile.whole_reason, profile.late_reason):
        if len(reason) > _LONGEST_REASON:
            raise StageFormatError(f"the profile has a reason of {len(reason)} characters")


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
                raise StageFormatError(f"the profile has the cost {value}, outside of 0 to {_LARGEST}")
