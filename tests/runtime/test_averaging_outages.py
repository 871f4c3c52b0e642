"""Averaging and training over connections that are cut."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import LocalCluster, Splits
from many_clusters import Clusters, raise_errors
from test_averaging import in_order, mlp_clusters, points_data, same
from torch.utils.data import DataLoader
from training_cases import small_model

from ravnest.averaging.service import AveragingService
from ravnest.deadlines import LINK_OUTAGE
from ravnest.runtime.control import node_runtime
from ravnest.transport.link import FrameLink
from ravnest.transport.memory import MemoryNetwork
from ravnest.wire.messages import Backward, Forward, Message, RingChunk

PAUSE = 0.02
OUTAGE = 0.5


@contextmanager
def cutting(network: MemoryNetwork, nodes: int) -> Iterator[list[tuple[int, int]]]:
    """Cut random connections again and again, all between two nodes at once."""
    over, cuts, drawn = threading.Event(), [], random.Random(1)
    pairs = list(itertools.combinations(range(nodes), 2))

    def run() -> None:
        while not over.wait(PAUSE):
            cuts.append(drawn.choice(pairs))
            network.cut(*cuts[-1])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield cuts
    finally:
        over.set()
        thread.join()


BLOCKING = {
    "schedule": "sync",
    "averaging": "blocking",
    "reduce_factor": 2,
    "micro_batches": 2,  # the Root's own choice depends on measured times
}


def _train(clusters: Clusters, folder: Path) -> list[dict[str, torch.Tensor]]:
    loaders = in_order(points_data(), folder, size=4)
    # A node that closes waits only some seconds for a connection to say goodbye.
    ended = threading.Barrier(len(clusters.nodes.names), timeout=120)
    raise_errors(clusters.train(loaders, epochs=4, save=True, then=lambda *_: ended.wait()))
    return [clusters.fused(cluster) for cluster in range(len(clusters.names))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("undisturbed")
    first, second = _train(mlp_clusters(folder, (2, 2), **BLOCKING), folder)
    assert same(first, second)
    assert not same(first, small_model("mlp").state_dict())
    return first


def test_connections_that_are_cut_all_the_time_change_no_bit(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    clusters = mlp_clusters(tmp_path, (2, 2), **BLOCKING)
    with cutting(clusters.nodes.network, nodes=4) as cuts:
        first, second = _train(clusters, tmp_path)
    assert len(cuts) > 10
    assert same(first, undisturbed)
    assert same(second, undisturbed)


class LongOutages:
    """Outages of all links between clusters in the middle of rounds, nearly as long as links wait.

    They take no time: the clock of averaging, which decides whether a round is too slow, jumps.
    """

    def __init__(self, network: MemoryNetwork, rounds: set[int]) -> None:
        self.services: list[AveragingService] = []
        self._network = network
        self._rounds = rounds
        self._lock = threading.Lock()
        self._pairs = [(a, b) for a in (0, 1) for b in (2, 3)]
        self._jumped = 0.0

    def now(self) -> float:
        return time.monotonic() + self._jumped

    def service(self, *args: Any, **options: Any) -> AveragingService:
        self.services.append(AveragingService(*args, **options, now=self.now))
        return self.services[-1]

    def before_chunk(self, round_number: int) -> None:
        """Part the clusters before the first chunk of a round is sent, and heal them later."""
        with self._lock:
            if round_number not in self._rounds:
                return
            self._rounds.remove(round_number)
            for pair in self._pairs:
                self._network.part(*pair)
        threading.Thread(target=self._last, daemon=True).start()

    def _last(self) -> None:
        self._jumped += LINK_OUTAGE - 1
        checked = threading.Semaphore(0)
        for service in self.services:
            service.post(service._check_clock)
            service.post(checked.release)
        assert all(checked.acquire(timeout=60) for _ in self.services)
        for pair in self._pairs:
            self._network.heal(*pair)


def test_long_outages_in_the_middle_of_rounds_change_no_bit(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = mlp_clusters(tmp_path, (2, 2), **BLOCKING)
    wanted = {3, 9, 24}  # the last one is the final round
    outages = LongOutages(clusters.nodes.network, wanted)
    send = FrameLink.send

    def watched(link: FrameLink, message: Message) -> None:
        if isinstance(message.head, RingChunk):
            outages.before_chunk(message.head.round.number)
        send(link, message)

    monkeypatch.setattr(FrameLink, "send", watched)
    monkeypatch.setattr(node_runtime, "AveragingService", outages.service)
    first, second = _train(clusters, tmp_path)
    assert wanted == set(), "there was an outage in each of these rounds"
    assert same(first, undisturbed)
    assert same(second, undisturbed)


def test_an_outage_adds_no_more_than_the_window_to_what_links_keep(
    tmp_path: Path, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Root without answers stops at the window, so that plans count all that waits in links."""
    source, names = splits("mlp", 2)
    window, under_way, parted = 3, threading.Event(), threading.Event()
    sent, total = Counter[type](), itertools.count()
    send = FrameLink.send

    def counted(link: FrameLink, message: Message) -> None:
        send(link, message)
        if next(total) == 50:
            under_way.set()
        if parted.is_set():
            sent[type(message.head)] += 1

    monkeypatch.setattr(FrameLink, "send", counted)
    cluster = LocalCluster(tmp_path, names, {"in_flight": window}, node_data=source / "node_data")
    numbers = [int(name.removeprefix("node_")) for name in names]

    def disturb() -> None:
        assert under_way.wait(60)
        cluster.network.part(*numbers)
        parted.set()
        threading.Event().wait(OUTAGE)
        parted.clear()
        cluster.network.heal(*numbers)

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    loader = DataLoader(points_data(), 8)
    cluster.train(lambda: (loader, None), node={"schedule": "sync", "micro_batches": 8}, epochs=20)
    disturbing.join()
    assert sent[Forward] + sent[Backward] <= 2 * window
    assert max(sent.values(), default=0) <= window
