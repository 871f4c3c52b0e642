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
import os
import random
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from chaos_node import BATCH, FEATURES, data, model
from fault_plan import Fault, FaultKind, FaultPlan
from fork_server import ForkServer
from torch import nn
from workloads import NODE_DATA, Workload, free_addresses

from ravnest import model_fusion
from ravnest.errors import RavnestError
from ravnest.provider.supervision import (
    PauseOver,
    ProcessEnded,
    RestartPolicy,
    SendSignal,
    StartAgain,
    Supervision,
)

_PATIENT = RestartPolicy(limit=1000)
"""Nodes are killed on purpose, as often as the plan says."""
_DUMP_SECONDS = 1.0
"""Time for a node that hangs to write the stacks of its threads."""


@dataclass(frozen=True)
class ChaosRun:
    """Size and settings of a run."""

    clusters: int = 3
    nodes: int = 2
    """Nodes of a cluster."""
    updates: int = 1000
    """Updates of each cluster."""
    epoch: int = 100
    """Updates of an epoch."""
    pace: float = 0.04
    """Least seconds between two updates of a cluster."""
    checkpoint_updates: int = 25
    reduce_factor: int = 20
    """Updates between two averages of the clusters."""
    silence: float = 60.0
    """Seconds without a new update in a cluster that has not finished, after which the run hangs."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the nodes."""

    @property
    def samples(self) -> int:
        """Samples of all clusters together."""
        return self.clusters * self.epoch * BATCH

    @property
    def epochs(self) -> int:
        """Epochs that the updates fill."""
        return -(-self.updates // self.epoch)

    @property
    def total(self) -> int:
        """Updates of all clusters together."""
        return self.clusters * self.epochs * self.epoch


@dataclass
class Recovery:
    """What followed a fault."""

    fault: Fault
    cluster: int
    at: float
    """Time of the fault, in seconds since the first update."""
    update: int
    """Updates of the cluster before it."""
    interrupted: bool = True
    """The cluster has noticed; updates before that were under way."""
    under_way: float | None = None
    """Seconds until the cluster made an update again."""
    regained: float | None = None
    """Seconds until it made an update that it had not made before."""


@dataclass(frozen=True)
class RunResult:
    """What happened in a run."""

    plan: FaultPlan
    seconds: float
    """Time from the first update to the last."""
    rate: float
    """Useful updates per second, over all clusters."""
    updates: tuple[int, ...]
    """Updates of each cluster."""
    repeated: int
    """Updates that were made again."""
    recoveries: tuple[Recovery, ...]
    restarts: int
    hang: str
    """What did not go on; empty if everything did."""
    failures: tuple[str, ...]
    """Nodes that failed for good."""
    corrupt: tuple[str, ...]
    """What is wrong with the results."""
    loss: float | None
    """Loss of the fused model over all data."""

    @property
    def good(self) -> bool:
        """True if nothing hung, failed or is wrong."""
        return not (self.hang or self.failures or self.corrupt)


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

    def __init__(self, settings: ChaosRun, plan: FaultPlan, folder: Path, server: ForkServer) -> None:
        self._settings = settings
        self._plan = plan
        self._folder = folder
        self._server = server
        self._names = form(settings, folder)
        self._cluster = {name: c for c, names in enumerate(self._names) for name in names}
        self._pids: dict[str, int] = {}
        self._progress = [_Progress() for _ in range(settings.clusters)]
        self._faults = list(plan.faults)
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._recoveries: list[Recovery] = []
        self._done = [False] * settings.clusters
        self._began = 0.0
        self._restarts = 0
        self._supervision = Supervision(
            self._cluster, restart=_PATIENT, groups=self._cluster, chance=random.Random(plan.seed)
        )

    def run(self) -> RunResult:
        with records(self._folder / "records") as receiver, selectors.DefaultSelector() as selector:
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
                **settings.settings,
            },
        }
        output = self._folder / f"{name}.out"
        self._pids[name] = self._server.start("chaos_node:main", arguments, output, environment)

    def _deadline(self) -> float:
        """Return the time of the next thing to do without an event."""
        times = [self._supervision.deadline, *(due for due, _ in self._later)]
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
                    self._signal(name, number)
                case StartAgain(name):
                    self._restarts += 1
                    self._start(name, {"RAVNEST_RESUME": "1"})

    def _signal(self, name: str, number: signal.Signals) -> None:
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(self._pids[name], number)

    def _end_all(self) -> None:
        """Let all nodes write to their output what they are doing, and kill them."""
        for number in (signal.SIGUSR1, signal.SIGKILL):
            for name in self._pids:
                self._signal(name, number)
            time.sleep(_DUMP_SECONDS)
        deadline = time.monotonic() + self._settings.silence
        while self._pids and time.monotonic() < deadline:
            gone = {ended.pid for ended in self._server.events(1.0)}
            self._pids = {name: pid for name, pid in self._pids.items() if pid not in gone}

    # Faults

    def _inject(self) -> None:
        now = time.monotonic()
        for later in [each for each in self._later if each[0] <= now]:
            self._later.remove(later)
            later[1]()
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
        match fault.kind:
            case FaultKind.KILL:
                self._signal(name, signal.SIGKILL)
            case FaultKind.STOP:
                self._signal(name, signal.SIGSTOP)
                self._after(fault, lambda: self._signal(name, signal.SIGCONT))
            case FaultKind.FULL_DISK:
                self._limit(fault, name, resource.RLIMIT_FSIZE)
            case FaultKind.OUT_OF_MEMORY:
                self._limit(fault, name, resource.RLIMIT_AS)
            case _:
                raise ValueError(f"{fault.kind} is not a fault of processes")

    def _limit(self, fault: Fault, name: str, limit: int) -> None:
        """Let a node get nothing more of a resource until the fault is over, or it is started again."""
        pid = self._pids[name]
        before = resource.prlimit(pid, limit)
        resource.prlimit(pid, limit, (1, before[1]))

        def restore() -> None:
            if self._pids.get(name) == pid:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, limit, before)

        self._after(fault, restore)

    def _after(self, fault: Fault, call: Callable[[], None]) -> None:
        assert fault.seconds is not None
        self._later.append((time.monotonic() + fault.seconds, call))

    # Results

    def _hang(self) -> str:
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


