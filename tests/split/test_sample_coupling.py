"""A batch is split only if each row of the outputs depends on the same row of the inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ravnest.split.deterministic import without_randomness
from ravnest.split.rows import shuffle_rows, vary_floats
from ravnest.split.sample_coupling import RowSplit, row_split
from ravnest.split.splitter import prepare


class Function(nn.Module):
    """A layer, then a function of its result."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.first(x))


class Attention(nn.Module):
    """A classifier of tokens with a mask, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.tokens(ids), src_key_padding_mask=mask == 0)
        weights = mask.unsqueeze(-1).float()
        return self.head((hidden * weights).sum(1) / weights.sum(1))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tokens(ids))[0])


class Gpt(nn.Module):
    """A decoder with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.places = nn.Parameter(torch.randn(5, 16))
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places[: ids.shape[1]]
        q, k, v = self.qkv(self.norm(x)).view(*ids.shape, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return self.head(x + mixed.transpose(1, 2).flatten(2))


class Vit(nn.Module):
    """A transformer over the patches of an image, with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.layer(torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1))[:, 0]


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.first(x)


class MeanOfTokens(nn.Module):
    """An embedding whose rows are centred over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(ids.view(ids.shape[0], -1))
        return hidden - hidden.mean(0)


def cnn(norm: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Dropout2d(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


def answer(model: nn.Module, *inputs: torch.Tensor, **kwargs: Any) -> RowSplit:
    return row_split(prepare(model.train(), inputs, **kwargs))


def of(function: Any, rows: int = 6) -> RowSplit:
    torch.manual_seed(0)
    return answer(Function(function), torch.randn(rows, 6))


def drop_path(x: torch.Tensor) -> torch.Tensor:
    return x * x.new_empty(x.shape[0], 1).bernoulli_(0.8).div_(0.8)


IMAGES = torch.randn(6, 3, 8, 8)
INDEPENDENT = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5), nn.Linear(9, 2)), torch.randn(6, 6)),
    "no norm": (lambda: cnn(nn.Identity()), IMAGES),
    "group norm": (lambda: cnn(nn.GroupNorm(2, 4)), IMAGES),
    "instance norm": (lambda: cnn(nn.InstanceNorm2d(4)), IMAGES),
    "frozen batch norm": (lambda: cnn(nn.BatchNorm2d(4).eval()), IMAGES),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), torch.randn(6, 6)),
    "gpt": (Gpt, torch.randint(20, (6, 5))),
    "vit": (Vit, IMAGES),
    "lstm": (Tagger, torch.randint(20, (6, 5))),
    "one sample": (lambda: nn.Linear(6, 6), torch.randn(1, 6)),
    "zeros": (lambda: nn.Linear(6, 6), torch.zeros(6, 6)),
    "the same tokens": (lambda: nn.Embedding(20, 4), torch.zeros(6, 5, dtype=torch.long)),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_samples_are_independent(name: str) -> None:
    make, x = INDEPENDENT[name]
    model = make()
    if name == "frozen batch norm":
        norm = model[1]
        model.train()
        norm.eval()
        assert row_split(prepare(model, (x,))).allowed
        return
    found = answer(model, x)
    assert found.allowed, found.reason
    assert found.smallest == 1


@pytest.mark.parametrize(
    "mask", [torch.ones(6, 5, dtype=torch.long), torch.arange(5).expand(6, 5).lt(4).long()]
)
def test_an_attention_mask(mask: torch.Tensor) -> None:
    found = answer(Attention(), torch.randint(20, (6, 5)), mask)
    assert found.allowed, found.reason


def test_the_model_and_the_random_numbers_stay_as_they_are() -> None:
    model = cnn(nn.Identity())
    prepared = prepare(model.train(), (IMAGES,))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    assert row_split(prepared).allowed
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_batch_norm_is_named_with_its_layer() -> None:
    found = answer(cnn(nn.BatchNorm2d(4)), IMAGES)
    assert found == RowSplit(False, "batch_norm in layer 1 computes statistics over the batch", 1)
    assert not answer(cnn(nn.BatchNorm2d(4, track_running_stats=False)), IMAGES).allowed


def test_batch_norm_of_weights_is_no_coupling() -> None:
    class Standardised(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.weight.reshape(1, self.out_features, -1)
            return functional.linear(
                x, functional.batch_norm(rows, None, None, training=True).reshape_as(self.weight)
            )

    assert answer(Standardised(6, 6), torch.randn(6, 6)).allowed


def test_a_buffer_that_changes() -> None:
    assert answer(Counter(), torch.randn(6, 6)).reason == "the buffer seen changes with each batch"
    assert not answer(cnn(nn.InstanceNorm2d(4, track_running_stats=True)), IMAGES).allowed


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.mean(), "the output has no batch dimension"),
        (lambda x: {"logits": x, "loss": x.mean()}, "output loss has no batch dimension"),
        (lambda x: x.t(), "the output has no batch dimension"),
        (lambda x: x @ x.T, "the output has the batch in two dimensions"),
        (lambda x: torch.cat([x, x[:1]]), "is not a multiple of the batch size"),
        (lambda x: x.view(-1, 2, 6).sum(1), "is not a multiple of the batch size"),
        (lambda x: x.view(6, 6), "the batch size is fixed at 6 by the model"),
    ],
)
def test_shapes_without_the_batch(function: Any, reason: str) -> None:
    found = of(function)
    assert not found.allowed
    assert reason in found.reason


