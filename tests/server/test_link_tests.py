"""Neighbours test their link before a job starts, and the plan uses the figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_cases import Caller, Case, FakePlanner, offer, opened

from ravnest.deadlines import LINK_FAILURE_KEPT, LINK_FIGURES_KEPT, LINK_TEST
from ravnest.plan.infeasible import Infeasible
from ravnest.plan.links import LinkFigures, MeasuredLink
from ravnest.plan.profile import ModelProfile, TensorProfile, UnitCost
from ravnest.relay.tickets import read_ticket
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobSpec
from ravnest.schemas.link_tests import LinkTestResult
from ravnest.schemas.providers import ProviderOffer
from ravnest.server.db.records import LinkRecord, ProviderRecord, ProviderState
from ravnest.server.scheduling.link_tests import (
    NO_LINKS,
    ProviderLinks,
    ProviderPair,
    addresses_of,
    link_record,
    listener_of,
    next_pairs,
    progress,
    usable,
)
from ravnest.server.scheduling.planning import Candidates, PlannedJob, plan_job
from ravnest.server.settings import ServerSettings
from ravnest.transport.certificates import signing_request

GOOD = {"to_listener": 90.0, "to_dialer": 45.0, "round_trip": 0.042, "route": "relayed"}
FAILED = {"failure": "no answer from 10.0.0.2:9000"}


def model(units: int = 6, crossing: int = 10**6) -> ModelProfile:
    return ModelProfile(
        units=tuple(UnitCost(1e9, 0, 0, *(crossing,) * 4) for _ in range(units)),
        state=tuple(
            TensorProfile(f"layer{u}.weight", 1000, trainable=True, averaged=True, units=(u,))
            for u in range(units)
        ),
        batch_size=4,
        input_bytes=0,
        smallest_rows=1,
    )


class RealPlans(FakePlanner):
    """Planner that makes real plans of a small model, and ships none of its files."""

    def plan(
        self, spec: JobSpec, providers: Candidates, links: ProviderLinks = NO_LINKS
    ) -> PlannedJob | Infeasible:
        self.asked.append(tuple(name for name, _ in providers))
        return plan_job(spec, model(), providers, links)


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with opened(tmp_path, planner=RealPlans()) as found:
        yield found


def join(case: Case, count: int, **changes: Any) -> list[Caller]:
    names = "abcdefgh"
    return [
        case.provider(names[k], **{"address": f"10.0.0.{k + 1}:9000", **changes}) for k in range(count)
    ]


def submit(case: Case, **changes: Any) -> tuple[Caller, str]:
    requester = case.requester()
    job = case.submit(requester, **{"clusters": 1, "min_providers": 2, **changes})
    case.match()
    return requester, job


def view(requester: Caller, job: str) -> tuple[str, str]:
    found = requester.get(f"/api/jobs/{job}")
    return found["state"], found["reason"]


def orders_of(providers: list[Caller]) -> dict[str, dict[str, Any]]:
    """Return the order of each provider that has one."""
    found = {each.id: each.heartbeat()["link_test"] for each in providers}
    return {provider: order for provider, order in found.items() if order is not None}


def answer(case: Case, providers: list[Caller], result: dict[str, Any] = GOOD) -> int:
    """Report the result of all tests that run now; return their number."""
    orders = orders_of(providers)
    for each in providers:
        if each.id in orders and not orders[each.id]["listens"]:
            each.post(f"/api/links/tests/{orders[each.id]['id']}/result", result)
    case.match()
    return len(orders) // 2


# A job with link tests


def test_neighbours_test_their_link_before_a_job_starts(case: Case) -> None:
    providers = join(case, 2)
    requester, job = submit(case)
    assert view(requester, job) == ("planned", "measuring the link between a and b")
    orders = orders_of(providers)
    assert len(orders) == 2
    listening = next(order for order in orders.values() if order["listens"])
    dialling = next(order for order in orders.values() if not order["listens"])
    assert listening["id"] == dialling["id"]
    assert (listening["node"], listening["peer"]) == (dialling["peer"], dialling["node"])
    assert listening["addresses"] == dialling["addresses"]
    assert listening["tls"]
    assert listening["relay"] is None
    assert answer(case, providers) == 1
    state, _ = view(requester, job)
    assert state == "shipping"
    plan = requester.get(f"/api/jobs/{job}")["plan"]
    assert "on the link to Node(1): 45 Mbit/s, 21 ms, relayed (measured)" in plan
    assert orders_of(providers) == {}


def test_figures_are_used_again(case: Case) -> None:
    providers = join(case, 2)
    requester, job = submit(case)
    answer(case, providers)
    requester.post(f"/api/jobs/{job}/cancel")
    _, again = submit(case)
    assert case.admin().get(f"/api/jobs/{again}")["state"] == "shipping"


def test_old_figures_and_those_of_other_addresses_are_not_used(case: Case) -> None:
    providers = join(case, 2)
    requester, job = submit(case)
    answer(case, providers)
    requester.post(f"/api/jobs/{job}/cancel")
    providers[0].post("/api/providers", offer("a", address="10.0.0.9:9000"))
    again, job = submit(case)
    assert view(again, job)[0] == "planned"
    answer(case, providers)
    assert view(again, job)[0] == "shipping"
    again.post(f"/api/jobs/{job}/cancel")
    case.time.now += LINK_FIGURES_KEPT + 1
    for each in providers:
        each.heartbeat()
    again, job = submit(case)
    assert view(again, job)[0] == "planned"


def test_a_provider_takes_part_in_one_test_at_a_time(case: Case) -> None:
    providers = join(case, 4)
    requester, job = submit(case, min_providers=4)
    assert len(orders_of(providers)) == 4
    assert "(0 of 3 are measured)" in view(requester, job)[1]
    assert answer(case, providers) == 2
    assert len(orders_of(providers)) == 2
    assert "(2 of 3 are measured)" in view(requester, job)[1]
    assert answer(case, providers) == 1
    assert view(requester, job)[0] == "shipping"


def test_loopback_links_are_not_tested(case: Case) -> None:
    for number, name in enumerate("ab"):
        case.provider(name, address=f"127.0.0.1:{9000 + number}")
    requester, job = submit(case)
    assert view(requester, job)[0] == "shipping"


def test_loopback_links_are_tested_if_a_setting_asks_for_it(tmp_path: Path) -> None:
    settings = ServerSettings(test_loopback_links=True)
    with opened(tmp_path, planner=RealPlans(), settings=settings) as case:
        providers = [case.provider(n, address=f"127.0.0.1:{9000 + k}") for k, n in enumerate("ab")]
        requester, job = submit(case)
        assert view(requester, job)[0] == "planned"
        assert not any(order["tls"] for order in orders_of(providers).values())
        answer(case, providers)
        assert view(requester, job)[0] == "shipping"


def test_one_node_needs_no_test(case: Case) -> None:
    join(case, 1)
    requester, job = submit(case, min_providers=1)
    assert view(requester, job)[0] == "shipping"


def test_a_slow_pair_is_replaced_by_one_that_is_tested_first(case: Case) -> None:
    """The ends of the slow link are fast with others, so that another pair may be better."""
    providers = join(case, 4)
    offers = {
        each.id: offer(n, address=f"10.0.0.{k + 1}:9000")
        for k, (each, n) in enumerate(zip(providers, "abcd", strict=True))
    }
    a, b, c, d = (each.id for each in providers)
    with case.server.db.write(case.time.now) as db:
        for pair, rate in (({a, b}, 1.0), ({a, c}, 80.0), ({b, d}, 80.0)):
            one, other = sorted(pair)
            addresses = addresses_of(offers[one], offers[other])
            db.links.put(LinkRecord(one, other, addresses, db.now, "", "direct", rate, rate, 0.01))
    requester, job = submit(case, min_providers=4)
    assert set(orders_of(providers)) != {a, b}
    assert answer(case, providers) == 1
    plan = requester.get(f"/api/jobs/{job}")["plan"]
    assert "80 Mbit/s" in plan
    assert " 1 Mbit/s" not in plan


def test_rounds_are_limited(tmp_path: Path) -> None:
    settings = ServerSettings(link_test_rounds=0)
    with opened(tmp_path, planner=RealPlans(), settings=settings) as case:
        join(case, 2)
        requester, job = submit(case)
        assert view(requester, job)[0] == "shipping"


# Failures


def test_a_job_says_which_providers_cannot_reach_each_other(case: Case) -> None:
    providers = join(case, 2)
    requester, job = submit(case)
    answer(case, providers, FAILED)
    state, reason = view(requester, job)
    assert state == "submitted"
    assert reason == "a and b cannot reach each other: no answer from 10.0.0.2:9000, no relay"
    assert [each.get("/api/providers")[0]["state"] for each in providers] == ["offered", "offered"]


def test_a_job_fails_if_it_asked_for_that(case: Case) -> None:
    providers = join(case, 2)
    requester, job = submit(case, on_insufficient="fail")
    answer(case, providers, FAILED)
    assert view(requester, job)[0] == "failed"


def test_a_failing_pair_is_avoided(case: Case) -> None:
    providers = join(case, 3)
    requester, job = submit(case, min_providers=3)
    first = {order["peer_name"] for order in orders_of(providers).values()}
    answer(case, providers, FAILED)
    while view(requester, job)[0] == "planned":
        answer(case, providers)
    state, reason = view(requester, job)
    assert state == "shipping", reason
    pipeline = [each["provider_name"] for each in requester.get(f"/api/jobs/{job}")["assignments"]]
    assert len(pipeline) == 3
    assert len(first) == 2


def test_a_job_starts_without_a_provider_that_reaches_nobody(case: Case) -> None:
    providers = join(case, 3)
    requester, job = submit(case, min_providers=2)
    while view(requester, job)[0] == "planned":
        orders = orders_of(providers)
        lonely = any(order["peer_name"] == "c" for order in orders.values())
        answer(case, providers, FAILED if lonely else GOOD)
    state, _ = view(requester, job)
    assert state == "shipping"
    assert len(requester.get(f"/api/jobs/{job}")["assignments"]) == 2


def test_a_listener_reports_why_it_cannot_listen(case: Case) -> None:
    providers = join(case, 2)
    requester, job = submit(case)
    orders = orders_of(providers)
    listener = next(each for each in providers if orders[each.id]["listens"])
    test = orders[listener.id]["id"]
    listener.post(f"/api/links/tests/{test}/result", GOOD, 422)
    listener.post(f"/api/links/tests/{test}/result", {"failure": "port 9000 is taken"})
    case.match()
    assert "port 9000 is taken" in view(requester, job)[1]


def test_a_test_without_an_answer_fails(case: Case) -> None:
    providers = join(case, 2)
    requester, job = submit(case)
    for _ in range(2):
        case.pass_time(LINK_TEST / 2 + 1)
        for each in providers:
            each.heartbeat()
    case.match()
    state, reason = view(requester, job)
    assert state == "submitted"
    assert "did not end within 40 seconds" in reason


def test_a_failing_pair_is_tested_again_later(case: Case) -> None:
    providers = join(case, 2)
    requester, job = submit(case)
    answer(case, providers, FAILED)
    case.time.now += LINK_FAILURE_KEPT + 1
    for each in providers:
        each.heartbeat()
    case.server.run_due()
    case.match()
    assert view(requester, job)[0] == "planned"
    answer(case, providers)
    assert view(requester, job)[0] == "shipping"


def test_a_pair_that_fails_is_tested_as_often_as_it_takes(case: Case) -> None:
    """The limit of rounds is for one start: a job that waits does not start untested one day."""
    providers = join(case, 2)
    requester, job = submit(case)
    for _ in range(5):
        assert view(requester, job)[0] == "planned"
        answer(case, providers, FAILED)
        assert view(requester, job)[0] == "submitted"
        case.time.now += LINK_FAILURE_KEPT + 1
        for each in providers:
            each.heartbeat()
        case.server.run_due()
        case.match()


def test_a_provider_that_joins_again_is_tested_again(case: Case) -> None:
    providers = join(case, 2)
    requester, job = submit(case)
    answer(case, providers, FAILED)
    providers[1].post("/api/providers", offer("b", address="10.0.0.2:9000"))
    case.match()
    assert view(requester, job)[0] == "planned"


def test_a_lost_provider_ends_the_round(case: Case) -> None:
    providers = join(case, 3)
    requester, job = submit(case, min_providers=2)
    providers[2].call("DELETE", f"/api/providers/{providers[2].id}")
    case.match()
    case.server.run_due()
    while view(requester, job)[0] == "planned":
        assert answer(case, providers[:2])
    assert view(requester, job)[0] == "shipping"


def test_a_cancelled_job_ends_its_tests(case: Case) -> None:
    providers = join(case, 2)
    requester, job = submit(case)
    test = next(iter(orders_of(providers).values()))["id"]
    requester.post(f"/api/jobs/{job}/cancel")
    assert orders_of(providers) == {}
    case.server.run_due()
    providers[0].post(f"/api/links/tests/{test}/result", FAILED, 404)
    assert case.admin().get("/api/links") == []


def test_the_queue_goes_on_while_links_are_tested(case: Case) -> None:
    join(case, 2)
    submit(case)
    case.provider("lone", address="10.0.0.9:9000")
    requester, job = submit(case, min_providers=1)
    assert view(requester, job)[0] == "shipping"


# Relays


def test_both_providers_get_access_to_relays(case: Case) -> None:
    relay = case.member(ApiRole.RELAY, "relay")
    relay.post("/api/relays", {"name": "r", "addresses": ["10.0.0.7:5"]})
    providers = join(case, 2)
    _, job = submit(case)
    for order in orders_of(providers).values():
        assert order["relay"]["job"] == job  # the relay serves it while it is planned
        assert order["relay"]["relays"] == [["10.0.0.7:5"]]
        ticket = read_ticket(
            order["relay"]["ticket"], case.server.relay_service.public_key, case.time.now
        )
        assert (ticket.node, ticket.peers) == (order["node"], (order["peer"],))
    assert job in case.server.relay_service.reply().running_jobs


def test_relayed_links_share_the_capacity_of_the_relay(case: Case) -> None:
    relay = case.member(ApiRole.RELAY, "relay")
    relay.post("/api/relays", {"name": "r", "addresses": ["10.0.0.7:5"], "capacity": 30.0})
    providers = join(case, 3)
    requester, job = submit(case, min_providers=3)
    while view(requester, job)[0] == "planned":
        answer(case, providers)
    plan = requester.get(f"/api/jobs/{job}")["plan"]
    assert plan.count(": 15 Mbit/s, 21 ms, relayed (measured)") == 2


# Permissions and figures


def test_only_the_two_providers_have_a_part_in_a_test(case: Case) -> None:
    providers = join(case, 2)
    submit(case)
    test = next(iter(orders_of(providers).values()))["id"]
    stranger = case.provider("x", address="10.0.0.8:9000")
    request, _ = signing_request("node_0")
    stranger.post(f"/api/links/tests/{test}/certificate", {"csr": request.decode()}, 403)
    stranger.post(f"/api/links/tests/{test}/result", FAILED, 403)
    case.member(ApiRole.REQUESTER).post(f"/api/links/tests/{test}/result", FAILED, 403)
    signed = providers[0].post(f"/api/links/tests/{test}/certificate", {"csr": request.decode()})
    assert "BEGIN CERTIFICATE" in signed["certificate"]
    answer(case, providers)
    assert not list(case.server.folder.job_authorities.glob(f"{test}*"))
    providers[0].post(f"/api/links/tests/{test}/certificate", {"csr": request.decode()}, 404)


@pytest.mark.parametrize(
    "wrong", [{"to_listener": -1.0}, {"to_listener": 1e9}, {"round_trip": -1}, {"route": "magic"}]
)
def test_impossible_figures_are_refused(case: Case, wrong: dict[str, Any]) -> None:
    providers = join(case, 2)
    submit(case)
    orders = orders_of(providers)
    dialer = next(each for each in providers if not orders[each.id]["listens"])
    dialer.post(f"/api/links/tests/{orders[dialer.id]['id']}/result", GOOD | wrong, 422)


def test_members_see_the_figures(case: Case) -> None:
    providers = join(case, 2)
    requester, _ = submit(case)
    answer(case, providers)
    (link,) = requester.get("/api/links")
    assert sorted(link["names"]) == ["a", "b"]
    assert {link["forward"], link["back"]} == {90.0, 45.0}
    assert (link["round_trip"], link["route"], link["failure"]) == (0.042, "relayed", "")


# Decisions


def record(name: str) -> ProviderRecord:
    return ProviderRecord(name, offer(name), ProviderState.RESERVED, "", "job", 0.0, left=False)


def test_figures_are_stored_by_direction() -> None:
    result = LinkTestResult(to_listener=9, to_dialer=4, round_trip=0.1)
    found = link_record(record("b"), record("a"), result, 5.0)
    assert (found.one, found.other, found.forward, found.back, found.time) == ("a", "b", 9, 4, 5.0)
    found = link_record(record("a"), record("b"), result, 5.0)
    assert (found.forward, found.back) == (4, 9)
    empty = link_record(record("a"), record("b"), LinkTestResult(), 5.0)
    assert empty.failure == "the test reported no figures"


def test_the_provider_that_can_be_dialled_listens() -> None:
    pair = ProviderPair("a", "b", (0, 1))
    assert listener_of(pair, {"a", "b"}) == "b"
    assert listener_of(pair, {"a"}) == "a"
    assert listener_of(pair, {"b"}) == listener_of(pair, ()) == "b"


def test_pairs_without_a_common_provider_are_tested_together() -> None:
    pairs = [ProviderPair(*names, (0, 1)) for names in ("ab", "bc", "cd", "de")]
    assert next_pairs(pairs, ()) == [pairs[0], pairs[2]]
    assert next_pairs(pairs, {"a", "d"}) == [pairs[1]]


def test_words_about_the_tests_that_run() -> None:
    assert progress([("a", "b")], 0, 1) == "measuring the link between a and b"
    many = progress([("a", "b"), ("c", "d"), ("e", "f")], 2, 6)
    assert many == "measuring the link between a and b, c and d and 1 more (2 of 6 are measured)"


def test_records_are_usable_for_the_same_addresses_and_a_while() -> None:
    offers: dict[str, ProviderOffer] = {name: offer(name) for name in "ab"}
    known = LinkRecord("a", "b", addresses_of(offers["a"], offers["b"]), 100.0)
    failed = LinkRecord("a", "b", known.addresses, 100.0, "no answer")
    assert usable([known, failed], offers, measured=50, failed=50) == (known, failed)
    assert usable([known, failed], offers, measured=50, failed=101) == (known,)
    assert usable([known], offers, measured=101, failed=0) == ()
    assert usable([known], {"a": offers["a"]}, measured=0, failed=0) == ()
    moved = offers | {"b": offer("b", address="10.0.0.1:1")}
    assert usable([known], moved, measured=0, failed=0) == ()


def test_figures_for_the_planner_have_node_numbers() -> None:
    providers = [(name, offer(name)) for name in ("c", "a", "b")]
    records = (
        LinkRecord("a", "c", "", 0.0, "", "relayed", 9.0, 4.0, 0.2),
        LinkRecord("a", "b", "", 0.0, "refused"),
        LinkRecord("a", "x", "", 0.0, "", "direct", 1.0, 1.0, 0.2),
    )
    found = ProviderLinks(records, relay_rate=50.0).figures(providers)
    failing = {(1, 2): "a and b cannot reach each other: refused"}
    assert found == LinkFigures({(0, 1): MeasuredLink(4.0, 0.1, relayed=True)}, failing, 50.0)
