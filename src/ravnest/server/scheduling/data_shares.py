"""Data shares: the rows of a job's data that each node gets, as slices of its files. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ravnest.errors import JobError
from ravnest.plan.plan import Plan, StagePlan
from ravnest.schemas.jobs import DataFile, DatasetFiles, JobSpec
from ravnest.schemas.providers import DataShare, RowRange


def check_data(spec: JobSpec) -> None:
    """Raise ``JobError`` if files and samples have different row counts.

    Workers would notice it only after they have fetched everything.
    """
    for name, data in (("train", spec.train), ("validation", spec.validation or spec.train)):
        for kind, files in (("inputs", data.inputs), ("labels", data.labels)):
            rows = sum(file.rows for file in files)
            if rows != data.samples:
                raise JobError(f"the {kind} of its {name} data have {rows} rows, not {data.samples}")


def least_rows(spec: JobSpec) -> int:
    """Return the number of samples below which a cluster has nothing to train on."""
    return spec.training.batch_size if spec.training.drop_last else 1


def rows_of(spec: JobSpec, plan: Plan, cluster: int) -> range:
    """Return the training rows of a cluster.

    The share is proportional to the cluster's predicted rate, so that all clusters finish an epoch at
    the same time. Every cluster gets at least ``least_rows``.
    """
    least = least_rows(spec)
    rates = [each.samples_per_second for each in plan.clusters]
    free = max(spec.train.samples - least * len(rates), 0)

    def bound(count: int) -> int:
        if count == len(rates):
            return spec.train.samples
        return least * count + int(free * (sum(rates[:count]) / sum(rates)) + 0.5)

    return range(bound(cluster), bound(cluster + 1))


def training_share(spec: JobSpec, plan: Plan, stage: StagePlan) -> DataShare:
    """Return the training data of a stage: its cluster's rows, and no files if nothing is trained."""
    found = share(spec.train, plan, stage, rows_of(spec, plan, stage.cluster))
    return found if spec.training.epochs else found.model_copy(update={"inputs": (), "labels": ()})


def whole(data: DatasetFiles | None, plan: Plan, stage: StagePlan) -> DataShare | None:
    """Return the validation data of a stage: every cluster gets all rows."""
    return None if data is None else share(data, plan, stage, range(data.samples))


def share(data: DatasetFiles, plan: Plan, stage: StagePlan, rows: range) -> DataShare:
    """Return the inputs for a Root, the labels for a Leaf, and both for a cluster's only node."""
    first, last = stage.index == 0, plan.next(stage.node.id) is None
    return DataShare(
        samples=len(rows),
        total=data.samples,
        first=rows.start,
        inputs=tuple(slices(data.inputs, rows)) if first else (),
        labels=tuple(slices(data.labels, rows)) if last else (),
    )


def slices(files: Sequence[DataFile], rows: range) -> Iterator[RowRange]:
    """Yield the parts of the files that hold these rows of a dataset."""
    begin = 0
    for file in files:
        start, stop = max(rows.start - begin, 0), min(rows.stop - begin, file.rows)
        if start < stop:
            yield RowRange(artifact=file.artifact, start=start, stop=stop)
        begin += file.rows
