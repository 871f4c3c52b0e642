"""A job as the server needs it for an estimate: costs and sizes, without weights and data."""

from __future__ import annotations

from ravnest.errors import JobError
from ravnest.jobs.dataset_writer import DataSize, StepProgress, measure_data
from ravnest.jobs.dry_run import input_names
from ravnest.jobs.job import Job
from ravnest.jobs.model import profiles_to_json
from ravnest.jobs.packing import profile_job
from ravnest.jobs.registry import named_loss
from ravnest.schemas.base import Artifact
from ravnest.schemas.estimates import PROFILES_LIMIT, EstimateRequest
from ravnest.schemas.jobs import DataFile, DatasetFiles, ModelFiles, NamedComponent

_NO_DIGEST = "0" * 64
_ANY_LOSS = NamedComponent(name="MSELoss")
"""Stands for a loss that is not one of torch: plans do not depend on it."""


def pack_estimate(job: Job, progress: StepProgress | None = None) -> EstimateRequest:
    """Capture the model of a job and return its costs, with the sizes of its files.

    One sample of each dataset is read. Raises ``JobError`` or ``SplitError`` as ``pack_job`` does, but
    the values of the data and the loss are not checked.
    """
    profiled = profile_job(job, progress or _ignore)
    job = profiled.job
    names = input_names(profiled.prepared.capture.example)
    data = {"train_data": job.train_data, "val_data": job.val_data, **profiled.sizes.padded}
    validation = None if job.val_data is None else measure_data(data["val_data"], names, "val_data")
    train = validation if not job.epochs else measure_data(data["train_data"], names)
    assert train is not None
    weights = sum(tensor.bytes for tensor in profiled.profile.state)
    spec = profiled.spec(
        ModelFiles(units=_sized(0), weights=_sized(weights)),
        _files(train),
        None if validation is None else _files(validation),
        named_loss(job.criterion) or _ANY_LOSS,
    )
    profiles = profiles_to_json([profiled.profile, *(cut.profile for cut in profiled.row_cut)])
    if len(profiles) > PROFILES_LIMIT:
        profiles = profiles_to_json([profiled.profile])
    if len(profiles) > PROFILES_LIMIT:
        raise JobError(
            f"the model has {len(profiled.profile.units)} parts and {len(profiled.profile.state)} "
            "tensors, too many for an estimate: submit the job instead"
        )
    return EstimateRequest(spec=spec, profiles=profiles)


def _files(size: DataSize) -> DatasetFiles:
    return DatasetFiles(
        samples=size.samples,
        inputs=(DataFile(artifact=_sized(size.input_bytes), rows=size.samples),),
        labels=(DataFile(artifact=_sized(size.label_bytes), rows=size.samples),),
    )


def _sized(size: int) -> Artifact:
    """Return a file of which only the size counts."""
    return Artifact(sha256=_NO_DIGEST, size=size)


def _ignore(_step: str, _done: int, _total: int) -> None:
    pass
