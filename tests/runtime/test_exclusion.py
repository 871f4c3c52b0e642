"""A node that the server excludes: its neighbours close their links to its machine and refuse it."""

from __future__ import annotations

from local_cluster import Formed
from training_cases import points

from ravnest import Trainer


class Excluding(Trainer):
    """Trainer whose Root excludes the Leaf after its first batch."""

    def train(self) -> None:
        self.node.forward_compute(next(iter(self.train_loader))[0])
        self.node.wait_for_backwards()
        self.node.exclude(1, 0)
        super().train()


def test_an_excluded_node_is_lost_and_cannot_return(cluster: Formed) -> None:
    local = cluster(rejoin_timeout=1.0)
    assert local.names == ["node_0", "node_1"]

    def script(name: str) -> None:
        with local.node(name, labels=points()) as own:
            kind = Excluding if name == "node_0" else Trainer
            kind(own, train_loader=points(), epochs=200, save=False).train()

    for error in local.errors(script):
        assert "has not connected" in str(error), "both wait for the other one until their time is over"
