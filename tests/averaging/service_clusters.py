"""Clusters of one node each with real averaging services, over the in-memory network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from node_files import node_file
from torch import Tensor

from ravnest.averaging.coordinator import Mode
from ravnest.averaging.deadlines import Deadlines
from ravnest.averaging.outcome import RoundOutcome
from ravnest.averaging.ports import AveragingConfig, RoundAverage, Vectors
from ravnest.averaging.service import AveragingService
from ravnest.store.node_spec import NeighbourSpec, RingSpec
from ravnest.transport.generations import Generations
from ravnest.transport.memory import MemoryNetwork
from ravnest.types import Address, RobustMean
from ravnest.wire.messages import PROTOCOL, Hello, HelloRefused, RoundId

SECONDS = 30.0
"""Limit of all waits; tests that pass wait far less."""
REJOIN = 600.0
"""Time for which a cluster waits for a lost node; no test waits for it."""
ELEMENTS = 3000


class FakeWeights:
    """One vector that is averaged; implements ``WeightsPort``. Nothing is ever in flight."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._stored: dict[RoundId, RoundAverage] = {}

    def copy(self, *, idle: bool, then: Callable[[dict[int, Tensor]], None]) -> None:
        then({0: self.values.clone()})

    def fault(self, vectors: Vectors) -> str:
        return ""

    def store(self, average: RoundAverage) -> None:
        self._stored[average.round] = average

    def settle(self, round_id: RoundId, *, commit: bool) -> None:
        average = self._stored.pop(round_id, None)
        if average is not None and commit:
            change = average.values[0]
            self.values = self.values + change if average.moves else change.clone()

    def sizes(self) -> Mapping[int, int]:
        return {0: ELEMENTS}

    def moving(self) -> Mapping[int, int]:
        return {0: ELEMENTS}


@dataclass
class Outside:
    """The network and the addresses that all specs have."""

    network: MemoryNetwork
    clusters: int
    mode: Mode = "background"
    codec: str = "raw"
    robust_mean: RobustMean | None = None
    outcomes: SimpleQueue[RoundOutcome] = field(default_factory=SimpleQueue)
    """Outcomes of all coordinators."""

    @property
    def members(self) -> tuple[NeighbourSpec, ...]:
        return tuple(NeighbourSpec(c, f"127.0.0.1:{9000 + c}") for c in range(self.clusters))


class Process:
    """A process of a cluster's only node; the cluster has the number of the node."""

    def __init__(self, outside: Outside, cluster: int, *, start: int = 0, generation: int = 0) -> None:
        members = outside.members
        port = 9000 + cluster + 100 * generation
        spec = node_file(
            cluster,
            stage=0,
            stages=1,
            cluster=cluster,
            address=f"127.0.0.1:{port}",
            roots=members,
            rings=(RingSpec(0, ("w",), members),),
            generation=generation,
        )
        self.spec = spec
        self.cluster = cluster
        self.generations = Generations()
        self.hello = Hello(
            PROTOCOL,
            "plan",
            cluster,
            cluster,
            0,
            codec=outside.codec,
            addresses=(spec.address,),
            generation=generation,
            incarnation=f"start {start}",
        )
        drawn = torch.Generator().manual_seed(10 * start + cluster)
        self.weights = FakeWeights(torch.randn(ELEMENTS, generator=drawn))
        self.released: SimpleQueue[bool] = SimpleQueue()
        self.errors: list[str] = []
        self.outside = outside
        self.transport = outside.network.transport()
        self.rounds: SimpleQueue[bool] = SimpleQueue()
        """Begins and ends of rounds."""
        callbacks = self.released.put, outside.outcomes.put, self.rounds.put
        config = AveragingConfig(outside.mode, 1, *callbacks)
        self.service = AveragingService(
            spec,
            self.weights,
            self.hello,
            self.transport,
            config=config,
            failed=self.errors.append,
            deadlines=Deadlines.outlasting(spec.outage, REJOIN),
            generations=self.generations,
            robust_mean=outside.robust_mean,
        )

    def admit(self, hello: Hello) -> Hello | HelloRefused:
        reason = self.generations.admit(hello)
        return self.hello if reason is None else HelloRefused(reason)

    def open(self) -> None:
        address = Address.parse(self.hello.addresses[0])
        self.transport.serve(address, self.admit, self.service, self.service.on_link)
        self.service.start(None, None)
        self.service.connect(SECONDS, lambda _: None)

    def kill(self) -> None:
        """End it without a word to the others."""
        network = self.outside.network
        network.forget(self.transport)
        self.transport._links.closed.set()  # it dials nobody any more
        for other in range(self.outside.clusters):
            network.cut(self.cluster, other)
        self.service.close(None)
