"""Routes to a provider: the addresses that it announces, and the relays that answer it."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import httpx
import pytest
from loopback_server import LoopbackServer, Wire, loopback_server, offer_of
from workloads import free_ports

from ravnest.deadlines import RELAY_MEASURE
from ravnest.errors import RelayError
from ravnest.http.api import ApiClient
from ravnest.provider.addresses import Addresses, addresses
from ravnest.provider.routes import RouteFinder, announced
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.providers import ProviderOffer, ProviderView
from ravnest.schemas.reachability import (
    AddressCheck,
    DialBackReply,
    RelayHeartbeat,
    RelayReply,
    RelayTrip,
)
from ravnest.types import Address


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackServer]:
    with loopback_server(tmp_path_factory.mktemp("server")) as found:
        yield found


def check(address: str, *, reachable: bool = False) -> AddressCheck:
    return AddressCheck(address=address, reachable=reachable, reason="" if reachable else "no answer")


def test_addresses_that_were_reached_come_first() -> None:
    own = ("192.168.1.5:9", "10.0.0.5:9", "8.8.4.4:9")
    checks = [check("192.168.1.5:9"), check("10.0.0.5:9"), check("8.8.4.4:9", reachable=True)]
    assert announced(own, checks) == ("8.8.4.4:9", "192.168.1.5:9", "10.0.0.5:9")


def test_the_observed_address_is_announced() -> None:
    own = ("192.168.1.5:9",)
    assert announced(own, [check("192.168.1.5:9"), check("8.8.4.4:9")]) == (*own, "8.8.4.4:9")
    mapped = announced(own, [check("192.168.1.5:9"), check("8.8.4.4:9", reachable=True)])
    assert mapped == ("8.8.4.4:9", "192.168.1.5:9")


def test_few_addresses_are_announced_and_the_observed_one_is_among_them() -> None:
    own = tuple(f"10.0.0.{n}:9" for n in range(8))
    found = announced(own, [*map(check, own), check("8.8.4.4:9")])
    assert found == (*own[:7], "8.8.4.4:9")


def test_a_server_cannot_add_many_addresses() -> None:
    strange = [check(f"9.9.9.{n}:9", reachable=True) for n in range(50)]
    assert announced(("10.0.0.1:9",), strange) == ("9.9.9.0:9", "10.0.0.1:9")


def found_routes(
    api: ApiClient, known: Addresses, trips: dict[str, float | Exception | None] | None = None
) -> ProviderOffer:
    def round_trip(relay: Sequence[Address], timeout: float) -> float | None:
        assert timeout == RELAY_MEASURE
        found = (trips or {})[str(relay[0])]
        if isinstance(found, Exception):
            raise found
        return found

    return RouteFinder(api, known, round_trip).complete(offer_of(address=known.known[0]))


def test_a_provider_that_the_server_reaches(server: LoopbackServer) -> None:
    free, closed = free_ports(2)
    with (
        server.api(ApiRole.PROVIDER, "reached") as api,
        addresses(server.url, f":{free}", [f"127.0.0.1:{closed}"]) as known,
    ):
        offer = found_routes(api, known)
        assert offer.addresses == (f"127.0.0.1:{free}", f"127.0.0.1:{closed}")
        assert offer.address == offer.addresses[0]
        view = api.post("/api/providers", offer, ProviderView)
        assert view.reachability == "direct"


def test_relays_that_answer_are_reported(server: LoopbackServer) -> None:
    trips: dict[str, float | Exception | None] = {
        "10.0.0.1:7": 0.25,
        "10.0.0.2:7": None,
        "10.0.0.3:7": RelayError("strange"),
    }
    for address in trips:
        with server.api(ApiRole.RELAY, address) as relay:
            relay.post("/api/relays", RelayHeartbeat(name="r", addresses=(address,)), RelayReply)
    with server.api(ApiRole.PROVIDER, "measured") as api, addresses(server.url) as known:
        offer = found_routes(api, known, trips)
    (trip,) = offer.relay_trips
    assert trip == RelayTrip(relay=trip.relay, seconds=0.25)


def test_the_offer_stays_while_a_worker_listens(server: LoopbackServer) -> None:
    wire = Wire()
    with server.api(ApiRole.PROVIDER, "busy", wire) as api, addresses(server.url) as known:
        before = offer_of(address=known.known[0])
        with socket.socket() as worker:
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            worker.bind(("127.0.0.1", known.port))
            worker.listen()
            assert RouteFinder(api, known).complete(before) == before
    assert not any("dial-back" in request for request in wire.requests)


def test_the_offer_stays_if_the_server_has_no_time(server: LoopbackServer) -> None:
    wire = Wire()
    wire.refuse["POST /api/providers/dial-back"] = 429
    with server.api(ApiRole.PROVIDER, "often", wire) as api, addresses(server.url) as known:
        before = offer_of(address=known.known[0])
        assert RouteFinder(api, known).complete(before) == before


def test_a_strange_relay_address_is_ignored(server: LoopbackServer) -> None:
    wire = Wire()
    reply = DialBackReply(checks=(), observed="", relays=())
    strange = reply.model_dump(mode="json") | {
        "relays": [{"id": "r", "name": "r", "addresses": ["no address"]}]
    }
    wire.alter["POST /api/providers/dial-back"] = lambda _: httpx.Response(200, json=strange)
    with server.api(ApiRole.PROVIDER, "odd", wire) as api, addresses(server.url) as known:
        assert found_routes(api, known).relay_trips == ()
