"""One training run of several clusters as real processes, under a fault plan.

``run`` starts the nodes from a fork server, applies the faults of the plan when their number of updates
is reached, starts nodes that die again as ``ravnest launch --restart`` does (with the same
``Supervision``), and returns what happened. The run is bounded: without progress for
``ChaosRun.silence`` seconds it is a hang, and is ended.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from chaos_faults import FaultInjector, make_proxies
from chaos_values import ChaosRun, Recovery, RunResult, check, form
from fault_plan import Fault, FaultKind, FaultPlan
from fork_server import ForkServer

from ravnest.provider.supervision import (
    PauseOver,
    ProcessEnded,
    RestartPolicy,
    SendSignal,
    StartAgain,
    Supervision,
)

OnStart = Callable[[str, int], None]
"""Called with the name and the process of each node that is started."""

_PATIENT = RestartPolicy(limit=1000)
"""Nodes are killed on purpose, as often as the plan says."""
_DUMP_SECONDS = 1.0
"""Time for a node that hangs to write the stacks of its threads."""


@dataclass
class _Progress:
    """Progress of a cluster."""

    updates: int = 0
    made: int = 0
    """All updates, with those that were made again."""
    first: float | None = None
    last: float | None = None
    changed: float = 0.0
    """Time of the last sign of progress."""


class _Watch:
    """Shell of a run: processes, records, faults."""

    def __init__(
        self,
        settings: ChaosRun,
        plan: FaultPlan,
        folder: Path,
        server: ForkServer,
        on_start: OnStart,
    ) -> None:
        self._settings = settings
        self._on_start = on_start
        self._plan = plan
        self._folder = folder
        self._server = server
        self._names = form(settings, folder)
        self._cluster = {name: c for c, names in enumerate(self._names) for name in names}
        self._pids: dict[str, int] = {}
        self._progress = [_Progress() for _ in range(settings.clusters)]
        self._faults = list(plan.faults)
        self._injector = FaultInjector(
            self._names,
            self._pids,
            make_proxies(folder, self._names[0]) if settings.proxied else {},
        )
        self._recoveries: list[Recovery] = []
        self._done = [False] * settings.clusters
        self._began = 0.0
        self._restarts = 0
        self._supervision = Supervision(
            self._cluster, restart=_PATIENT, groups=self._cluster, chance=random.Random(plan.seed)
        )

    def run(self) -> RunResult:
        with (
            contextlib.ExitStack() as proxies,
            records(self._folder / "records") as receiver,
            selectors.DefaultSelector() as selector,
        ):
            for proxied in self._injector.proxies.values():
                proxies.enter_context(proxied.proxy)
            selector.register(receiver, selectors.EVENT_READ)
            selector.register(self._server.fileno, selectors.EVENT_READ)
            for name in self._cluster:
                self._start(name, {})
            self._began = time.monotonic()
            for progress in self._progress:
                progress.changed = self._began
            hang = ""
            while self._supervision.active and not hang:
                selector.select(max(self._deadline() - time.monotonic(), 0.0))
                self._take_records(receiver)
                self._supervise()
                self._inject()
                hang = self._hang()
            if hang:
                self._end_all()
        return self._result(hang)

    def _start(self, name: str, environment: Mapping[str, str]) -> None:
        settings = self._settings
        proxied = self._injector.proxies.get(name)
        listen = {} if proxied is None else {"listen": f"127.0.0.1:{proxied.port}"}
        arguments = {
            "node": name,
            "folder": str(self._folder),
            "socket": str(self._folder / "records"),
            "samples": settings.samples,
            "epochs": settings.epochs,
            "pace": settings.pace,
            "settings": {
                "schedule": "sync",
                "micro_batches": 2,
                "reduce_factor": settings.reduce_factor,
                "checkpoint_updates": settings.checkpoint_updates,
                **listen,
                **settings.settings,
            },
        }
        output = self._folder / f"{name}.out"
        self._pids[name] = self._server.start("chaos_node:main", arguments, output, environment)
        self._on_start(name, self._pids[name])

    def _deadline(self) -> float:
        """Return the time of the next thing to do without an event."""
        times = [self._supervision.deadline, *(due for due, _ in self._injector.later)]
        silent = map(self._silent_from, range(self._settings.clusters))
        latest = time.monotonic() + self._settings.silence
        return min(latest, *silent, *(each for each in times if each is not None))

    # Records

    def _take_records(self, receiver: socket.socket) -> None:
        while True:
            try:
                record = json.loads(receiver.recv(1 << 16))
            except BlockingIOError:
                return
            cluster = self._cluster[record["node"]]
            if record["kind"] == "loss":
                self._take_loss(cluster, record["update"] + 1)
            elif record["kind"] == "phase" and record["phase"] in {"connect", "rejoin"}:
                self._take_interruption(cluster, record["node"])

    def _take_interruption(self, cluster: int, node: str) -> None:
        if node == self._names[cluster][0]:
            for recovery in self._recoveries:
                recovery.interrupted |= recovery.cluster == cluster

    def _take_loss(self, cluster: int, update: int) -> None:
        progress, now = self._progress[cluster], time.monotonic()
        new = update > progress.updates
        progress.made += 1
        progress.first = now if progress.first is None else progress.first
        if new:
            progress.updates, progress.last, progress.changed = update, now, now
        for recovery in self._recoveries:
            waits = recovery.interrupted and recovery.regained is None
            if recovery.cluster == cluster and waits:
                since = now - self._began - recovery.at
                recovery.under_way = since if recovery.under_way is None else recovery.under_way
                recovery.regained = since if update > recovery.update else None

    # Processes

    def _supervise(self) -> None:
        now = time.monotonic()
        names = {pid: name for name, pid in self._pids.items()}
        for ended in self._server.events(0.0):
            name = names[ended.pid]
            del self._pids[name]
            if ended.code == 0:
                self._done[self._cluster[name]] = True
            self._act(ProcessEnded(name, ended.code))
        if self._supervision.deadline is not None and self._supervision.deadline <= now:
            self._act(PauseOver())

    def _act(self, event: ProcessEnded | PauseOver) -> None:
        for action in self._supervision.handle(event, time.monotonic()):
            match action:
                case SendSignal(name, number):
                    self._injector.signal(name, number)
                case StartAgain(name):
                    self._restarts += 1
                    self._start(name, {"RAVNEST_RESUME": "1"})

    def _end_all(self) -> None:
        """Let all nodes write to their output what they are doing, and kill them."""
        for number in (signal.SIGUSR1, signal.SIGKILL):
            for name in self._pids:
                self._injector.signal(name, number)
            time.sleep(_DUMP_SECONDS)
        deadline = time.monotonic() + self._settings.silence
        while self._pids and time.monotonic() < deadline:
            gone = {ended.pid for ended in self._server.events(1.0)}
            for name in [name for name, pid in self._pids.items() if pid in gone]:
                del self._pids[name]

    # Faults

    def _inject(self) -> None:
        now = time.monotonic()
        self._injector.end_due(now)
        made = sum(progress.updates for progress in self._progress)
        for fault in [each for each in self._faults if each.moment.at <= made]:
            name = f"node_{fault.node}"
            if self._done[self._cluster[name]]:
                self._faults.remove(fault)  # its cluster has finished
            elif name in self._pids:  # else it is down; the fault follows when it is back
                self._faults.remove(fault)
                self._happen(fault, name, now)

    def _happen(self, fault: Fault, name: str, now: float) -> None:
        cluster = self._cluster[name]
        update = self._progress[cluster].updates
        noticed = fault.kind is not FaultKind.KILL
        self._recoveries.append(Recovery(fault, cluster, now - self._began, update, noticed))
        self._injector.happen(fault, name)

    # Results

    def _hang(self) -> str:
        if time.monotonic() - self._began > self._settings.limit:
            return f"the run did not end within {self._settings.limit:.0f} s"
        for cluster, progress in enumerate(self._progress):
            if self._silent_from(cluster) <= time.monotonic():
                return (
                    f"cluster {cluster} made no progress for {self._settings.silence:.0f} s after "
                    f"{progress.updates} updates"
                )
        return ""

    def _silent_from(self, cluster: int) -> float:
        """Return the time at which a cluster hangs; one that has trained waits for the others."""
        if self._done[cluster]:
            return math.inf
        trained = self._progress[cluster].updates == self._settings.epochs * self._settings.epoch
        changed = [p.changed for p in (self._progress if trained else [self._progress[cluster]])]
        return max(changed) + self._settings.silence

    def _result(self, hang: str) -> RunResult:
        updates = tuple(progress.updates for progress in self._progress)
        firsts = [p.first for p in self._progress if p.first is not None]
        lasts = [p.last for p in self._progress if p.last is not None]
        seconds = max(lasts) - min(firsts) if firsts and lasts else 0.0
        failures = tuple(self._supervision.summary())
        corrupt, loss = ((), None) if hang else check(self._settings, self._folder)
        return RunResult(
            self._plan,
            seconds,
            sum(updates) / seconds if seconds else 0.0,
            updates,
            sum(progress.made for progress in self._progress) - sum(updates),
            tuple(self._recoveries),
            self._restarts,
            hang,
            failures,
            corrupt,
            loss,
        )


def run(
    settings: ChaosRun,
    plan: FaultPlan,
    folder: Path,
    server: ForkServer,
    on_start: OnStart = lambda _name, _pid: None,
) -> RunResult:
    """Train in ``folder`` under a fault plan."""
    folder.mkdir(parents=True)
    return _Watch(settings, plan, folder, server, on_start).run()


@contextlib.contextmanager
def records(path: Path) -> Iterator[socket.socket]:
    """Receive records at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.setblocking(False)
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        receiver.bind(str(path))
        yield receiver
