"""Starts of nodes: what a new Root reports, and what other clusters are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
from local_cluster import Formed
from many_clusters import form_clusters
from training_cases import SMALL_MODELS, points, small_model

from ravnest import Trainer
from ravnest.averaging.service import AveragingService
from ravnest.errors import RunError, RunInterruptedError
from ravnest.runtime.control.node_runtime import NodeRuntime
from ravnest.runtime.control.runtime_restarts import RuntimeRestarts
from ravnest.runtime.control.telemetry_reporter import TelemetryReporter
from ravnest.split.module import StageModule
from ravnest.telemetry import RecoveryRecord, WorkerRecord
from ravnest.transport.base import Link
from ravnest.types import Address, CheckpointId
from ravnest.wire.messages import Abort, Hello, Message

SECONDS = 30.0


class OtherRoot:
    """The Root of the other cluster, which keeps what it is told."""

    def __init__(self) -> None:
        self.told: SimpleQueue[object] = SimpleQueue()

    def on_message(self, link: Link, message: Message) -> None:
        self.told.put(message.head)

    def on_lost(self, link: Link, reason: str) -> None:
        pass


def lost_runtime() -> NodeRuntime:
    """Return what is needed of a runtime that has lost a neighbour."""
    made: Any = SimpleNamespace(
        resumed=SimpleNamespace(run="run", checkpoint=None),
        status=SimpleNamespace(updates=3),
        progress=SimpleNamespace(say=lambda _: None),
        abandon=lambda _: None,
    )
    return cast(NodeRuntime, made)


@pytest.mark.parametrize("cluster", [0, 1])
def test_a_root_whose_recovery_fails_tells_the_other_roots(tmp_path: Path, cluster: int) -> None:
    clusters = form_clusters(tmp_path, small_model("mlp"), SMALL_MODELS["mlp"][1], (2, 2))
    network = clusters.nodes.network
    own, other = (clusters.nodes.node(clusters.names[c][0]) for c in (cluster, 1 - cluster))
    config, hello = own._config, other._config.hello()
    listener, root = network.transport(), OtherRoot()

    def admit(_: Hello) -> Hello:
        return hello

    listener.serve(Address.parse(other._config.spec.address), admit, root, lambda _: None)

    def damaged() -> StageModule:
        raise RunError("the checkpoints of node_0 and node_1 do not fit together")

    restarts = RuntimeRestarts(damaged, network.transport)
    interruption = RunInterruptedError("node_1 was lost")
    with pytest.raises(RunError, match="do not fit together"):
        restarts.recover(config, lost_runtime(), interruption, calls=0, phases=0)
    told = root.told.get(timeout=SECONDS)
    assert isinstance(told, Abort)
    assert (told.node, told.recoverable) == (config.spec.node, False)
    assert "do not fit together" in told.reason
    listener.close()


class Recoveries:
    """Sink that keeps what is reported about recoveries."""

    def __init__(self) -> None:
        self.found: list[RecoveryRecord] = []

    def emit(self, record: WorkerRecord) -> None:
        if isinstance(record, RecoveryRecord):
            self.found.append(record)


def broken_after(batches: int) -> Iterator[Any]:
    for number, batch in enumerate(points(100)):
        if number == batches:
            raise MemoryError("the machine has no memory")
        yield batch


def test_a_new_root_says_how_many_updates_are_repeated(cluster: Formed) -> None:
    """The lost one cannot say it; the other nodes know what they have made."""
    local = cluster(nodes=2, checkpoint_minutes=60.0, hands_over=True, rejoin_timeout=SECONDS)
    sink = Recoveries()

    def script(name: str) -> None:
        if name == local.names[0]:
            with pytest.raises(MemoryError), local.node(name) as lost:
                Trainer(lost, train_loader=broken_after(5)).train()
        with local.node(name, labels=points(100), record_sink=sink) as own:
            Trainer(own, train_loader=points(100)).train()

    local.results(script)
    (record,) = sink.found
    assert record.update == 0
    assert 1 <= record.repeated <= 5
    assert record.source == "the original weights: there is no checkpoint yet"


@pytest.mark.parametrize("averaging", [None, object()])
def test_the_average_of_other_clusters_is_part_of_where_the_state_comes_from(averaging: object) -> None:
    sink = Recoveries()
    runtime: Any = SimpleNamespace(
        resumed=SimpleNamespace(checkpoint=CheckpointId(4, 0), made=7, source="the nodes' own disks"),
        _averaging=averaging,
        _config=SimpleNamespace(spec=SimpleNamespace(role="Root")),
        progress=SimpleNamespace(say=lambda _: None),
        telemetry=TelemetryReporter(sink),
    )
    NodeRuntime.report_recovery(runtime, "node_1 was lost", 1.0)
    (record,) = sink.found
    assert record.repeated == 3
    assert ("average" in record.source) == (averaging is not None)


@pytest.mark.parametrize("resume", [False, True])
def test_a_cluster_that_begins_again_may_be_behind_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    """All its nodes were started again, and there is no checkpoint: others may have averaged."""
    told: list[bool] = []

    def continue_from(_: object, *_given: int, after_loss: bool) -> None:
        told.append(after_loss)

    monkeypatch.setattr(AveragingService, "continue_from", continue_from)
    clusters = form_clusters(tmp_path, small_model("mlp"), SMALL_MODELS["mlp"][1], (1, 1))
    clusters.train(lambda _: (points(), None), node=lambda _: {"resume": resume})
    assert told == [resume] * 2
