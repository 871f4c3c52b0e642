"""Figures in the records of a run."""

from __future__ import annotations

import math
from typing import NamedTuple

from ravnest.telemetry import (
    CheckpointRecord,
    LossRecord,
    PaceRecord,
    RecoveryRecord,
    RoundRecord,
    TimingRecord,
    ValidationRecord,
    WorkerRecord,
)


class Scalar(NamedTuple):
    """One figure; not a number if it was not finite."""

    name: str
    value: float


def scalars_of(record: WorkerRecord) -> list[Scalar]:
    """Return the figures of a record, by names that group them by what they are about."""
    match record:
        case LossRecord(loss=loss, staleness=staleness, learning_rate=rate):
            known = [] if rate is None else [Scalar("train/learning_rate", rate)]
            return [_scalar("train/loss", loss), Scalar("train/staleness", staleness), *known]
        case ValidationRecord(name=name, value=value, metrics=metrics):
            values = {name: value, **metrics}
            return [_scalar(f"validation/{each}", values[each]) for each in values]
        case PaceRecord(samples_per_second=rate) if rate is not None:
            return [Scalar("train/samples_per_second", rate)]
        case RoundRecord(committed=True, seconds=seconds, clusters=clusters):
            return [
                Scalar("averaging/seconds", seconds),
                Scalar("averaging/clusters", len(clusters)),
            ]
        case TimingRecord():
            return [
                Scalar(f"stage_{record.stage}/{name}_ms", 1000 * seconds)
                for name, seconds in (
                    ("forward", record.forward),
                    ("backward", record.backward),
                    ("step", record.step),
                    ("to_next", record.to_next),
                    ("to_previous", record.to_previous),
                )
            ]
        case CheckpointRecord(seconds=seconds):
            return [Scalar("checkpoint/seconds", seconds)]
        case RecoveryRecord(seconds=seconds, repeated=repeated):
            return [Scalar("recovery/seconds", seconds), Scalar("recovery/repeated", repeated)]
    return []


def _scalar(name: str, value: float | None) -> Scalar:
    return Scalar(name, math.nan if value is None else value)
