"""Where a server listens, and under which names."""

import pytest

from ravnest.errors import ServerError
from ravnest.server.http.listener import public_host, listen, certificate_names, needs_tls, url_of


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
def test_others_are_served_over_tls(host: str, expected: bool) -> None:
    assert needs_tls(host) == expected


def test_the_name_that_is_shown_is_the_one_that_was_given() -> None:
    assert public_host("0.0.0.0", ["ravnest.example", "10.0.0.1"]) == "ravnest.example"
    assert public_host("127.0.0.1", []) == "127.0.0.1"
    assert public_host("0.0.0.0", []) not in ("", "0.0.0.0")


def test_the_certificate_is_good_for_all_names() -> None:
    names = certificate_names("0.0.0.0", ["ravnest.example"])
    assert {"ravnest.example", "127.0.0.1"} <= set(names)
    assert "0.0.0.0" not in names
    assert "10.0.0.1" in certificate_names("10.0.0.1", [])


def test_addresses() -> None:
    assert url_of("::1", 80, tls=False) == "http://[::1]:80"
    assert url_of("a.example", 443, tls=True) == "https://a.example:443"
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0
    with pytest.raises(ServerError):
        listen("192.0.2.77", 0)
