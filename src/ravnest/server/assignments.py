"""Which artifacts messages name."""

from __future__ import annotations

from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import GraphLoss, JobSpec
from ravnest.schemas.providers import Assignment, ProviderOffer


def needed_files(spec: JobSpec) -> list[Artifact]:
    """Every artifact that a job names."""
    data = [spec.train] + ([spec.validation] if spec.validation is not None else [])
    files = [spec.model.units, spec.model.weights]
    files += [piece.artifact for each in data for piece in (*each.inputs, *each.labels)]
    if isinstance(spec.training.loss, GraphLoss):
        files += [spec.training.loss.stage, spec.training.loss.weights]
    return files


def needed_by(assignment: Assignment) -> list[Artifact]:
    """Every artifact that a provider fetches for its part."""
    shares = [assignment.train] + ([assignment.validation] if assignment.validation is not None else [])
    files = [assignment.stage, assignment.weights]
    files += [piece.artifact for share in shares for piece in (*share.inputs, *share.labels)]
    if assignment.loss is not None:
        files += [assignment.loss.stage, assignment.loss.weights]
    return files


FETCHING = ("waiting", "fetching")
"""Phases before a part trains."""
_SLACK = 4.0
"""Times what the measured bandwidth explains: several fetch at once, and bandwidth varies."""


def fetch_limit(assignment: Assignment, offer: ProviderOffer, grace: float) -> float:
    """Seconds after which a provider is taken to be stuck."""
    size = sum(artifact.size for artifact in needed_by(assignment))
    return grace + _SLACK * 8 * size / (offer.bandwidth * 1e6)
