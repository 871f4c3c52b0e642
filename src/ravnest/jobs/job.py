"""``Job``, the requester's description of a training run, and its form as a message and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import nn

from ravnest.errors import JobError, SettingsError
from ravnest.jobs.dataset_writer import PackedData, StepProgress, batch_size_of, pack_data
from ravnest.jobs.dry_run import DryRun, check_data, dry_run, example_for, input_names
from ravnest.jobs.graph_loss import pack_loss
from ravnest.jobs.model import UnitModel, pack_model, read_units
from ravnest.jobs.registry import check_update, named_loss, named_optimizer, named_scheduler
from ravnest.plan.profile import ModelProfile
from ravnest.plan.profiler import optimizer_state_factor, profile_model
from ravnest.plan.row_cuts import row_cuts_to_ship, whole_reason
from ravnest.runtime.settings import codec_for, is_count
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import (
    DataFile,
    DatasetFiles,
    GraphLoss,
    JobSpec,
    ModelFiles,
    NamedComponent,
    TrainingSpec,
)
from ravnest.split.self_check import verify
from ravnest.split.splitter import PreparedModel, SplitStage, balanced_cuts, prepare
from ravnest.store.files import sha256_of
from ravnest.wire.codecs import RAW

_CHECKED_STAGES = 3
"""Number of stages that the model is merged into for the check before upload."""
_STEPS = 5
"""Number of packing steps that are reported to the progress callback."""


@dataclass(frozen=True, eq=False)
class Job:
    """Description of a training run to submit."""

    model: nn.Module
    """Model to train. Its current weights are the initial weights; the object itself is not changed."""
    example_args: Sequence[Any] | torch.Tensor
    """Positional inputs of the model's `forward`: tensors of a batch, or of a single sample with a
    batch dimension of 1, or constants."""
    train_data: Any
    """Training samples: a dataset with a length and an index, a tuple of tensors or a `DataLoader`.
    See [Data](#data)."""
    criterion: Callable[..., Any]
    """Loss: a module or function of `torch.nn`, or a function of the model's output and the labels.
    See [Losses](#losses)."""
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    """Class of `torch.optim` whose step needs no closure."""
    optimizer_params: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the optimizer: numbers, strings, booleans, None, or lists of them."""
    lr_scheduler: type[Any] | None = None
    """Class of `torch.optim.lr_scheduler` that takes neither functions nor other schedulers."""
    lr_scheduler_params: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the scheduler, of the same types as `optimizer_params`."""
    lr_step_on_epoch_change: bool = True
    """Step the scheduler at the end of each epoch; `False`: after each update."""
    epochs: int = 1
    """Number of passes over the training data."""
    batch_size: int | None = None
    """Samples per micro-batch; memory is planned for it. `None`: the batch size of the `DataLoader`,
    or of the example, or 64 if the example is a single sample."""
    val_data: Any = None
    """Validation samples, in the same forms as `train_data`; `None`: no validation."""
    val_freq: int = 1
    """Epochs between validations."""
    example_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword inputs of the model's `forward`: tensors as in `example_args`, or constants."""
    update_frequency: int = 1
    """Batches per update; the gradient is their mean."""
    schedule: Literal["auto", "sync", "async"] = "auto"
    """`sync`: the updates of a single process. `async`: gradients may be one update old. `auto`: the
    one that reaches a given loss sooner by prediction: `sync` if batches can be split into enough
    micro-batches, else `async`. See [Schedules](schedules.md)."""
    micro_batches: int | Literal["auto"] = "auto"
    """Number of micro-batches that each batch is split into. `auto`: chosen by predicted and then
    by measured times, and 1 if the result would not be that of the whole batch."""
    compression: bool | str = False
    """Encoding of activations, gradients and averages between providers: `False` (none), `True` or
    `"fp16"`, `"bf16"`, `"int8"`. See [Compression](compression.md)."""
    reduce_factor: int | None = None
    """Updates between averaging rounds of the clusters; `None`: once per epoch, but at most every 2 s.
    See [Averaging](averaging.md)."""
    average_optim: bool = False
    """Average the optimizer's state as well."""
    clip_grad_norm: float | None = None
    """Maximum norm of the gradients of the whole model."""
    look_ahead: bool = True
    """In `async`, run forward passes on weights that the optimizer's state predicts for the update of
    their gradient. See [Schedules](schedules.md)."""
    recompute: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass instead of storing them, which saves memory and takes
    time. `"auto"`: each provider as much as its memory makes necessary."""
    shuffle: bool = True
    """Shuffle the samples before the clusters share them, and again in each epoch."""
    drop_last: bool = False
    """Leave out the last batch of an epoch if it is smaller than `batch_size`."""
    seed: int = 42
    """Seed of the sample order, of dropout and of other random operations."""
    name: str = ""
    """Name that is shown to people; empty: the class name of the model."""
    clusters: int | None = None
    """Number of clusters; `None`: the planner chooses."""
    min_providers: int = 1
    """Number of idle providers that the job waits for before it is planned."""
    max_providers: int | None = None
    """Maximum number of providers that the job uses; `None`: all idle providers."""
    on_insufficient: Literal["wait", "fail"] | float = "wait"
    """Reaction if the providers are too few or cannot hold the model, also after a loss during training:
    `wait` for more, `fail`, or wait for this number of seconds."""
    resume_from: str | None = None
    """Ended job of yours whose newest checkpoint training starts from, such as `"job-1234abcd"`."""


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
    files = _Files()
    optimizer, scheduler = _check_settings(job)
    named = named_loss(job.criterion)
    report("capturing the model", 0, _STEPS)
    example = example_for(job.model, job.example_args, job.example_kwargs, _batch_size(job))
    prepared = prepare(job.model, *example.rebuild(example.tensors))
    _check_batch(job, prepared)
    report("packing the model", 1, _STEPS)
    factor = optimizer_state_factor(job.optimizer, job.optimizer_params)
    profile = replace(
        profile_model(prepared, optimizer_factor=factor), whole_reason=whole_reason(job.optimizer)
    )
    row_cut = [] if profile.whole_reason else list(row_cuts_to_ship(prepared, profile))
    model = pack_model(prepared, profile, folder / "model", row_cut)
    report("checking the model", 2, _STEPS)
    units = read_units(model.units)
    _check_merged(prepared, profile, units)
    for cut, merged in zip(row_cut[:1], units.row_cut, strict=False):
        _check_merged(cut.prepared, cut.profile, merged)
    report("packing the data", 3, _STEPS)
    train, validation = _pack_data(job, prepared, folder, report)
    report("checking the loss", 4, _STEPS)
    loss = _loss(job, named, prepared, dry_run(prepared, train), files, folder)
    report("hashing the files", _STEPS, _STEPS)
    spec = _spec(
        job,
        ModelFiles(units=files.add(model.units), weights=files.add(model.weights)),
        files.add_data(train),
        None if validation is None else files.add_data(validation),
        _training(job, example.batch_size or 1, optimizer, scheduler, loss),
    )
    return PackedJob(spec, files.found)


def _ignore(_step: str, _done: int, _total: int) -> None:
    pass


def _check_settings(job: Job) -> tuple[NamedComponent, NamedComponent | None]:
    """Return the optimizer and the scheduler; raise ``JobError`` for settings the server refuses."""
    optimizer = named_optimizer(job.optimizer, job.optimizer_params)
    scheduler = None
    if job.lr_scheduler is not None:
        scheduler = named_scheduler(job.lr_scheduler, job.lr_scheduler_params)
    check_update(optimizer, scheduler)
    empty = Artifact(sha256="0" * 64, size=0)
    try:
        _spec(
            job,
            ModelFiles(units=empty, weights=empty),
            DatasetFiles(samples=1, inputs=(), labels=()),
            None,
            _training(job, 1, optimizer, scheduler, NamedComponent(name="MSELoss")),
        )
    except ValidationError as error:
        raise JobError(_first_problem(error)) from error
    return optimizer, scheduler


def _spec(
    job: Job,
    model: ModelFiles,
    train: DatasetFiles,
    validation: DatasetFiles | None,
    training: TrainingSpec,
) -> JobSpec:
    return JobSpec(
        name=job.name or type(job.model).__name__[:100],
        model=model,
        train=train,
        validation=validation,
        training=training,
        clusters=job.clusters,
        min_providers=job.min_providers,
        max_providers=job.max_providers,
        on_insufficient=job.on_insufficient,
        resume_from=job.resume_from,
    )


def _batch_size(job: Job) -> int | None:
    found = job.batch_size if job.batch_size is not None else batch_size_of(job.train_data)
    if found is not None and not is_count(found):
        raise JobError(f"batch_size must be an integer of at least 1, not {found!r}")
    return found


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


def _pack_data(
    job: Job, prepared: PreparedModel, folder: Path, report: StepProgress
) -> tuple[PackedData, PackedData | None]:
    names = input_names(prepared)
    train = pack_data(
        job.train_data, names, folder / "train", seed=job.seed, shuffle=job.shuffle, progress=report
    )
    check_data(prepared, train, "train_data")
    if job.val_data is None:
        return train, None
    validation = pack_data(
        job.val_data,
        names,
        folder / "validation",
        seed=job.seed,
        shuffle=job.shuffle,
        progress=report,
        label="val_data",
    )
    check_data(prepared, validation, "val_data")
    return train, validation


def _loss(
    job: Job,
    named: NamedComponent | None,
    prepared: PreparedModel,
    first_batch: DryRun,
    files: _Files,
    folder: Path,
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
    packed = pack_loss(job.criterion, first_batch.output, first_batch.labels, folder / "loss")
    return GraphLoss(stage=files.add(packed.stage), weights=files.add(packed.weights))


def _training(
    job: Job,
    batch_size: int,
    optimizer: NamedComponent,
    scheduler: NamedComponent | None,
    loss: NamedComponent | GraphLoss,
) -> TrainingSpec:
    try:
        codec = codec_for(job.compression)
    except SettingsError as error:
        raise JobError(str(error)) from error
    return TrainingSpec(
        epochs=job.epochs,
        batch_size=batch_size,
        optimizer=optimizer,
        scheduler=scheduler,
        lr_step_on_epoch_change=job.lr_step_on_epoch_change,
        loss=loss,
        update_frequency=job.update_frequency,
        schedule=job.schedule,
        micro_batches=job.micro_batches,
        compression=None if codec == RAW.name else codec,  # type: ignore[arg-type]
        reduce_factor=job.reduce_factor,
        average_optim=job.average_optim,
        val_freq=job.val_freq,
        clip_grad_norm=job.clip_grad_norm,
        look_ahead=job.look_ahead,
        recompute=job.recompute,
        shuffle=job.shuffle,
        drop_last=job.drop_last,
        seed=job.seed,
    )


class _Files:
    """Files of a job by digest."""

    def __init__(self) -> None:
        self.found: dict[str, Path] = {}

    def add(self, path: Path) -> Artifact:
        digest = sha256_of(path)
        self.found[digest] = path
        return Artifact(sha256=digest, size=path.stat().st_size)

    def add_data(self, data: PackedData) -> DatasetFiles:
        return DatasetFiles(
            samples=data.samples, inputs=self._pieces(data.inputs), labels=self._pieces(data.labels)
        )

    def _pieces(self, files: Sequence[tuple[Path, int]]) -> tuple[DataFile, ...]:
        return tuple(DataFile(artifact=self.add(path), rows=rows) for path, rows in files)


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(item) for item in first["loc"])
    return f"the job has {where}={first['input']!r}: {first['msg'].lower()}"
