"""A small internet of network namespaces: public hosts, homes behind NAT, and a host with IPv6 only.

Needs root, iproute2, nftables and conntrack. The addresses are those reserved for documentation; they
exist only inside the namespaces. Packets to other addresses get no answer, as in the real internet.
Both homes use the same private addresses, like most homes.

    server    198.51.100.10   2001:db8::10
    relay     198.51.100.30   2001:db8::30
    open      198.51.100.20                   no restriction
    six                       2001:db8::60    no restriction
    homes[0]  198.51.100.101  router; its host is 192.168.1.10
    homes[1]  198.51.100.102  router; its host is 192.168.1.10
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from forked_command import enter_namespace

from ravnest.types import Address

DEVICE = "net0"
"""Network device of every host."""
_PROGRAMS = ("ip", "tc", "nft", "conntrack", "unshare")
_GATEWAYS = ("198.51.100.1", "2001:db8::1")
_LAN_GATEWAY = "192.168.1.1"
_LAN_HOST = "192.168.1.10"
_FIREWALL = """
table inet home {
    chain forward {
        type filter hook forward priority filter; policy drop;
        ct state invalid drop
        ct state established,related accept
        ct status dnat accept
        iifname "lan" accept
    }
    chain input {
        type filter hook input priority filter; policy drop;
        ct state established,related accept
        iifname { "lan", "lo" } accept
    }
    chain prerouting {
        type nat hook prerouting priority dstnat;
    }
    chain postrouting {
        type nat hook postrouting priority srcnat;
        oifname "wan" masquerade
    }
}
"""


@functools.cache
def missing() -> str | None:
    """Return the reason why this process cannot create such networks, or None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [program for program in _PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    allowed = subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True)
    return "this process may not create network namespaces" if allowed.returncode else None


