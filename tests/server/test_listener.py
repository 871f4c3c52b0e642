"""Listening socket, names and URL of a server."""

import pytest

from ravnest.errors import ServerError
from ravnest.server.http.listener import (
    certificate_names,
    listen,
    needs_tls,
    public_host,
    relay_hosts,
    url_of,
)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", False),
        ("localhost", False),
        ("::1", False),
        ("0.0.0.0", True),
        ("::", True),
        ("a.example", True),
    ],
)
def test_other_machines_are_served_over_tls(host: str, expected: bool) -> None:
    assert needs_tls(host) == expected


def test_the_public_host_is_the_first_public_name_or_an_own_address() -> None:
    assert public_host("0.0.0.0", ["ravnest.example", "10.0.0.1"]) == "ravnest.example"
    assert public_host("127.0.0.1", []) == "127.0.0.1"
    assert public_host("0.0.0.0", []) not in ("", "0.0.0.0")


def test_a_relay_is_reached_at_public_names_and_own_addresses() -> None:
    assert relay_hosts("10.0.0.1", []) == ["10.0.0.1"]
    assert relay_hosts("10.0.0.1", ["a.example"]) == ["a.example", "10.0.0.1"]
    found = relay_hosts("0.0.0.0", ["a.example"])
    assert found[0] == "a.example"
    assert 1 <= len(found) <= 8
    assert "127.0.0.1" not in found
    assert "0.0.0.0" not in found


def test_the_certificate_has_all_names() -> None:
    names = certificate_names("0.0.0.0", ["ravnest.example"])
    assert {"ravnest.example", "127.0.0.1"} <= set(names)
    assert "0.0.0.0" not in names
    assert "10.0.0.1" in certificate_names("10.0.0.1", [])


def test_urls_and_sockets() -> None:
    assert url_of("::1", 80, tls=False) == "http://[::1]:80"
    assert url_of("a.example", 443, tls=True) == "https://a.example:443"
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0
    with pytest.raises(ServerError):
        listen("192.0.2.77", 0)
