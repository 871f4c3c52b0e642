"""Metric files of a run: one loss per update, one accuracy per validation."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)

ACCURACIES = "val_accuracies.txt"
MOST_WAITING = 8 << 20
"""Bytes of lines that are kept in memory while a file cannot be written."""
_MISSING = b"nan\n"
"""Line for a value for which there was no room in memory either, so that line numbers stay right."""


class RawFile(Protocol):
    """File without a buffer: what it did not write, it has not kept."""

    def write(self, data: bytes, /) -> int | None:
        """Write some of the bytes and return how many; raise ``OSError`` if none can be written."""

    def close(self) -> None:
        """Close the file."""


def _open_raw(path: Path) -> RawFile:
    return path.open("ab", buffering=0)


def name_for(filename: str | Path, cluster: int) -> Path:
    """Return the path for a cluster: ``filename`` for cluster 0, with the number added for others."""
    path = Path(filename)
    return path if cluster == 0 else path.with_name(f"{path.stem}_cluster_{cluster}{path.suffix}")


class MetricFile:
    """Text file with one number per line; a file of an earlier run is renamed, not overwritten.

    Training does not depend on it: lines that cannot be written, because the disk is full, wait in
    memory and are written when there is room again.
    """

    def __init__(self, path: Path, open_raw: Callable[[Path], RawFile] = _open_raw) -> None:
        self._path = path
        self._open_raw = open_raw
        self._file: RawFile | None = None
        self._continues = False
        """The file is one of this run."""
        self._waiting = bytearray()
        """Lines that are not written yet."""
        self._forgotten = 0
        """Lines after those for which there was no room in memory."""
        self._problem: OSError | None = None
        """Reason for which lines wait."""

    def resume(self, lines: int) -> None:
        """Continue an earlier file after its first ``lines`` lines."""
        try:
            kept = self._path.read_bytes().splitlines(keepends=True)[:lines]
        except FileNotFoundError:
            return
        except OSError as error:
            self._report(error)
            return
        self._continues = True
        size = sum(map(len, kept))
        try:
            with self._path.open("rb+") as file:  # in place: a copy would need room
                file.truncate(size)
        except OSError as error:
            self._report(error)

    def append(self, value: float) -> None:
        """Write a line; it is in the file when this returns, unless the disk is full."""
        line = f"{value:.9g}\n".encode()
        if self._forgotten or len(self._waiting) + len(line) > MOST_WAITING:
            self._forgotten += 1
        else:
            self._waiting += line
        self._write()

    def close(self) -> str:
        """Close the file; return what is missing in it and what to do, empty if nothing is."""
        self._write()
        if self._file is not None:
            self._file.close()
            self._file = None
        if not self._waiting and not self._forgotten:
            return ""
        count = self._waiting.count(b"\n") + self._forgotten
        return (
            f"the last {count} lines of {self._path} are missing: {self._problem}. The trained model is "
            "not affected. Before the next run, make room on that disk, or use a file on another one "
            "(loss_filename of Node)"
        )

    def _write(self) -> None:
        """Write what waits, as far as possible."""
        try:
            while self._waiting or self._forgotten:
                if not self._waiting:
                    count = min(self._forgotten, MOST_WAITING // len(_MISSING))
                    self._forgotten -= count
                    self._waiting += count * _MISSING
                written = self._opened().write(bytes(self._waiting))
                if not written:
                    raise OSError(errno.EAGAIN, "nothing was written")
                del self._waiting[:written]
        except OSError as error:
            self._report(error)
            return
        if self._problem is not None:
            logger.info("%s can be written again, and is complete", self._path)
            self._problem = None

    def _opened(self) -> RawFile:
        if self._file is None:
            if not self._continues:
                set_aside(self._path)
                self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open_raw(self._path)
            self._continues = True
        return self._file

    def _report(self, error: OSError) -> None:
        if self._problem is None:
            logger.warning(
                "%s cannot be written: %s. Training continues, and the lines are written when there is "
                "room again",
                self._path,
                error,
            )
        self._problem = error


def set_aside(path: Path) -> Path | None:
    """Rename an existing file to the first free ``<name>.<n><suffix>`` and return the new path."""
    if not path.exists():
        return None
    number = 1
    while (other := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(other)
    return other
