"""Progress of one assignment, and the report that the server gets about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ravnest.deadlines import FIRST_PAUSE
from ravnest.provider.best_uploads import BestUploads
from ravnest.provider.check_upload import CheckUploads
from ravnest.provider.checkpoint_orders import CheckpointOrders
from ravnest.provider.events import Action, ShowProgress, UploadCheck, UploadCheckpoints
from ravnest.provider.outcome import MOST_RECORDS_KEPT, Outcome
from ravnest.provider.record_pipe import is_sample
from ravnest.provider.work_meter import WorkMeter
from ravnest.schemas.jobs import ResultFile
from ravnest.schemas.providers import (
    MOST_RECORDS,
    AssignmentReport,
    ExcludedNode,
    FailureCause,
    Phase,
    TlsRejections,
)
from ravnest.telemetry import WorkerRecord, WorkRecord

KEPT_RECORDS = 20_000
"""Acknowledged records that are kept, in case the server restarts with an older state."""
MOST_KEPT_RECORDS = 200_000
"""Records that are kept at most, some 50 MB; beyond that the oldest are lost."""
MOST_SAMPLES_WAITING = 20_000
"""Unacknowledged records before further timings and queue lengths are dropped."""
_LONGEST_REASON = 4000
MOST_REPORTED_TEXT = 256 << 10
"""Characters of warnings and reasons in a report: the server refuses messages of more than 4 MB."""

_DIGITS = 10
"""Characters of a number of a span, on average at most."""


class RecordLog:
    """Records of a worker by position, from the oldest that is kept.

    Records that the server has not acknowledged are kept for as long as there is room. Timings and queue
    lengths are dropped on arrival, before they get a position, while too many records wait.
    """

    def __init__(self, first: int = 0, records: Iterable[WorkerRecord] = ()) -> None:
        """``records``: records that the server does not have yet; ``first``: position of their first."""
        self._records = list(records)
        self._first = first
        """Position of the oldest record that is kept."""
        self._acknowledged = first
        self.is_progressing = True
        """``False`` if the last answer of the server acknowledged no further record."""

    @property
    def end(self) -> int:
        """Position after the newest record."""
        return self._first + len(self._records)

    @property
    def waiting(self) -> int:
        """Records that the server does not have."""
        return self.end - self._acknowledged

    def add(self, records: Iterable[WorkerRecord]) -> None:
        """Append records."""
        for record in records:
            if not is_sample(record) or self.waiting < MOST_SAMPLES_WAITING:
                self._records.append(record)
        self._forget(len(self._records) - MOST_KEPT_RECORDS)

    def acknowledge(self, known: int) -> None:
        """Note that the server has the first ``known`` records, fewer than before if it lost some."""
        before, self._acknowledged = self._acknowledged, max(self._first, min(known, self.end))
        self.is_progressing = self._acknowledged > before
        dispensable = self._acknowledged - KEPT_RECORDS - self._first
        if dispensable > KEPT_RECORDS:  # rarely: a list moves all that remains
            self._forget(dispensable)

    def _forget(self, count: int) -> None:
        if count > 0:
            del self._records[:count]
            self._first += count
            self._acknowledged = max(self._acknowledged, self._first)

    def unacknowledged(self, most: int) -> tuple[int, tuple[WorkerRecord, ...]]:
        """Return the records that the server does not have, with the position of the first."""
        start = self._acknowledged - self._first
        return self._acknowledged, tuple(self._records[start : start + most])

    def next(self) -> tuple[int, tuple[WorkerRecord, ...]]:
        """Return the records to report next, with the position of the first."""
        first, records = self.unacknowledged(MOST_RECORDS)
        length = 0
        for count, record in enumerate(records):
            length += len(getattr(record, "message", "")) + len(getattr(record, "reason", ""))
            length += _DIGITS * len(getattr(record, "spans", ()))
            if length > MOST_REPORTED_TEXT and count:
                return first, records[:count]
        return first, records


@dataclass
class AssignmentProgress:
    """Progress of one assignment."""

    assignment: str
    phase: Phase = "fetching"
    busy: bool = True
    """A fetch, the worker or an upload runs."""
    again_at: float | None = None
    """Time at which the last step is tried again, after the server did not answer."""
    pause: float = FIRST_PAUSE
    stopping: bool = False
    is_root: bool = False
    node_title: str = ""
    """Description of the node, known once the assignment is fetched."""
    failure: str = ""
    cause: FailureCause = "job"
    """Cause of ``failure``."""
    waiting: str = ""
    """Why the trained files are not at the server yet."""
    records: RecordLog = field(default_factory=RecordLog)
    result: tuple[ResultFile, ...] = ()
    tls_rejections: TlsRejections = field(default_factory=TlsRejections)
    checkpoints: CheckpointOrders = field(default_factory=CheckpointOrders)
    excluded: tuple[ExcludedNode, ...] = ()
    """Nodes to which the worker was told to close its links."""
    trace: int = 0
    """Newest request of the server for spans."""
    checks: CheckUploads = field(default_factory=CheckUploads)
    best: BestUploads = field(default_factory=BestUploads)
    meter: WorkMeter = field(default_factory=WorkMeter)

    @classmethod
    def kept(cls, assignment: str, outcome: Outcome) -> AssignmentProgress:
        """Return the progress of an assignment that an earlier process has trained to the end."""
        return cls(
            assignment,
            phase="uploading" if outcome.is_root else "finished",
            busy=outcome.is_root,
            is_root=outcome.is_root,
            node_title=outcome.title,
            records=RecordLog(outcome.first_record, outcome.records),
        )

    @property
    def outcome(self) -> Outcome:
        """The outcome to keep until the server has acknowledged it."""
        first, records = self.records.unacknowledged(MOST_RECORDS_KEPT)
        return Outcome(is_root=self.is_root, title=self.node_title, first_record=first, records=records)

    @property
    def is_trained(self) -> bool:
        """``True`` once the worker has trained to the end."""
        return self.phase in ("uploading", "finished")

    @property
    def is_over(self) -> bool:
        """``True`` once only the final report is left to send."""
        return self.phase in ("finished", "failed")

    @property
    def title(self) -> str:
        """Name of the assignment in messages to the owner."""
        return self.node_title or "the job"

    @property
    def finished(self) -> str:
        """Line that says that the node has trained to the end, and what it has done."""
        total = self.meter.total
        done = "" if total is None else f" after {total.samples:,} samples: {total}"
        return f"{self.node_title}: finished{done}"

    def take(self, records: Sequence[WorkerRecord], now: float) -> list[Action]:
        """Add records of the worker; return what to show of those about its own work."""
        own = [record for record in records if isinstance(record, WorkRecord)]
        reported = [record for record in records if not isinstance(record, WorkRecord)]
        self.records.add(reported)
        self.checkpoints.note(reported)
        self.checks.note(reported)
        self.best.note(reported)
        figures = [self.meter.add(record, now) for record in own]
        return [ShowProgress(f"{self.title}: {each}") for each in figures if each is not None]

    def uploads(self) -> list[Action]:
        """Return the uploads that are due beside the worker: checkpoints, and files of spot checks."""
        has_checkpoints = self.phase in ("fetched", "training")  # of an earlier assignment, at first
        order = self.checkpoints.begin() if has_checkpoints else None
        check = self.checks.begin() if self.phase == "training" else None
        actions: list[Action] = [] if order is None else [UploadCheckpoints(self.assignment, order)]
        return actions if check is None else [*actions, UploadCheck(self.assignment, check)]

    def report(self) -> AssignmentReport:
        """Return the report to send, with the oldest records that the server does not have.

        The server takes no records of an ended assignment, so the end is reported with the last
        records, unless the server stops to acknowledge them.
        """
        first, records = self.records.next()
        is_last = first + len(records) == self.records.end
        held_back = self.is_over and not is_last and self.records.is_progressing
        trained = self.is_root and self.phase == "finished"
        return AssignmentReport(
            assignment=self.assignment,
            phase=("uploading" if trained else "training") if held_back else self.phase,
            reason=(self.waiting if held_back else self.failure or self.waiting)[:_LONGEST_REASON],
            cause=self.cause,
            result=() if held_back else self.result,
            tls_rejections=self.tls_rejections,
            first_record=first,
            records=records,
            checkpoints=self.checkpoints.uploaded,
            best=self.best.done,
            upload_done=self.checkpoints.done,
            checks=self.checks.uploaded,
        )
