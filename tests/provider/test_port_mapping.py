"""A port of the router is mapped, renewed and removed; failures are told and not raised."""

from __future__ import annotations

import threading

import pytest

from ravnest.deadlines import PORT_LEASE
from ravnest.provider import port_mapping
from ravnest.provider.port_mapping import CONFLICT, ONLY_PERMANENT, GatewayError, mapped_port
from ravnest.types import Address

INTERNAL = Address("192.168.1.10", 20_000)


class Router:
    """A router in memory."""

    def __init__(self, host: str = "198.51.100.7", *, taken: set[int] | None = None) -> None:
        self.host = host
        self.taken = taken or set()
        self.only_permanent = False
        self.refuses = False
        self.mappings: dict[int, tuple[Address, float]] = {}
        self.asked = threading.Condition()
        self.requests = 0

    def external_host(self) -> str:
        return self.host

    def add(self, external_port: int, internal: Address, lease: float) -> None:
        with self.asked:
            self.requests += 1
            self.asked.notify_all()
            self._add(external_port, internal, lease)

    def _add(self, external_port: int, internal: Address, lease: float) -> None:
        if self.refuses:
            raise GatewayError("Not authorized (UPnP error 606)", 606)
        if external_port in self.taken:
            raise GatewayError("taken", CONFLICT)
        if self.only_permanent and lease:
            raise GatewayError("only permanent", ONLY_PERMANENT)
        self.mappings[external_port] = (internal, lease)

    def remove(self, external_port: int) -> None:
        del self.mappings[external_port]

    def await_requests(self, count: int) -> None:
        with self.asked:
            goal = self.requests + count
            assert self.asked.wait_for(lambda: self.requests >= goal, 10)


def _never(line: str) -> None:
    pytest.fail(line)


def test_the_same_port_is_mapped_and_removed_at_the_end() -> None:
    router = Router()
    with mapped_port(INTERNAL, _never, lambda _: router) as mapping:
        assert mapping.address == Address("198.51.100.7", 20_000)
        assert router.mappings == {20_000: (INTERNAL, PORT_LEASE)}
    assert router.mappings == {}


def test_another_port_is_mapped_if_the_first_ones_are_taken() -> None:
    router = Router(taken={20_000, 20_001})
    with mapped_port(INTERNAL, _never, lambda _: router) as mapping:
        assert mapping.address == Address("198.51.100.7", 20_002)


def test_a_router_whose_ports_are_all_taken_is_told() -> None:
    router = Router(taken=set(range(65_536)))
    with mapped_port(INTERNAL, _never, lambda _: router) as mapping:
        assert mapping.address is None
        assert "are given to other machines" in mapping.reason


def test_a_router_without_leases_maps_for_ever_until_the_end() -> None:
    router = Router(taken={20_000})
    router.only_permanent = True
    with mapped_port(INTERNAL, _never, lambda _: router):
        assert router.mappings == {20_001: (INTERNAL, 0.0)}
    assert router.mappings == {}


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("", "no public address"),
        ("0.0.0.0", "no public address"),
        ("192.168.0.2", "another router"),
        ("100.64.3.4", "another router"),
    ],
)
def test_a_router_without_a_public_address_is_of_no_use(host: str, why: str) -> None:
    router = Router(host)
    with mapped_port(INTERNAL, _never, lambda _: router) as mapping:
        assert mapping.address is None
        assert why in mapping.reason
    assert router.mappings == {}


def test_a_refusal_is_told_and_not_raised() -> None:
    router = Router()
    router.refuses = True
    with mapped_port(INTERNAL, _never, lambda _: router) as mapping:
        assert mapping.address is None
        assert mapping.reason == "the router maps no port: Not authorized (UPnP error 606)"


def test_a_mapping_is_renewed_and_problems_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping, "PORT_RENEWAL", 0.001)
    router = Router()
    said: list[str] = []
    heard = threading.Semaphore(0)

    def say(line: str) -> None:
        said.append(line)
        heard.release()

    with mapped_port(INTERNAL, say, lambda _: router):
        with router.asked:
            router.mappings.clear()  # the router was restarted
        router.await_requests(2)
        assert 20_000 in router.mappings
        router.refuses = True
        assert heard.acquire(timeout=10)
        router.await_requests(3)
        router.refuses = False
        assert heard.acquire(timeout=10)
    assert [line.split(":")[0] for line in said] == [
        "the router did not renew the mapping of port 20000",
        "the router has renewed the mapping of port 20000",
    ]
    assert router.mappings == {}
