"""A training as its requester describes it, and as files and a message that the server takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import nn

from ravnest.errors import JobError, SettingsError
from ravnest.jobs.dataset_writer import PackedData, Progress, batch_size_of, pack_data
from ravnest.jobs.dry_run import DryRun, check_data, dry_run, example_for, input_names
from ravnest.jobs.graph_loss import pack_loss
from ravnest.jobs.model import PackedModel, pack_model, read_units
from ravnest.jobs.registry import check_update, named_loss, named_optimizer, named_scheduler
from ravnest.plan.profile import ModelProfile
from ravnest.plan.profiler import optimizer_state_factor, profile_model
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
"""Stages that the model is joined to for the check before it is sent."""
_STEPS = 5


@dataclass(frozen=True, eq=False)
class Job:
    """A training to be submitted. Names and meanings are those of ``Node`` and ``Trainer``."""

    model: nn.Module
    example_args: Sequence[Any] | torch.Tensor
    """Inputs of the model's forward: a batch, or a single sample with a batch dimension of 1."""
    train_data: Any
    """A dataset with a length and an index whose samples are ``(inputs..., target)`` or mappings with
    ``labels``; a tuple of tensors ``(inputs..., targets)``; or a ``DataLoader``, of which the dataset
    and the ``batch_size`` are taken."""
    criterion: Callable[..., Any]
    """A loss of ``torch.nn``, or any function of the model's output and the labels that can be captured
    as a graph."""
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_params: Mapping[str, Any] = field(default_factory=dict)
    lr_scheduler: type[Any] | None = None
    lr_scheduler_params: Mapping[str, Any] = field(default_factory=dict)
    lr_step_on_epoch_change: bool = True
    epochs: int = 1
    batch_size: int | None = None
    """None: that of the ``DataLoader`` or of the example; 64 for an example of one sample."""
    val_data: Any = None
    val_freq: int = 1
    example_kwargs: Mapping[str, Any] = field(default_factory=dict)
    update_frequency: int = 1
    schedule: Literal["async", "sync"] = "async"
    compression: bool | str = False
    reduce_factor: int | None = None
    average_optim: bool = False
    clip_grad_norm: float | None = None
    look_ahead: bool = False
    recompute: bool = False
    shuffle: bool = True
    drop_last: bool = False
    seed: int = 42
    name: str = ""
    """For people; the model's class if not given."""
    clusters: int | None = None
    min_providers: int = 1
    max_providers: int | None = None
    on_insufficient: Literal["wait", "fail"] = "wait"
    """What to do while the providers that are there cannot hold the model."""


@dataclass(frozen=True)
class PackedJob:
    """A job ready to be sent."""

    spec: JobSpec
    files: dict[str, Path]
    """The artifacts that it names, by digest."""


def pack_job(job: Job, folder: Path, progress: Progress | None = None) -> PackedJob:
    """Capture the model and write model, data and loss below ``folder``.

    All that can be known to go wrong at the providers is found here: ``JobError`` and ``SplitError``
    say what, before anything is sent. The model is left as it was.
    """
    tell = progress or _silent
    files = _Files()
    update = _check_settings(job)
    named = named_loss(job.criterion)
    tell("capturing the model", 0, _STEPS)
    example = example_for(job.model, job.example_args, job.example_kwargs, _batch_size(job))
    prepared = prepare(job.model, *example.rebuild(example.tensors))
    _check_batch(job, prepared)
    tell("packing the model", 1, _STEPS)
    factor = optimizer_state_factor(job.optimizer, job.optimizer_params)
    profile = profile_model(prepared, optimizer_factor=factor)
    model = pack_model(prepared, profile, folder / "model")
    tell("checking the model", 2, _STEPS)
    _check_joined(prepared, profile, model)
    tell("packing the data", 3, _STEPS)
    train, validation = _pack_data(job, prepared, folder, tell)
    tell("checking the loss", 4, _STEPS)
    loss = _loss(job, named, prepared, dry_run(prepared, train), files, folder)
    tell("naming the files", _STEPS, _STEPS)
    spec = JobSpec(
        name=_name(job),
        model=ModelFiles(units=files.add(model.units), weights=files.add(model.weights)),
        train=files.add_data(train),
        validation=None if validation is None else files.add_data(validation),
        training=_training(job, example.batch_size or 1, *update, loss),
        clusters=job.clusters,
        min_providers=job.min_providers,
        max_providers=job.max_providers,
        on_insufficient=job.on_insufficient,
    )
    return PackedJob(spec, files.found)


