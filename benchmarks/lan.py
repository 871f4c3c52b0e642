"""Simulated machines: network namespaces around a switch, each with a link of a given rate.

Needs root and iproute2. Each namespace has one link to the switch, limited by ``tbf`` in both
directions, like a machine with such a connection.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from types import TracebackType
from typing import Self


def possible() -> bool:
    """Return True if this process can create namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None


class Lan:
    """Create ``count`` namespaces for the duration of the context."""

    device = "net0"
    """Rate of the link of each machine to the switch."""

    def __init__(self, count: int, megabits: int) -> None:
        prefix = f"rvn{os.getpid()}"
        self._switch = f"{prefix}s"
        self._megabits = megabits
        self.names = [f"{prefix}n{i}" for i in range(count)]
        self.hosts = [f"10.77.0.{i + 1}" for i in range(count)]

    def __enter__(self) -> Self:
        # Namespaces outlive the process that creates them: on SIGTERM it must remove them first.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._remove()

    def inside(self, place: int) -> list[str]:
        """Return the prefix of a command that runs it on a machine."""
        return ["ip", "netns", "exec", self.names[place]]

    def _make(self) -> None:
        for name in (self._switch, *self.names):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "switch", "up")
        for place, (name, host) in enumerate(zip(self.names, self.hosts, strict=True)):
            port = f"port{place}"
            pair = ["link", "add", port, "type", "veth", "peer", "name", self.device, "netns", name]
            _run("ip", "-n", self._switch, *pair)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "switch", "up")
            _run("ip", "-n", name, "address", "add", f"{host}/24", "dev", self.device)
            _run("ip", "-n", name, "link", "set", self.device, "up")
            self._limit(self._switch, port)
            self._limit(name, self.device)

    def _limit(self, namespace: str, device: str) -> None:
        limit = ["tbf", "rate", f"{self._megabits}mbit", "burst", "64kb", "latency", "100ms"]
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *limit)

    def _remove(self) -> None:
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
