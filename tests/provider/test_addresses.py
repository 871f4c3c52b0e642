"""Addresses of a provider: where it listens, and where others reach it."""

import datetime
import socket
from unittest.mock import Mock

import pytest

import ravnest.provider.addresses
from ravnest.errors import ServerUnreachableError, SettingsError
from ravnest.provider.addresses import addresses
from ravnest.provider.interfaces import candidate_hosts, interface_hosts, local_host
from ravnest.transport.certificates import Authority
from ravnest.transport.socket_transport import SocketTransport
from ravnest.transport.tls import Credentials
from ravnest.types import Address

SERVER = "http://127.0.0.1:8400"


def test_the_default_address_is_the_one_that_reaches_the_server() -> None:
    with addresses(SERVER) as found:
        (known,) = found.known
        host, _, port = known.partition(":")
        assert host == "127.0.0.1"
        assert 20_000 <= int(port) < 32_768
        assert found.listen == known
        assert found.port == int(port)


def test_the_port_is_reserved_and_a_node_can_listen_there() -> None:
    with addresses(SERVER) as found:
        where = ("127.0.0.1", found.port)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(where)
        with socket.socket() as node:
            node.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as nodes do
            node.bind(where)
            node.listen()
            with socket.create_connection(where, 5):
                pass


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server be on another machine, and this one have several addresses."""
    hosts = ["10.0.0.7", "fe80::1%eth0", "127.0.0.1", "2a01:4f8::7", "192.168.1.9", "::1"]
    monkeypatch.setattr(ravnest.provider.addresses, "local_host", lambda _: "192.168.1.9")
    monkeypatch.setattr(ravnest.provider.addresses, "interface_hosts", lambda: hosts)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_all_addresses_are_announced_and_the_node_listens_at_all() -> None:
    with addresses("https://server:7100") as found:
        hosts = [Address.parse(each).host for each in found.known]
        assert hosts == ["192.168.1.9", "2a01:4f8::7", "10.0.0.7"]
        assert {Address.parse(each).port for each in found.known} == {found.port}
        assert found.listen == f"[::]:{found.port}"
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", found.port))


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_listener_takes_the_reserved_port_for_ipv4_and_ipv6() -> None:
    identity = Authority("test", datetime.datetime.now(datetime.UTC))
    issued = identity.issue("node_0", ["localhost"])
    transport = SocketTransport(Credentials(identity.certificate, issued.certificate, issued.key))
    with addresses("https://server:7100") as found:
        try:
            listen = Address.parse(found.listen)
            bound = transport.serve(listen, Mock(), Mock(), Mock())
            assert bound.port == found.port
            for host in ("127.0.0.1", "::1"):
                with socket.create_connection((host, found.port), 5):
                    pass
        finally:
            transport.close()


@pytest.mark.usefixtures("elsewhere")
def test_listening_for_ipv4_only() -> None:
    with addresses("https://server:7100", listen="0.0.0.0") as found:
        hosts = [Address.parse(each).host for each in found.known]
        assert hosts == ["192.168.1.9", "10.0.0.7"]
        assert found.listen == f"0.0.0.0:{found.port}"


@pytest.mark.usefixtures("elsewhere")
def test_announced_addresses_come_first() -> None:
    given = ("203.0.113.7:80", "home.example")
    with addresses("https://server:7100", ":21985", given) as found:
        assert found.known[:3] == ("203.0.113.7:80", "home.example:21985", "192.168.1.9:21985")


def test_behind_a_router_the_node_listens_on_all_interfaces_at_the_same_port() -> None:
    with addresses(SERVER, announced=["203.0.113.7:21987"]) as found:
        assert found.known == ("203.0.113.7:21987",)
        assert found.listen in ("[::]:21987", "0.0.0.0:21987")


def test_a_forwarded_port() -> None:
    with addresses(SERVER, listen="127.0.0.1:21988", announced=["home.example:80"]) as found:
        assert (found.known, found.listen) == (("home.example:80",), "127.0.0.1:21988")


def test_only_a_port_or_only_a_host() -> None:
    with addresses(SERVER, listen=":21989") as found:
        assert (found.known, found.listen) == (("127.0.0.1:21989",), "127.0.0.1:21989")
    with addresses(SERVER, listen="127.0.0.2") as found:
        assert found.known[0].startswith("127.0.0.2:")


def test_the_first_free_port_of_a_range_is_taken() -> None:
    with (
        addresses(SERVER, listen=":21990-21992") as first,
        addresses(SERVER, listen="127.0.0.1:21990-21992") as second,
    ):
        assert (first.port, second.port) == (21990, 21991)
        with (
            pytest.raises(SettingsError, match=r"127\.0\.0\.1:21990 to 21991.*--listen"),
            addresses(SERVER, listen=":21990-21991"),
        ):
            pass


@pytest.mark.parametrize("text", [":5-4", ":1-70000", "x y:1-2", ":0-5", ":-5"])
def test_an_invalid_range_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--listen"), addresses(SERVER, listen=text):
        pass


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        with (
            pytest.raises(SettingsError, match=rf"127\.0\.0\.1:{port}.*--listen"),
            addresses(SERVER, listen=f"127.0.0.1:{port}"),
        ):
            pass


@pytest.mark.parametrize("text", ["x:y", ":0", "a b", "1.2.3.4.5:80", ""])
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--address"), addresses(SERVER, announced=[text]):
        pass


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("127.0.0.1", ("127.0.0.1",)),
        ("::1", ("::1",)),
        ("10.1.1.1", ("10.1.1.1", "8.8.4.4", "2a01:4f8::7", "192.168.1.9", "fd00::5")),
        ("2a01:4f8::7", ("2a01:4f8::7", "8.8.4.4", "10.1.1.1", "192.168.1.9", "fd00::5")),
    ],
)
def test_hosts_are_sorted_and_unusable_ones_left_out(first: str, expected: tuple[str, ...]) -> None:
    found = ["fd00::5", "192.168.1.9", "fe80::1%eth0", "169.254.3.4", "127.0.0.1", "::1", "8.8.4.4"]
    found += ["10.1.1.1", "2a01:4f8::7", "224.0.0.1", "0.0.0.0", "no address", "02:42:ac:11:00:02"]
    assert candidate_hosts(found, first) == expected


def test_the_hosts_of_this_machine() -> None:
    assert "127.0.0.1" in interface_hosts()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_server_with_an_ipv6_address() -> None:
    assert local_host("https://[::1]:7100") == "::1"
    with addresses("https://[::1]:7100") as found:
        assert found.known == (f"[::1]:{found.port}",)
        assert found.listen == found.known[0]


def test_an_unknown_server_name() -> None:
    with pytest.raises(ServerUnreachableError, match=r"nowhere\.invalid"):
        local_host("https://nowhere.invalid:8400")
