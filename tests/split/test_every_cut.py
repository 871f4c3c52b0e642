"""Small models cut at every legal position stay exact, with tensors copied as over a network."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import relu
from zoo_models.exactness import Unsplit, compare, record_training

from ravnest.split import Chain, PreparedModel, prepare

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
BATCH = 4


class Skips(nn.Module):
    """A value with many uses, in-place writes, and an input that a late operation needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        first = torch.relu(self.layers[0](x))
        y = self.norm(self.layers[1](first) * first)
        y += first
        y[:, 0] = 0.5
        y = relu(y, inplace=True)
        z = self.dropout(self.layers[2](y) + first * 2)
        return {"out": self.layers[3](z).masked_fill(mask, 0.0) + first, "early": first.sum(1)}


class TiedGPT(nn.Module):
    """Embedding tied to the head, causal attention with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.randn(5, 8))
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("causal", torch.triu(torch.ones(5, 5, dtype=torch.bool), 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position
        x = x + self.attention(x, x, x, attn_mask=self.causal, need_weights=False)[0]
        return self.head(self.norm(x))


class SharedLayer(nn.Module):
    """The same layer four times, so that its gradient is a sum over several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(self.layer(x)) + self.layer(x) * 0.5
        return self.out(x)


Pair = namedtuple("Pair", ["sequence", "last"])


class Recurrent(nn.Module):
    """Two kinds of multi-layer recurrence, with dropout between the layers; a namedtuple output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, dropout=0.2, batch_first=True)
        self.gru = nn.GRU(6, 4, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> Pair:
        x, _ = self.lstm(x)
        x, last = self.gru(x)
        return Pair(x, last.transpose(0, 1))


class Counting(nn.Module):
    """Buffers that forward updates, in place and by assignment; a no_grad block; random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        y = self.first(x)
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * y.mean(0)
            scale = y.abs().max() + 1
        noise = torch.rand_like(y) if self.training else torch.zeros_like(y)
        return self.second(y / scale + noise - self.mean)


class Sizes(nn.Module):
    """Sizes computed from the batch and used far from the tensor they came from."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        count = x.shape[0]
        weights = (self.first.weight.sum(0) * 2).expand(count, 6)
        flat = torch.stack([weights, pair[0] * pair[1]]).view(2 * count, 6).sum(0) / count
        return self.second(torch.cat([flat.expand(count, 6), self.first(x)], 1))


@dataclass
class Answer:
    logits: torch.Tensor
    count: int
    nothing: None = None


class Frozen(nn.Module):
    """A frozen beginning, a frozen middle, a dataclass output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        for index in (0, 2):
            self.layers[index].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Answer:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return Answer(x, 3)


def _skips() -> Example:
    return Skips(), (torch.randn(BATCH, 6),), {"mask": torch.rand(BATCH, 6) > 0.5}


def _encoder() -> Example:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    mask = torch.zeros(BATCH, 5, dtype=torch.bool)
    mask[:, 4] = True
    return model, (torch.randn(BATCH, 5, 8),), {"src_key_padding_mask": mask}


MODELS: dict[str, Callable[[], Example]] = {
    "skips": _skips,
    "tied": lambda: (TiedGPT(), (torch.randint(0, 11, (BATCH, 5)),), {}),
    "shared": lambda: (SharedLayer(), (torch.randn(BATCH, 6),), {}),
    "recurrent": lambda: (Recurrent(), (torch.randn(BATCH, 3, 5),), {}),
    "counting": lambda: (Counting(), (torch.randn(BATCH, 6),), {}),
    "sizes": lambda: (
        Sizes(),
        (torch.randn(BATCH, 6), (torch.randn(BATCH, 6), torch.randn(BATCH, 6))),
        {},
    ),
    "frozen": lambda: (Frozen(), (torch.randn(BATCH, 6),), {}),
    "encoder": _encoder,
}


@cache
def prepared_model(name: str) -> tuple[PreparedModel, Example]:
    """Return a prepared model with its example, the same object for the whole test session."""
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    return prepare(model, args, kwargs), (model, args, kwargs)


class Network(Chain):
    """A chain that copies tensors between stages: dense, with the sender's strides."""

    def transfer(self, value: torch.Tensor) -> torch.Tensor:
        return value.detach().clone(memory_format=torch.preserve_format)


@pytest.fixture(scope="module", params=list(MODELS))
def case(request: pytest.FixtureRequest) -> tuple[PreparedModel, Example]:
    """A prepared model with its example; capturing takes longer than the tests."""
    return prepared_model(request.param)


def test_every_cut_is_exact(case: tuple[PreparedModel, Example]) -> None:
    prepared, (model, args, kwargs) = case
    expected = record_training(Unsplit(copy.deepcopy(model)), args, kwargs)
    assert prepared.cuts
    for cut in prepared.cuts:
        actual = record_training(Network.of(prepared.cut([cut])), args, kwargs)
        assert compare(expected, actual) is None, f"cut at {cut} of {prepared.cuts}"


def test_a_stage_per_unit_is_exact(case: tuple[PreparedModel, Example]) -> None:
    prepared, (model, args, kwargs) = case
    expected = record_training(Unsplit(copy.deepcopy(model)), args, kwargs)
    split = prepared.cut(prepared.cuts)
    assert compare(expected, record_training(Network.of(split), args, kwargs)) is None
    fused = Network.of(split).state_dict()
    assert list(fused) == list(model.state_dict())
    copy.deepcopy(model).load_state_dict(fused, strict=True)


def test_a_stage_without_trainable_parameters_passes_gradients_or_stops_them() -> None:
    prepared, (_, args, _) = prepared_model("frozen")
    split = prepared.cut([2, 4, 6])
    chain = Chain.of(split)
    loss = chain(*args).logits.sum()
    gradients = chain.gradients([(loss, None)])
    assert set(gradients) == {f"layers.{i}.{n}" for i in (1, 3) for n in ("weight", "bias")}
    wants = [stage.spec.graphs["train"].inputs[0].gradient for stage in split.stages]
    assert wants == [False, False, True, True], (
        "no gradient flows back to stages without trainable parameters"
    )
