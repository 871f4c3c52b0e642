"""Plans jobs and writes their stages, with the server's own artifacts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ravnest.api.jobs import JobSpec
from ravnest.api.providers import Assignment, Offer
from ravnest.jobs.model import UnitModel, read_units
from ravnest.server.artifacts import ArtifactFolder
from ravnest.server.planning import Planned, Short
from ravnest.server.shipping import PlannedJob, Shortage, plan_job, ship


class ShippingPlanner:
    """For one thread."""

    def __init__(self, artifacts: ArtifactFolder, scratch: Path) -> None:
        self._artifacts = artifacts
        self._scratch = scratch
        self._model: tuple[str, UnitModel] | None = None
        """The last one that was read: a job that waits is planned again at each change."""

    def plan(self, spec: JobSpec, providers: Sequence[tuple[str, Offer]]) -> Planned | Short:
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
