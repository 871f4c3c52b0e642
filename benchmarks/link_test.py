"""Accuracy and duration of link tests between two simulated machines, for several rates.

Both machines are network namespaces (``lan.py``), whose links are limited by ``tbf``; the test uses the
real transport with TLS, as between two providers. Needs root and iproute2. Run as a script to print the
table.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lan import Lan

from ravnest.provider.link_test import LinkTest
from ravnest.schemas.link_tests import LinkTestOrder
from ravnest.transport.certificates import Authority
from ravnest.transport.tls import Credentials
from ravnest.types import Address

RATES = (1, 10, 100, 1000)
PORT = 9000
DIALER, LISTENER = 0, 1


def order(hosts: list[str], place: int) -> LinkTestOrder:
    """Return the order of one machine."""
    return LinkTestOrder(
        id="link-bench",
        listens=place == LISTENER,
        node=place,
        peer=1 - place,
        peer_name=f"machine {1 - place}",
        addresses=(f"{hosts[LISTENER]}:{PORT}",),
        tls=True,
    )


def take_part(folder: Path, place: int) -> None:
    """Run one side of a test, in the namespace of its machine; the dialler prints the result."""
    hosts = json.loads((folder / "hosts.json").read_text())
    pem = [(folder / f"{name}.pem").read_bytes() for name in ("authority", f"{place}", f"{place}-key")]
    test = LinkTest(order(hosts, place), Address(hosts[place], PORT), lambda _: Credentials(*pem))
    begin = time.monotonic()
    result = test.run()
    if result is not None:
        print(result.model_dump_json())
        print(time.monotonic() - begin)


def measure(megabits: int) -> str:
    """Return the row of a rate."""
    with tempfile.TemporaryDirectory() as name, Lan(2, megabits) as lan:
        folder = Path(name)
        _prepare(folder, lan)
        command = [sys.executable, __file__, name]
        listener = subprocess.Popen([*lan.inside(LISTENER), *command, str(LISTENER)])
        try:
            found = subprocess.run(
                [*lan.inside(DIALER), *command, str(DIALER)], capture_output=True, text=True, check=True
            )
        finally:
            listener.terminate()
            listener.wait()
    text, seconds = found.stdout.splitlines()
    result = json.loads(text)
    rates = f"{result['to_listener'] or 0:.3g} | {result['to_dialer'] or 0:.3g}"
    trip = f"{1e3 * result['round_trip']:.1f} ms"
    return f"| {megabits} | {rates} | {trip} | {float(seconds):.1f} s |"


def _prepare(folder: Path, lan: Lan) -> None:
    """Write certificates for both machines."""
    authority = Authority("link test", datetime.datetime.now(datetime.UTC))
    (folder / "hosts.json").write_text(json.dumps(lan.hosts))
    (folder / "authority.pem").write_bytes(authority.certificate)
    for place, host in enumerate(lan.hosts):
        identity = authority.issue(f"node_{place}", [host])
        (folder / f"{place}.pem").write_bytes(identity.certificate)
        (folder / f"{place}-key.pem").write_bytes(identity.key)


def report() -> str:
    """Return the table of all rates."""
    lines = [
        "| link, Mbit/s | measured to the listener | to the dialler | round trip | time of the test |",
        "|--:|--:|--:|--:|--:|",
    ]
    return "\n".join([*lines, *(measure(rate) for rate in RATES)])


if __name__ == "__main__":
    if len(sys.argv) == 3:
        take_part(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        print(report())
