"""Traces of jobs: requests, and the spans of their nodes."""

from __future__ import annotations

from ravnest.schemas.base import TolerantSchema


class TraceRequested(TolerantSchema):
    """A request for the spans of a job's nodes."""

    order: int
    """Number of the request."""


class TracedAssignment(TolerantSchema):
    """A node that has sent spans, or that is asked for them."""

    assignment: str
    node: int
    cluster: int
    stage: int
    role: str
    provider: str
    """Name of the provider."""
    is_training: bool
    """Its worker runs, so that it can answer a request."""
    order: int
    """Number of the newest request that it has answered; 0: none."""


class TraceSpans(TolerantSchema):
    """Spans of one assignment."""

    spans: tuple[tuple[int, ...], ...]
    """Numbers of the spans of each record, as ``tracing.spans`` describes them."""
