"""Policy: which addresses the server dials for a provider."""

import ipaddress

import pytest

from ravnest.server.reachability.policy import dial_refusal, parse_ip

GLOBAL, PRIVATE, LOOPBACK = "8.8.4.4", "192.168.1.5", "127.0.0.1"
OWN = frozenset(map(ipaddress.ip_address, ("9.9.9.9", "10.0.0.1", "127.0.0.1", "::1")))


def refused(target: str, source: str | None) -> bool:
    found, origin = parse_ip(target), None if source is None else parse_ip(source)
    assert found is not None
    return dial_refusal(found, origin, OWN) is not None


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (GLOBAL, GLOBAL),
        ("1.1.1.1", GLOBAL),
        ("2a01:4f8::7", GLOBAL),
        (PRIVATE, PRIVATE),
        ("10.9.8.7", PRIVATE),
        ("fd00::7", PRIVATE),
        (GLOBAL, PRIVATE),
        (LOOPBACK, LOOPBACK),
        ("::1", LOOPBACK),
        ("127.0.0.7", LOOPBACK),
        (PRIVATE, LOOPBACK),
        ("10.0.0.1", LOOPBACK),
        ("10.0.0.1", "9.9.9.9"),
        ("::ffff:8.8.4.4", GLOBAL),
        ("100.64.0.7", "100.64.0.9"),
    ],
)
def test_addresses_of_the_provider_may_be_dialled(target: str, source: str) -> None:
    assert not refused(target, source)


@pytest.mark.parametrize("source", [GLOBAL, PRIVATE, LOOPBACK, None])
@pytest.mark.parametrize(
    "target",
    [
        "169.254.169.254",
        "169.254.3.4",
        "fe80::1",
        "fd00:ec2::254",
        "100.100.100.200",
        "192.0.0.192",
        "168.63.129.16",
        "::ffff:169.254.169.254",
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "ff02::1",
    ],
)
def test_metadata_services_and_the_like_are_never_dialled(target: str, source: str | None) -> None:
    assert refused(target, source)


def test_not_even_if_the_request_seems_to_come_from_there() -> None:
    assert refused("169.254.169.254", "169.254.169.254")


@pytest.mark.parametrize(
    "target",
    [
        LOOPBACK,
        "::1",
        "::ffff:127.0.0.1",
        PRIVATE,
        "10.1.2.3",
        "172.16.0.1",
        "100.64.0.7",
        "fd00::7",
        "9.9.9.9",  # the server itself
        "10.0.0.1",
        "64:ff9b::10.0.0.1",
        "2002:a00:1::1",
    ],
)
def test_a_provider_on_the_internet_cannot_reach_hosts_behind_the_server(target: str) -> None:
    assert refused(target, GLOBAL)


@pytest.mark.parametrize("target", [LOOPBACK, "9.9.9.9", "10.0.0.1"])
def test_a_provider_on_the_local_network_cannot_reach_the_server_s_own_services(target: str) -> None:
    assert refused(target, PRIVATE)


def test_without_a_source_nothing_is_dialled() -> None:
    assert refused(GLOBAL, None)
    assert parse_ip("testclient") is None
