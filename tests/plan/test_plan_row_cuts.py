"""Plans that cut large tensors along their rows, because no node can hold them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from workloads import GPT

from ravnest.errors import PlanError
from ravnest.formation import Formation, form_clusters
from ravnest.plan.node_configs import NodeConfig
from ravnest.plan.profiler import profile_model
from ravnest.plan.row_cuts import (
    BLOCK_COUNTS,
    blocks_of,
    row_cut_models,
    row_cuts_to_ship,
    whole_reason,
)
from ravnest.split import prepare
from ravnest.types import Address

VOCABULARY = 4096
EXAMPLE = (torch.arange(8).reshape(2, 4),)


def tied_gpt(vocabulary: int = VOCABULARY, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    model = GPT(vocabulary, 32, layers, 4, heads=2)
    model.head.weight = model.embed.weight
    return model


def formed(ram: float, count: int = 4, **options: object) -> Formation:
    nodes = [NodeConfig(i, Address("10.0.0.1", 80 + i), ram, 1000.0, None) for i in range(count)]
    return form_clusters(tied_gpt(), EXAMPLE, {}, nodes=nodes, clusters=1, **options)


def test_a_tensor_is_cut_into_as_few_blocks_as_possible() -> None:
    assert formed(0.02).plan.row_cuts == ()
    cut = formed(0.002)
    (found,) = cut.plan.row_cuts
    assert (found.name, found.bytes, found.blocks) == ("embed.weight", VOCABULARY * 32 * 4, 2)
    assert formed(0.0016).plan.row_cuts[0].blocks > 2
    for stage in cut.plan.stages:
        assert stage.memory.total <= stage.node.ram * 1e9
    assert (
        "embed.weight (524 kB) is cut into 2 blocks of rows, because no plan fits the RAM otherwise."
    ) in cut.explain()


def test_batches_of_a_cut_model_can_be_split_as_before() -> None:
    whole = formed(0.02)
    cut = formed(0.002)
    assert cut.profile.smallest_rows == whole.profile.smallest_rows == 1


def test_the_reason_stays_if_cutting_does_not_help() -> None:
    with pytest.raises(PlanError, match="the model needs 4 MB to train at batch 2"):
        formed(0.0005)


def test_optimizers_that_read_whole_tensors_get_whole_tensors() -> None:
    assert whole_reason(None) == whole_reason(torch.optim.AdamW) == ""
    with pytest.raises(PlanError, match=r"cut along their rows, because Adafactor reads them as a"):
        formed(0.0008, optimizer=torch.optim.Adafactor)


def test_other_tensors_are_cut_into_blocks_of_the_same_size() -> None:
    tensors = {
        "large": torch.empty(1000, 10),
        "half": torch.empty(500, 10),
        "few": torch.empty(3, 3000),
        "small": torch.empty(100, 10),
    }
    assert blocks_of(tensors, 4) == {"large": 4, "half": 2, "few": 3}
    assert blocks_of(tensors, 2) == {"large": 2, "few": 2}
    assert blocks_of({}, 2) == {}


def test_models_that_cannot_fit_are_not_measured() -> None:
    prepared = prepare(tied_gpt(), EXAMPLE)
    profile = profile_model(prepared)
    assert list(row_cut_models(prepared, profile, [1e6, 1e6])) == []
    counts = [m.profile.row_cuts[0].blocks for m in row_cut_models(prepared, profile, [6e5] * 8)]
    assert counts == [count for count in BLOCK_COUNTS if count >= 4]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_only_large_tensors_are_shipped_in_blocks(tied: bool) -> None:
    prepared = prepare(tied_gpt(), EXAMPLE)
    assert list(row_cuts_to_ship(prepared, profile_model(prepared))) == []
    words = VOCABULARY * 2
    large = prepare(tied_gpt(words, 1) if tied else GPT(words, 32, 1, 4, heads=2), EXAMPLE)
    shipped = list(row_cuts_to_ship(large, profile_model(large)))
    assert [model.profile.row_cuts[0].blocks for model in shipped] == [2, 4, 8]
