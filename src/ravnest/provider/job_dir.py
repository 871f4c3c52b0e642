"""Folders of a provider: one per assignment, with file names that are chosen here, not by the server."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ravnest.errors import StageFormatError
from ravnest.provider.outcome import Outcome
from ravnest.schemas.base import Artifact, Schema
from ravnest.schemas.providers import Assignment, ExcludedNode
from ravnest.store.bundle import STAGE_FILE, WEIGHTS_FILE
from ravnest.store.files import read_json, write_json
from ravnest.store.node_spec import CertificateFiles

BUNDLE = "stage"
CERTIFICATES = CertificateFiles(
    "certificates/authority.pem", "certificates/node.pem", "certificates/node.key"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_LIMIT = 256 << 20
_LONGEST_NUMBER = 32
_EXCLUDED = TypeAdapter(tuple[ExcludedNode, ...])

DEFAULT_DISK = 100_000_000_000
DEFAULT_SECONDS = 7 * 86_400.0
"""Limits of a job, unless the owner sets others."""


class WorkerSettings(Schema):
    """Settings of a worker that the provider chooses, not the server."""

    ram: int
    """Bytes."""
    cores: int
    listen: str | None = None
    """Address at which the node listens, if it differs from the address that others use."""
    disk: int = DEFAULT_DISK
    """Bytes that the folder of a job may take."""
    seconds: float = DEFAULT_SECONDS
    """Time that a worker may run."""


@dataclass(frozen=True)
class JobDir:
    """The folder of one assignment, in which its worker runs."""

    folder: Path

    @property
    def node_data(self) -> Path:
        """Folder with the same layout as ``clusterize`` writes, for one node."""
        return self.folder / "node_data"

    @property
    def stage(self) -> tuple[Path, Path]:
        """Graph and weights of the stage."""
        return self.node_data / BUNDLE / STAGE_FILE, self.node_data / BUNDLE / WEIGHTS_FILE

    @property
    def loss(self) -> tuple[Path, Path]:
        """Graph and weights of the requester's own loss."""
        return self.folder / "loss" / STAGE_FILE, self.folder / "loss" / WEIGHTS_FILE

    @property
    def augmentation(self) -> tuple[Path, Path]:
        """Graph and weights of the requester's augmentation."""
        folder = self.folder / "augmentation"
        return folder / STAGE_FILE, folder / WEIGHTS_FILE

    def metric(self, number: int) -> tuple[Path, Path]:
        """Return the paths of graph and weights of one of the requester's own metrics."""
        folder = self.folder / "metrics" / str(number)
        return folder / STAGE_FILE, folder / WEIGHTS_FILE

    def data_file(self, artifact: Artifact) -> Path:
        """Return the path of a file of samples or labels."""
        return self.folder / "data" / f"{artifact.sha256}.safetensors"

    def rows_file(self, artifact: Artifact) -> Path:
        """Return the path of the numbers of samples of an epoch."""
        return self.folder / "data" / f"{artifact.sha256}.rows"

    @property
    def trained(self) -> Path:
        """Folder of the trained stages."""
        return self.folder / "trained"

    def trained_files(self, cluster: int) -> list[Path]:
        """Return the files of a cluster's trained stages."""
        found = (self.trained / f"cluster_{cluster}").glob("node_*")
        return sorted(path for path in found if path.suffix in (".json", ".safetensors"))

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints of the stage, and of the neighbours' replicas."""
        return self.folder / "checkpoints"

    @property
    def uploads(self) -> Path:
        """Folder of further names of checkpoints while they are uploaded."""
        return self.folder / "uploads"

    @property
    def check_uploads(self) -> Path:
        """Folder of a further name of a spot check's file while it is uploaded."""
        return self.folder / "check_uploads"

    @property
    def scratch(self) -> Path:
        """Folder for all that the worker writes beside checkpoints and trained stages."""
        return self.folder / "scratch"

    @property
    def written(self) -> tuple[Path, ...]:
        """The folders in which the worker may write; it only reads the others."""
        return self.scratch, self.checkpoints, self.trained

    @property
    def losses(self) -> Path:
        """Loss file of the node, as ``Node(loss_filename=...)`` takes it."""
        return self.scratch / "losses.txt"

    @property
    def output(self) -> Path:
        """Stdout of the worker."""
        return self.folder / "output.txt"

    @property
    def errors(self) -> Path:
        """Stderr of the worker; its last line says why training failed."""
        return self.folder / "errors.txt"

    @property
    def idle(self) -> Path:
        """Bytes of memory that the worker held before it read the job's data."""
        return self.scratch / "idle.json"

    def write_excluded(self, nodes: Sequence[ExcludedNode]) -> None:
        """Write the nodes to which the worker closes its links."""
        write_json(self._excluded, [each.model_dump(mode="json") for each in nodes], compact=True)

    def read_excluded(self) -> tuple[ExcludedNode, ...]:
        """Read the nodes to which the worker closes its links; none if nobody is excluded."""
        if not self._excluded.exists():
            return ()
        return _EXCLUDED.validate_python(read_json(self._excluded, _LIMIT))

    def write_trace_order(self, order: int) -> None:
        """Write the number of the server's newest request for spans."""
        write_json(self._trace_order, order, compact=True)

    def read_trace_order(self) -> int:
        """Read the number of the server's newest request for spans; 0 if there is none."""
        try:
            order = read_json(self._trace_order, _LONGEST_NUMBER)
        except (OSError, StageFormatError):
            return 0
        return order if isinstance(order, int) else 0

    @property
    def _trace_order(self) -> Path:
        return self.folder / "trace.json"

    @property
    def _excluded(self) -> Path:
        return self.folder / "excluded.json"

    @property
    def _assignment(self) -> Path:
        return self.folder / "assignment.json"

    @property
    def _settings(self) -> Path:
        return self.folder / "settings.json"

    @property
    def _outcome(self) -> Path:
        return self.folder / "outcome.json"

    @property
    def has_outcome(self) -> bool:
        """``True`` if the folder holds a result, for whichever server."""
        return self.read_outcome() is not None

    def write_outcome(self, outcome: Outcome) -> None:
        """Write the marker of a folder whose result the server has not acknowledged yet."""
        write_json(self._outcome, outcome.model_dump(mode="json"), compact=True)

    def read_outcome(self) -> Outcome | None:
        """Read the marker of a result; ``None`` if there is none, or none that can be read."""
        try:
            return Outcome.model_validate(read_json(self._outcome, _LIMIT))
        except (OSError, StageFormatError, ValidationError):
            return None

    def forget_outcome(self) -> None:
        """Remove the marker of a result that is made anew."""
        self._outcome.unlink(missing_ok=True)

    def write_assignment(self, assignment: Assignment) -> None:
        """Write the assignment, once all files that it names are here."""
        write_json(self._assignment, assignment.model_dump(mode="json"), compact=True)

    def read_assignment(self) -> Assignment:
        """Read the assignment."""
        return Assignment.model_validate(read_json(self._assignment, _LIMIT))

    def write_settings(self, settings: WorkerSettings) -> None:
        """Write the settings for the worker, before it starts."""
        write_json(self._settings, settings.model_dump(mode="json"))

    def read_settings(self) -> WorkerSettings:
        """Read the settings."""
        return WorkerSettings.model_validate(read_json(self._settings, _LIMIT))