def _silent(_what: str, _done: int, _total: int) -> None:
    pass


def _check_settings(job: Job) -> tuple[NamedComponent, NamedComponent | None]:
    """The optimizer and the scheduler; ``JobError`` for what the server would refuse in the end."""
    optimizer = named_optimizer(job.optimizer, job.optimizer_params)
    scheduler = None
    if job.lr_scheduler is not None:
        scheduler = named_scheduler(job.lr_scheduler, job.lr_scheduler_params)
    check_update(optimizer, scheduler)
    nothing = Artifact(sha256="0" * 64, size=0)
    no_data = DatasetFiles(samples=1, inputs=(), labels=())
    try:
        JobSpec(
            name=_name(job),
            model=ModelFiles(units=nothing, weights=nothing),
            train=no_data,
            training=_training(job, 1, optimizer, scheduler, NamedComponent(name="MSELoss")),
            clusters=job.clusters,
            min_providers=job.min_providers,
            max_providers=job.max_providers,
            on_insufficient=job.on_insufficient,
        )
    except ValidationError as error:
        raise JobError(_first_problem(error)) from error
    return optimizer, scheduler


def _name(job: Job) -> str:
    return job.name or type(job.model).__name__[:100]


def _batch_size(job: Job) -> int | None:
    found = job.batch_size if job.batch_size is not None else batch_size_of(job.train_data)
    if found is not None and not is_count(found):
        raise JobError(f"batch_size must be a whole number from 1, not {found!r}")
    return found


def _check_batch(job: Job, prepared: PreparedModel) -> None:
    if prepared.capture.fixed_batch and not job.drop_last:
        raise JobError(
            f"the model works for batches of {prepared.capture.example.batch_size} only, and the last "
            "batch of an epoch may be smaller: use drop_last=True, or replace int(x.shape[0]), len(x) "
            "or a constant in view/reshape by x.shape[0] or -1 in its forward"
        )


def _check_joined(prepared: PreparedModel, profile: ModelProfile, packed: PackedModel) -> None:
    """Compare the model with what a server would make of the files."""
    units = read_units(packed.units)
    count = min(_CHECKED_STAGES, len(units.units))
    cuts = balanced_cuts(prepared, [1.0] * count)
    specs = units.stages([prepared.cuts.index(cut) + 1 for cut in cuts])
    tensors = {key: entry.tensor.detach() for key, entry in prepared.capture.state.tensors.items()}
    stages = [
        SplitStage(spec, {entry.key: tensors[entry.key] for entry in spec.state}) for spec in specs
    ]
    memory = sum(unit.activation_bytes for unit in profile.units)
    memory += max(unit.workspace_bytes for unit in profile.units)
    verify(prepared.capture, [stages], activation_bytes=memory)


def _pack_data(
    job: Job, prepared: PreparedModel, folder: Path, tell: Progress
) -> tuple[PackedData, PackedData | None]:
    names = input_names(prepared)
    train = pack_data(
        job.train_data, names, folder / "train", seed=job.seed, shuffle=job.shuffle, progress=tell
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
        progress=tell,
        what="val_data",
    )
    check_data(prepared, validation, "val_data")
    return train, validation


def _loss(
    job: Job,
    named: NamedComponent | None,
    prepared: PreparedModel,
    rehearsal: DryRun,
    files: _Files,
    folder: Path,
) -> NamedComponent | GraphLoss:
    if named is not None:
        rehearsal.check_loss(named)
        return named
    modes = prepared.capture.modes
    if job.val_data is not None and modes["train"].structure != modes["eval"].structure:
        raise JobError(
            "the model's output has another structure in validation than in training, and a criterion "
            "of your own is captured for one of them: use a loss of torch.nn, or leave val_data out"
        )
    packed = pack_loss(job.criterion, rehearsal.output, rehearsal.labels, folder / "loss")
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
    """The files of a job by their digests."""

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
    where = ".".join(str(part) for part in first["loc"])
    return f"{where} of the job is {first['input']!r}: {first['msg'].lower()}"
