"""Faults of real processes: signals, limits of their resources, and proxies that disturb their links."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fault_plan import Fault, FaultKind
from link_proxy import LinkProxy
from workloads import NODE_DATA, free_ports

from ravnest.store.node_spec import read_node
from ravnest.types import Address


@dataclass(frozen=True)
class ProxiedNode:
    """Node behind a proxy."""

    proxy: LinkProxy
    port: int
    """Port at which the node listens."""


def make_proxies(folder: Path, names: Sequence[str]) -> dict[str, ProxiedNode]:
    """Return a proxy for the address of each node."""
    announced = [Address.parse(read_node(folder / NODE_DATA, name).address).port for name in names]
    ports = free_ports(len(names))
    return {
        name: ProxiedNode(LinkProxy(address, port), port)
        for name, address, port in zip(names, announced, ports, strict=True)
    }


@dataclass
class FaultInjector:
    """Faults of the nodes of a run."""

    names: Sequence[Sequence[str]]
    """Nodes of each cluster, Root first."""
    pids: Mapping[str, int]
    """Process of each node that runs."""
    proxies: Mapping[str, ProxiedNode] = field(default_factory=dict)
    later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    """Ends of faults, and when they are due."""

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a node, if it runs."""
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(self.pids[name], number)

    def end_due(self, now: float) -> None:
        """End the faults that are over."""
        for each in [each for each in self.later if each[0] <= now]:
            self.later.remove(each)
            each[1]()

    def happen(self, fault: Fault, name: str) -> None:
        """Let a fault happen to a node that runs."""
        match fault.kind:
            case FaultKind.KILL:
                self.signal(name, signal.SIGKILL)
            case FaultKind.STOP:
                self.signal(name, signal.SIGSTOP)
                self._after(fault, lambda: self.signal(name, signal.SIGCONT))
            case FaultKind.FULL_DISK:
                self._limit(fault, name, resource.RLIMIT_FSIZE)
            case FaultKind.OUT_OF_MEMORY:
                self._limit(fault, name, resource.RLIMIT_AS)
            case FaultKind.PARTITION | FaultKind.ONE_WAY:
                self._block(fault)
            case FaultKind.DELAY:
                proxy, inward = self._proxy_of(fault)
                assert fault.size is not None
                proxy.delay(fault.size, inward=inward)
                self._after(fault, functools.partial(proxy.delay, 0.0, inward=inward))
            case FaultKind.CORRUPT:
                proxy, inward = self._proxy_of(fault)
                proxy.corrupt(inward=inward)
            case _:
                raise ValueError(f"{fault.kind} is not a fault of processes")

    def _block(self, fault: Fault) -> None:
        """Hold back what a node sends to its neighbour, or what both send, until the fault is over."""
        proxy, sent_inward = self._proxy_of(fault)
        ways = {sent_inward} if fault.kind is FaultKind.ONE_WAY else {True, False}
        for inward in ways:
            proxy.block(inward=inward)
            self._after(fault, functools.partial(proxy.unblock, inward=inward))

    def _proxy_of(self, fault: Fault) -> tuple[LinkProxy, bool]:
        """Return the proxy of a link, and whether the node of the fault sends to its listener."""
        order = [int(name.removeprefix("node_")) for name in self.names[0]]
        assert fault.peer is not None
        sender, receiver = order.index(fault.node), order.index(fault.peer)
        assert abs(sender - receiver) == 1, f"{fault}: only neighbours are connected"
        return self.proxies[self.names[0][max(sender, receiver)]].proxy, sender < receiver

    def _limit(self, fault: Fault, name: str, limit: int) -> None:
        """Let a node get nothing more of a resource until the fault is over, or it is started again."""
        pid = self.pids[name]
        before = resource.prlimit(pid, limit)
        resource.prlimit(pid, limit, (1, before[1]))

        def restore() -> None:
            if self.pids.get(name) == pid:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, limit, before)

        self._after(fault, restore)

    def _after(self, fault: Fault, call: Callable[[], None]) -> None:
        assert fault.seconds is not None
        self.later.append((time.monotonic() + fault.seconds, call))
