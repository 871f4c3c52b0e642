"""Models that cannot be split exactly, each with a part of the error message."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo_models.corners import Layers, features
from zoo_models.registry import BATCH, Example, ZooModel, entry, image, tokens
from zoo_models.vision import torchvision_models

MODELS: list[ZooModel] = []


class DataDependentBranch(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        x = x.relu() if x.mean() > 0 else x.tanh()
        return self.three(self.two(x))


class RoundedGradient(torch.autograd.Function):
    """Rounding with a straight-through gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class CustomFunction(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two(RoundedGradient.apply(self.one(x) * 4)))


class AutocastInside(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.two(self.one(x).relu())
        return self.three(x.float())


class ScaledGradient(Layers):
    """A tensor hook that changes gradients and is not visible in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.1)
        return self.three(self.two(x).relu())


class BackwardHook(Layers):
    """A backward hook on a module that scales its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.two.register_full_backward_hook(lambda _, gradients, __: (gradients[0] * 0.1,))

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two(self.one(x).relu()))


class ReadsAValue(Layers):
    def forward(self, x: Tensor) -> Tensor:
        scale = float(self.one(x).abs().max())
        return self.three(self.two(self.one(x) / scale))


class PackedSequence(nn.Module):
    """Packed sequences, whose lengths forward reads as values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 8)
        self.gru = nn.GRU(8, 12, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(text), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.gru(packed)[1][-1])


class ThroughNumpy(Layers):
    def forward(self, x: Tensor) -> Tensor:
        window = torch.from_numpy(x.detach().numpy().cumsum(1))
        return self.three(self.two(self.one(x + window)))


class VmapInside(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(x).relu())
        return torch.vmap(lambda row: self.three(row).tanh())(x)


@entry(MODELS, "torch.nn", refusal="depends on the value of a tensor")
def data_dependent_branch() -> Example:
    return DataDependentBranch(), (features(),), {}


@entry(MODELS, "torch.nn", refusal="is a custom torch.autograd.Function")
def custom_autograd_function() -> Example:
    return CustomFunction(), (features(),), {}


@entry(MODELS, "torch.nn", refusal="autocast inside forward")
def autocast_inside_forward() -> Example:
    return AutocastInside(), (features(),), {}


@entry(MODELS, "torch.nn", refusal="a hook on a tensor")
def tensor_hook() -> Example:
    return ScaledGradient(), (features(),), {}


@entry(MODELS, "torch.nn", refusal="has a backward hook")
def backward_hook() -> Example:
    return BackwardHook(), (features(),), {}


@entry(MODELS, "torch.nn", refusal="depends on the value of a tensor")
def reads_a_value() -> Example:
    return ReadsAValue(), (features(),), {}


@entry(MODELS, "torch.nn", refusal="a batch norm with momentum=None")
def cumulative_batch_norm() -> Example:
    """A batch norm without momentum, which reads its counter as a Python number."""
    norm = nn.BatchNorm1d(16, momentum=None)
    return nn.Sequential(nn.Linear(8, 16), norm, nn.Linear(16, 4)), (features(),), {}


@entry(MODELS, "torch.nn", refusal="packed sequences")
def packed_sequence() -> Example:
    return PackedSequence(), (tokens(9), torch.tensor([9, 5, 7, 3])), {}


@entry(MODELS, "torch.nn", refusal="forward leaves torch")
def through_numpy() -> Example:
    return ThroughNumpy(), (features(),), {}


@entry(MODELS, "torch.nn", refusal="vmap")
def vmap_inside_forward() -> Example:
    return VmapInside(), (features(),), {}


@entry(MODELS, "torchvision", refusal="cannot be captured")
def torchvision_retinanet() -> Example:
    model = torchvision_models().detection.retinanet_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64
    )
    boxes = torch.tensor([[4.0, 4.0, 40.0, 40.0]])
    targets = [{"boxes": boxes, "labels": torch.tensor([1])} for _ in range(BATCH)]
    return model, (list(image(64)), targets), {}
