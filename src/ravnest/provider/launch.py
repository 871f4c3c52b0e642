"""Starts the nodes of this machine, each in a process of its own."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

from ravnest.deadlines import RECORDS_CLOSE
from ravnest.errors import LaunchError
from ravnest.host import usable_cores, working_kernels
from ravnest.logs.json_lines import LogFormat, json_line
from ravnest.logs.record_stream import PROGRESS_VARIABLE, RECORDS_VARIABLE
from ravnest.provider.child_process import ChildProcess, run_together
from ravnest.provider.record_pipe import read_records
from ravnest.provider.supervision import RestartPolicy, Supervision
from ravnest.store.node_spec import NodeSpec, read_nodes
from ravnest.telemetry import WorkerRecord
from ravnest.transport.tls import dial_address, is_loopback
from ravnest.types import Address

_THREADS = "OMP_NUM_THREADS"
RESUME = "RAVNEST_RESUME"
"""Environment variable of a node that was started again: it continues from its newest checkpoint."""
TRACE = "RAVNEST_TRACE"
"""Environment variable of nodes: the folder in which they write what they do when."""
OnRecords = Callable[[str, Sequence[WorkerRecord]], None]
"""Called with the name of a node and the records that it reported."""
_KEPT_LINES = 20
"""Lines of each node that are shown if a node fails and the output was not."""
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")


def launch(  # noqa: PLR0913 - keywords with defaults
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    folder: str | Path = "node_data",
    work: str | Path | None = None,
    console: Console | None = None,
    restart: bool = False,
    trace: str | Path | None = None,
    on_records: OnRecords | None = None,
    shows_progress: bool = False,
    quiet: bool = False,
    log_format: LogFormat = "text",
) -> int:
    """Run ``python script node_<i> arguments...`` for every node of ``folder`` on this machine.

    Shows their output with the node's name before each line, ends them together, and returns 0 or
    the exit code of the first that failed. They run in the folder ``work``, by default the current one.
    ``restart`` starts a node that fails again, with ``RAVNEST_RESUME=1`` in its environment; nodes
    that have failed too often in a row end all of them. ``trace``: folder in which the nodes write what
    they do when. ``on_records`` gets what the nodes report while they train, from several threads;
    ``shows_progress``: the caller shows it, so that nodes write no progress lines of their own.
    ``quiet`` shows no output of the nodes, unless one fails: then the last lines of each.
    ``log_format``: lines as text, or as JSON with one object per line.
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
    names = [node.name for node in nodes]
    output = NodeOutput(Console() if console is None else console, names, log_format)
    cores = usable_cores()
    shares = thread_shares(os.environ, len(nodes), cores)
    if shares and not quiet:
        output.say(
            f"{len(nodes)} nodes share {cores} cores: {_THREADS}={shares[_THREADS]} for each; set "
            f"{_THREADS} to change it"
        )
    supervision = Supervision(
        (node.name for node in nodes),
        restart=RestartPolicy() if restart else None,
        groups={node.name: node.cluster for node in nodes},
    )
    environment = {"PYTHONUNBUFFERED": "1", **working_kernels(), **os.environ, **shares}
    if trace is not None:
        environment[TRACE] = str(Path(trace).absolute())
    if shows_progress:
        environment[PROGRESS_VARIABLE] = "0"
    with ExitStack() as stack:
        pipes = {} if on_records is None else stack.enter_context(_record_pipes(nodes, on_records))
        children = [
            ChildProcess(
                node.name,
                (sys.executable, str(path), node.name, *arguments),
                environment | _pipe_variable(pipes.get(node.name)),
                None if work is None else Path(work),
                pass_fds=(pipes[node.name],) if node.name in pipes else (),
                ends_with_us=True,
            )
            for node in nodes
        ]
        show = output.keep if quiet else output.show
        run_together(children, supervision, show, say=output.say, restarted={RESUME: "1"})
    if supervision.exit_code:
        output.show_kept()
    for line in supervision.summary():
        output.say(line)
    return supervision.exit_code


def _pipe_variable(descriptor: int | None) -> dict[str, str]:
    return {} if descriptor is None else {RECORDS_VARIABLE: str(descriptor)}


@contextmanager
def _record_pipes(nodes: Sequence[NodeSpec], on_records: OnRecords) -> Iterator[dict[str, int]]:
    """Yield the end of a pipe for each node; what comes through is read until the context ends."""
    ends: dict[str, int] = {}
    readers = []
    for node in nodes:
        source, ends[node.name] = os.pipe()
        receive = partial(on_records, node.name)
        readers.append(threading.Thread(target=read_records, args=(source, receive), daemon=True))
        readers[-1].start()
    try:
        yield ends
    finally:
        for end in ends.values():
            os.close(end)
        for reader in readers:
            reader.join(RECORDS_CLOSE)  # a process that a node started may keep the pipe open


def nodes_here(nodes: Sequence[NodeSpec], hosts: frozenset[str]) -> list[NodeSpec]:
    """Return the nodes whose address is one of this machine's ``hosts``."""
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
    """Return the addresses of this machine's network interfaces."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
    return frozenset(entry.address.partition("%")[0] for entry in found if entry.family in families)


def _resolved(name: str) -> set[str]:
    try:
        return {str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(name, None)}
    except OSError:
        return set()


def thread_shares(environment: Mapping[str, str], nodes: int, cores: int) -> dict[str, str]:
    """Return environment variables that divide the cores between the nodes of this machine."""
    if nodes < 2 or _THREADS in environment:
        return {}
    return {_THREADS: str(max(cores // nodes, 1))}


@dataclass(frozen=True)
class NodeOutput:
    """Output of several nodes in one console: the node's name before each line, in its own colour."""

    console: Console
    names: Sequence[str] = ()
    log_format: LogFormat = "text"
    kept: dict[str, deque[str]] = field(default_factory=dict)
    """Last lines of each node that were not shown."""

    def keep(self, name: str, line: str) -> None:
        """Keep a line of a node instead of showing it."""
        self.kept.setdefault(name, deque(maxlen=_KEPT_LINES)).append(line)

    def show_kept(self) -> None:
        """Show the lines that were kept."""
        for name, lines in self.kept.items():
            for line in lines:
                self.show(name, line)

    def show(self, name: str, line: str) -> None:
        """Show a line of a node; a progress line that rewrites itself is shown in its last state."""
        last = line.rstrip("\r").rpartition("\r")[2]
        if self.log_format == "json":
            self._print(Text(json_line("node", node=name, message=last)))
            return
        width = max(map(len, self.names))
        colour = _COLOURS[self.names.index(name) % len(_COLOURS)]
        self._print(Text.assemble((f"{name:<{width}} | ", colour), last))

    def say(self, line: str) -> None:
        """Show a line of the launcher."""
        is_json = self.log_format == "json"
        self._print(Text(json_line("launch", message=line)) if is_json else Text(line, "bold"))

    def _print(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)
