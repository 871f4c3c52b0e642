"""Reachability of providers: the decision and its reason, and the plans that follow from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from server_cases import Case, FakePlanner, offer, opened

from ravnest.schemas.providers import Assignment
from ravnest.schemas.reachability import AddressCheck, RelayTrip, RelayView
from ravnest.server.reachability.status import reachability
from ravnest.server.scheduling.planning import PlannedJob
from ravnest.transport.certificates import signing_request

NEAR = RelayView(id="r1", name="attic", addresses=("8.8.8.8:7101",))
FAR = RelayView(id="r2", name="moon", addresses=("1.1.1.1:7101",))
TRIPS = (RelayTrip(relay="r2", seconds=0.2), RelayTrip(relay="r1", seconds=0.0123))


def check(address: str, reason: str = "") -> AddressCheck:
    return AddressCheck(address=address, reachable=not reason, reason=reason)


def behind_nat(**changes: Any) -> Any:
    return offer(address="192.168.1.5:9000", addresses=("192.168.1.5:9000", "8.8.4.4:9000"), **changes)


BLOCKED = (check("192.168.1.5:9000", "private"), check("8.8.4.4:9000", "no answer within 3 s"))


def test_a_provider_that_was_reached_is_direct() -> None:
    found = reachability(behind_nat(), (BLOCKED[0], check("8.8.4.4:9000")), {})
    assert (found.kind, found.reason) == ("direct", "the server reaches it at 8.8.4.4:9000")


def test_an_address_counts_only_if_it_is_announced() -> None:
    found = reachability(offer(address="192.168.1.5:9000"), (check("8.8.4.4:9000"),), {})
    assert found.kind == "unreachable"


def test_without_a_check_the_offer_counts() -> None:
    found = reachability(behind_nat(), (), {})
    assert (found.kind, found.reason) == ("direct", "its addresses were not tested")


def test_a_provider_that_a_relay_answers_is_relayed() -> None:
    found = reachability(behind_nat(relay_trips=TRIPS), BLOCKED, {"r1": NEAR, "r2": FAR})
    assert found.kind == "relayed"
    for words in ("8.8.4.4:9000: no answer", "relay attic (12.3 ms)", "open TCP port 9000", "--address"):
        assert words in found.reason


def test_a_relay_that_is_gone_does_not_count() -> None:
    found = reachability(behind_nat(relay_trips=TRIPS), BLOCKED, {"r2": FAR})
    assert "relay moon (200.0 ms)" in found.reason
    found = reachability(behind_nat(relay_trips=TRIPS[:1]), BLOCKED, {"r1": NEAR})
    assert found.kind == "unreachable"
    assert "no relay answers it (8.8.8.8:7101)" in found.reason
    found = reachability(behind_nat(relay_trips=TRIPS), BLOCKED, {})
    assert found.kind == "unreachable"
    assert "this server has no relay" in found.reason


def test_the_reason_names_a_few_addresses_and_the_observed_one() -> None:
    checks = [check(f"10.0.0.{n}:9000", "private") for n in range(8)]
    reason = reachability(behind_nat(), [*checks, BLOCKED[1]], {}).reason
    assert "10.0.0.1:9000" in reason
    assert "10.0.0.2:9000" not in reason
    assert "(10.0.0.0:9000 and 10.0.0.1:9000: private; 8.8.4.4:9000: no answer" in reason


# --- plans ---------------------------------------------------------------------------------------


def block(case: Case, provider: str) -> None:
    """Have the server find that nobody can dial a provider."""
    with case.server.db.write(case.time.now) as db:
        record = db.providers.get(provider)
        assert record is not None
        db.providers.set_checks(provider, [check(record.offer.address, "no answer within 3 s")])


def test_an_unreachable_provider_is_not_planned_with_others(case: Case) -> None:
    requester = case.requester()
    alice, bob = case.provider("alice", compute=90.0), case.provider("bob", address="127.0.0.1:9001")
    block(case, alice.id)
    job = case.submit(requester)
    case.match()
    assert case.planner.asked == [(bob.id,)]
    assert bob.heartbeat()["assignment"] == f"{job}-0"
    assert alice.heartbeat()["assignment"] is None


def test_it_comes_last_if_a_job_takes_few_providers(case: Case) -> None:
    requester = case.requester()
    alice, bob = case.provider("alice", compute=90.0), case.provider("bob", address="127.0.0.1:9001")
    block(case, alice.id)
    case.submit(requester, max_providers=1)
    case.match()
    assert bob.heartbeat()["assignment"]


def test_an_unreachable_provider_can_train_alone(case: Case) -> None:
    requester, alice = case.requester(), case.provider("alice")
    block(case, alice.id)
    case.submit(requester)
    case.match()
    assert alice.heartbeat()["assignment"]


def test_a_job_that_needs_it_waits_and_says_why(case: Case) -> None:
    requester = case.requester()
    alice, _ = case.provider("alice"), case.provider("bob", address="127.0.0.1:9001")
    block(case, alice.id)
    case.planner.needs = 2
    job = case.submit(requester, min_providers=2)
    case.match()
    reason = requester.get(f"/api/jobs/{job}")["reason"]
    assert "Others cannot reach alice" in reason
    assert "ravnest nodes" in reason
    assert len(case.planner.asked) == 1


@pytest.mark.parametrize("is_there", [True, False])
def test_a_relayed_provider_is_planned_while_its_relay_works(case: Case, is_there: bool) -> None:
    requester = case.requester()
    trips = (RelayTrip(relay="server", seconds=0.01),)
    alice = case.provider("alice", relay_trips=[trip.model_dump() for trip in trips])
    bob = case.provider("bob", address="127.0.0.1:9001", compute=10.0)
    block(case, alice.id)
    if is_there:
        case.server.relay_service.put_own(_NoRelay(), [])
    case.submit(requester)
    case.match()
    assert set(case.planner.asked[0]) == ({alice.id, bob.id} if is_there else {bob.id})
    views = {view["id"]: view["reachability"] for view in requester.get("/api/providers")}
    assert views == {alice.id: "relayed" if is_there else "unreachable", bob.id: "direct"}


class _HostileNames(FakePlanner):
    """Planner whose nodes have addresses that are named like other nodes."""

    def ship(self, job: str, planned: PlannedJob) -> tuple[Assignment, ...]:
        hostile = ("node_0.:9000", "NODE_0:9000", "localhost:9000", "alice.example:9000")
        return tuple(
            each.model_copy(update={"node_spec": replace(each.node_spec, others=hostile)})
            for each in super().ship(job, planned)
        )


def test_hosts_of_an_offer_are_not_in_the_certificate_of_its_node(tmp_path: Path) -> None:
    """A host ``node_0.`` in an offer passed for ``node_0``."""
    with opened(tmp_path, planner=_HostileNames(tls=True, needs=2)) as case:
        requester, _alice = case.requester(), case.provider("alice")
        bob = case.provider("bob", address="127.0.0.1:9001", compute=10.0)
        case.submit(requester)
        case.match()
        request = {"csr": signing_request("node_0")[0].decode()}
        path = f"/api/assignments/{bob.heartbeat()['assignment']}/certificate"
        signed = bob.post(path, request)["certificate"]
    certificate = x509.load_pem_x509_certificate(signed.encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.DNSName("node_1")]
    assert certificate.subject.rfc4514_string() == "CN=node_1"


class _NoRelay:
    def set_running_jobs(self, jobs: frozenset[str] | None) -> None:
        pass
