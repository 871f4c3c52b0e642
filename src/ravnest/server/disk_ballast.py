"""Ballast: a file that is deleted when the disk is full, so that the server can go on and start again.

Uploads leave some space free, but other programs may fill the disk. Without any space the database
cannot store a change, and a server could not even start.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

_BLOCK = 1 << 20
_ROOM = 4
"""The ballast is written only if so many times its size is free."""
_log = logging.getLogger(__name__)


class DiskBallast:
    """File of a fixed size in the server's folder."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size

    @property
    def is_short(self) -> bool:
        """Return whether the disk has less space left than the ballast takes."""
        return shutil.disk_usage(self._path.parent).free < self._size

    def release(self) -> None:
        """Delete the ballast if the disk is full."""
        if self.is_short and self._path.exists():
            self._path.unlink(missing_ok=True)
            _log.warning("the disk is full: %.0f MB were freed for the database", self._size / 1e6)

    def restore(self) -> None:
        """Write the ballast if it is absent and there is enough space."""
        if self._path.exists() or shutil.disk_usage(self._path.parent).free < _ROOM * self._size:
            return
        temporary = self._path.with_suffix(".new")
        try:
            with temporary.open("wb") as file:
                for _ in range(0, self._size, _BLOCK):
                    file.write(os.urandom(_BLOCK))  # some file systems compress zeros to nothing
            temporary.replace(self._path)
        except OSError as error:
            _log.warning("%s was not written: %s", self._path, error)
            temporary.unlink(missing_ok=True)
