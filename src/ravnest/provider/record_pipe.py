"""Telemetry records on their way from a worker process to its agent: JSON lines in a pipe."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
from pydantic import TypeAdapter, ValidationError

from ravnest.deadlines import RECORD_PAUSE, RECORDS_CLOSE
from ravnest.schemas.providers import Record
from ravnest.telemetry import (
    PaceRecord,
    QueueRecord,
    TimingRecord,
    WarningRecord,
    WorkerRecord,
    WorkRecord,
)

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""Records that wait to be sent before timings and queue lengths are dropped."""
LONGEST_MESSAGE = 2000
"""Characters of a warning."""
_LONGEST_LINE = 1 << 16

_records: TypeAdapter[WorkerRecord] = TypeAdapter(Record)
_encoder = msgspec.json.Encoder()


def is_sample(record: WorkerRecord) -> bool:
    """Return ``True`` for a measurement that the next one replaces, so that it may be dropped."""
    return isinstance(record, TimingRecord | QueueRecord | PaceRecord | WorkRecord)


class RecordWriter:
    """Writes records to a pipe from a thread of its own; implements ``RecordSink``.

    ``emit`` never waits for the pipe. While more than ``BACKLOG`` records wait, timings and queue
    lengths are dropped and counted; all other records are kept.
    """

    def __init__(self, descriptor: int) -> None:
        self.dropped = 0
        """Timings and queue lengths that were dropped."""
        self._descriptor = descriptor
        self._waiting: queue.SimpleQueue[WorkerRecord | None] = queue.SimpleQueue()
        """Ends with None. Putting a record takes no lock of Python's, for which training would wait."""
        self._over = threading.Event()
        self._dropping = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="telemetry records", daemon=True)

    def start(self) -> None:
        """Start the thread that writes."""
        self._thread.start()

    def emit(self, record: WorkerRecord) -> None:
        """Queue a record; returns at once and does not raise."""
        if self._over.is_set():
            return
        if self._waiting.qsize() >= BACKLOG and is_sample(record):
            with self._dropping:
                self.dropped += 1
            return
        self._waiting.put(record)

    def close(self) -> None:
        """Write the records that wait, for a bounded time, and close the pipe."""
        self._over.set()
        self._waiting.put(None)
        self._thread.join(RECORDS_CLOSE)
        if self.dropped:
            logger.info("%d timings and queue lengths were not sent: the pipe was full", self.dropped)

    def _run(self) -> None:
        try:
            with os.fdopen(self._descriptor, "wb") as pipe:
                while records := self._next():
                    pipe.write(_encoder.encode_lines(records))
                    pipe.flush()
                    self._over.wait(RECORD_PAUSE)
        except OSError as error:  # the agent has ended, and this process is about to
            logger.info("records cannot be sent to the provider agent: %s", error)
            self._over.set()
            while not self._waiting.empty():
                self._waiting.get()

    def _next(self) -> list[WorkerRecord]:
        """Wait for records and return all that wait; none once the writer is closed."""
        records: list[WorkerRecord] = []
        while (record := self._waiting.get()) is not None:
            records.append(_shortened(record))
            if self._waiting.empty():
                return records
        if records:
            self._waiting.put(None)
        return records


@contextmanager
def record_writer(descriptor: int | None) -> Iterator[RecordWriter | None]:
    """Send records to ``descriptor`` while the block runs; nothing is sent without one."""
    if descriptor is None:
        yield None
        return
    os.set_inheritable(descriptor, False)
    writer = RecordWriter(descriptor)
    writer.start()
    try:
        yield writer
    finally:
        writer.close()


def read_records(descriptor: int, on_records: Callable[[tuple[WorkerRecord, ...]], None]) -> None:
    """Pass on the records of a pipe until its other end is closed, then close it.

    A worker handles data of others, so what it writes is checked: lines that are too long or no
    record are left out and counted.
    """
    wrong = 0
    with os.fdopen(descriptor, "rb") as pipe:
        rest = b""
        while chunk := pipe.read1(_LONGEST_LINE):  # all that is there: records come in batches
            *lines, rest = (rest + chunk).split(b"\n")
            records = [record for line in lines if (record := decoded(line)) is not None]
            wrong += len(lines) - len(records)
            if len(rest) > _LONGEST_LINE:
                rest = b""
            if records:
                on_records(tuple(records))
    if wrong:
        logger.warning("the worker wrote %d lines that are not telemetry records", wrong)


def decoded(line: bytes) -> WorkerRecord | None:
    """Return the record of a line, or ``None`` if it holds none."""
    if len(line) > _LONGEST_LINE:
        return None
    try:
        record = _records.validate_json(line)
    except ValidationError:
        return None
    return _shortened(record)


def _shortened(record: WorkerRecord) -> WorkerRecord:
    if isinstance(record, WarningRecord) and len(record.message) > LONGEST_MESSAGE:
        return replace(record, message=record.message[:LONGEST_MESSAGE])
    return record
