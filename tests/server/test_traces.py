"""Traces of jobs at the server: requests, what nodes send, and who may read it."""

from __future__ import annotations

from typing import Any

import pytest
from server_cases import Case

from ravnest.schemas.auth import ApiRole
from ravnest.schemas.providers import MOST_SPANS
from ravnest.server.db.new_records import NEWEST_KEPT
from ravnest.tracing.spans import SpanKind, TraceSpan, flattened


def spans(*indices: int, order: int = 0) -> dict[str, Any]:
    """Return a record with one forward pass for each index."""
    found = [TraceSpan(SpanKind.FORWARD, 1000 * index, 5, 0, 0, index) for index in indices]
    return {"kind": "spans", "spans": flattened(found), "order": order}


def test_nodes_that_train_are_asked_and_their_spans_are_read(case: Case) -> None:
    rita, alice = case.requester(), case.provider()
    job = case.submit(rita)
    case.match()
    reply = alice.report("training", records=[spans(0, 1)])
    assert "trace" not in reply, "earlier versions do not know it"
    order = rita.post(f"/api/jobs/{job}/trace", None)["order"]
    assert rita.post(f"/api/jobs/{job}/trace", None)["order"] > order
    assert alice.heartbeat()["trace"] > order
    (node,) = rita.get(f"/api/jobs/{job}/trace")
    assert (node["order"], node["is_training"], node["provider"]) == (0, True, "alice")
    answer = [spans(2), spans(3, order=order), spans(4)]
    alice.report("training", first_record=1, records=answer)
    (node,) = rita.get(f"/api/jobs/{job}/trace")
    assert node["order"] == order
    found = rita.get(f"/api/jobs/{job}/trace/{node['assignment']}")["spans"]
    assert [each[5] for each in found] == [0, 2, 3, 4]
    rita.get(f"/api/jobs/{job}/trace/unknown", 404)


def test_only_the_owner_and_admins_read_traces(case: Case) -> None:
    rita, alice = case.requester(), case.provider()
    job = case.submit(rita)
    case.match()
    alice.report("training", records=[spans(0)])
    for member in (case.member(ApiRole.VIEWER), alice):
        member.get(f"/api/jobs/{job}/trace", 403)
        member.post(f"/api/jobs/{job}/trace", None, 403)
    assert case.member(ApiRole.ADMIN).get(f"/api/jobs/{job}/trace")


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "spans", "spans": [1, 2, 3]},
        {"kind": "spans", "spans": [99, *[0] * 9]},
        {"kind": "spans", "spans": [0, -1, *[0] * 8]},
        {"kind": "spans", "spans": [0, 2**60, *[0] * 8]},
        {"kind": "spans", "spans": ["a", *[0] * 9]},
        {"kind": "spans", "spans": [], "order": -1},
        {"kind": "spans", "spans": [0] * 10 * (MOST_SPANS + 1)},
    ],
)
def test_spans_of_a_hostile_provider_are_refused(case: Case, record: dict[str, Any]) -> None:
    alice = case.provider()
    case.submit(case.requester())
    case.match()
    report = {"assignment": alice.heartbeat()["assignment"], "phase": "training", "records": [record]}
    alice.heartbeat(422, report=report)


def test_a_job_keeps_a_bounded_number_of_spans(case: Case) -> None:
    rita, alice = case.requester(), case.provider()
    job = case.submit(rita)
    case.match()
    most = NEWEST_KEPT["spans"]
    alice.report("training", records=[spans(index) for index in range(most + 5)])
    (node,) = rita.get(f"/api/jobs/{job}/trace")
    found = rita.get(f"/api/jobs/{job}/trace/{node['assignment']}")["spans"]
    assert [each[5] for each in found] == list(range(5, most + 5))