@dataclass(frozen=True)
class JobsDir:
    """The folder of a provider, with a folder for each assignment."""

    folder: Path

    def job_dir(self, assignment: str) -> JobDir:
        """Return the folder of an assignment; refuses names that could lead elsewhere."""
        if not _NAME.fullmatch(assignment):
            raise StageFormatError(f"{assignment[:100]!r} is not the name of an assignment")
        return JobDir(self.folder / assignment)

    def assignments(self) -> Iterator[str]:
        """Yield the assignments that have a folder."""
        if self.folder.is_dir():
            yield from sorted(p.name for p in self.folder.iterdir() if _NAME.fullmatch(p.name))

    def outcomes(self, provider: str) -> dict[str, Outcome]:
        """Return the assignments that a provider has trained to the end, and whose server lacks them.

        Results for other servers stay where they are.
        """
        found = ((name, self.job_dir(name).read_outcome()) for name in self.assignments())
        return {name: each for name, each in found if each is not None and each.provider == provider}

    def adopt(self, earlier: str, assignment: str) -> None:
        """Use the folder of an earlier assignment for another one of the same node, if it exists."""
        old, new = self.job_dir(earlier).folder, self.job_dir(assignment).folder
        if old.is_dir() and not new.exists():
            old.rename(new)

    def discard(self, assignment: str) -> None:
        """Remove the folder of an assignment, whatever its worker has made in it."""
        folder = self.job_dir(assignment).folder
        with suppress(RecursionError):  # folders within folders
            shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            with suppress(OSError):
                _flatten(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _flatten(folder: Path) -> None:
    """Remove all files below a folder, and all folders but empty ones directly in it."""
    names = itertools.count()
    pending = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    while pending:
        inner = folder / pending.pop()
        inner.chmod(0o700)
        for entry in list(os.scandir(inner)):
            if entry.is_dir(follow_symlinks=False):
                name = f".discarded-{next(names)}"
                Path(entry.path).rename(folder / name)
                pending.append(name)
            else:
                Path(entry.path).unlink()
