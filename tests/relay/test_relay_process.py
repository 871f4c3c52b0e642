import io
import socket

import msgspec
import psutil
import pytest
from relay_keys import LOOPBACK, PUBLIC, access
from test_relay_listener import wait_until

from ravnest.errors import RelayError
from ravnest.relay.limits import RelayLimits
from ravnest.relay.listener import RelayListener
from ravnest.relay.process import RelayProcess
from ravnest.relay.program import run
from ravnest.relay.round_trip import relay_round_trip
from ravnest.types import Address

SECONDS = 60.0


def test_a_relay_runs_restarts_and_stops() -> None:
    relay = RelayProcess(LOOPBACK, PUBLIC, RelayLimits(), frozenset({"job-a"}))
    relay.start()
    listener = RelayListener(access(1, (0,), relay.address), Address("127.0.0.1", 1))
    listener.start()
    try:
        assert listener.wait_registered(SECONDS)
        first = relay.pid
        assert first is not None
        process = psutil.Process(first)
        process.kill()
        wait_until(lambda: not listener.registered)
        assert listener.wait_registered(SECONDS)
        assert relay.pid not in (None, first)
        relay.set_running_jobs(frozenset({"job-b"}))
        wait_until(lambda: not listener.registered)
        relay.set_running_jobs(frozenset({"job-a", "job-b"}))
        assert listener.wait_registered(SECONDS)
    finally:
        listener.close()
        last = relay.pid
        relay.stop()
    assert last is not None
    assert not psutil.pid_exists(last)
    assert relay_round_trip([relay.address], 5.0) is None


def test_a_relay_that_cannot_listen_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        relay = RelayProcess(Address("127.0.0.1", taken.getsockname()[1]), PUBLIC, RelayLimits(), None)
        with pytest.raises(RelayError, match="cannot listen"):
            relay.start()
    assert relay.pid is None


def test_the_program_ends_with_its_input() -> None:
    config = {
        "host": "127.0.0.1",
        "port": 0,
        "key": PUBLIC.public_bytes_raw(),
        "limits": {"mbit_per_second": 100.0},
        "jobs": None,
    }
    lines = [config, {"jobs": []}, {"jobs": ["a"]}, {"jobs": None}]
    output = io.BytesIO()
    code = run(io.BytesIO(b"".join(msgspec.json.encode(line) + b"\n" for line in lines)), output)
    assert code == 0
    assert msgspec.json.decode(output.getvalue())["type"] == "ready"
