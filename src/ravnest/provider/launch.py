"""Starts the nodes that live on this machine, each in a process of its own."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

from ravnest.errors import LaunchError
from ravnest.provider.child_process import Command, run_together
from ravnest.provider.supervision import Supervision
from ravnest.store.node_spec import NodeSpec, read_nodes
from ravnest.transport.tls import dial_address, is_loopback
from ravnest.types import Address

_THREADS = "OMP_NUM_THREADS"
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")


def launch(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    folder: str | Path = "node_data",
    work: str | Path | None = None,
    console: Console | None = None,
) -> int:
    """Run ``python script node_<i> arguments...`` for every node of ``folder`` on this machine.

    Shows their output with the node's name before each line, ends them together, and returns 0 or
    the exit code of the first that failed. ``work`` is the folder they run in; this one if None.
    """
    path = Path(script).absolute()
    if not path.is_file():
        raise LaunchError(f"there is no script {script}: name the one that every provider runs")
    nodes = nodes_here(read_nodes(Path(folder)), own_hosts())
    if not nodes:
        raise LaunchError(
            f"no node of {folder} has an address of this machine: check the IPs in node_configs.json, "
            "or start its nodes on their own machines"
        )
    output = Output(Console() if console is None else console, [node.name for node in nodes])
    shares = thread_shares(os.environ, len(nodes), _cores())
    if shares:
        output.say(
            f"{len(nodes)} nodes share {_cores()} cores: {_THREADS}={shares[_THREADS]} for each, "
            f"unless you set it"
        )
    supervision = Supervision(node.name for node in nodes)
    run_together(
        [Command(node.name, (sys.executable, str(path), node.name, *arguments)) for node in nodes],
        supervision,
        output.show,
        environment={"PYTHONUNBUFFERED": "1", **os.environ, **shares},
        folder=None if work is None else Path(work),
    )
    for line in supervision.summary():
        output.say(line)
    return supervision.exit_code


def nodes_here(nodes: Sequence[NodeSpec], hosts: frozenset[str]) -> list[NodeSpec]:
    """The nodes whose address is one of this machine's ``hosts``."""
    return [node for node in nodes if _is_here(Address.parse(node.address), hosts)]


def _is_here(address: Address, hosts: frozenset[str]) -> bool:
    address = dial_address(address)
    if is_loopback(address) or address.host in hosts:
        return True
    try:
        ipaddress.ip_address(address.host)
    except ValueError:
        return not hosts.isdisjoint(_resolved(address.host))
    return False


def own_hosts() -> frozenset[str]:
    """The addresses of this machine's interfaces."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
    return frozenset(entry.address.partition("%")[0] for entry in found if entry.family in families)


def _resolved(name: str) -> set[str]:
    try:
        return {str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(name, None)}
    except OSError:
        return set()


def thread_shares(environment: Mapping[str, str], nodes: int, cores: int) -> dict[str, str]:
    """What to set so that nodes of one machine do not fight for its cores."""
    if nodes < 2 or _THREADS in environment:
        return {}
    return {_THREADS: str(max(cores // nodes, 1))}


def _cores() -> int:
    """That this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


@dataclass(frozen=True)
class Output:
    """Lines of several nodes in one place: a name before each, on a terminal in the node's colour."""

    console: Console
    names: Sequence[str]

    def show(self, name: str, line: str) -> None:
        """A line that a node has written; of one that rewrites itself, what it ended as."""
        width = max(map(len, self.names))
        colour = _COLOURS[self.names.index(name) % len(_COLOURS)]
        last = line.rstrip("\r").rpartition("\r")[2]
        self._print(Text.assemble((f"{name:<{width}} | ", colour), last))

    def say(self, line: str) -> None:
        """A line of the launcher's own."""
        self._print(Text(line, "bold"))

    def _print(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)
