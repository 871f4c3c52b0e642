"""A cluster that does not recover tells the other clusters."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
from many_clusters import form_clusters
from training_cases import SMALL_MODELS, small_model

from ravnest.errors import RunError, RunInterruptedError
from ravnest.runtime.control.node_runtime import NodeRuntime
from ravnest.runtime.control.runtime_restarts import RuntimeRestarts
from ravnest.split.module import StageModule
from ravnest.transport.base import Link
from ravnest.types import Address
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
