"""Averaging and training over connections that are cut."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from local_cluster import LocalCluster, Splits
from many_clusters import Clusters, raise_errors
from test_averaging import in_order, mlp_clusters, points_data, same
from torch.utils.data import DataLoader
from training_cases import small_model

from ravnest.transport.link import FrameLink
from ravnest.transport.memory import MemoryNetwork
from ravnest.wire.messages import Backward, Forward, Message

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


def _train(clusters: Clusters, folder: Path) -> list[dict[str, torch.Tensor]]:
    loaders = in_order(points_data(), folder, size=4)
    raise_errors(clusters.train(loaders, epochs=4, save=True))
    return [clusters.fused(cluster) for cluster in range(len(clusters.names))]


def test_clusters_agree_although_connections_are_cut_all_the_time(tmp_path: Path) -> None:
    """A round may be given up meanwhile, since rounds do not wait for long; no link is lost."""
    clusters = mlp_clusters(tmp_path, (2, 2), schedule="sync", averaging="blocking", reduce_factor=2)
    with cutting(clusters.nodes.network, nodes=4) as cuts:
        first, second = _train(clusters, tmp_path)
    assert len(cuts) > 10
    assert same(first, second)
    assert not same(first, small_model("mlp").state_dict())


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
    assert 0 < sent[Forward] + sent[Backward] <= 2 * window
    assert max(sent.values()) <= window
