"""Dimensions besides the batch that vary: captured, checked, bounded by the example, or refused."""

from __future__ import annotations

import logging

import pytest
import sympy
import torch
from torch import nn
from torch.nn import functional

from ravnest.errors import CaptureError, SplitError, StageInputError
from ravnest.split import Chain, prepare, split
from ravnest.split.encoding import stage_from_json, stage_to_json
from ravnest.split.sample_coupling import row_split
from ravnest.split.size_conditions import SizeCondition, provable_conditions
from ravnest.split.size_variations import smaller_examples


class Attention(nn.Module):
    """A layer of attention with positions and an optional mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.positions = nn.Embedding(32, 8)
        self.all = nn.Linear(8, 24)
        self.head = nn.Linear(8, 20)

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        length = input_ids.shape[1]
        x = self.tokens(input_ids) + self.positions(torch.arange(length))
        q, k, v = self.all(x).view(x.shape[0], length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        allowed = None if mask is None else mask[:, None, None, :]
        mixed = functional.scaled_dot_product_attention(q, k, v, allowed, is_causal=mask is None)
        return self.head(x + mixed.transpose(1, 2).reshape(x.shape[0], length, 8))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.layers = kind(8, 8, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Linear(16, 5)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.tokens(input_ids))[0])


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.head = nn.Linear(4, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.second(self.norm(self.first(images)).relu())
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Loop(Recurrent):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for _ in range(input_ids.shape[1]):
            x = x + 1
        return self.head(torch.cat([x, x], 2))


class Decides(Recurrent):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        if input_ids.shape[1] > 4:
            x = x * 2
        return self.head(torch.cat([x, x], 2))


class DecidesByBoth(Recurrent):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        if input_ids.shape[1] > input_ids.shape[0]:
            x = x * 2
        return self.head(torch.cat([x, x], 2))


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 20, (rows, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize(
    ("make", "example", "varying", "others"),
    [
        (Attention, (ids(4, 16),), {"input_ids": [1]}, [(ids(4, 9),), (ids(3, 1),), (ids(1, 15),)]),
        (
            Attention,
            (ids(4, 16), torch.ones(4, 16, dtype=torch.bool)),
            {"input_ids": 1, "mask": -1},
            [(ids(2, 7), torch.tensor([[True] * 7, [True] * 3 + [False] * 4]))],
        ),
        (lambda: Recurrent(nn.LSTM), (ids(4, 16),), {"input_ids": [1]}, [(ids(2, 5),)]),
        (lambda: Recurrent(nn.GRU), (ids(4, 16),), {"input_ids": [1]}, [(ids(2, 5),)]),
        (Images, (torch.rand(4, 3, 24, 20),), {"images": (2, 3)}, [(torch.rand(2, 3, 12, 17),)]),
    ],
    ids=["attention", "masked", "lstm", "gru", "images"],
)
def test_other_sizes_are_equal_to_the_model(
    make: type[nn.Module],
    example: tuple[torch.Tensor, ...],
    varying: dict[str, object],
    others: list[tuple[torch.Tensor, ...]],
) -> None:
    torch.manual_seed(0)
    model = make()
    found = split(model, example, stages=2, varying=varying)  # type: ignore[arg-type]
    chain = Chain.of(found)
    for inputs in (*others, example):
        torch.manual_seed(1)
        for parameter in (*model.parameters(), *chain.parameters()):
            parameter.grad = None
        expected = model(*inputs)
        expected.square().sum().backward()
        torch.manual_seed(1)
        output = chain(*inputs)
        chain.backward(output.square().sum())
        assert torch.equal(output, expected)
        own = dict(chain.named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(own[name].grad, parameter.grad)  # type: ignore[arg-type]


def test_the_example_has_the_largest_size() -> None:
    found = split(Attention(), (ids(4, 16),), stages=2, varying={"input_ids": [1]})
    stage = stage_from_json(stage_to_json(found.stages[0].spec))
    assert [str(size) for size in stage.graphs["train"].inputs[0].shape] == ["b0", "b1"]
    assert [str(bounds) for bounds in stage.graphs["eval"].symbols] == ["1 to any", "1 to 16"]
    chain = Chain.of(found)
    with pytest.raises(StageInputError, match=r"input_ids has shape \[4, 17\].*dimension 1.*1 to 16"):
        chain(ids(4, 17))


def test_a_size_that_was_not_named_is_fixed_and_the_message_says_how_it_can_vary() -> None:
    chain = Chain.of(split(Attention(), (ids(4, 16),), stages=2))
    with pytest.raises(
        StageInputError, match=r"input_ids has shape \[4, 9\].*varying=\{'input_ids': \[1\]\}"
    ):
        chain(ids(4, 9))


def test_a_line_that_needs_a_plain_number_is_named() -> None:
    with pytest.raises(
        CaptureError, match=r"range\(input_ids.shape\[1\]\)[\s\S]*dimension 1 of input_ids \(16"
    ):
        prepare(Loop(nn.LSTM), (ids(4, 16),), varying={"input_ids": [1]})


def test_a_condition_on_a_size_limits_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        prepared = prepare(Decides(nn.LSTM), (ids(4, 16),), varying={"input_ids": [1]})
    assert "dimension 1 of input_ids here" in caplog.text
    symbols = prepared.cut(()).stages[0].spec.graphs["train"].symbols
    assert [str(bounds) for bounds in symbols] == ["1 to any", "5 to 16"]


def test_a_condition_on_two_sizes_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"input_ids.shape\[0\]:\n.*dimension 1 of input_ids"):
        prepare(DecidesByBoth(nn.LSTM), (ids(4, 16),), varying={"input_ids": [1]})


@pytest.mark.parametrize(
    ("varying", "message"),
    [
        ({"inputs_ids": [1]}, "did you mean 'input_ids'"),
        ({"input_ids": [2]}, "not a dimension of input_ids: it has 2"),
        ({"input_ids": ["1"]}, "not a dimension"),
        (["input_ids"], "must map names of inputs"),
    ],
)
def test_wrong_dimensions_are_refused(varying: dict[str, list[int]], message: str) -> None:
    with pytest.raises(SplitError, match=message):
        prepare(Attention(), (ids(4, 16),), varying=varying)


def test_an_example_of_length_1_is_refused() -> None:
    with pytest.raises(SplitError, match="largest size"):
        prepare(Attention(), (ids(4, 1),), varying={"input_ids": [1]})


def test_the_self_check_uses_smaller_sizes_of_each_dimension() -> None:
    prepared = prepare(Images(), (torch.rand(4, 3, 24, 20),), varying={"images": (2, 3)})
    shapes = [
        tuple(example.tensors[0].shape[2:])
        for example in smaller_examples(prepared.capture, prepared.capture.example)
    ]
    assert shapes[:3] == [(12, 10), (12, 20), (24, 10)]
    assert (3, 3) in shapes


def test_batches_of_sequences_can_be_split() -> None:
    prepared = prepare(Attention(), (ids(4, 16),), varying={"input_ids": [1]})
    assert row_split(prepared).allowed


def test_conditions_on_several_sizes_are_proven_or_kept() -> None:
    batch, length = sympy.symbols("batch length", positive=True, integer=True)
    several = SizeCondition(sympy.Gt(batch * length, 3), "")
    equal = SizeCondition(sympy.Ne(batch, length), "")
    single = SizeCondition(sympy.Gt(length, 2), "")
    limits = {batch: None, length: 16}
    assert provable_conditions([several, single], limits) == ([single], 4)
    assert provable_conditions([equal], limits) == ([equal], 1)
