"""Offers and reports of lying providers are bounded, and one that failed is chosen last."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from server_cases import FakePlanner, offer, opened, spec

from ravnest.schemas.auth import ApiRole
from ravnest.schemas.providers import Assignment, AssignmentReport, HeartbeatReply, ProviderOffer


@pytest.mark.parametrize(
    "lie",
    [
        {"ram": 1e30},
        {"ram": 0},
        {"vram": 1e30},
        {"cores": 10**9},
        {"compute": 1e300},
        {"bandwidth": 1e300},
        {"bandwidth": float("inf")},
        {"compute": float("nan")},
        {"round_trip": 1e9},
        {"name": "x" * 101},
        {"version": "x" * 10_000},
        {"torch": "x" * 10_000},
        {"addresses": tuple(f"10.0.0.{n}:1" for n in range(13))},
        {"address": "x" * 301},
        {"trained": tuple(str(n) for n in range(101))},
        {"trained": ("x" * 10_000,)},
        {"sandbox": "the best"},
    ],
)
def test_an_offer_is_bounded(lie: dict[str, Any]) -> None:
    """An offer of 1e300 GFLOP/s got every job, and made plans fail."""
    with pytest.raises(ValidationError):
        offer(**lie)


def test_an_offer_says_its_sandbox_or_nothing() -> None:
    """Providers of earlier versions do not know the field."""
    old = offer().model_dump(exclude={"sandbox"})
    assert ProviderOffer.model_validate(old).sandbox is None
    assert ProviderOffer.model_validate(old).in_sandbox("bwrap").sandbox == "bwrap"


def test_fields_of_later_versions_are_ignored_in_descriptions_and_refused_in_orders(
    tmp_path: Path,
) -> None:
    """A new provider at an older server was refused because of a field of its offer."""
    with opened(tmp_path) as case:
        alice = case.member(ApiRole.PROVIDER, "alice")
        later = offer("alice").model_dump(mode="json") | {"colour": "blue"}
        view = alice.post("/api/providers", later)
        assert "colour" not in view["offer"]
        rita = case.requester()
        job = spec().model_dump(mode="json")
        rita.post("/api/jobs", job | {"colour": "blue"}, 422)
        rita.post("/api/jobs", job | {"training": job["training"] | {"colour": "blue"}}, 422)
        case.submit(rita)
        case.match()
        assignment = alice.heartbeat(colour="blue")["assignment"]
        report = {"assignment": assignment, "phase": "fetching", "colour": "blue"}
        reply = alice.heartbeat(report=report)
        assert HeartbeatReply.model_validate(reply | {"colour": "blue"}).assignment == assignment
        body = alice.get(f"/api/assignments/{assignment}")
        with pytest.raises(ValidationError, match="colour"):
            Assignment.model_validate(body | {"colour": "blue"})


def test_the_ids_in_a_report_are_bounded() -> None:
    with pytest.raises(ValidationError):
        AssignmentReport(assignment="x" * 10_000, phase="training")


def test_a_provider_that_failed_comes_last(tmp_path: Path) -> None:
    """The strongest offer got every job, although its provider failed each of them."""
    with opened(tmp_path, planner=FakePlanner(size=1)) as case:
        rita = case.requester()
        mallory = case.provider("mallory", compute=1e6, ram=1000.0)
        alice = case.provider("alice", address="127.0.0.1:9001")
        job = case.submit(rita, max_providers=1)
        case.match()
        assert case.planner.asked[-1] == (mallory.id,)
        mallory.report("failed", reason="no memory", cause="machine")
        rita.post(f"/api/jobs/{job}/cancel")
        case.submit(rita, max_providers=1)
        case.match()
        assert case.planner.asked[-1] == (alice.id,)
        case.submit(rita, max_providers=1)
        case.match()
        assert mallory.id in case.planner.asked[-1], "it is still used if there is no other"


def test_an_offer_that_nothing_proves_is_not_the_first_choice(tmp_path: Path) -> None:
    """An offer of 1e7 GFLOP/s and 100,000 GB got every small job."""
    with opened(tmp_path, planner=FakePlanner(size=1)) as case:
        rita = case.requester()
        alice = case.provider("alice", compute=40.0)
        bob = case.provider("bob", address="127.0.0.1:9001", compute=60.0)
        case.submit(rita)
        case.match()
        for each in (alice, bob):
            content = each.id.encode()
            artifact = {"sha256": each.upload(content), "size": len(content)}
            each.report("finished", result=[{"name": "node_0.json", "artifact": artifact}])
        mallory = case.provider("mallory", address="127.0.0.1:9002", compute=1e7, ram=1e5)
        for expected in (bob, mallory, alice):
            case.submit(rita, max_providers=1)
            case.match()
            assert case.planner.asked[-1] == (expected.id,)
