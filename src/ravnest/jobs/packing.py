"""A job as a message and files: its model is captured, its data and its loss are checked and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ravnest.errors import JobError
from ravnest.jobs.adapter import ADAPTER_FILE, adapter_of, write_adapter
from ravnest.jobs.augmentation import pack_augmentation
from ravnest.jobs.dataset_writer import (
    PackedData,
    StepProgress,
    pack_data,
    with_padding,
)
from ravnest.jobs.dry_run import (
    DryRun,
    as_large_as,
    check_batch_sizes,
    check_data,
    check_lengths,
    dry_run,
    example_for,
    first_inputs,
    input_names,
)
from ravnest.jobs.evaluation import as_evaluation, without_training
from ravnest.jobs.graph_loss import pack_loss
from ravnest.jobs.job import Job
from ravnest.jobs.job_files import JobFiles
from ravnest.jobs.job_settings import (
    UpdateSettings,
    batch_size_of_job,
    check_settings,
    job_spec,
    metric_of_plateau,
    training_spec,
)
from ravnest.jobs.learning_rates import check_one_cycle
from ravnest.jobs.loss_split import split_like, with_loss
from ravnest.jobs.metrics import pack_metrics, select_metrics
from ravnest.jobs.model import UnitModel, pack_model, read_units, write_units
from ravnest.jobs.padded_samples import PaddedSamples, largest_batch, varying_dims
from ravnest.jobs.registry import (
    named_loss,
)
from ravnest.jobs.value_checks import ValueScan, check_classes, check_extremes
from ravnest.plan.profile import ModelProfile
from ravnest.plan.profiler import kept_state, optimizer_state_factor, profile_model
from ravnest.plan.row_cuts import RowCutModel, row_cuts_to_ship, whole_reason
from ravnest.runtime.data import LABELS
from ravnest.schemas.jobs import (
    AugmentationSpec,
    DatasetFiles,
    GraphLoss,
    JobSpec,
    ModelFiles,
    NamedComponent,
)
from ravnest.split.dimensions import varying_outputs
from ravnest.split.example import Example
from ravnest.split.self_check import verify
from ravnest.split.split_stage import SplitStage
from ravnest.split.splitter import PreparedModel, balanced_cuts, prepare

_CHECKED_STAGES = 3
"""Number of stages that the model is merged into for the check before upload."""
_STEPS = 5
"""Number of packing steps that are reported to the progress callback."""


@dataclass(frozen=True)
class PackedJob:
    """A job as a message and files, ready to be uploaded."""

    spec: JobSpec
    files: dict[str, Path]
    """Files of the artifacts in ``spec``, by digest."""


def pack_job(job: Job, folder: Path, progress: StepProgress | None = None) -> PackedJob:
    """Capture the model and write model, data and loss below ``folder``.

    Raises ``JobError`` or ``SplitError`` for every problem that can be detected before training. The
    model is not changed.
    """
    report = progress or _ignore
    files = JobFiles()
    selection = select_metrics(job.metrics, job.early_stopping, job.keep_best, metric_of_plateau(job))
    if selection.metrics and job.val_data is None:
        raise JobError(
            "metrics, early_stopping and keep_best are about validations: give val_data, or omit them"
        )
    named = named_loss(job.criterion)
    profiled = profile_job(job, report)
    job = profiled.job
    prepared, profile, row_cut = profiled.prepared, profiled.profile, profiled.row_cut
    sizes = profiled.sizes
    model = pack_model(prepared, profile, folder / "model", row_cut)
    report("checking the model", 2, _STEPS)
    units = read_units(model.units)
    _check_merged(prepared, profile, units)
    for cut, merged in zip(row_cut[:1], units.row_cut, strict=False):
        _check_merged(cut.prepared, cut.profile, merged)
    report("packing the data", 3, _STEPS)
    scans = {label: _scan(job, label) for label in ("train_data", "val_data")}
    train, validation = _pack_data(job, prepared, folder, report, scans, sizes.padded)
    report("checking the loss", 4, _STEPS)
    first_batch = dry_run(prepared, train, sizes.largest)
    for scan in scans.values():
        check_classes(scan, job.criterion, first_batch.output)
    loss = _loss(job, named, prepared, first_batch, files, folder, sizes.varying.get(LABELS, ()))
    known = with_loss(profile, job.criterion, first_batch) if job.epochs else profile
    if known != profile:
        row_cut = tuple(replace(cut, profile=split_like(cut.profile, known)) for cut in row_cut)
        write_units(model, prepared, known, row_cut)
    augmentation = _augmentation(job, prepared, train, files, folder, varying=bool(sizes.varying))
    measured = pack_metrics(
        selection.metrics, first_batch.output, first_batch.labels, folder, files.add_graph
    )
    for scan in scans.values():
        check_extremes(scan, job.criterion, first_batch.output, first_batch.labels)
    adapter = adapter_of(job.model) if job.epochs else None
    if adapter is not None:
        write_adapter(adapter, folder / ADAPTER_FILE)
    report("hashing the files", _STEPS, _STEPS)
    spec = profiled.spec(
        ModelFiles(units=files.add(model.units), weights=files.add(model.weights)),
        files.add_data(train),
        None if validation is None else files.add_data(validation),
        loss,
        {
            "augmentation": augmentation,
            "metrics": measured,
            "early_stopping": selection.stopping,
            "keep_best": selection.best,
        },
    )
    if adapter is not None:
        spec = spec.model_copy(update={"adapter": files.add(folder / ADAPTER_FILE)})
    return PackedJob(spec, files.found)


@dataclass(frozen=True)
class _Sizes:
    """Sizes of the samples, if they differ."""

    padded: Mapping[str, PaddedSamples]
    """Datasets whose loader pads each batch, by their names in errors."""
    varying: Mapping[str, list[int]]
    """Dimensions of batches whose sizes differ, by field."""
    largest: Mapping[str, torch.Tensor] | None
    """Batch as large as the largest one; None if sizes do not differ."""


@dataclass(frozen=True)
class ProfiledJob:
    """A job whose settings are checked, with the captured model and its costs."""

    job: Job
    rule: UpdateSettings
    prepared: PreparedModel
    profile: ModelProfile
    batch_size: int
    sizes: _Sizes
    row_cut: tuple[RowCutModel, ...]
    """The same model with tensors cut along their rows, for providers that cannot hold them whole."""

    def spec(
        self,
        model: ModelFiles,
        train: DatasetFiles,
        validation: DatasetFiles | None,
        loss: NamedComponent | GraphLoss,
        others: Mapping[str, Any] | None = None,
    ) -> JobSpec:
        """Return the message that describes the job with these files.

        ``others``: settings of the training that depend on files.
        """
        training = training_spec(self.job, self.batch_size, self.rule, loss, train.samples)
        check_one_cycle(training, train.samples)
        training = training.model_copy(update=dict(others or {}))
        return job_spec(self.job, model, train, validation, training)


def profile_job(job: Job, report: StepProgress) -> ProfiledJob:
    """Check the settings of a job, capture its model and measure the costs of its parts."""
    job = job if job.epochs else as_evaluation(job)
    rule = check_settings(job)
    report("capturing the model", 0, _STEPS)
    example = example_for(job.model, job.example_args, job.example_kwargs, batch_size_of_job(job))
    sizes = _sizes(job, example)
    example = example if sizes.largest is None else as_large_as(example, sizes.largest)
    args, kwargs = example.rebuild(example.tensors)
    inputs = {name: dims for name, dims in sizes.varying.items() if name != LABELS}
    prepared = prepare(job.model, args, kwargs, varying=inputs, precision=job.precision)
    _check_batch(job, prepared)
    report("packing the model", 1, _STEPS)
    own = ({**job.optimizer_params, **group.params} for group in rule.groups)
    settings = (job.optimizer_params, *own)
    factor = max(optimizer_state_factor(job.optimizer, each) for each in settings)
    kept = kept_state(factor, job.model.parameters(), job.optimizer_state, ema=job.ema is not None)
    profile = replace(kept.applied(profile_model(prepared)), whole_reason=whole_reason(job.optimizer))
    if job.schedule == "async" and profile.late_reason:
        raise JobError(
            f"{profile.late_reason}, which an update could overtake with schedule='async': use 'sync' "
            "or 'auto'"
        )
    row_cut = () if profile.whole_reason else tuple(row_cuts_to_ship(prepared, profile))
    if not job.epochs:
        profile = without_training(profile)
        row_cut = tuple(replace(cut, profile=without_training(cut.profile)) for cut in row_cut)
    return ProfiledJob(job, rule, prepared, profile, example.batch_size or 1, sizes, row_cut)


def _sizes(job: Job, example: Example) -> _Sizes:
    padded = _padded_data(job, input_names(example))
    varying = varying_dims(list(padded.values()))
    largest = largest_batch(list(padded.values()), example.batch_size or 1) if varying else None
    return _Sizes(padded, varying, largest)


def _ignore(_step: str, _done: int, _total: int) -> None:
    pass


def _check_batch(job: Job, prepared: PreparedModel) -> None:
    if prepared.capture.fixed_batch and not job.drop_last:
        raise JobError(
            f"the model accepts only batches of {prepared.capture.example.batch_size} samples, and the "
            "last batch of an epoch may be smaller: use drop_last=True, or replace int(x.shape[0]), "
            "len(x) or a constant in view/reshape by x.shape[0] or -1 in its forward"
        )


def _check_merged(prepared: PreparedModel, profile: ModelProfile, units: UnitModel) -> None:
    """Compare the model with stages that are merged from the files, as the server merges them."""
    count = min(_CHECKED_STAGES, len(units.units))
    cuts = balanced_cuts(prepared, [1.0] * count)
    specs = units.stages([prepared.cuts.index(cut) + 1 for cut in cuts])
    tensors = {key: entry.tensor.detach() for key, entry in prepared.capture.state.tensors.items()}
    stages = [
        SplitStage(spec, {entry.key: tensors[entry.key] for entry in spec.state}) for spec in specs
    ]
    memory = sum(unit.activation_bytes for unit in profile.units)
    memory += max(unit.workspace_bytes for unit in profile.units)
    verify(
        prepared.capture,
        [stages],
        activation_bytes=memory,
        operation_bytes=prepared.operation_bytes,
    )


def _scan(job: Job, label: str) -> ValueScan:
    return ValueScan(label, job.criterion, refuses=job.check_values)


def _padded_data(job: Job, names: Sequence[str]) -> dict[str, PaddedSamples]:
    """Return the datasets whose batches a ``collate_fn`` makes, by the name of the setting."""
    found: dict[str, PaddedSamples] = {}
    for label, given in (("train_data", job.train_data), ("val_data", job.val_data)):
        if (samples := with_padding(given, names, label)) is not None:
            found[label] = samples
    return found


def _pack_data(
    job: Job,
    prepared: PreparedModel,
    folder: Path,
    report: StepProgress,
    scans: Mapping[str, ValueScan],
    padded: Mapping[str, PaddedSamples],
) -> tuple[PackedData, PackedData | None]:
    """Return the packed training and validation data; without training, the latter twice."""
    names = input_names(prepared.capture.example)
    rows = batch_size_of_job(job) or prepared.capture.example.batch_size or 1

    def pack(label: str, given: object) -> PackedData:
        packed = pack_data(
            padded.get(label, given),
            names,
            folder / ("train" if label == "train_data" else "validation"),
            seed=job.seed,
            shuffle=job.shuffle,
            progress=report,
            label=label,
            scan=scans[label].add,
        )
        check_data(prepared, packed, label)
        return packed

    train = None
    if job.epochs:
        train = pack("train_data", job.train_data)
        if "train_data" in padded:
            check_lengths(prepared, padded["train_data"], "train_data")
        last = [] if job.drop_last else [train.samples % rows or rows]
        check_batch_sizes(prepared, [min(rows, train.samples), *last], "train_data")
        if job.val_data is None:
            return train, None
    validation = pack("val_data", job.val_data)
    if "val_data" in padded:
        check_lengths(prepared, padded["val_data"], "val_data", "eval")
    check_batch_sizes(prepared, [validation.samples % rows or rows], "val_data", "eval")
    return train or validation, validation


def _loss(
    job: Job,
    named: NamedComponent | None,
    prepared: PreparedModel,
    first_batch: DryRun,
    files: JobFiles,
    folder: Path,
    label_dims: Sequence[int] = (),
) -> NamedComponent | GraphLoss:
    if named is not None:
        first_batch.check_loss(named)
        return named
    modes = prepared.capture.modes
    if job.val_data is not None and modes["train"].structure != modes["eval"].structure:
        raise JobError(
            "the model's output has another structure in evaluation than in training, and a custom "
            "criterion is captured for one structure: use a loss of torch.nn, or omit val_data"
        )
    varying = {**varying_outputs(prepared.capture), **({"labels": label_dims} if label_dims else {})}
    packed = pack_loss(
        job.criterion,
        first_batch.output,
        first_batch.labels,
        folder / "loss",
        varying=varying,
        precision=job.precision,
    )
    return files.add_graph(packed)


def _augmentation(
    job: Job,
    prepared: PreparedModel,
    train: PackedData,
    files: JobFiles,
    folder: Path,
    *,
    varying: bool,
) -> AugmentationSpec | None:
    if job.augment is None:
        return None
    if varying:
        raise JobError(
            "augment is captured for samples of one size, and the samples of train_data differ: pad "
            "them to one size in the dataset, or leave augment out"
        )
    batch = first_inputs(prepared, train)
    graph = files.add_graph(pack_augmentation(job.augment, batch, folder / "augmentation"))
    return AugmentationSpec(graph=graph, inputs=tuple(batch))
