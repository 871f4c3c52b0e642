"""Jobs that are submitted again with changed settings: what may change, and what is refused."""

from typing import Any

import pytest
import torch

from ravnest.errors import JobError
from ravnest.jobs.changed_settings import changed_spec, job_changes
from ravnest.jobs.learning_rates import PIECEWISE, named_schedule
from ravnest.schemas.base import Artifact
from ravnest.schemas.job_changes import JobChanges
from ravnest.schemas.jobs import (
    BestRule,
    DataFile,
    DatasetFiles,
    JobSpec,
    ModelFiles,
    NamedComponent,
    TrainingSpec,
)

FILE = Artifact(sha256="0" * 64, size=1)


def data(samples: int) -> DatasetFiles:
    files = (DataFile(artifact=FILE, rows=samples),)
    return DatasetFiles(samples=samples, inputs=files, labels=files)


def spec(scheduler: NamedComponent | None = None, **changes: Any) -> JobSpec:
    training = TrainingSpec(
        epochs=4,
        batch_size=10,
        optimizer=NamedComponent(name="SGD", params={"lr": 0.1, "momentum": 0.9}),
        loss=NamedComponent(name="CrossEntropyLoss"),
        scheduler=scheduler,
        keep_best=BestRule(metric="loss", mode="min"),
        **changes,
    )
    return JobSpec(
        name="first",
        model=ModelFiles(units=FILE, weights=FILE),
        train=data(40),
        validation=data(10),
        training=training,
        resume_from="job-1",
    )


def changed(old: JobSpec, **fields: Any) -> JobSpec:
    return changed_spec(old, job_changes(fields))


def test_only_what_is_given_changes() -> None:
    found = changed(spec(), lr=0.01, name="second", epochs=7, clusters=2, compression=True)
    assert found.training.optimizer.params == {"lr": 0.01, "momentum": 0.9}
    assert (found.name, found.training.epochs, found.clusters) == ("second", 7, 2)
    assert found.training.compression == "fp16"
    assert found.resume_from is None, "it does not continue what the earlier job continued"
    rest = {"optimizer", "epochs", "compression"}
    before = spec().training
    assert all(
        getattr(found.training, name) == getattr(before, name)
        for name in TrainingSpec.model_fields
        if name not in rest
    )
    assert changed(spec()).training == before


def test_changes_are_sent_without_what_stays() -> None:
    body = job_changes({"lr": 0.5, "clip_grad_norm": None})
    assert JobChanges.model_validate_json(body.model_dump_json()) == body
    assert body.model_dump() == {"optimizer_params": {"lr": 0.5}, "clip_grad_norm": None}


def test_a_schedule_is_made_for_the_new_number_of_updates() -> None:
    old = spec(named_schedule("cosine", {}, 16), lr_step_on_epoch_change=False)
    assert changed(old, lr=0.5).training.scheduler == old.training.scheduler
    with pytest.raises(JobError, match="for 16 updates, and the changed job makes 32: give lr"):
        changed(old, epochs=8)
    found = changed(old, epochs=8, lr_scheduler="linear", lr_scheduler_params={"warmup_steps": 2})
    assert found.training.scheduler is not None
    assert found.training.scheduler.name == PIECEWISE
    assert found.training.scheduler.params["steps"] == [2, 30]
    torchs = changed(old, epochs=8, lr_scheduler=torch.optim.lr_scheduler.StepLR,
                     lr_scheduler_params={"step_size": 3})  # fmt: skip
    assert torchs.training.scheduler == NamedComponent(name="StepLR", params={"step_size": 3})
    assert torchs.training.lr_step_on_epoch_change
    assert changed(old, epochs=8, lr_scheduler=None).training.scheduler is None


def test_a_trained_job_can_be_evaluated_and_an_evaluation_cannot_be_trained() -> None:
    found = changed(spec(), epochs=0)
    assert (found.training.epochs, found.clusters, found.training.keep_best) == (0, 1, None)
    evaluation = found.model_copy(update={"train": found.validation})
    assert changed(evaluation, name="again").training.epochs == 0
    with pytest.raises(JobError, match="has no training data"):
        changed(evaluation, epochs=2)
    with pytest.raises(JobError, match="has no validation data"):
        changed(spec().model_copy(update={"validation": None}), epochs=0)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model": 1}, "model is part of the captured model, so that it cannot change without another"),
        ({"criterion": 1}, "criterion is captured with the model"),
        ({"batch_size": 3}, "batch_size is the size for which memory and times"),
        ({"optimizer": "AdamW"}, "optimizer decides how much memory each weight needs"),
        ({"example_args": 1}, "change it in your program and submit the job from there"),
        ({"epoch": 3}, "a resubmission has no keyword 'epoch': did you mean epochs?"),
        ({"epochs": -1}, "epochs=-1: "),
        ({"optimizer_params": 3}, "optimizer_params=3: "),
        ({"optimizer_params": {"lr": -1.0}}, "SGD does not accept optimizer_params: "),
        ({"optimizer_params": {"rate": 1.0}}, "SGD does not accept optimizer_params: "),
        ({"lr_scheduler": "cosines"}, "no schedule is called 'cosines'"),
        ({"lr_scheduler": "StepLR"}, "StepLR does not accept lr_scheduler_params: "),
        ({"lr_scheduler": "plateau"}, "belongs to the captured metrics"),
        ({"lr_scheduler_params": {"gamma": 1.0}}, "name the scheduler too"),
        ({"schedule": "async"}, "checked when the model is captured"),
        ({"clip_grad_norm": 1.0, "clip_grad_value": 1.0}, "not both"),
        ({"robust_mean": "trimmed"}, "robust_mean needs clusters=3"),
    ],
)
def test_changes_that_do_not_fit_are_refused_with_the_reason(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(JobError) as caught:
        changed(spec(), **fields)
    assert why in str(caught.value)


def test_parameters_that_need_more_memory_are_refused() -> None:
    plain = spec()
    sgd = NamedComponent(name="SGD", params={"lr": 0.1})
    plain = plain.model_copy(update={"training": plain.training.model_copy(update={"optimizer": sgd})})
    with pytest.raises(JobError, match="SGD keeps 1 numbers for each weight instead of 0"):
        changed(plain, optimizer_params={"momentum": 0.9})
    assert changed(spec(), optimizer_params={"momentum": 0.0}).training.epochs == 4


def test_a_cycle_of_torch_must_last_for_the_new_number_of_updates() -> None:
    cycle = NamedComponent(name="OneCycleLR", params={"max_lr": 0.1, "total_steps": 16})
    old = spec(cycle, lr_step_on_epoch_change=False)
    assert changed(old, lr=0.5).training.scheduler == cycle
    with pytest.raises(JobError, match="given 16 steps, and the job makes 32, after each update"):
        changed(old, epochs=8)
