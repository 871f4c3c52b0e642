"""Spans of a job's nodes, as they are stored."""

from __future__ import annotations

from ravnest.schemas.traces import TracedAssignment, TraceSpans
from ravnest.server.db.database import Transaction
from ravnest.server.db.new_records import NEWEST_KEPT
from ravnest.server.db.records import AssignmentRecord
from ravnest.telemetry import SpansRecord


def traced_assignments(db: Transaction, job: str) -> list[TracedAssignment]:
    """Return the nodes of a job's current plan, with those that were replaced."""
    return [_traced(db, each) for each in db.assignments.of_job(job)]


def _traced(db: Transaction, assignment: AssignmentRecord) -> TracedAssignment:
    provider = db.providers.get(assignment.provider)
    return TracedAssignment(
        assignment=assignment.id,
        node=assignment.node,
        cluster=assignment.cluster,
        stage=db.assignments.body(assignment.id).node_spec.stage,
        role=assignment.role,
        provider="" if provider is None else provider.offer.name,
        is_training=assignment.phase == "training",
        order=db.telemetry.answered_order(assignment.id),
    )


def stored_spans(db: Transaction, assignment: str) -> TraceSpans:
    """Return the spans of an assignment, oldest first."""
    found = db.telemetry.newest(assignment, SpansRecord, NEWEST_KEPT["spans"])
    return TraceSpans(spans=tuple(record.spans for record in reversed(found)))
