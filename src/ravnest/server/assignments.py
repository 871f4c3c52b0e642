"""Artifacts that jobs and assignments need, and the time allowed to fetch them."""

from __future__ import annotations

from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import GraphLoss, JobSpec, TrainingSpec
from ravnest.schemas.providers import Assignment, ProviderOffer


def needed_files(spec: JobSpec) -> list[Artifact]:
    """Return every artifact that a job names."""
    data = [spec.train] + ([spec.validation] if spec.validation is not None else [])
    files = [spec.model.units, spec.model.weights]
    files += [] if spec.adapter is None else [spec.adapter]
    files += [file.artifact for each in data for file in (*each.inputs, *each.labels)]
    if isinstance(spec.training.loss, GraphLoss):
        files += [spec.training.loss.stage, spec.training.loss.weights]
    return files + graph_files(spec.training)


def graph_files(training: TrainingSpec) -> list[Artifact]:
    """Return the files of the requester's own metrics and augmentation."""
    graphs = list(training.graph_metrics.values())
    if training.augmentation is not None:
        graphs.append(training.augmentation.graph)
    return [file for graph in graphs for file in (graph.stage, graph.weights)]


def needed_by(assignment: Assignment) -> list[Artifact]:
    """Return every artifact that a provider fetches for its assignment."""
    shares = [assignment.train] + ([assignment.validation] if assignment.validation is not None else [])
    files = [assignment.stage, assignment.weights]
    files += [file for share in shares for file in share.files]
    if assignment.loss is not None:
        files += [assignment.loss.stage, assignment.loss.weights]
    files += graph_files(assignment.training)
    if assignment.seed is not None:
        files += [assignment.seed.tensors, assignment.seed.manifest]
    return files


def assignment_id(job: str, attempt: int, node: int) -> str:
    """Return the id of the first assignment of a node; ``attempt``: plans of the job before."""
    return f"{job}-{node}" if attempt == 0 else f"{job}-p{attempt}-{node}"


FETCHING = ("waiting", "fetching")
"""Phases of an assignment before training."""
_SLACK = 4.0
"""Allowed multiple of the time predicted from the bandwidth: several providers fetch at once."""


def fetch_limit(assignment: Assignment, offer: ProviderOffer, grace: float) -> float:
    """Return the seconds after which a provider that still fetches is considered stuck."""
    size = sum(artifact.size for artifact in needed_by(assignment))
    return grace + _SLACK * 8 * size / (offer.bandwidth * 1e6)
