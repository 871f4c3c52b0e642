"""``ravnest relay``: a real relay that joins a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_server import SECONDS, LoopbackServer, Wire, loopback_server, next_assignment, offer_of
from workloads import free_ports

from ravnest.errors import ServerError, ServerRefusedError, SettingsError
from ravnest.http.api import ApiClient
from ravnest.provider.relay_program import RelayHeartbeats, run_relay
from ravnest.relay.round_trip import relay_round_trip
from ravnest.relay.service import RelayCounters
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.providers import ProviderView
from ravnest.schemas.reachability import RelayHeartbeat, RelayView
from ravnest.types import Address


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackServer]:
    with loopback_server(tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAVNEST_HOME", str(tmp_path / "home"))


def relays(server: LoopbackServer) -> list[RelayView]:
    with server.api(ApiRole.VIEWER, "viewer") as api:
        return api.get("/api/relays", list[RelayView])


def test_a_relay_joins_answers_and_leaves(
    server: LoopbackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    lines: list[str] = []
    original = RelayHeartbeats.run

    def run(self: RelayHeartbeats) -> None:
        (view,) = relays(server)
        assert (view.name, view.addresses) == ("attic", (f"127.0.0.1:{port}",))
        trip = relay_round_trip([Address("127.0.0.1", port)], SECONDS)
        assert trip is not None
        self.stop()
        original(self)

    monkeypatch.setattr(RelayHeartbeats, "run", run)
    token = server.running.token(ApiRole.RELAY)
    listen = f"127.0.0.1:{port}"
    run_relay(server.url, token, name="attic", listen=listen, capacity=100.0, say=lines.append)
    assert lines == [f"attic forwards for {server.url} at 127.0.0.1:{port}, until Ctrl-C"]
    assert relays(server) == []
    run_relay(server.url, name="attic", listen=listen, say=lines.append)


def test_wrong_arguments(server: LoopbackServer) -> None:
    with pytest.raises(SettingsError, match="more than 0 Mbit/s"):
        run_relay(server.url, capacity=0.0, say=lambda _: None)
    with pytest.raises(ServerError, match=r"nobody has not joined .*--role relay"):
        run_relay(server.url, name="nobody", say=lambda _: None)
    token = server.running.token(ApiRole.VIEWER)
    with pytest.raises(ServerError, match=r"--role relay"):
        run_relay(server.url, token, name="viewer", say=lambda _: None)


class ToldRelay:
    """A relay that stores what it is told."""

    def __init__(self) -> None:
        self._told = threading.Condition()
        self.jobs: list[frozenset[str] | None] = []

    def set_running_jobs(self, jobs: frozenset[str] | None) -> None:
        with self._told:
            self.jobs.append(jobs)
            self._told.notify_all()

    def counters(self) -> RelayCounters:
        return RelayCounters(circuits=2, bytes=77)

    def wait_for(self, count: int) -> None:
        with self._told:
            assert self._told.wait_for(lambda: len(self.jobs) >= count, SECONDS)


BEAT = RelayHeartbeat(name="attic", addresses=("127.0.0.1:7101",))


def test_the_relay_is_told_which_jobs_run_and_survives_an_outage(server: LoopbackServer) -> None:
    wire, relay, lines = Wire(), ToldRelay(), list[str]()
    with server.api(ApiRole.RELAY, "told", wire) as api:
        beats = RelayHeartbeats(api, relay, BEAT, lines.append)
        thread = threading.Thread(target=beats.run)
        thread.start()
        relay.wait_for(1)
        with (
            server.api(ApiRole.PROVIDER, "worker") as provider,
            server.submit() as handle,
        ):
            view = provider.post("/api/providers", offer_of("worker"), ProviderView)
            next_assignment(provider, view.id)
            relay.wait_for(2)
            (listed,) = relays(server)
            assert (listed.circuits, listed.forwarded) == (2, 77)
            wire.down = True
            wire.wait_for("POST /api/relays")
            handle.cancel()
            wire.down = False
            relay.wait_for(3)
            provider.delete(f"/api/providers/{view.id}")
        beats.stop()
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert relay.jobs == [frozenset(), frozenset({handle.id}), frozenset()]
    assert relays(server) == []


def test_a_refused_relay_ends(server: LoopbackServer) -> None:
    with ApiClient(server.url, "no credential") as api, pytest.raises(ServerRefusedError) as refused:
        RelayHeartbeats(api, ToldRelay(), BEAT, lambda _: None).run()
    assert refused.value.status == 401
