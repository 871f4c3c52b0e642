"""The seam between matching and what plans a job and writes its stages."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ravnest.jobs.model import UnitModel, read_units
from ravnest.schemas.jobs import JobSpec
from ravnest.schemas.providers import Assignment, ProviderOffer
from ravnest.server.artifacts import ArtifactFolder
from ravnest.server.scheduling.shipping import PlannedJob, Shortage, plan_job, ship


@dataclass(frozen=True)
class Planned:
    """Who does what in a job."""

    providers: tuple[str, ...]
    """The provider of each node, by the node's number."""
    words: str
    """The plan in words."""
    details: Any
    """The planner's own, for ``ship``."""


@dataclass(frozen=True)
class Short:
    """The providers cannot hold the model, and why."""

    reason: str


class JobPlanner(Protocol):
    """Both take seconds of CPU, and are called in a thread of their own."""

    def plan(self, spec: JobSpec, providers: Sequence[tuple[str, ProviderOffer]]) -> Planned | Short:
        """Plan a job for these providers, strongest first."""
        ...

    def ship(self, job: str, planned: Planned) -> tuple[Assignment, ...]:
        """Write the stages among the artifacts; an assignment for each node, by number."""
        ...


class ShippingPlanner:
    """For one thread."""

    def __init__(self, artifacts: ArtifactFolder, scratch: Path) -> None:
        self._artifacts = artifacts
        self._scratch = scratch
        self._model: tuple[str, UnitModel] | None = None
        """The last one that was read: a job that waits is planned again at each change."""

    def plan(self, spec: JobSpec, providers: Sequence[tuple[str, ProviderOffer]]) -> Planned | Short:
        """Plan a job for these providers, strongest first."""
        planned = plan_job(spec, self._read(spec.model.units.sha256), providers)
        if isinstance(planned, Shortage):
            return Short(planned.reason)
        return Planned(planned.providers, planned.words, planned)

    def ship(self, job: str, planned: Planned) -> tuple[Assignment, ...]:
        """Write the stages among the artifacts; an assignment for each node, by number."""
        details = planned.details
        assert isinstance(details, PlannedJob)
        shutil.rmtree(self._scratch, ignore_errors=True)  # of a process that was killed here
        self._scratch.mkdir(parents=True)
        weights = self._artifacts.path(details.spec.model.weights.sha256)
        return ship(job, details, weights, self._artifacts.add, self._scratch)

    def _read(self, sha256: str) -> UnitModel:
        if self._model is None or self._model[0] != sha256:
            self._model = (sha256, read_units(self._artifacts.path(sha256)))
        return self._model[1]
