"""The networks of the internet tests: who reaches whom, and what faults do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from internet import Home, Host, Internet, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

ECHO = """
import socket, threading
listener = socket.create_server(("::", 9000), family=socket.AF_INET6, dualstack_ipv6=True)
print("listening", flush=True)
def answer(connection, peer):
    try:
        while received := connection.recv(100):
            connection.sendall(peer.encode() + b" " + received)
    except OSError:
        pass
while True:
    connection, peer = listener.accept()
    arguments = (connection, peer[0].removeprefix("::ffff:"))
    threading.Thread(target=answer, args=arguments, daemon=True).start()
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 9000), 1) as connection:
    connection.sendall(b"x")
    print(connection.recv(100).decode())
"""
TALK = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 9000), 5)
connection.settimeout(1)
for line in sys.stdin:
    try:
        connection.sendall(b"x")
        print("answered" if connection.recv(100) else "closed", flush=True)
    except TimeoutError:
        print("silent", flush=True)
    except (ConnectionAbortedError, ConnectionResetError):
        print("reset", flush=True)
"""


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with Internet("t") as made:
        hosts = (made.server, made.open, made.six, *(home.host for home in made.homes))
        echoes = [_start(host, ECHO) for host in hosts]
        for echo in echoes:
            assert _line(echo) == "listening"
        yield made
        for echo in echoes:
            echo.kill()
            echo.communicate()


def test_public_hosts_reach_each_other_by_the_family_that_both_have(internet: Internet) -> None:
    four, six = internet.server.addresses
    assert _asked(internet.open, four) == internet.open.addresses[0]
    assert _asked(internet.open, six) is None
    assert _asked(internet.six, six) == internet.six.addresses[0]
    assert _asked(internet.six, four) is None
    assert _asked(internet.server, internet.six.addresses[0]) == six
    assert _asked(internet.open, internet.six.addresses[0]) is None
    assert _asked(internet.six, internet.open.addresses[0]) is None


def test_a_home_reaches_out_with_the_address_of_its_router_and_nobody_reaches_in(
    internet: Internet,
) -> None:
    first, second = internet.homes
    four, six = internet.server.addresses
    assert [_asked(home.host, four) for home in (first, second)] == [first.public, second.public]
    assert _asked(first.host, six) is None
    for place in (internet.server, second.host):
        assert _asked(place, first.public) is None
    assert _asked(internet.server, first.host.addresses[0]) is None
    # Private addresses are not unique: another home's host has the same one.
    assert _asked(first.host, second.host.addresses[0]) == first.host.addresses[0]


def test_flushed_nat_state_silences_connections_and_new_ones_work(internet: Internet) -> None:
    home = internet.homes[0]
    with _talk(home.host, internet.server.addresses[0]) as say:
        assert say() == "answered"
        home.flush()
        assert say() == "silent"
    assert _asked(home.host, internet.server.addresses[0]) == home.public


def test_faults_of_a_cable_and_resets(internet: Internet) -> None:
    with _talk(internet.six, internet.server.addresses[1]) as say:
        assert say() == "answered"
        with internet.six.offline():
            assert say() == "silent"
        assert _asked(internet.six, internet.server.addresses[1]) == internet.six.addresses[0]
        internet.six.reset_connections()
        assert say() == "reset"


def test_a_new_address_silences_connections_from_the_old_one() -> None:
    with Internet("a") as own:
        echo = _start(own.server, ECHO)
        assert _line(echo) == "listening"
        with _talk(own.open, own.server.addresses[0]) as say:
            assert say() == "answered"
            own.open.renumber(own.open.addresses[0], "198.51.100.99")
            assert say() in ("silent", "reset")
        assert _asked(own.open, own.server.addresses[0]) == "198.51.100.99"
        echo.kill()
        echo.communicate()


def test_a_forwarded_port_lets_connections_in() -> None:
    with Internet("f") as own:
        home: Home = own.homes[1]
        echo = _start(home.host, ECHO)
        assert _line(echo) == "listening"
        assert _asked(own.server, home.public) is None
        home.forward(9000)
        assert _asked(own.server, home.public) == own.server.addresses[0]
        echo.kill()
        echo.communicate()


def _start(host: Host, script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [*host.inside(), sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def _talk(host: Host, address: str) -> Iterator[Callable[[], str]]:
    """Keep a connection open; each call sends something and returns what came of it."""
    process = _start(host, TALK, address)
    assert process.stdin is not None

    def say() -> str:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return _line(process)

    yield say
    process.communicate()


def _asked(host: Host, address: str) -> str | None:
    """Return the address that the host has for the echo server at ``address``; None without answer."""
    command = [*host.inside(), sys.executable, "-c", ASK, address]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    return done.stdout.split()[0] if done.returncode == 0 else None
