"""Metric files of a run: one loss per update, one accuracy per validation."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from ravnest.store.files import write_atomically

ACCURACIES = "val_accuracies.txt"


def name_for(filename: str | Path, cluster: int) -> Path:
    """Return the path for a cluster: ``filename`` for cluster 0, with the number added for others."""
    path = Path(filename)
    return path if cluster == 0 else path.with_name(f"{path.stem}_cluster_{cluster}{path.suffix}")


class MetricFile:
    """Text file with one number per line; a file of an earlier run is renamed, not overwritten."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def resume(self, lines: int) -> None:
        """Continue an earlier file after its first ``lines`` lines."""
        try:
            kept = self._path.read_text(encoding="utf-8").splitlines(keepends=True)[:lines]
        except FileNotFoundError:
            return
        write_atomically(self._path, lambda target: target.write_text("".join(kept), encoding="utf-8"))
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def append(self, value: float) -> None:
        """Write a line; it is in the file when this returns."""
        if self._file is None:
            set_aside(self._path)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        self._file.write(f"{value:.9g}\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def set_aside(path: Path) -> Path | None:
    """Rename an existing file to the first free ``<name>.<n><suffix>`` and return the new path."""
    if not path.exists():
        return None
    number = 1
    while (other := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(other)
    return other
