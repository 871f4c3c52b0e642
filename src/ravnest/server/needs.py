"""Which artifacts messages name."""

from __future__ import annotations

from ravnest.api.jobs import GraphLoss, JobSpec
from ravnest.api.model import Artifact
from ravnest.api.providers import Assignment


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
