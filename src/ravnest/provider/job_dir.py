"""The folder that a worker has to itself; its names are ours, none is the server's."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ravnest.errors import StageFormatError
from ravnest.runtime.control.metric_files import ACCURACIES, name_for
from ravnest.schemas.base import Artifact, Schema
from ravnest.schemas.providers import Assignment
from ravnest.store.bundle import STAGE_FILE, WEIGHTS_FILE
from ravnest.store.files import read_json, write_json
from ravnest.store.node_spec import CertificateFiles

BUNDLE = "stage"
CERTIFICATES = CertificateFiles(
    "certificates/authority.pem", "certificates/node.pem", "certificates/node.key"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_LIMIT = 256 << 20


class WorkerSettings(Schema):
    """What the provider, not the server, decides about a worker."""

    ram: int
    """Bytes."""
    cores: int
    listen: str | None = None
    """Where it differs from the address that others know."""


@dataclass(frozen=True)
class JobDir:
    """Where everything of one assignment is."""

    folder: Path

    @property
    def node_data(self) -> Path:
        """As ``clusterize`` would write it, for one node."""
        return self.folder / "node_data"

    @property
    def stage(self) -> tuple[Path, Path]:
        """Graph and weights of the stage."""
        return self.node_data / BUNDLE / STAGE_FILE, self.node_data / BUNDLE / WEIGHTS_FILE

    @property
    def loss(self) -> tuple[Path, Path]:
        """Graph and weights of the requester's own loss."""
        return self.folder / "loss" / STAGE_FILE, self.folder / "loss" / WEIGHTS_FILE

    def piece(self, artifact: Artifact) -> Path:
        """A piece of the data."""
        return self.folder / "data" / f"{artifact.sha256}.safetensors"

    @property
    def trained(self) -> Path:
        """Trained stages."""
        return self.folder / "trained"

    def trained_files(self, cluster: int) -> list[Path]:
        """The trained stages of a cluster with their manifests."""
        found = (self.trained / f"cluster_{cluster}").glob("node_*")
        return sorted(path for path in found if path.suffix in (".json", ".safetensors"))

    @property
    def losses(self) -> Path:
        """As ``Node(loss_filename=...)`` takes it."""
        return self.folder / "losses.txt"

    def losses_of(self, cluster: int) -> Path:
        """Losses by update."""
        return name_for(self.losses, cluster)

    def figures_of(self, cluster: int) -> Path:
        """Results of validations."""
        return name_for(self.folder / ACCURACIES, cluster)

    @property
    def output(self) -> Path:
        """What the worker writes to stdout."""
        return self.folder / "output.txt"

    @property
    def errors(self) -> Path:
        """What the worker writes to stderr; its last line says why it failed."""
        return self.folder / "errors.txt"

    @property
    def idle(self) -> Path:
        """The bytes that the worker had before it read anything of the job's."""
        return self.folder / "idle.json"

    @property
    def _assignment(self) -> Path:
        return self.folder / "assignment.json"

    @property
    def _settings(self) -> Path:
        return self.folder / "settings.json"

    def write_assignment(self, assignment: Assignment) -> None:
        """Once all that it names is here."""
        write_json(self._assignment, assignment.model_dump(mode="json"), compact=True)

    def read_assignment(self) -> Assignment:
        """What the worker is to do."""
        return Assignment.model_validate(read_json(self._assignment, _LIMIT))

    def write_settings(self, settings: WorkerSettings) -> None:
        """For the worker, before it starts."""
        write_json(self._settings, settings.model_dump(mode="json"))

    def read_settings(self) -> WorkerSettings:
        """What the provider decided."""
        return WorkerSettings.model_validate(read_json(self._settings, _LIMIT))


@dataclass(frozen=True)
class JobsDir:
    """The folder of a provider, with a workplace for each assignment."""

    folder: Path

    def place(self, assignment: str) -> JobDir:
        """The workplace of an assignment; refuses names that could lead elsewhere."""
        if not _NAME.fullmatch(assignment):
            raise StageFormatError(f"{assignment[:100]!r} is not the name of an assignment")
        return JobDir(self.folder / assignment)

    def places(self) -> Iterator[str]:
        """Assignments that have one."""
        if self.folder.is_dir():
            yield from sorted(p.name for p in self.folder.iterdir() if _NAME.fullmatch(p.name))

    def discard(self, assignment: str) -> None:
        """Remove a workplace."""
        shutil.rmtree(self.place(assignment).folder, ignore_errors=True)
