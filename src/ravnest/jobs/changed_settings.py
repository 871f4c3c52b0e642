"""Settings of a job that is submitted again with changes: their checks, and the changed message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ravnest.errors import JobError, PlanError
from ravnest.jobs.learning_rates import PIECEWISE, PLATEAU, check_one_cycle, named_schedule
from ravnest.jobs.registry import (
    check_update,
    named_component,
    optimizer_class,
    scheduler_names,
)
from ravnest.plan.profiler import optimizer_state_factor
from ravnest.schemas.job_changes import JobChanges
from ravnest.schemas.jobs import JobSpec, NamedComponent, ParameterGroup, TrainingSpec

_OF_JOB = ("name", "clusters", "min_providers", "max_providers", "on_insufficient")
"""Changes that are settings of the job; the others are settings of its training."""
_TRANSLATED = {"optimizer_params", "lr_scheduler", "lr_scheduler_params"}
_TORCH_PLATEAU = "ReduceLROnPlateau"


def job_changes(fields: Mapping[str, Any]) -> JobChanges:
    """Return changes that a user gives with the names of ``Job``; raise ``JobError`` for others.

    ``lr`` stands for ``optimizer_params["lr"]``. A scheduler may be a class of torch.
    """
    given = dict(fields)
    if "lr" in given:
        own = given.get("optimizer_params", {})
        if not isinstance(own, Mapping):
            raise JobError(f"optimizer_params must be a mapping, not {own!r}")
        given["optimizer_params"] = {**own, "lr": given.pop("lr")}
    scheduler = given.get("lr_scheduler")
    if isinstance(scheduler, type):
        given["lr_scheduler"] = scheduler.__name__
    if given.get("compression") in (True, False):
        given["compression"] = "fp16" if given["compression"] else None
    try:
        return JobChanges(**given)
    except ValidationError as error:
        raise JobError(first_problem(error)) from error


def first_problem(error: ValidationError) -> str:
    """Return the first problem of a message as a sentence."""
    first = error.errors()[0]
    where = ".".join(str(item) for item in first["loc"])
    said = str(first["msg"]).removeprefix("Value error, ")
    return f"{where}={first['input']!r}: {said}" if where else said


def changed_spec(old: JobSpec, changes: JobChanges) -> JobSpec:
    """Return the job with changed settings; raise ``JobError`` if they do not fit it.

    ``start_from`` is left to the caller.
    """
    given = changes.given
    _check_evaluation(old, given)
    training = _training(old, changes)
    own = {name: given[name] for name in _OF_JOB if name in given}
    if training.epochs == 0:
        own["clusters"] = 1
    try:
        return JobSpec.model_validate({**_fields(old), "resume_from": None, **own, "training": training})
    except ValidationError as error:
        raise JobError(first_problem(error)) from error


def _fields(message: JobSpec | TrainingSpec) -> dict[str, Any]:
    return {name: getattr(message, name) for name in type(message).model_fields}


def _check_evaluation(old: JobSpec, given: Mapping[str, Any]) -> None:
    epochs = given.get("epochs", old.training.epochs)
    if epochs and not old.training.epochs and old.train == old.validation:
        raise JobError(
            "the job was submitted to evaluate a model and has no training data: it can only be "
            "submitted again with epochs=0"
        )
    if epochs == 0 and old.validation is None:
        raise JobError("epochs=0 evaluates the model, and the job has no validation data")


def _training(old: JobSpec, changes: JobChanges) -> TrainingSpec:
    before, given = old.training, changes.given
    update = {
        name: value for name, value in given.items() if name not in _OF_JOB and name not in _TRANSLATED
    }
    if given.get("schedule") == "async" and before.schedule != "async":
        raise JobError(
            "schedule='async' is checked when the model is captured: set it in your program and submit "
            "the job from there"
        )
    update["optimizer"] = _optimizer(before, given.get("optimizer_params", {}))
    if given.get("epochs") == 0:
        update |= {"early_stopping": None, "keep_best": None, "robust_mean": None}
    try:
        training = TrainingSpec.model_validate({**_fields(before), **update})
        training = TrainingSpec.model_validate({**_fields(training), **_scheduler(old, training, given)})
    except ValidationError as error:
        raise JobError(first_problem(error)) from error
    if training.clip_grad_norm is not None and training.clip_grad_value is not None:
        raise JobError("give clip_grad_norm or clip_grad_value, not both; null or None removes one")
    check_update(training.optimizer, training.scheduler, training.parameter_groups)
    check_one_cycle(training, old.train.samples)
    return training


def _optimizer(before: TrainingSpec, params: Mapping[str, Any]) -> NamedComponent:
    """Return the optimizer with changed parameters, unless it needs more memory with them."""
    optimizer = before.optimizer
    if not params:
        return optimizer
    changed = named_component(optimizer.name, "optimizer_params", {**optimizer.params, **params})
    one, other = (_state_factor(each, before.parameter_groups) for each in (changed, optimizer))
    if one > other:
        raise JobError(
            f"with these optimizer_params, {optimizer.name} keeps {one:g} numbers for each weight "
            f"instead of {other:g}, and memory was planned without them: change them in your program "
            "and submit the job from there"
        )
    return changed


def _state_factor(optimizer: NamedComponent, groups: tuple[ParameterGroup, ...]) -> float:
    """Return the largest optimizer state per weight of all groups."""
    kind = optimizer_class(optimizer.name)
    settings = ({}, *(group.params for group in groups))
    try:
        return max(optimizer_state_factor(kind, {**optimizer.params, **own}) for own in settings)
    except PlanError as error:
        raise JobError(f"{optimizer.name} does not accept optimizer_params: {error}") from error


def _scheduler(old: JobSpec, training: TrainingSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the learning rate scheduler that change."""
    before = old.training
    updates = training.epochs * training.updates_per_epoch(old.train.samples)
    if "lr_scheduler" not in given:
        if "lr_scheduler_params" in given:
            raise JobError("lr_scheduler_params needs lr_scheduler: name the scheduler too")
        were = before.epochs * before.updates_per_epoch(old.train.samples)
        if before.scheduler is not None and before.scheduler.name == PIECEWISE and 0 < updates != were:
            raise JobError(
                f"the learning rate follows a schedule for {were} updates, and the changed job makes "
                f"{updates}: give lr_scheduler too, such as lr_scheduler='cosine', or None"
            )
        return {}
    scheduler, params = given["lr_scheduler"], given.get("lr_scheduler_params", {})
    if scheduler is None:
        return {"scheduler": None, "plateau_metric": ""}
    if scheduler in (PLATEAU, _TORCH_PLATEAU):
        raise JobError(
            "a learning rate that follows a metric belongs to the captured metrics: set it in your "
            "program and submit the job from there"
        )
    if scheduler in scheduler_names() and scheduler != PIECEWISE:
        named = named_component(scheduler, "lr_scheduler_params", params)
        by_epoch = given.get("lr_step_on_epoch_change", True)
    else:
        named, by_epoch = named_schedule(scheduler, params, updates), False
    return {"scheduler": named, "lr_step_on_epoch_change": by_epoch, "plateau_metric": ""}
