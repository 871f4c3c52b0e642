"""The figures that a run leaves behind: losses by update, accuracies by validation."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

ACCURACIES = "val_accuracies.txt"


def name_for(filename: str | Path, cluster: int) -> Path:
    """The file of a cluster: cluster 0 has the given name, others their number in it."""
    path = Path(filename)
    return path if cluster == 0 else path.with_name(f"{path.stem}_cluster_{cluster}{path.suffix}")


class MetricFile:
    """One figure a line, as they come; a file of an earlier run is kept under another name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def append(self, figure: float) -> None:
        """Add a line; it is in the file when this returns."""
        if self._file is None:
            set_aside(self._path)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        self._file.write(f"{figure:.9g}\n")

    def close(self) -> None:
        """No further line comes."""
        if self._file is not None:
            self._file.close()


def set_aside(path: Path) -> Path | None:
    """Rename a file that exists to the first free ``<name>.<n><suffix>``; the new name."""
    if not path.exists():
        return None
    number = 1
    while (other := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(other)
    return other
