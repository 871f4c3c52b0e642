"""Settings of a job: checks, and their form as a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import ValidationError

from ravnest.errors import JobError, SettingsError
from ravnest.jobs.dataset_writer import (
    batch_size_of,
)
from ravnest.jobs.job import Job
from ravnest.jobs.learning_rates import PLATEAU, named_plateau, named_schedule, plateau_metric
from ravnest.jobs.registry import (
    check_shapes,
    check_update,
    named_groups,
    named_optimizer,
    named_scheduler,
)
from ravnest.runtime.settings import check_ema, check_state_form, codec_for, is_count
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import (
    DatasetFiles,
    GraphLoss,
    JobSpec,
    ModelFiles,
    NamedComponent,
    ParameterGroup,
    TrainingSpec,
)
from ravnest.types import ROBUST_CLUSTERS
from ravnest.wire.codecs import RAW

_SOME_UPDATES = 1000
"""Number of updates with which schedules are checked before the data is packed."""


@dataclass(frozen=True)
class UpdateSettings:
    """Optimizer of a job, and the scheduler of a given number of updates."""

    optimizer: NamedComponent
    groups: tuple[ParameterGroup, ...]
    scheduler: Callable[[int], NamedComponent | None]


def check_settings(job: Job) -> UpdateSettings:
    """Return how weights are updated; raise ``JobError`` for settings the server refuses."""
    _check_given(job)
    optimizer = named_optimizer(job.optimizer, job.optimizer_params)
    groups = named_groups(job.parameter_groups, job.model)
    rule = UpdateSettings(optimizer, groups, _scheduler(job))
    check_update(optimizer, rule.scheduler(_SOME_UPDATES), groups)
    check_shapes(job.optimizer, job.optimizer_params, job.model)
    if job.clip_grad_norm is not None and job.clip_grad_value is not None:
        raise JobError("give clip_grad_norm or clip_grad_value, not both")
    _check_options(job)
    if job.robust_mean is not None and (job.clusters or 0) < ROBUST_CLUSTERS:
        raise JobError(
            f"robust_mean={job.robust_mean!r} needs {ROBUST_CLUSTERS} clusters or more, and the job has "
            f"clusters={job.clusters}: of two, nobody can tell which one is wrong. Set "
            f"clusters={ROBUST_CLUSTERS} or more, or leave robust_mean out"
        )
    empty = Artifact(sha256="0" * 64, size=0)
    try:
        job_spec(
            job,
            ModelFiles(units=empty, weights=empty),
            DatasetFiles(samples=1, inputs=(), labels=()),
            None,
            training_spec(job, 1, rule, NamedComponent(name="MSELoss"), samples=1),
        )
    except ValidationError as error:
        raise JobError(_first_problem(error)) from error
    return rule


def _check_options(job: Job) -> None:
    try:
        check_ema(job.ema)
        check_state_form(job.optimizer_state, average_optim=job.average_optim)
    except SettingsError as error:
        raise JobError(str(error)) from error


def _check_given(job: Job) -> None:
    if job.train_data is None:
        raise JobError("the job has no train_data: give Job(train_data=...) the samples to train with")
    tensors = isinstance(job.example_args, torch.Tensor) or len(job.example_args)
    if not tensors and not job.example_kwargs:
        raise JobError(
            "the job has no example inputs: give Job(example_args=...) or Job(example_kwargs=...) a "
            "batch of the model's inputs"
        )


def _scheduler(job: Job) -> Callable[[int], NamedComponent | None]:
    given, params = job.lr_scheduler, job.lr_scheduler_params
    if given is None:
        return lambda _: None
    if given == PLATEAU:
        plateau = named_plateau(params)
        return lambda _: plateau
    if _counts_updates(job):
        return lambda updates: named_schedule(given, params, updates)
    named = named_scheduler(given, params)
    return lambda _: named


def _counts_updates(job: Job) -> bool:
    """Return whether the scheduler is one of ours, which count updates."""
    return isinstance(job.lr_scheduler, str | list | tuple) and job.lr_scheduler != PLATEAU


def metric_of_plateau(job: Job) -> str:
    """Return the metric that the learning rate follows; empty if it follows none."""
    return plateau_metric(job.lr_scheduler_params) if job.lr_scheduler == PLATEAU else ""


def job_spec(
    job: Job,
    model: ModelFiles,
    train: DatasetFiles,
    validation: DatasetFiles | None,
    training: TrainingSpec,
) -> JobSpec:
    """Return the message that describes a job with these files."""
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


def batch_size_of_job(job: Job) -> int | None:
    """Return the batch size of the job or of its loader; None if neither has one."""
    found = job.batch_size if job.batch_size is not None else batch_size_of(job.train_data)
    if found is not None and not is_count(found):
        raise JobError(f"batch_size must be an integer of at least 1, not {found!r}")
    return found


def training_spec(
    job: Job,
    batch_size: int,
    rule: UpdateSettings,
    loss: NamedComponent | GraphLoss,
    samples: int,
) -> TrainingSpec:
    """Return the settings of training as a message, with the scheduler for so many samples."""
    try:
        codec = codec_for(job.compression)
    except SettingsError as error:
        raise JobError(str(error)) from error
    training = TrainingSpec(
        epochs=job.epochs,
        batch_size=batch_size,
        optimizer=rule.optimizer,
        optimizer_state=job.optimizer_state,
        parameter_groups=rule.groups,
        lr_step_on_epoch_change=job.lr_step_on_epoch_change and not _counts_updates(job),
        loss=loss,
        update_frequency=job.update_frequency,
        schedule=job.schedule,
        micro_batches=job.micro_batches,
        compression=None if codec == RAW.name else codec,  # type: ignore[arg-type]
        reduce_factor=job.reduce_factor,
        average_optim=job.average_optim,
        robust_mean=job.robust_mean,
        val_freq=job.val_freq,
        clip_grad_norm=job.clip_grad_norm,
        clip_grad_value=job.clip_grad_value,
        plateau_metric=metric_of_plateau(job),
        ema=job.ema,
        stop_on_nan=job.stop_on_nan,
        look_ahead=job.look_ahead,
        recompute=job.recompute,
        shuffle=job.shuffle,
        drop_last=job.drop_last,
        seed=job.seed,
    )
    updates = training.epochs * training.updates_per_epoch(samples)
    return training.model_copy(update={"scheduler": rule.scheduler(updates)})


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(item) for item in first["loc"])
    return f"the job has {where}={first['input']!r}: {first['msg'].lower()}"
