"""What a provider does for one assignment, as far as it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from ravnest.schemas.jobs import ResultFile
from ravnest.schemas.providers import AssignmentReport, Phase, TlsRejections

FIRST_PAUSE = 1.0
MOST_LOSSES = 10_000
"""In one report."""


@dataclass
class AssignmentProgress:
    """What is done for one assignment."""

    assignment: str
    phase: Phase = "fetching"
    busy: bool = True
    """Something runs for it: a fetch, the worker or an upload."""
    again_at: float | None = None
    """When to try the same again, after the server was away."""
    pause: float = FIRST_PAUSE
    stopping: bool = False
    is_root: bool = False
    place: str = ""
    failure: str = ""
    losses: list[float | None] = field(default_factory=list)
    acknowledged: int = 0
    figures: tuple[float | None, ...] = ()
    result: tuple[ResultFile, ...] = ()
    strangers: TlsRejections = field(default_factory=TlsRejections)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left but to say so."""
        return self.phase in ("finished", "failed")

    @property
    def title(self) -> str:
        """For lines that a human reads."""
        return self.place or "the job"

    def report(self) -> AssignmentReport:
        """As the server is told, with the losses that it does not have."""
        first = min(self.acknowledged, len(self.losses))
        return AssignmentReport(
            assignment=self.assignment,
            phase=self.phase,
            reason=self.failure[:4000],
            first_loss=first,
            losses=tuple(self.losses[first : first + MOST_LOSSES]),
            figures=self.figures,
            result=self.result,
            strangers=self.strangers,
        )
