"""Small models and data for training tests, and the single-process reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workloads import GPT, digits

from ravnest import set_seed


class SmallCNN(nn.Module):
    """Convolutions, batch norm, a skip connection, dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8 * 16, 32)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first = torch.relu(self.norm1(self.conv1(images)))
        second = torch.relu(self.norm2(self.conv2(first))) + first
        pooled = nn.functional.max_pool2d(second, 2).flatten(1)
        return self.output(self.dropout(torch.relu(self.hidden(pooled))))


class TiedGPT(GPT):
    """Language model whose output layer shares the embedding's weight."""

    def __init__(self, vocabulary: int = 16, width: int = 16, layers: int = 3, length: int = 8) -> None:
        super().__init__(vocabulary, width, layers, length, heads=2)
        self.head.weight = self.embed.weight


def digits_cnn() -> nn.Module:
    """Model of the demo, without dropout."""
    model = digits()
    model.dropout.p = 0.0
    return model


def token_loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    """Cross entropy over all positions; a criterion that takes the loader's whole batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[-1].flatten())


def image_loaders(batches: int = 10, size: int = 8, seed: int = 1) -> tuple[DataLoader, DataLoader]:
    """Return shuffled training and validation data with one generator; the last batch is smaller."""
    made = torch.Generator().manual_seed(seed)
    images = torch.randn(batches * size - 3, 1, 8, 8, generator=made)
    labels = (images.mean((1, 2, 3)) * 40).long().clamp(-5, 4) + 5
    order = torch.Generator().manual_seed(seed)
    data = TensorDataset(images, labels)
    train = DataLoader(data, size, shuffle=True, generator=order)
    return train, DataLoader(data, size, shuffle=True, generator=order)


def token_loaders(batches: int = 10, size: int = 4, seed: int = 1) -> tuple[DataLoader, None]:
    """Return sequences to sort."""
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 16, (batches * size, 8), generator=made)
    order = torch.Generator().manual_seed(seed)
    return DataLoader(
        TensorDataset(tokens, tokens.sort(1).values), size, shuffle=True, generator=order
    ), None


def train_alone(
    model: nn.Module,
    loader: Iterable[Any],
    loss_of: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    scheduler: Any = None,
    update_frequency: int = 1,
    clip: float | None = None,
    after_epoch: Callable[[], None] = lambda: None,
) -> list[float]:
    """Train in a single process, as a reference, and return the loss of each update."""
    losses: list[float] = []
    model.train()
    for _ in range(epochs):
        gathered: list[float] = []

        def update(gathered: list[float]) -> None:
            for parameter in model.parameters():
                if parameter.grad is not None and len(gathered) > 1:
                    parameter.grad.div_(len(gathered))
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(gathered) / len(gathered))

        for batch in loader:
            loss = loss_of(model(batch[0]), batch)
            loss.backward()
            gathered.append(loss.item())
            if len(gathered) == update_frequency:
                update(gathered)
                gathered = []
        if gathered:
            update(gathered)
        if scheduler is not None:
            scheduler.step()
        after_epoch()
    return losses


class MLP(nn.Module):
    """Smallest model that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.third):
            x = torch.tanh(layer(x))
        return self.last(x)


class DropoutMLP(MLP):
    """Model with dropout in every stage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.third):
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.3, self.training)
        return self.last(x)


class HalfFrozenMLP(MLP):
    """Model whose first half has no trainable parameters."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.first, self.second):
            layer.requires_grad_(False)


class Encoder(nn.Module):
    """Model with keyword inputs, like BERT."""

    def __init__(self, vocabulary: int = 16, width: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.types = nn.Embedding(2, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(
        self,
        *,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor,
        attention_mask: torch.Tensor,
    ) -> torch.Tensor:
        x = self.tokens(input_ids) + self.types(token_type_ids)
        mask = attention_mask[..., None].to(x.dtype)
        mixed = torch.tanh(self.mix(x)) * mask
        return self.head(x + mixed.sum(1, keepdim=True) / mask.sum(1, keepdim=True))


def _encoder_example() -> dict[str, torch.Tensor]:
    ids = torch.arange(20).reshape(4, 5) % 16
    return {"input_ids": ids, "token_type_ids": ids % 2, "attention_mask": torch.ones_like(ids)}


SMALL_MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "mlp": (MLP, (torch.rand(5, 4),)),
    "dropout": (DropoutMLP, (torch.rand(5, 4),)),
    "half-frozen": (HalfFrozenMLP, (torch.rand(5, 4),)),
    "encoder": (Encoder, _encoder_example()),
    "digits-cnn": (digits_cnn, (torch.rand(8, 1, 8, 8),)),
    "tied-gpt": (TiedGPT, (torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(0)),)),
}
"""Factories of models and example inputs, by name."""


def small_model(case: str) -> nn.Module:
    """Return a model by name, always with the same weights."""
    set_seed(7)
    return SMALL_MODELS[case][0]()


def points(count: int = 22, size: int = 5, seed: int = 1, **options: Any) -> DataLoader:
    """Return a loader of points in four dimensions with three classes; by default not shuffled."""
    made = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=made)
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), size, **options)
