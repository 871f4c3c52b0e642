"""Common patterns whose code reads values of tensors, or replaces buffers, can be split."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from zoo_models.exactness import Unsplit, compare, record_training

from ravnest.split import Chain, split


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        return self.out(self.encoder(x, mask))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.size(1))
        return self.out(self.transformer(x, y, tgt_mask=mask))


class Sampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.distributions.Normal(self.mean(x), 1.0)
        sample = found.rsample()
        return self.out(sample) + found.log_prob(sample.detach()).mean(-1, keepdim=True)


class ReplacedBuffer(nn.Module):
    """A running mean that is used, and then replaced by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x) * self.mean
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.out(x)


class SpeechLoss(nn.Module):
    """A model that computes its CTC loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chances = self.out(self.inner(x).relu()).log_softmax(-1).transpose(0, 1)
        labels = (x[:, :3, 0].abs() * 5).long().clamp(1, 5)
        rows = x.shape[0]
        return nn.functional.ctc_loss(chances, labels, torch.full((rows,), 5), torch.full((rows,), 2))


_MASK = nn.Transformer.generate_square_subsequent_mask(5)


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (Encoder, [(4, 5, 8)]),
        (Encoder, [(4, 5, 8), _MASK]),
        (Translator, [(4, 5, 8), (4, 6, 8)]),
        (Sampler, [(4, 8)]),
        (ReplacedBuffer, [(4, 8)]),
        (SpeechLoss, [(4, 5, 8)]),
    ],
)
def test_patterns_train_as_the_unsplit_model(
    build: Callable[[], nn.Module], shapes: list, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = build()
    args = tuple(s if isinstance(s, torch.Tensor) else torch.randn(s) for s in shapes)
    expected = record_training(Unsplit(copy.deepcopy(model)), args, {})
    with caplog.at_level(logging.WARNING, logger="ravnest"):
        chain = Chain.of(split(model, args))
    assert compare(expected, record_training(chain, args, {})) is None
    assert torch.distributions.Distribution._validate_args, "validation is on again"


def test_a_compiled_model_is_compared_without_its_compiler() -> None:
    """Compiled batch norms round otherwise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    found = split(torch.compile(model, backend="aot_eager"), (torch.randn(4, 8),))  # type: ignore[arg-type]
    assert "_orig_mod.1.running_mean" in Chain.of(found).state_dict()
