"""Figures and records of a run in a folder."""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ravnest.errors import SettingsError
from ravnest.logs.background import BackgroundSink, TimedRecord
from ravnest.logs.event_file import EventFile
from ravnest.logs.scalars import scalars_of
from ravnest.telemetry import LossRecord

METRICS = "metrics.csv"
RECORDS = "records.jsonl"
_COLUMNS = ("time", "update", "name", "value")


class RunLog(BackgroundSink):
    """Writes the figures of a run to a folder: for TensorBoard, and as ``metrics.csv``.

    ``records.jsonl`` has everything that was reported, one JSON object per line, with its time. Files of
    an earlier run are continued. Pass one to the Root: ``Node(..., record_sink=RunLog("runs/first"))``.
    """

    def __init__(self, folder: str | Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = Path(folder)
        self._update = 0
        """Newest update; it is the step of figures that have none of their own."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            begins = not (self.folder / METRICS).exists()
            self._metrics = (self.folder / METRICS).open("a", encoding="utf-8", newline="")
            self._records = (self.folder / RECORDS).open("a", encoding="utf-8")
            self._events = EventFile(self.folder, clock(), f"{os.getpid()}.{time.monotonic_ns()}")
        except OSError as error:
            raise SettingsError(f"cannot write a log to {self.folder}: {error}") from error
        self._rows = csv.writer(self._metrics)
        if begins:
            self._rows.writerow(_COLUMNS)
        super().__init__(clock)

    def handle(self, item: TimedRecord) -> None:
        """Write a record."""
        moment, record = item
        if isinstance(record, LossRecord):
            self._update = record.update
        fields = msgspec.json.encode(record).decode()  # an object with one field at least: its kind
        self._records.write(f'{{"time":{moment:.3f},{fields[1:]}\n')
        scalars = [(name, math.nan if value is None else value) for name, value in scalars_of(record)]
        if scalars:
            self._rows.writerows((f"{moment:.3f}", self._update, *each) for each in scalars)
            self._events.add(scalars, self._update, moment)

    def flush(self) -> None:
        """Have readers see what was written."""
        for file in (self._metrics, self._records, self._events):
            file.flush()

    def end(self) -> None:
        """Close the files."""
        for file in (self._metrics, self._records, self._events):
            file.close()