@dataclass(frozen=True)
class Host:
    """A namespace with one network device, which is connected to a port of another namespace."""

    namespace: str
    addresses: tuple[str, ...]
    switch: str
    port: str

    def inside(self) -> list[str]:
        """Return the prefix of a command that runs it on this host."""
        return ["ip", "netns", "exec", self.namespace]

    def thread(self) -> ThreadPoolExecutor:
        """Return one thread of this process whose sockets are on this host."""
        return ThreadPoolExecutor(1, initializer=enter_namespace, initargs=(self.namespace,))

    @contextmanager
    def offline(self) -> Iterator[None]:
        """Pull the cable while the block runs; addresses and connections stay."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "down")
        try:
            yield
        finally:
            _run("ip", "-n", self.switch, "link", "set", self.port, "up")

    def limit(self, megabits: float) -> None:
        """Limit the rate of the cable in both directions."""
        rate = ["tbf", "rate", f"{megabits}mbit", "burst", "16kb", "latency", "400ms"]
        for namespace, device in ((self.namespace, DEVICE), (self.switch, self.port)):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *rate)

    def renumber(self, old: str, new: str) -> None:
        """Change an IPv4 address of this host; connections from the old one get no answers."""
        gateway = _run("ip", "-n", self.namespace, "route", "show", "default").split()[2]
        _run("ip", "-n", self.namespace, "address", "delete", f"{old}/24", "dev", DEVICE)
        _run("ip", "-n", self.namespace, "address", "add", f"{new}/24", "dev", DEVICE)
        _run("ip", "-n", self.namespace, "route", "replace", "default", "via", gateway)

    def connections(self) -> list[tuple[Address, Address]]:
        """Return the local and the remote address of each established TCP connection."""
        shown = _run(*self.inside(), "ss", "-H", "-t", "-n", "state", "established")
        pairs = (line.replace("::ffff:", "").split()[2:4] for line in shown.splitlines())
        return [(_address(local), _address(peer)) for local, peer in pairs]

    def reset_connections(self) -> None:
        """Reset all TCP connections of this host."""
        _run(*self.inside(), "ss", "--kill", "--tcp", "state", "established")


@dataclass(frozen=True)
class Home:
    """A router with masquerading that lets no connection in, and the host behind it."""

    router: Host
    host: Host

    @property
    def public(self) -> str:
        """Public address of the router."""
        return self.router.addresses[0]

    def flush(self) -> None:
        """Forget all connections, like a router that was restarted; their packets are dropped."""
        _run(*self.router.inside(), "conntrack", "--flush")

    def forward(self, port: int) -> None:
        """Open a port of the router and forward its connections to the host."""
        match = ["iifname", "wan", "tcp", "dport", str(port)]
        rule = [*match, "dnat", "ip", "to", f"{self.host.addresses[0]}:{port}"]
        _run(*self.router.inside(), "nft", "add", "rule", "inet", "home", "prerouting", *rule)


class Internet:
    """Create the namespaces for the duration of the context."""

    def __init__(self, name: str = "i") -> None:
        self._prefix = f"rvn{os.getpid()}{name}"
        self._switch = f"{self._prefix}-net"
        self._namespaces = [self._switch]
        self.server = self._public("server", "198.51.100.10", "2001:db8::10")
        self.relay = self._public("relay", "198.51.100.30", "2001:db8::30")
        self.open = self._public("open", "198.51.100.20")
        self.six = self._public("six", "2001:db8::60")
        self.homes = [self._home(place) for place in range(2)]
        self._before: Any = None

    def __enter__(self) -> Self:
        # Namespaces outlive the process that creates them: on SIGTERM it must remove them first.
        self._before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
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

    def _public(self, name: str, *addresses: str) -> Host:
        namespace = f"{self._prefix}-{name}"
        self._namespaces.append(namespace)
        return Host(namespace, addresses, self._switch, name)

    def _home(self, place: int) -> Home:
        router = self._public(f"router{place}", f"198.51.100.{101 + place}")
        namespace = f"{self._prefix}-home{place}"
        self._namespaces.append(namespace)
        return Home(router, Host(namespace, (_LAN_HOST,), router.namespace, "lan"))

    def _make(self) -> None:
        for namespace in self._namespaces:
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
        switch = self._switch
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        for gateway in _GATEWAYS:
            _add_address(switch, "switch", gateway)
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        for host in (self.server, self.relay, self.open, self.six):
            self._plug(host, DEVICE)
        for home in self.homes:
            self._plug(home.router, "wan")
            _connect(home.host, DEVICE, (_LAN_GATEWAY,))
            _add_address(home.router.namespace, "lan", _LAN_GATEWAY)
            _protect(home.router)

    def _plug(self, host: Host, device: str) -> None:
        _connect(host, device, _GATEWAYS)
        _run("ip", "-n", self._switch, "link", "set", host.port, "master", "switch")

    def _remove(self) -> None:
        signal.signal(signal.SIGTERM, self._before)
        for namespace in self._namespaces:
            _end_processes(namespace)
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def _connect(host: Host, device: str, gateways: tuple[str, ...]) -> None:
    """Connect a host to its port, with its addresses and the routes that they need."""
    pair = ["link", "add", host.port, "type", "veth", "peer", "name", device, "netns", host.namespace]
    _run("ip", "-n", host.switch, *pair)
    for address in host.addresses:
        _add_address(host.namespace, device, address)
    _run("ip", "-n", host.namespace, "link", "set", device, "up")
    _run("ip", "-n", host.switch, "link", "set", host.port, "up")
    for gateway in gateways:
        if any((":" in gateway) == (":" in address) for address in host.addresses):
            family = "-6" if ":" in gateway else "-4"
            _run("ip", family, "-n", host.namespace, "route", "add", "default", "via", gateway)


def _protect(router: Host) -> None:
    """Let a router masquerade; packets of connections that it does not know are dropped."""
    _run(*router.inside(), "sysctl", "-w", "net.ipv4.ip_forward=1")
    _run(*router.inside(), "nft", "-f", "-", text=_FIREWALL)
    _run(*router.inside(), "sysctl", "-w", "net.netfilter.nf_conntrack_tcp_loose=0")


def _add_address(namespace: str, device: str, address: str) -> None:
    if ":" in address:
        arguments = [f"{address}/64", "dev", device, "nodad"]
    else:
        arguments = [f"{address}/24", "dev", device]
    _run("ip", "-n", namespace, "address", "add", *arguments)


def _address(text: str) -> Address:
    """Parse an address as ``ss`` shows it; IPv4 addresses of IPv6 sockets are in brackets, too."""
    host, _, port = text.rpartition(":")
    return Address(host.strip("[]"), int(port))


def _end_processes(namespace: str) -> None:
    """Kill what still runs in a namespace, which would otherwise stay after its name is deleted."""
    pids = subprocess.run(
        ["ip", "netns", "pids", namespace], check=False, capture_output=True, text=True
    ).stdout.split()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(int(pid), 9)


def _run(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, input=text)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout
