"""Jobs that only evaluate a model: no training data, no updates, no trained weights."""

from __future__ import annotations

from dataclasses import replace

from ravnest.errors import JobError
from ravnest.jobs.job import Job
from ravnest.plan.profile import ModelProfile

_ABOUT_TRAINING = ("early_stopping", "keep_best", "resume_from", "robust_mean")


def as_evaluation(job: Job) -> Job:
    """Return a job with ``epochs=0`` without what only training needs; ``JobError`` if it has too much.

    Every cluster validates with all samples, so that one cluster suffices. Samples keep their order.
    """
    if job.val_data is None:
        raise JobError(
            "epochs=0 evaluates the model without training: give val_data=..., or epochs=1 or more"
        )
    given = next((name for name in _ABOUT_TRAINING if getattr(job, name) is not None), None)
    if given is not None:
        raise JobError(f"{given} is about training, and epochs=0 only evaluates the model: leave it out")
    if job.clusters not in (None, 1):
        raise JobError(f"clusters={job.clusters} would all compute the same: epochs=0 takes one cluster")
    return replace(
        job, train_data=None, augment=None, lr_scheduler=None, shuffle=False, schedule="sync", clusters=1
    )


def without_training(profile: ModelProfile) -> ModelProfile:
    """Return the costs of a model that is not trained: no gradients, optimizer state or averages."""
    state = tuple(replace(tensor, trainable=False, averaged=False) for tensor in profile.state)
    return replace(profile, state=state, optimizer_bytes_per_parameter_byte=0.0, update_copies=0.0)
