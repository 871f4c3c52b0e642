"""Files of a job by digest, as they are uploaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ravnest.jobs.dataset_writer import PackedData
from ravnest.jobs.graph_loss import PackedLoss
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import DataFile, DatasetFiles, GraphLoss
from ravnest.store.files import sha256_of


class JobFiles:
    """Files of a job by digest."""

    def __init__(self) -> None:
        self.found: dict[str, Path] = {}
        """Paths by digest."""

    def add(self, path: Path) -> Artifact:
        """Add a file and return its description."""
        digest = sha256_of(path)
        self.found[digest] = path
        return Artifact(sha256=digest, size=path.stat().st_size)

    def add_graph(self, packed: PackedLoss) -> GraphLoss:
        """Add the files of a graph."""
        return GraphLoss(stage=self.add(packed.stage), weights=self.add(packed.weights))

    def add_data(self, data: PackedData) -> DatasetFiles:
        """Add the files of a dataset."""
        return DatasetFiles(
            samples=data.samples, inputs=self._pieces(data.inputs), labels=self._pieces(data.labels)
        )

    def _pieces(self, files: Sequence[tuple[Path, int]]) -> tuple[DataFile, ...]:
        return tuple(DataFile(artifact=self.add(path), rows=rows) for path, rows in files)
