"""Figures and records of a run in a folder."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ravnest.errors import SettingsError
from ravnest.logs.background import BackgroundSink, TimedRecord
from ravnest.logs.event_file import EventFile
from ravnest.logs.scalars import scalars_of
from ravnest.telemetry import LossRecord

METRICS = "metrics.csv"
RECORDS = "records.jsonl"
_COLUMNS = "time,update,name,value\r\n"

_encoder = msgspec.json.Encoder()


@functools.lru_cache(maxsize=1000)
def _quoted(name: str) -> str:
    """Return a name as a field of CSV."""
    if not set(name) & set(',"\r\n'):
        return name
    return '"' + name.replace('"', '""') + '"'


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class RunLog(BackgroundSink):
    """Writes the figures of a run to a folder: for TensorBoard, and as ``metrics.csv``.

    ``records.jsonl`` has everything that was reported, one JSON object per line, with its time. Files of
    an earlier run are continued. Pass one to the Root: ``Node(..., record_sink=RunLog("runs/first"))``.
    """

    def __init__(
        self,
        folder: str | Path,
        clock: Callable[[], float] = time.time,
        *,
        continues: bool = True,
    ) -> None:
        """``continues``: ``False`` refuses a folder that has records of an earlier run."""
        self.folder = Path(folder)
        self._update = 0
        """Newest update; it is the step of figures that have none of their own."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not continues and _size(self.folder / RECORDS):
                raise SettingsError(
                    f"{self.folder} has the log of an earlier run; this one may repeat its updates, "
                    "so figures would be there twice. Give another folder, or remove this one"
                )
            begins = not (self.folder / METRICS).exists()
            self._metrics = (self.folder / METRICS).open("a", encoding="utf-8", newline="")
            self._records = (self.folder / RECORDS).open("ab")
            self._events = EventFile(self.folder, clock(), f"{os.getpid()}.{time.monotonic_ns()}")
        except OSError as error:
            raise SettingsError(f"cannot write a log to {self.folder}: {error}") from error
        if begins:
            self._metrics.write(_COLUMNS)
        super().__init__(clock)

    def handle(self, items: Sequence[TimedRecord]) -> None:
        """Write some records: once to each file."""
        lines, rows = [], []
        for at, record in items:
            if isinstance(record, LossRecord):
                self._update = record.update
            moment = f"{at:.3f}"
            # an object with one field at least: its kind
            lines.append(b'{"time":%b,%b\n' % (moment.encode(), _encoder.encode(record)[1:]))
            if scalars := scalars_of(record):
                head = f"{moment},{self._update}"
                rows += [f"{head},{_quoted(name)},{value!r}\r\n" for name, value in scalars]
                self._events.add(scalars, self._update, at)
        self._records.write(b"".join(lines))
        self._metrics.write("".join(rows))

    def flush(self) -> None:
        """Have readers see what was written."""
        for file in (self._metrics, self._records, self._events):
            file.flush()

    def end(self) -> None:
        """Close the files."""
        for file in (self._metrics, self._records, self._events):
            file.close()
