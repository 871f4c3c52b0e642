"""Addresses of a provider: where it listens, and where others reach it."""

import socket

import pytest

from ravnest.errors import ServerUnreachableError, SettingsError
from ravnest.provider.addresses import addresses, local_host

SERVER = "http://127.0.0.1:8400"


def test_the_default_address_is_the_one_that_reaches_the_server() -> None:
    with addresses(SERVER) as found:
        host, _, port = found.known.partition(":")
        assert host == "127.0.0.1"
        assert 20_000 <= int(port) < 32_768
        assert found.listen is None


def test_the_port_is_reserved_and_a_node_can_listen_there() -> None:
    with addresses(SERVER) as found:
        where = ("127.0.0.1", int(found.known.partition(":")[2]))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(where)
        with socket.socket() as node:
            node.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            node.bind(where)
            node.listen()
            with socket.create_connection(where, 5):
                pass


def test_behind_a_router_the_node_listens_on_all_interfaces_at_the_same_port() -> None:
    with addresses(SERVER, address="203.0.113.7:21987") as found:
        assert found.known == "203.0.113.7:21987"
        assert found.listen == "0.0.0.0:21987"


def test_a_forwarded_port() -> None:
    with addresses(SERVER, listen="127.0.0.1:21988", address="home.example:80") as found:
        assert (found.known, found.listen) == ("home.example:80", "127.0.0.1:21988")


def test_only_a_port_or_only_a_host() -> None:
    with addresses(SERVER, listen=":21989") as found:
        assert (found.known, found.listen) == ("127.0.0.1:21989", None)
    with addresses(SERVER, listen="127.0.0.2") as found:
        assert found.known.startswith("127.0.0.2:")


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
    with pytest.raises(SettingsError, match="--address"), addresses(SERVER, address=text):
        pass


def test_an_unknown_server_name() -> None:
    with pytest.raises(ServerUnreachableError, match=r"nowhere\.invalid"):
        local_host("https://nowhere.invalid:8400")
