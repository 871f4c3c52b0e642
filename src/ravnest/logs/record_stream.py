"""Records of a node as JSON lines to the launcher that started it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from ravnest.logs.background import BackgroundSink, TimedRecord
from ravnest.telemetry import RecordSink, WorkerRecord

RECORDS_VARIABLE = "RAVNEST_RECORDS"
"""Environment variable of a node whose launcher reads its records: the descriptor of a pipe."""
PROGRESS_VARIABLE = "RAVNEST_PROGRESS"
"""Environment variable of a node: 0 if its launcher shows its progress."""

_encoder = msgspec.json.Encoder()


class RecordStream(BackgroundSink):
    """Writes records to a pipe, one JSON object per line."""

    PAUSE = 0.2  # a person looks at them

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._pipe = os.fdopen(descriptor, "wb")
        super().__init__()

    def handle(self, items: Sequence[TimedRecord]) -> None:
        """Write some records."""
        self._pipe.write(_encoder.encode_lines([item.record for item in items]))

    def flush(self) -> None:
        """Have the launcher see what was written."""
        self._pipe.flush()

    def end(self) -> None:
        """Close the pipe."""
        self._pipe.close()


class _BothSinks:
    """Passes records on to two receivers."""

    def __init__(self, one: RecordSink, other: RecordSink) -> None:
        self._one = one
        self._other = other

    def emit(self, record: WorkerRecord) -> None:
        """Take a record."""
        self._one.emit(record)
        self._other.emit(record)


def launched_sink(sink: RecordSink | None) -> RecordSink | None:
    """Return a receiver for ``sink`` and for the launcher of this process, if one waits for records.

    Only the first node of a process reports to the launcher.
    """
    descriptor = os.environ.pop(RECORDS_VARIABLE, "")
    if not descriptor.isdecimal():
        return sink
    try:
        stream = RecordStream(int(descriptor))
    except OSError:  # the variable was inherited, the pipe was not
        return sink
    return stream if sink is None else _BothSinks(sink, stream)
