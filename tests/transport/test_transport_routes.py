"""Routes to a peer: which are tried, in which order, and what is said if none answers."""

import threading
from collections.abc import Callable, Mapping

import pytest

from ravnest.relay.access import RelayAccess
from ravnest.relay.tickets import Endpoint
from ravnest.transport.routes import Route, RouteSearch, Unanswered, combined, routes_to
from ravnest.types import Address

LAN, PUBLIC, HOME = Address("10.0.0.1", 1), Address("203.0.113.9", 1), Address("127.0.0.1", 1)
NEAR, FAR, SIXTH = Address("198.51.100.1", 7), Address("198.51.100.2", 7), Address("2001:db8::1", 7)
ACCESS = RelayAccess(((NEAR, SIXTH), (FAR,)), Endpoint("job", 0), "ticket")
REFUSED = Unanswered("refused", nothing_listens=True)
SECONDS = 20.0


def relayed(address: Address) -> Route:
    return Route(address, Endpoint("job", 1), "ticket")


def answers(by_address: Mapping[Address, Unanswered | None]) -> Callable[..., Unanswered | None]:
    return lambda address, seconds: by_address[address]


def test_direct_routes_come_before_relays_in_the_given_order() -> None:
    routes = routes_to([LAN, PUBLIC, LAN], ACCESS, 1)
    assert routes == [Route(LAN), Route(PUBLIC), relayed(NEAR), relayed(SIXTH), relayed(FAR)]
    assert [route.kind for route in routes] == ["direct", "direct", *["relayed"] * 3]


@pytest.mark.parametrize(
    ("addresses", "access", "peer"), [([HOME], ACCESS, 1), ([LAN], None, 1), ([LAN], ACCESS, None)]
)
def test_no_relay_without_tls_access_or_a_name(
    addresses: list[Address], access: RelayAccess | None, peer: int | None
) -> None:
    assert routes_to(addresses, access, peer) == [Route(addresses[0])]


def test_a_single_route_is_not_searched_for() -> None:
    assert list(RouteSearch([Route(LAN)], SECONDS, answers({}))) == [Route(LAN)]


def test_a_relay_waits_until_all_direct_routes_have_failed() -> None:
    relay_answered = threading.Event()

    def reach(address: Address, seconds: float) -> Unanswered | None:
        if address == FAR:
            relay_answered.set()
            return None
        relay_answered.wait(seconds)
        return REFUSED

    search = RouteSearch([Route(LAN), Route(PUBLIC), relayed(FAR)], SECONDS, reach)
    assert list(search) == [relayed(FAR)]
    assert search.failures == {Route(LAN): REFUSED, Route(PUBLIC): REFUSED}


def test_a_direct_route_is_tried_before_a_relay_that_answered_earlier() -> None:
    relay_answered = threading.Event()

    def reach(address: Address, seconds: float) -> None:
        relay_answered.wait(seconds) if address == LAN else relay_answered.set()

    assert list(RouteSearch([Route(LAN), relayed(FAR)], SECONDS, reach)) == [Route(LAN), relayed(FAR)]


def test_silent_addresses_do_not_hold_up_a_relay() -> None:
    over = threading.Event()

    def reach(address: Address, seconds: float) -> Unanswered | None:
        if address == LAN:
            over.wait(seconds)
            return REFUSED
        return None

    search = iter(RouteSearch([Route(LAN), relayed(FAR), relayed(NEAR)], SECONDS, reach))
    assert next(search) == relayed(FAR)  # after LINK_DIRECT_FIRST, although LAN has not answered
    over.set()
    assert list(search) == [relayed(NEAR)]


def test_relays_are_tried_in_the_given_order() -> None:
    search = RouteSearch(
        [Route(LAN), relayed(FAR), relayed(NEAR)],
        SECONDS,
        answers({LAN: REFUSED, FAR: None, NEAR: None}),
    )
    assert list(search) == [relayed(FAR), relayed(NEAR)]


def test_a_preferred_relay_gets_a_moment_to_answer() -> None:
    other_answered = threading.Event()

    def reach(address: Address, seconds: float) -> Unanswered | None:
        if address == LAN:
            return REFUSED
        other_answered.wait(seconds) if address == NEAR else other_answered.set()
        return None

    search = RouteSearch([Route(LAN), relayed(NEAR), relayed(FAR)], SECONDS, reach)
    assert list(search) == [relayed(NEAR), relayed(FAR)]


def test_what_never_answers_is_a_failure() -> None:
    over = threading.Event()
    search = RouteSearch([Route(LAN), Route(PUBLIC)], 0.05, lambda *_: over.wait(SECONDS) and None)
    assert list(search) == []
    assert set(search.failures) == {Route(LAN), Route(PUBLIC)}
    over.set()


def test_the_reason_names_each_route() -> None:
    found = combined(
        {Route(LAN): REFUSED, relayed(FAR): Unanswered("it is not registered at the relay")}
    )
    assert found.reason == f"{LAN}: refused; relay {FAR}: it is not registered at the relay"
    assert not found.nothing_listens, "it may be about to register again"


def test_a_process_is_gone_if_all_its_addresses_refuse() -> None:
    assert combined({Route(LAN): REFUSED, Route(PUBLIC): REFUSED}).nothing_listens
    assert combined({Route(LAN): REFUSED}) is REFUSED
    assert not combined({Route(LAN): REFUSED, Route(PUBLIC): Unanswered("no answer")}).nothing_listens
    assert not combined({}).nothing_listens
