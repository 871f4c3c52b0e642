"""Which rows of a job's data each node gets, as slices of its pieces. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ravnest.errors import JobError
from ravnest.plan.plan import Plan, StagePlan
from ravnest.schemas.jobs import DataFile, DatasetFiles, JobSpec
from ravnest.schemas.providers import DataShare, RowRange


def check_data(spec: JobSpec) -> None:
    """``JobError`` if pieces and samples do not add up; workers would notice only when they have all."""
    for name, data in (("train", spec.train), ("validation", spec.validation or spec.train)):
        for kind, pieces in (("inputs", data.inputs), ("labels", data.labels)):
            rows = sum(piece.rows for piece in pieces)
            if rows != data.samples:
                raise JobError(f"the {kind} of its {name} data have {rows} rows, not {data.samples}")


def least_rows(spec: JobSpec) -> int:
    """A cluster with fewer samples would have nothing to train on."""
    return spec.training.batch_size if spec.training.drop_last else 1


def rows_of(spec: JobSpec, plan: Plan, cluster: int) -> range:
    """A cluster's share, by its predicted rate, so that all come to the end of an epoch together."""
    least = least_rows(spec)
    rates = [each.samples_per_second for each in plan.clusters]
    free = max(spec.train.samples - least * len(rates), 0)

    def bound(count: int) -> int:
        if count == len(rates):
            return spec.train.samples
        return least * count + int(free * (sum(rates[:count]) / sum(rates)) + 0.5)

    return range(bound(cluster), bound(cluster + 1))


def whole(data: DatasetFiles | None, plan: Plan, stage: StagePlan) -> DataShare | None:
    """Validation data: every cluster has all of it."""
    return None if data is None else share(data, plan, stage, range(data.samples))


def share(data: DatasetFiles, plan: Plan, stage: StagePlan, rows: range) -> DataShare:
    """Inputs to the Root and labels to the Leaf; the only node of a cluster is both."""
    first, last = stage.index == 0, plan.next(stage.node.id) is None
    return DataShare(
        samples=len(rows),
        inputs=tuple(_slices(data.inputs, rows)) if first else (),
        labels=tuple(_slices(data.labels, rows)) if last else (),
    )


def _slices(pieces: Sequence[DataFile], rows: range) -> Iterator[RowRange]:
    begin = 0
    for piece in pieces:
        start, stop = max(rows.start - begin, 0), min(rows.stop - begin, piece.rows)
        if start < stop:
            yield RowRange(artifact=piece.artifact, start=start, stop=stop)
        begin += piece.rows
