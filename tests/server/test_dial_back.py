"""Dial-back: real listeners on loopback, and hostile requests and answers."""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from server_cases import Case, Time, offer, opened
from starlette.testclient import TestClient
from workloads import free_ports

from ravnest.deadlines import DIAL_BACK, DIAL_BACK_GAP
from ravnest.errors import ServerRefusedError
from ravnest.provider.dial_back import dial_back_listener, new_nonce
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.reachability import AddressCheck, DialBackRequest
from ravnest.server.http.app import create_app
from ravnest.server.reachability import dial_back
from ravnest.server.reachability.dial_back import DialBackService, check_addresses
from ravnest.types import Address

LOOPBACK = ipaddress.ip_address("127.0.0.1")
GLOBAL = ipaddress.ip_address("8.8.4.4")
FINGERPRINT = "0" * 64


def request(*addresses: str, port: int = 9, **changes: Any) -> DialBackRequest:
    fields = {"fingerprint": FINGERPRINT, "nonce": FINGERPRINT, **changes}
    return DialBackRequest(addresses=addresses, port=port, **fields)


def checked(asked: DialBackRequest, source: Any = LOOPBACK) -> dict[str, AddressCheck]:
    found = asyncio.run(check_addresses(asked, source, frozenset()))
    return {check.address: check for check in found}


@contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[tuple[int, DialBackRequest]]:
    (port,) = free_ports(1)
    nonce = new_nonce()
    with dial_back_listener(Address(host, port), nonce) as fingerprint:
        yield port, request(f"{host}:{port}", port=port, fingerprint=fingerprint, nonce=nonce)


def test_a_listening_provider_is_reached() -> None:
    with listening() as (port, asked):
        assert checked(asked) == {
            f"127.0.0.1:{port}": AddressCheck(address=f"127.0.0.1:{port}", reachable=True)
        }


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_the_source_of_the_request_is_tried_too_and_names_are_resolved() -> None:
    with listening("::") as (port, asked):
        found = checked(asked.model_copy(update={"addresses": (f"localhost:{port}", f"[::1]:{port}")}))
        assert list(found) == [f"localhost:{port}", f"[::1]:{port}", f"127.0.0.1:{port}"]
        assert all(each.reachable for each in found.values())


def test_the_listener_leaves_the_port_free() -> None:
    with listening() as (port, asked):
        checked(asked)
        with (
            pytest.raises(OSError, match="in use"),
            dial_back_listener(Address("127.0.0.1", port), "00"),
        ):
            pass
    with dial_back_listener(Address("127.0.0.1", port), "00"):
        pass


@pytest.mark.parametrize("field", ["fingerprint", "nonce"])
def test_another_program_is_not_taken_for_the_provider(field: str) -> None:
    with listening() as (_, asked):
        (check,) = checked(asked.model_copy(update={field: "f" * 64})).values()
        assert (check.reachable, check.reason) == (False, "another program answers there")


