"""Files with the spans of nodes, one or more per process, below a folder.

Each file has a header and then lines of numbers. A process that records more than one file can hold
keeps its first file and its newest two, so that the disk does not fill up.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import msgspec

from ravnest.errors import SettingsError
from ravnest.tracing.node_trace import NodeTrace, TracedNode
from ravnest.tracing.spans import FIELDS, TraceSpan, flattened, unflattened

FORMAT = "ravnest-trace-1"
PATTERN = "*.spans.jsonl"
SPANS_PER_FILE = 100_000
"""Spans after which another file begins; some 6 MB."""
_SPANS_PER_LINE = 256
_LONGEST_LINE = 1 << 17
_MOST_BYTES = 64 << 20
"""Size of a file that is read."""
_RUN_GAP = 600 * 1_000_000
"""Microseconds without any span after which another run begins."""


class SpanFiles:
    """Writes the spans of one process; implements ``SpanSink``."""

    def __init__(self, folder: str | Path, node: TracedNode, limit: int = SPANS_PER_FILE) -> None:
        self._folder = Path(folder)
        self._node = node
        self._limit = limit
        self._name = f"node_{node.node}.{time.time_ns() // 1_000_000}.{os.getpid()}"
        self._files: list[Path] = []
        self._file: IO[str] | None = None
        self._written = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"cannot write a trace to {self._folder}: {error}") from error

    def write(self, spans: Sequence[TraceSpan]) -> None:
        """Append spans."""
        for start in range(0, len(spans), _SPANS_PER_LINE):
            if self._file is None or self._written >= self._limit:
                self._begin()
            assert self._file is not None
            part = spans[start : start + _SPANS_PER_LINE]
            self._file.write(msgspec.json.encode(flattened(part)).decode() + "\n")
            self._written += len(part)
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self) -> None:
        """Begin another file, and remove one between the first and the newest two."""
        self.close()
        path = self._folder / f"{self._name}.{len(self._files)}{PATTERN[1:]}"
        self._files.append(path)
        self._file, self._written = path.open("w", encoding="utf-8"), 0
        self._file.write(json.dumps({"format": FORMAT, **asdict(self._node)}) + "\n")
        if len(self._files) > 3:
            self._files[-3].unlink(missing_ok=True)


def read_traces(folder: Path) -> list[NodeTrace]:
    """Return the traces of the newest run below a folder; ``SettingsError`` if there is none."""
    paths = sorted(folder.glob(PATTERN))
    if not paths:
        raise SettingsError(
            f"there is no trace in {folder}: train with Node(trace=folder) or `ravnest launch "
            "SCRIPT --trace FOLDER`, then give that folder"
        )
    parts: dict[str, list[NodeTrace]] = {}
    for path in paths:
        process = path.name.removesuffix(PATTERN[1:]).rpartition(".")[0]
        parts.setdefault(process, []).append(_read(path))
    return newest_run(
        NodeTrace(each[0].node, tuple(span for part in each for span in part.spans))
        for each in parts.values()
    )


def newest_run(traces: Iterable[NodeTrace]) -> list[NodeTrace]:
    """Return the traces of the last run: those without a long gap between them, the newest last."""
    ordered = sorted((each for each in traces if each.spans), key=lambda each: each.interval)
    found: list[NodeTrace] = []
    end = 0
    for trace in ordered:
        start, last = trace.interval
        if start > end + _RUN_GAP:
            found = []
        found.append(trace)
        end = max(end, last)
    return found


def _read(path: Path) -> NodeTrace:
    """Return the spans of a file; a line that its process did not finish to write is left out."""
    if path.stat().st_size > _MOST_BYTES:
        raise SettingsError(f"{path} has more than {_MOST_BYTES >> 20} MB: it is no trace of a node")
    try:
        with path.open(encoding="utf-8") as file:
            node = _header(json.loads(file.readline(_LONGEST_LINE)))
            spans: list[TraceSpan] = []
            while line := file.readline(_LONGEST_LINE):
                if line.endswith("\n"):
                    spans += unflattened(_numbers(json.loads(line)))
    except (ValueError, TypeError, RecursionError) as error:
        raise SettingsError(f"{path} is no trace of a node: {error}") from error
    return NodeTrace(node, tuple(spans))


def _header(found: Any) -> TracedNode:
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise ValueError(f"its first line is not that of the format {FORMAT}")
    node = TracedNode(**found)
    numbers = node.node, node.cluster, node.stage
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("its first line has no numbers of a node")
    if not all(isinstance(text, str) for text in (node.role, node.provider)):
        raise ValueError("its first line has no names of a node")
    return node


def _numbers(found: Any) -> list[int]:
    if not isinstance(found, list) or len(found) > FIELDS * _SPANS_PER_LINE:
        raise ValueError("a line is no list of numbers")
    return found
