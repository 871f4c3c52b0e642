"""The relay that a server runs beside itself, in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from loopback_server import SECONDS
from workloads import free_ports

from ravnest.errors import ServerError
from ravnest.relay.round_trip import relay_round_trip
from ravnest.server.http import runner
from ravnest.server.http.runner import RunningServer, serve
from ravnest.server.reachability.relays import OWN_RELAY
from ravnest.types import Address


@contextmanager
def served(folder: Path, **options: object) -> Iterator[RunningServer]:
    with serve(folder / "server", relay=True, relay_port=0, **options) as running:  # type: ignore[arg-type]
        yield running


def own_addresses(running: RunningServer) -> list[Address]:
    view = running.server.relay_service.live()[OWN_RELAY]
    return [Address.parse(text) for text in view.addresses]


def test_the_relay_answers_and_ends_with_the_server(tmp_path: Path) -> None:
    with served(tmp_path) as running:
        (address,) = own_addresses(running)
        assert address.host == "127.0.0.1"
        assert running.relay_addresses == [str(address)]
        trip = relay_round_trip([address], SECONDS)
        assert trip is not None
        (child,) = relay_processes()
    assert not child.is_running()
    assert relay_round_trip([address], 1.0) is None


def relay_processes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "ravnest.relay" in " ".join(p.cmdline())]


def test_a_relay_that_dies_is_started_again_at_the_same_port(tmp_path: Path) -> None:
    with served(tmp_path) as running:
        addresses = own_addresses(running)
        (child,) = relay_processes()
        os.kill(child.pid, signal.SIGKILL)
        child.wait(SECONDS)
        answered = threading.Event()

        def ask() -> None:
            while relay_round_trip(addresses, SECONDS) is None:
                pass
            answered.set()

        threading.Thread(target=ask, daemon=True).start()
        assert answered.wait(SECONDS)
        (again,) = relay_processes()
        assert again.pid != child.pid


def test_on_loopback_there_is_no_relay_unless_it_is_wanted(tmp_path: Path) -> None:
    with serve(tmp_path) as running:
        assert running.server.relay_service.live() == {}
        assert running.relay_addresses == []


def test_other_machines_reach_the_relay_at_the_next_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "needs_tls", lambda _: True)  # as if it listened outside of loopback
    with serve(tmp_path, port=free_pair(), public_names=["relay.example"]) as running:
        port = int(running.url.rpartition(":")[2]) + 1
        assert own_addresses(running) == [Address("relay.example", port), Address("127.0.0.1", port)]
    with serve(tmp_path, relay=False) as running:
        assert running.server.relay_service.live() == {}


def free_pair() -> int:
    """Return a port after which the next one is free as well."""
    return next(port for port in free_ports(50) if _is_free(port + 1))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
    return True


def test_a_port_in_use_is_an_error_only_if_the_relay_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path / "first") as first:
        port = own_addresses(first)[0].port
        with (
            pytest.raises(ServerError, match="--relay-port"),
            serve(tmp_path / "second", relay=True, relay_port=port),
        ):
            pass
        monkeypatch.setattr(runner, "needs_tls", lambda _: True)
        with serve(tmp_path / "third", relay_port=port) as third:
            assert third.server.relay_service.live() == {}
