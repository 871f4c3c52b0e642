"""Tensors cut along their rows: which can be cut, and what the blocks compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ravnest.errors import FusionError, StageFormatError
from ravnest.split import Chain, PreparedModel, prepare, verify
from ravnest.split.chain import fuse
from ravnest.split.element_wise import element_wise
from ravnest.split.encoding import stage_from_json, stage_to_json
from ravnest.split.graph import RowBlock
from ravnest.split.row_blocks import block_ranges, cuttable_tensors
from ravnest.split.splitter import balanced_cuts

ROWS = 20


class Words(nn.Module):
    """An embedding, a hidden layer and an output layer with a bias."""

    def __init__(self, padding: int | None = None, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, 6, padding_idx=padding)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, ROWS)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(tokens))))


class Lookup(nn.Module):
    """An embedding alone, and a layer that makes the graph worth cutting."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, 6, padding_idx=padding)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens) * self.scale


TOKENS = torch.tensor([[0, 5, 9, 10, 19], [19, 1, 4, 6, 7], [11, 12, 13, 14, 15]])


def chain_of(prepared: PreparedModel, stages: int) -> Chain:
    return Chain.of(prepared.cut(balanced_cuts(prepared, [1.0] * stages)))


@given(rows=st.integers(1, 10_000), count=st.integers(1, 64))
def test_blocks_cover_all_rows_in_nearly_equal_parts(rows: int, count: int) -> None:
    ranges = block_ranges(rows, count)
    sizes = [each.stop - each.first for each in ranges]
    assert len(ranges) == min(count, rows)
    assert [each.first for each in ranges] == [0, *(each.stop for each in ranges[:-1])]
    assert ranges[-1].stop == rows
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


@given(
    rows=st.integers(2, 40),
    count=st.integers(1, 8),
    tokens=st.lists(st.integers(0, 10_000), min_size=1, max_size=12),
)
def test_the_chain_looks_up_the_rows_of_the_whole_tensor(
    rows: int, count: int, tokens: list[int]
) -> None:
    weight = torch.arange(rows).float()
    found: torch.Tensor | None = None
    indices = torch.tensor(tokens) % rows
    for block in block_ranges(rows, count):
        local = indices - block.first
        lowest = 0 if block.first else None
        highest = block.stop - block.first - 1 if block.stop < rows else None
        inside = local if lowest is highest is None else local.clamp(lowest, highest)
        looked_up = weight[block.first : block.stop][inside]
        found = looked_up if found is None else torch.where(local == inside, looked_up, found)
    assert torch.equal(found, weight[indices])


@cache
def prepared_lookup(padding: int | None = None) -> tuple[Lookup, PreparedModel]:
    """Return a model and its capture, which is the same for any number of blocks."""
    model = Lookup(padding)
    return model, prepare(model, (TOKENS,))


@pytest.mark.parametrize("padding", [None, 0, 9, 10, ROWS - 1])
@pytest.mark.parametrize("count", [2, 3, 4, ROWS])
def test_an_embedding_in_blocks_is_exact(padding: int | None, count: int) -> None:
    model, prepared = prepared_lookup(padding)
    chain = chain_of(prepared.with_row_blocks({"embed.weight": count}), 3)
    for tokens in (TOKENS, TOKENS[:1], torch.tensor([[9, 10]] * 3).repeat(1, 3)[:, :5]):
        for training in (True, False):
            model.train(training)
            chain.train(training)
            assert torch.equal(chain(tokens), model(tokens))
        model.train()
        chain.train()
        gradient = torch.randn(*tokens.shape, 6)
        model.zero_grad()
        model(tokens).backward(gradient)
        found = chain.gradients([(chain(tokens), gradient)])
        parts = [found[r.name_in("embed.weight")] for r in block_ranges(ROWS, count)]
        assert torch.equal(torch.cat(parts), model.embed.weight.grad)
        assert torch.equal(found["scale"], model.scale.grad)


