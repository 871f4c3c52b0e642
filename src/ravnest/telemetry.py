"""Records that a node reports while it trains.

The runtime creates them, the worker process sends them to its provider agent over a pipe, and the agent
sends them to the server. They are plain frozen dataclasses, so that each of these layers can use them
without a dependency on the others; ``kind`` tells them apart on the wire.

Non-finite numbers are reported as ``None``: JSON has no NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ravnest.types import Schedule


@dataclass(frozen=True, slots=True)
class LossRecord:
    """Loss of one update; reported by Roots."""

    update: int
    """Number of the update in the run, from 0."""
    epoch: int
    loss: float | None
    """Mean over the batches of the update; ``None`` if it is not finite."""
    microbatches: int
    """Micro-batches in the update."""
    staleness: int
    """Updates applied between the forward and the backward pass of the last micro-batch."""
    learning_rate: float | None = None
    """Learning rate of the update, of the first parameter group; ``None`` if the Root trains nothing."""
    kind: Literal["loss"] = "loss"


@dataclass(frozen=True, slots=True)
class ValidationRecord:
    """Result of one validation; reported by Roots."""

    number: int
    """Number of the validation in the run, from 0."""
    epoch: int
    """Epochs trained before the validation."""
    name: str
    """Label of the first metric; ``accuracy`` or ``loss`` if none was chosen."""
    value: float | None
    samples: int
    metrics: dict[str, float | None] = field(default_factory=dict)
    """Values of all chosen metrics by label."""
    kind: Literal["validation"] = "validation"


@dataclass(frozen=True, slots=True)
class BestRecord:
    """The weights of a validation are kept as the best ones so far; reported by Roots."""

    epoch: int
    """Epochs trained before the validation."""
    metric: str
    """Metric by which they are the best ones."""
    value: float
    kind: Literal["best"] = "best"


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """Outcome of one averaging round; reported by the coordinating Root."""

    round: int
    attempts: int
    mode: Literal["background", "blocking", "final"]
    committed: bool
    clusters: tuple[int, ...]
    """Clusters that took part."""
    seconds: float
    sent_bytes: int
    reason: str
    """Why nothing was averaged, or which clusters were missing; empty if all took part."""
    kind: Literal["round"] = "round"


@dataclass(frozen=True, slots=True)
class TimingRecord:
    """Mean cost of a micro-batch at one stage, in seconds; reported by Roots for all stages."""

    stage: int
    microbatches: int
    """Micro-batches that the means are taken over."""
    forward: float
    backward: float
    """With the weight gradients that are computed later."""
    step: float
    """Optimizer step: once per update, not per micro-batch."""
    to_next: float
    """Delay of the links to the neighbours, without queueing; 0 where there is none."""
    to_previous: float
    to_next_busy: float | None = None
    """Time for which a micro-batch occupies these links; ``None``: an older version does not say it."""
    to_previous_busy: float | None = None
    kind: Literal["timing"] = "timing"


@dataclass(frozen=True, slots=True)
class QueueRecord:
    """Queue lengths at one node."""

    in_flight: int
    """Micro-batches that the stage has started and not finished."""
    window: int
    """Micro-batches that the Root may have in flight; 0 at other nodes."""
    inbox: int
    """Calls that wait for the compute thread."""
    averaging: bool = False
    """An averaging round is open, in the background or while training waits; only at Roots."""
    kind: Literal["queue"] = "queue"


@dataclass(frozen=True, slots=True)
class WorkRecord:
    """Work of one node since its process began; for the owner of the machine, not for the server."""

    updates: int
    """Updates of the training so far."""
    epoch: int
    """Epoch in progress, from 0."""
    samples: int
    """Samples trained here."""
    busy: float
    """Seconds in which the compute thread ran."""
    received_bytes: int
    sent_bytes: int
    kind: Literal["work"] = "work"


@dataclass(frozen=True, slots=True)
class PaceRecord:
    """Pace of a cluster; reported by Roots about once per second."""

    epoch: int
    """Epoch in progress, from 0."""
    updates: int | None
    """Updates of the whole training, as far as they can be predicted."""
    samples_per_second: float | None
    """Mean since training began in this process."""
    seconds_left: float | None
    """Predicted time until the end of training."""
    recent: float | None = None
    """Samples per second since the record before this one."""
    kind: Literal["pace"] = "pace"


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """Schedule of a cluster; reported by Roots when training begins, and when the number changes."""

    schedule: Schedule
    microbatches: int
    """Micro-batches of a whole batch."""
    reason: str
    """Why it was chosen, as a sentence."""
    kind: Literal["schedule"] = "schedule"


@dataclass(frozen=True, slots=True)
class WarningRecord:
    """A warning of the node, as its log shows it."""

    message: str
    kind: Literal["warning"] = "warning"


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A checkpoint of this node's stage is complete on its disk."""

    update: int
    """Updates that it contains."""
    phase: int
    """Phases that are over in it."""
    bytes: int
    seconds: float
    """Time for which training stopped here."""
    kind: Literal["checkpoint"] = "checkpoint"


@dataclass(frozen=True, slots=True)
class RecoveryRecord:
    """Training continues after the loss of a node; reported by Roots."""

    lost: str
    """The loss, as a sentence."""
    update: int
    """Updates of the checkpoint from which training continues."""
    repeated: int
    """Updates that are made again."""
    source: str
    """Origin of the lost state, as a sentence."""
    seconds: float
    """Time from the loss until training continued."""
    kind: Literal["recovery"] = "recovery"


@dataclass(frozen=True, slots=True)
class CheckRecord:
    """A file for a spot check is complete on this node's disk."""

    check: str
    """Random name of the check."""
    part: Literal["received", "stated"]
    """``received``: the output that arrived here. ``stated``: what the output of this stage was computed
    from."""
    phase: int
    index: int
    """Micro-batch of the phase."""
    seconds: float
    """Time for which training stopped here."""
    kind: Literal["check"] = "check"


@dataclass(frozen=True, slots=True)
class SpansRecord:
    """Part of a node's trace, for ``ravnest trace``."""

    spans: tuple[int, ...]
    """Numbers of some spans one after the other, as ``tracing.spans`` describes them."""
    order: int = 0
    """Number of the request that is answered with this record; 0: none, or more records follow."""
    kind: Literal["spans"] = "spans"


PhaseName = Literal["connect", "train", "validate", "predict", "average", "save", "end", "rejoin"]
"""``rejoin``: the node waits for a lost neighbour, or for the machine that takes its place."""


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """Start of a phase at the node."""

    phase: PhaseName
    epoch: int
    """Epoch that the phase belongs to, from 0."""
    kind: Literal["phase"] = "phase"


WorkerRecord = (
    LossRecord
    | ValidationRecord
    | BestRecord
    | RoundRecord
    | TimingRecord
    | QueueRecord
    | WorkRecord
    | PaceRecord
    | ScheduleRecord
    | WarningRecord
    | CheckpointRecord
    | RecoveryRecord
    | PhaseRecord
    | CheckRecord
    | SpansRecord
)


class RecordSink(Protocol):
    """Receiver of a node's records."""

    def emit(self, record: WorkerRecord) -> None:
        """Take a record. Called from several threads; must return at once and not raise."""


def finite(value: float) -> float | None:
    """Return ``value``, or ``None`` if it is infinite or not a number."""
    return value if math.isfinite(value) else None
