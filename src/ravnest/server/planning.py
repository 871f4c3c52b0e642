"""The seam between matching and what plans a job and writes its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ravnest.api.jobs import JobSpec
from ravnest.api.providers import Assignment, Offer


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

    def plan(self, spec: JobSpec, providers: Sequence[tuple[str, Offer]]) -> Planned | Short:
        """Plan a job for these providers, strongest first."""
        ...

    def ship(self, job: str, planned: Planned) -> tuple[Assignment, ...]:
        """Write the stages among the artifacts; an assignment for each node, by number."""
        ...