def test_a_port_at_which_nothing_listens() -> None:
    (port,) = free_ports(1)
    (check,) = checked(request(port=port)).values()
    assert not check.reachable
    assert "refused" in check.reason


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9\r\n", b"x" * 100_000])
def test_hostile_answers(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                try:
                    peer.sendall(answer)
                    peer.shutdown(socket.SHUT_WR)
                    peer.recv(1 << 16)
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        (check,) = checked(request(port=server.getsockname()[1])).values()
        thread.join()
    assert (check.reachable, check.reason) == (False, "another program answers there")


def test_all_addresses_are_dialled_at_once_and_the_event_loop_is_free() -> None:
    """The peer answers none before all are connected, and runs in the same event loop."""

    async def run() -> set[str]:
        with socket.create_server(("0.0.0.0", 0), backlog=64) as silent:
            silent.setblocking(False)
            port = silent.getsockname()[1]
            asked = request(*(f"127.0.0.{host}:{port}" for host in range(1, 16)), port=port)
            dialling = asyncio.create_task(check_addresses(asked, LOOPBACK, frozenset()))
            accept = asyncio.get_running_loop().sock_accept
            peers = [(await accept(silent))[0] for _ in range(15)]
            for peer in peers:
                peer.close()
            return {check.reason for check in await dialling}

    assert asyncio.run(run()) == {"another program answers there"}


def test_slow_answers_are_not_awaited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial_back, "DIAL_BACK_EACH", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (check,) = checked(request(port=silent.getsockname()[1])).values()
    assert "no answer within 0.2 s" in check.reason


def test_refused_addresses_are_not_dialled() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        names = (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "169.254.169.254:80")
        private = ("10.0.0.1:22", "192.168.0.1:80", "[fd00::1]:443")
        asked = request(*names, *private, "no address", "1.2.3.4:99999")
        found = asyncio.run(_refused(asked))
        with pytest.raises(BlockingIOError):
            server.accept()
    assert len(found) == 9
    assert not any(check.reachable for check in found)
    assert "private address" in next(c.reason for c in found if c.address == "10.0.0.1:22")


async def _refused(asked: DialBackRequest) -> list[AddressCheck]:
    """Check all addresses as if they came from the internet, without the source itself."""
    reasons = [await dial_back._problem(text, asked, GLOBAL, frozenset()) for text in asked.addresses]
    return [
        AddressCheck(address=text, reachable=reason is None, reason=reason or "")
        for text, reason in zip(asked.addresses, reasons, strict=True)
    ]


def test_a_name_that_does_not_exist() -> None:
    (check, _) = checked(request("nowhere.invalid:80")).values()
    assert "cannot resolve the name nowhere.invalid" in check.reason


def test_a_provider_is_checked_once_at_a_time_and_not_too_often() -> None:
    time = Time()
    service = DialBackService(lambda: time.now)

    async def twice() -> None:
        first = asyncio.create_task(service.check("p", request("nowhere:x"), "testclient"))
        await asyncio.sleep(0)
        with pytest.raises(ServerRefusedError, match="just now"):
            await service.check("p", request("nowhere:x"), "testclient")
        await first
        time.now += DIAL_BACK_GAP
        await service.check("p", request("nowhere:x"), "testclient")

    asyncio.run(twice())
    assert [check.reachable for check in service.take("p") or ()] == [False]
    assert service.take("p") is None
    assert service.take("other") is None


# --- the route -----------------------------------------------------------------------------------


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    """A server that sees requests come from loopback."""
    with opened(tmp_path / "server") as found:
        client = TestClient(
            create_app(found.server), base_url="http://server", client=("127.0.0.1", 5000)
        )
        yield Case(found.server, client, found.time, found.planner)


def test_the_result_decides_the_reachability_of_the_next_offer(case: Case) -> None:
    provider = case.member(ApiRole.PROVIDER, "alice")
    with listening() as (port, asked):
        reply = provider.post("/api/providers/dial-back", asked)
        assert reply["observed"] == "127.0.0.1"
        assert reply["checks"] == [
            {"address": f"127.0.0.1:{port}", "reachable": True, "reason": ""},
        ]
    address = f"127.0.0.1:{port}"
    view = provider.post("/api/providers", offer(address=address, addresses=(address,)))
    assert view["reachability"] == "direct"
    assert address in view["reachability_reason"]
    provider.post("/api/providers/dial-back", asked, 429)
    case.time.now += DIAL_BACK
    provider.post("/api/providers/dial-back", asked)
    view = provider.post("/api/providers", offer(address=address))
    assert view["reachability"] == "unreachable"
    for words in (address, "refused", f"open TCP port {port}", "--address", "no relay", "ravnest relay"):
        assert words in view["reachability_reason"]
    assert provider.get("/api/providers") == [view]
    again = provider.post("/api/providers", offer(address=address, ram=2.0))
    assert again["reachability"] == "unreachable", "without another check, the earlier one counts"


def test_requests_with_too_many_addresses_are_refused(case: Case) -> None:
    provider = case.member(ApiRole.PROVIDER)
    many = request().model_dump(mode="json") | {"addresses": [f"10.0.0.{n}:1" for n in range(17)]}
    provider.post("/api/providers/dial-back", many, 422)
    provider.post("/api/providers/dial-back", many | {"addresses": [], "port": 0}, 422)
    provider.post("/api/providers/dial-back", many | {"addresses": [], "nonce": "short"}, 422)
    case.member(ApiRole.REQUESTER).post("/api/providers/dial-back", request(), 403)