@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_an_index_outside_of_the_tensor_is_still_an_error(wrong: int) -> None:
    _, prepared = prepared_lookup()
    cut = prepared.with_row_blocks({"embed.weight": 3})
    with pytest.raises(IndexError):
        chain_of(cut, 3)(torch.full((2, 5), wrong))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_training_in_blocks_equals_the_whole_model(tied: bool, stages: int) -> None:
    torch.manual_seed(0)
    model = Words(padding=3, tied=tied)
    prepared = prepare(model, (TOKENS,))
    counts = {"embed.weight": 3} if tied else {"embed.weight": 3, "head.weight": 2}
    cut = prepared.with_row_blocks(counts)
    chain = chain_of(cut, stages)
    assert verify(cut.capture, [cut.cut(balanced_cuts(cut, [1.0] * stages)).stages]).batch_size == 3
    ours = torch.optim.AdamW(chain.parameters(), 1e-2)
    theirs = torch.optim.AdamW(model.parameters(), 1e-2)
    target = TOKENS.flip(1).flatten()
    for _ in range(5):
        ours.zero_grad()
        theirs.zero_grad()
        loss = nn.functional.cross_entropy(chain(TOKENS).flatten(0, 1), target)
        chain.backward(loss)
        expected = nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), target)
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
        ours.step()
        theirs.step()
    fused = chain.state_dict()
    assert list(fused) == list(model.state_dict())
    assert fused._metadata == model.state_dict()._metadata
    copy.deepcopy(model).load_state_dict(fused, strict=True)
    for name, tensor in model.state_dict().items():
        assert torch.allclose(fused[name], tensor, atol=1e-5), name
    chain.eval()
    model.eval()
    assert torch.allclose(chain(TOKENS), model(TOKENS), atol=1e-5)


def test_every_cut_between_blocks_is_legal() -> None:
    model = Words(tied=True)
    cut = prepare(model, (TOKENS,)).with_row_blocks({"embed.weight": 4})
    stages = cut.cut(cut.cuts).stages
    holders = {e.key: e.stages for s in stages for e in s.spec.state if e.rows is not None}
    weights = [key for key in holders if key.startswith("embed")]
    assert len(weights) == 4
    assert len({holders[key] for key in weights}) == 4, "each block has its own stages"
    assert all(len(holders[key]) == 2 for key in weights), "and is tied for itself"
    assert sum(key.startswith("head.bias") for key in holders) == 4
    assert torch.allclose(Chain.of(cut.cut(cut.cuts))(TOKENS), model(TOKENS), atol=1e-6)


class Renormed(Words):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, 6, max_norm=1.0)


class Scaled(Words):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, 6, scale_grad_by_freq=True)


class ReadElsewhere(Words):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.embed.weight.sum() + self.head.bias.sum()


@pytest.mark.parametrize("make", [Renormed, Scaled, ReadElsewhere])
def test_tensors_with_other_uses_stay_whole(make: Callable[[], nn.Module]) -> None:
    found = cuttable_tensors(prepare(make(), (TOKENS,)).capture)
    assert "embed.weight" not in found
    assert "hidden.weight" in found
    assert ("head.weight" in found) == (make is not ReadElsewhere)


def test_frozen_tensors_are_cut_too() -> None:
    model = Words()
    model.embed.weight.requires_grad_(False)
    cut = prepare(model, (TOKENS,)).with_row_blocks({"embed.weight": 2})
    blocks = [e for s in cut.cut(()).stages for e in s.spec.state if e.rows is not None]
    assert [entry.trainable for entry in blocks] == [False, False]
    assert torch.equal(chain_of(cut, 2)(TOKENS), model(TOKENS))


def test_blocks_survive_the_stage_format() -> None:
    cut = prepare(Words(tied=True), (TOKENS,)).with_row_blocks({"embed.weight": 2})
    (stage,) = cut.cut(()).stages
    data = stage_to_json(stage.spec)
    assert stage_from_json(data) == stage.spec
    entry = next(e for e in data["state"] if "rows" in e)
    assert entry["rows"] == [0, 10, 20]
    assert list(entry["names"]) == ["embed.weight.rows_0_10", "head.weight.rows_0_10"]
    for wrong in ([0, 11, 20], [5, 15, 20], [10, 0, 20], [0, 10, 9]):
        entry["rows"] = wrong
        with pytest.raises(StageFormatError):
            stage_from_json(data)


def test_fusion_reports_missing_blocks() -> None:
    cut = prepare(Lookup(), (TOKENS,)).with_row_blocks({"embed.weight": 3})
    stages = cut.cut(cut.cuts).stages
    lacking = [(s.spec, s.tensors) for s in stages if "embed.weight.rows_6_13" not in s.tensors]
    with pytest.raises(FusionError, match=r"blocks of embed.weight do not cover its 20 rows"):
        fuse(lacking)


def test_names_of_blocks_belong_to_their_range() -> None:
    rows = RowBlock(3, 7, 20)
    assert rows.name_of_whole(rows.name_in("a.weight")) == "a.weight"
    with pytest.raises(StageFormatError):
        RowBlock(3, 8, 20).name_of_whole(rows.name_in("a.weight"))


def test_optimizers_that_update_each_element_alone() -> None:
    assert element_wise(torch.optim.SGD)
    assert element_wise(torch.optim.AdamW)
    assert not element_wise(torch.optim.Adafactor)
    assert not element_wise(torch.optim.LBFGS)
    assert not element_wise(torch.optim.Optimizer)
