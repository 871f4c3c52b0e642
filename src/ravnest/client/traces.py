"""Trace of a submitted job, from the spans that its server has."""

from __future__ import annotations

import time
from collections.abc import Callable

from ravnest.deadlines import TRACE_ANSWER
from ravnest.errors import ServerError
from ravnest.http.api import ApiClient
from ravnest.schemas.jobs import JobView
from ravnest.schemas.traces import TracedAssignment, TraceRequested, TraceSpans
from ravnest.tracing.node_trace import NodeTrace, TracedNode
from ravnest.tracing.spans import TraceSpan, unflattened


def job_trace(api: ApiClient, job: str, clock: Callable[[], float] = time.monotonic) -> list[NodeTrace]:
    """Return the spans of all nodes of a job; those that train are asked for their newest first.

    Nodes that do not answer in time have the spans that they sent before, or none.
    """
    path = f"/api/jobs/{job}"
    view = api.get(path, JobView)
    nodes = api.get(f"{path}/trace", list[TracedAssignment])
    if not view.state.is_final and any(each.is_training for each in nodes):
        order = api.post(f"{path}/trace", None, TraceRequested, idempotent=True).order
        deadline = clock() + TRACE_ANSWER
        while (left := deadline - clock()) > 0:
            nodes = api.get(f"{path}/trace", list[TracedAssignment])
            if all(each.order >= order for each in nodes if each.is_training):
                break
            params = {"changed": view.changed, "timeout": left}
            view = api.get(f"{path}/wait", JobView, params=params, wait=left)
    return [
        NodeTrace(
            TracedNode(each.node, each.cluster, each.stage, each.role, each.provider),
            _spans(api.get(f"{path}/trace/{each.assignment}", TraceSpans)),
        )
        for each in nodes
    ]


def _spans(found: TraceSpans) -> tuple[TraceSpan, ...]:
    """Return the spans of a node, each once: several requests may have got the same ones."""
    known: dict[TraceSpan, None] = {}
    try:
        for numbers in found.spans:
            known.update(dict.fromkeys(unflattened(numbers)))
    except ValueError as error:
        raise ServerError(f"the server sent a trace that cannot be read: {error}") from error
    return tuple(known)
