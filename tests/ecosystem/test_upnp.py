"""A provider behind a router that maps ports by UPnP asks it for one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from forked_command import CommandStarter
from internet import Home, Internet, missing
from internet_world import InternetWorld

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.skipif(
        importlib.util.find_spec("async_upnp_client") is None, reason="async-upnp-client not installed"
    ),
]

MAP = """
import sys
from ravnest.provider.port_mapping import mapped_port
from ravnest.types import Address
with mapped_port(Address("192.168.1.10", 21000), print) as mapping:
    print(mapping.address, mapping.reason, flush=True)
    sys.stdin.readline()
"""


@contextmanager
def upnp_router(home: Home) -> Iterator[subprocess.Popen[str]]:
    """Run the router's UPnP service while the block runs."""
    script = str(Path(__file__).with_name("upnp_router.py"))
    command = [*home.router.inside(), sys.executable, script, "192.168.1.1", home.public]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_port_is_mapped_while_it_is_needed() -> None:
    with Internet("u") as internet:
        home = internet.homes[0]
        command = [*home.host.inside(), sys.executable, "-c", MAP]
        with upnp_router(home) as router:
            said = _output(command)
            assert said.startswith(f"{home.public}:21000 the router forwards"), said
            assert router.stdout is not None
            requests = [router.stdout.readline().strip() for _ in range(3)]
            assert requests == [
                "AddPortMapping 21000",
                "GetExternalIPAddress",
                "DeletePortMapping 21000",
            ]
        assert "none answered a UPnP search" in _output(command)


@pytest.mark.slow
def test_a_provider_is_direct_if_its_router_maps_its_port(
    tmp_path: Path, starter: CommandStarter
) -> None:
    with Internet("m") as internet, InternetWorld(tmp_path, internet, starter) as world:
        home = internet.homes[0]
        world.serve()
        with upnp_router(home):
            provider = world.provide("home0", home.host, "--map-port", "--listen=:21000")
            provider.said(f"the router forwards {home.public}:21000 to this machine")
            provider.said(f"other providers reach it at {home.public}:21000")
            assert provider.end() in (0, 130), "130: before it began to wait for jobs"


def _output(command: list[str]) -> str:
    done = subprocess.run(command, check=True, input="\n", stdout=subprocess.PIPE, text=True, timeout=60)
    return done.stdout