def run(settings: ChaosRun, plan: FaultPlan, folder: Path, server: ForkServer) -> RunResult:
    """Train in ``folder`` under a fault plan."""
    folder.mkdir(parents=True)
    return _Watch(settings, plan, folder, server).run()


@contextlib.contextmanager
def records(path: Path) -> Iterator[socket.socket]:
    """Receive records at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.setblocking(False)
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        receiver.bind(str(path))
        yield receiver


def form(settings: ChaosRun, folder: Path) -> list[list[str]]:
    """Split the model for the clusters; return the names of their nodes."""
    example = torch.randn(BATCH, FEATURES), torch.zeros(BATCH, dtype=torch.long)
    work = Workload("chaos", model, lambda: example, 2)
    addresses = free_addresses(settings.clusters * settings.nodes)
    names = work.form_clusters(folder, addresses, settings.clusters)
    assert [len(each) for each in names] == [settings.nodes] * settings.clusters, names
    assert (folder / NODE_DATA).exists()
    return names


def fused(folder: Path, cluster: int = 0) -> dict[str, torch.Tensor]:
    """Return the model that a cluster has trained."""
    state: dict[str, torch.Tensor] = torch.load(
        model_fusion(cluster, folder=folder / "trained"), weights_only=True
    )
    return state


def check(settings: ChaosRun, folder: Path) -> tuple[tuple[str, ...], float | None]:
    """Return what is wrong with the results of a run, and the loss of the model."""
    wrong: list[str] = []
    states: list[dict[str, torch.Tensor]] = []
    for cluster in range(settings.clusters):
        try:
            states.append(fused(folder, cluster))
        except RavnestError as error:
            wrong.append(f"cluster {cluster} has no model: {error}")
        losses = folder / ("losses.txt" if cluster == 0 else f"losses_cluster_{cluster}.txt")
        lines = len(losses.read_text().splitlines()) if losses.exists() else 0
        if lines != settings.epochs * settings.epoch:
            wrong.append(f"cluster {cluster} has recorded {lines} updates")
    for cluster, state in enumerate(states):
        if not all(torch.isfinite(tensor).all() for tensor in state.values()):
            wrong.append(f"the model of cluster {cluster} is not finite")
        if any(not torch.equal(state[name], states[0][name]) for name in states[0]):
            wrong.append(f"clusters 0 and {cluster} have different models")
    return tuple(wrong), _loss(settings, states[0]) if states else None


def _loss(settings: ChaosRun, state: Mapping[str, torch.Tensor]) -> float:
    trained = model()
    trained.load_state_dict(state)
    points, classes = data(settings.samples).tensors
    with torch.no_grad():
        return float(nn.functional.cross_entropy(trained(points), classes))