def test_inputs_without_the_batch() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.first(x) * mask

    found = answer(Masked(), torch.randn(4, 6), torch.ones(6))
    assert found.reason == "input mask has no batch dimension"
    found = answer(nn.LSTM(3, 5), torch.randn(6, 4, 3), batch_dim=1)
    assert found.reason == "the batch is dimension 1 of the inputs, not dimension 0"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(0),
        lambda x: x @ x.T @ x,
        lambda x: x / x.norm(),
        lambda x: x.cumsum(0),
        lambda x: x.flip(0),
        lambda x: x.roll(1, 0),
        lambda x: x.view(-1, 2, 6).flip(1).reshape(x.shape),
        lambda x: functional.softmax(x, 0),
        lambda x: x / x.shape[0],
        lambda x: 0.7 * x + 0.3 * x[torch.randperm(x.shape[0])],
        lambda x: 0.7 * x + 0.3 * x[torch.rand(x.shape[0]).argsort()],
        lambda x: (x, x > x.mean(0)),
    ],
)
def test_samples_that_see_each_other(function: Any) -> None:
    found = of(function, rows=8)
    assert not found.allowed, found.reason


@pytest.mark.parametrize("example", [torch.zeros(6, 6), torch.ones(6, 6), torch.ones(1, 6)])
def test_equal_rows_of_an_example_hide_nothing(example: torch.Tensor) -> None:
    found = answer(Function(lambda x: x - x.mean(0)), example)
    assert "depend on the other samples of the batch" in found.reason


@pytest.mark.parametrize("example", [torch.zeros(6, 3), torch.arange(3).expand(6, 3)])
def test_equal_tokens_hide_nothing(example: torch.Tensor) -> None:
    assert not answer(MeanOfTokens(), example.long()).allowed


def test_an_example_that_cannot_be_varied_is_refused() -> None:
    class OneHot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = self.first(functional.one_hot(ids, 6).float())
            return hidden - hidden.mean(0)

    assert "all samples of the example are the same" in answer(OneHot(), torch.zeros(4).long()).reason
    assert "depend on the other samples" in answer(OneHot(), torch.arange(4)).reason


@pytest.mark.parametrize(
    "function",
    [
        drop_path,
        lambda x: x + torch.randn_like(x),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
        lambda x: x + torch.rand(x.shape[0], 1) + torch.randint(3, (x.shape[0], 1)),
        lambda x: functional.gumbel_softmax(x, dim=1),
        lambda x: functional.rrelu(functional.alpha_dropout(x, 0.3, training=True), training=True),
        lambda x: x.gather(1, torch.multinomial(x.softmax(1), 2)),
        lambda x: x[:, torch.randperm(6)],
        lambda x: torch.normal(x, 1.0),
        lambda x: x.view(x.shape[0], 2, 1, 3),
        lambda x: x.reshape(-1, 3),
    ],
)
def test_randomness_and_reshapes_of_a_sample_are_no_coupling(function: Any) -> None:
    found = of(function)
    assert found.allowed, found.reason


def test_the_smallest_micro_batch() -> None:
    class AtLeastFive(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.shape[0] >= 5 else x

    assert answer(AtLeastFive(6, 6), torch.randn(6, 6)) == RowSplit(
        True, "each row of the outputs depends on the same row of the inputs only", 5
    )
    squeezed = of(lambda x: x[:, :1].squeeze())
    assert squeezed.allowed
    assert squeezed.smallest == 2


def test_a_model_in_half_precision() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(torch.bfloat16)
    assert answer(model, torch.randn(6, 64, dtype=torch.bfloat16)).allowed


def test_a_random_operator_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ravnest.split.deterministic._SETTINGS", {})
    prepared = prepare(nn.Sequential(nn.Linear(6, 6), nn.Dropout()), (torch.randn(6, 6),))
    graph = prepared.cut(()).stages[0].spec.graphs["train"]
    assert without_randomness(graph) == "dropout"
    assert "dropout draws random numbers" in row_split(prepared).reason


def test_variations_keep_the_range_of_values() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(8, 4)
    varied = vary_floats(probabilities, generator)
    assert not torch.equal(varied, probabilities)
    assert probabilities.min() <= varied.min()
    assert varied.max() <= probabilities.max()
    assert bool((vary_floats(torch.ones(8), generator) > 0).all())
    columns = torch.stack([torch.arange(8), torch.arange(100, 108)], 1)
    shuffled = shuffle_rows(columns, generator)
    assert not torch.equal(shuffled, columns)
    assert torch.equal(shuffled.sort(0).values, columns)
