"""Logits and loss in chunks of positions: planned if RAM is short at the Leaf, as few as fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plan_cases import chain, node, planned
from torch import nn

from ravnest.errors import StageFormatError
from ravnest.plan.explain import explain
from ravnest.plan.infeasible import Infeasible
from ravnest.plan.loss_chunks import chunk_counts, with_loss_chunks
from ravnest.plan.planner import make_plan
from ravnest.plan.profile import ChunkableHead, ModelProfile
from ravnest.plan.profiler import profile_model
from ravnest.split import prepare
from ravnest.store.node_spec import make_node_spec

LOGITS = 10**9


def with_head(rows: int | None = 32) -> ModelProfile:
    """Return four units, of which the last makes 1 GB of logits; 32 samples in a batch."""
    head = ChunkableHead(
        unit=3,
        positions=512,
        logits_bytes=LOGITS,
        gradient_bytes=10**6,
        parameter_bytes=1000,
        activation_bytes=10**6,
        workspace_bytes=10**6,
        passing_bytes=10**6,
        deferred_bytes=0,
    )
    plain = chain(4, activation=10**6, workspace=10**6, crossing=10**6, rows=rows)
    units = [*plain.units[:-1], replace(plain.units[-1], deferred_bytes=LOGITS, passing_bytes=LOGITS)]
    return replace(plain, units=tuple(units), loss_bytes=3 * LOGITS, chunkable=head)


@pytest.mark.parametrize(
    ("ram", "chunks"), [(4.0, 1), (3.1, 1), (2.9, 2), (1.3, 4), (0.4, 8), (0.1, 32), (0.06, 64)]
)
def test_the_fewest_chunks_that_fit(ram: float, chunks: int) -> None:
    plan = planned(with_head(), [node(0, ram), node(1, ram)])
    (cluster,) = plan.clusters
    assert cluster.loss_chunks == chunks
    leaf = cluster.stages[-1]
    assert leaf.memory.total <= ram * 1e9
    specs = [make_node_spec(plan, stage, "cluster_0/node_0", "") for stage in cluster.stages]
    assert [spec.loss_chunks for spec in specs] == [1, chunks]
    words = f"Logits and loss are computed in {chunks} chunks of positions, because RAM is short."
    assert (words in explain(plan, with_head(), ["layer"] * 4)) == (chunks > 1)


def test_smaller_micro_batches_come_first() -> None:
    (cluster,) = planned(with_head(rows=1), [node(0, 2.5), node(1, 2.5)]).clusters
    assert cluster.loss_chunks == 1
    assert cluster.microbatches >= 4


def test_each_cluster_has_its_own_number() -> None:
    nodes = [node(0, 0.5), node(1, 4.0), node(2, 0.5), node(3, 0.5)]
    plan = planned(with_head(), nodes, clusters=2)
    for cluster in plan.clusters:
        leaf = cluster.stages[-1]
        assert cluster.loss_chunks == (1 if leaf.node.ram == 4.0 else 8)
        assert leaf.memory.total <= leaf.node.ram * 1e9


def test_without_a_chunkable_head_the_model_does_not_fit() -> None:
    profile = replace(with_head(), chunkable=None)
    assert chunk_counts(profile) == [1]
    assert with_loss_chunks(profile, 8) == profile
    assert isinstance(make_plan(profile, [node(0, 1.0), node(1, 1.0)]), Infeasible)


def test_a_chunk_has_some_positions() -> None:
    profile = with_head()
    assert profile.chunkable is not None
    few = replace(profile, chunkable=replace(profile.chunkable, positions=40))
    assert chunk_counts(few) == [1, 2, 4]


def test_only_the_last_stage_has_chunks() -> None:
    plan = planned(with_head(), [node(0, 0.4), node(1, 0.4)])
    root = make_node_spec(plan, plan.clusters[0].stages[0], "cluster_0/node_0", "")
    with pytest.raises(StageFormatError, match="only the last stage"):
        replace(root, loss_chunks=2)
    with pytest.raises(StageFormatError, match="loss_chunks must be at least 1"):
        replace(root, loss_chunks=0)


class Tagger(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.head = nn.Linear(8, classes, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(x)))


def test_the_profile_describes_the_head() -> None:
    profile = profile_model(prepare(Tagger(100), (torch.rand(4, 32, 8),)))
    logits, hidden = 4 * 32 * 100 * 4, 4 * 32 * 8 * 4
    head = profile.chunkable
    assert head is not None
    assert (head.unit, head.positions) == (len(profile.units) - 1, 32)
    assert (head.logits_bytes, head.gradient_bytes, head.parameter_bytes) == (
        logits,
        hidden,
        8 * 100 * 4,
    )
    assert profile.loss_bytes == 3 * logits
    chunked = with_loss_chunks(profile, 4)
    assert chunked.loss_bytes == 0
    assert chunked.units[-1].passing_bytes == 3 * logits // 4 + hidden
    assert chunked.units[-1].deferred_bytes == 0


def test_outputs_without_positions_are_not_chunked() -> None:
    assert profile_model(prepare(Tagger(100), (torch.rand(4, 8),))).chunkable is None
