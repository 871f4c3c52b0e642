"""Modules of torch.jit: scripted, traced, and loaded from a file."""

from __future__ import annotations

import io
import warnings

import torch
from torch import Tensor, nn

from zoo_models.registry import BATCH, Example, ZooModel, entry, image, tokens
from zoo_models.vision import torchvision_models
from zoo_models.written import GRUClassifier, LSTMTagger, TiedGPT

MODELS: list[ZooModel] = []


def scripted(model: nn.Module) -> nn.Module:
    """Call ``torch.jit.script`` without its deprecation warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(model)


def traced(model: nn.Module, *inputs: Tensor) -> nn.Module:
    """Call ``torch.jit.trace``, which fixes the current mode of the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, inputs, check_trace=False)


def reloaded(model: nn.Module) -> nn.Module:
    """Return the module after ``torch.jit.save`` and ``torch.jit.load``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = io.BytesIO()
        torch.jit.save(model, file)
        file.seek(0)
        return torch.jit.load(file)


class ControlFlow(nn.Module):
    """A loop and a branch that depend on the module's settings, which only scripting preserves."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.layer = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 4)
        self.rounds = 3

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(x)
        for step in range(self.rounds):
            if step % 2 == 0:  # noqa: SIM108
                x = x + self.norm(self.layer(x)).relu()
            else:
                x = self.drop(x) * scale
        return self.head(x), x


@entry(MODELS, "torch.jit")
def scripted_control_flow() -> Example:
    model = scripted(ControlFlow())
    return model, (torch.randn(BATCH, 8), torch.rand(BATCH, 1)), {}


@entry(MODELS, "torch.jit")
def scripted_resnet18() -> Example:
    model = torchvision_models().resnet18(weights=None, num_classes=10)
    return scripted(model), (image(32),), {}


@entry(MODELS, "torch.jit")
def scripted_mobilenet_v3() -> Example:
    model = torchvision_models().mobilenet_v3_small(weights=None, num_classes=10)
    return reloaded(scripted(model)), (image(32),), {}


@entry(MODELS, "torch.jit")
def scripted_lstm() -> Example:
    return reloaded(scripted(LSTMTagger())), (tokens(9),), {}


@entry(MODELS, "torch.jit")
def scripted_gru() -> Example:
    return scripted(GRUClassifier()), (tokens(9),), {}


@entry(MODELS, "torch.jit")
def traced_resnet18() -> Example:
    model = torchvision_models().resnet18(weights=None, num_classes=10)
    return traced(model, image(32)), (image(32),), {}


@entry(MODELS, "torch.jit")
def traced_gpt() -> Example:
    class Logits(TiedGPT):
        def forward(self, text: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(text)[0]

    return reloaded(traced(Logits(), tokens(12))), (tokens(12),), {}
