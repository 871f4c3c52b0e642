"""Clusters that average, as plain training of replicas in one process: fast and reproducible.

A cluster of any size in ``sync`` computes what a single process computes. Therefore k clusters with
blocking rounds are k models, each with its share of the data and its own optimizer, that are averaged
at a fixed interval of updates. ``averaging.py`` checks that with real clusters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sorting import KINDS, LAYERS, LENGTH, WIDTH, token_loss
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from workloads import GPT, digits

from ravnest import set_seed

SEQUENCES, HELD_OUT = 16384, 1024
_ORDER = 9


@dataclass(frozen=True, eq=False)
class Lesson:
    """Task to learn, with its training settings."""

    name: str
    make: Callable[[], nn.Module]
    data: Callable[[int], tuple[TensorDataset, TensorDataset]]
    """Training data and held-out data of a seed."""
    loss_of: Callable[[Any, torch.Tensor], torch.Tensor]
    held_out_loss: Callable[[Any, torch.Tensor], torch.Tensor]
    batch: int
    optimizer: type[torch.optim.Optimizer]
    optimizer_params: dict[str, Any] = field(default_factory=dict)
    """Optimizer settings except the learning rate."""

    def loader(self, share: Any) -> DataLoader:
        """Return the batches in the order that all nodes of a cluster share."""
        order = torch.Generator().manual_seed(_ORDER)
        return DataLoader(share, self.batch, shuffle=True, generator=order, drop_last=True)

    def first(self, seed: int) -> nn.Module:
        """Return the model before training."""
        set_seed(seed)
        return self.make()


def shares(dataset: TensorDataset, clusters: int, seed: int = 42) -> list[Subset[Any]]:
    """Return the share that ``ravnest.shard`` gives each cluster."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
    bounds = [len(dataset) * part // clusters for part in range(clusters + 1)]
    return [Subset(dataset, order[bounds[c] : bounds[c + 1]]) for c in range(clusters)]


class Replicas:
    """Models of k clusters."""

    def __init__(self, lesson: Lesson, clusters: int, seed: int, rate: float) -> None:
        self._lesson = lesson
        self._train, self._held_out = lesson.data(seed)
        first = lesson.first(seed)
        self.models = [copy.deepcopy(first) for _ in range(clusters)]
        self._batches = [_endless(lesson.loader(s)) for s in shares(self._train, clusters)]
        self._optimizers = [
            lesson.optimizer(model.parameters(), lr=rate, **lesson.optimizer_params)
            for model in self.models
        ]
        self._samples = [0] * clusters

    def update(self, rate: float | None = None) -> None:
        """Run one update of each cluster."""
        for index, (model, optimizer) in enumerate(zip(self.models, self._optimizers, strict=True)):
            if rate is not None:
                optimizer.param_groups[0]["lr"] = rate
            inputs, targets = next(self._batches[index])
            optimizer.zero_grad()
            self._lesson.loss_of(model(inputs), targets).backward()
            optimizer.step()
            self._samples[index] += len(inputs)

    def average(self) -> None:
        """Replace all models by their mean, weighted by the samples since the last average."""
        mean = self.mean()
        for model in self.models:
            model.load_state_dict(mean, strict=False)
        self._samples = [0] * len(self.models)

    def mean(self) -> dict[str, torch.Tensor]:
        """Return all floating-point tensors."""
        if not any(self._samples):
            return self.models[0].state_dict()
        states, total = [model.state_dict() for model in self.models], sum(self._samples)
        weights = [samples / total for samples in self._samples]
        return {
            key: sum((s[key] * w for s, w in zip(states, weights, strict=True)), torch.zeros(()))
            for key, tensor in states[0].items()
            if tensor.is_floating_point()
        }

    def loss(self) -> float:
        """Return the loss of the averaged model on held-out data."""
        model = copy.deepcopy(self.models[0])
        model.load_state_dict(self.mean(), strict=False)
        model.eval()
        inputs, targets = self._held_out.tensors
        with torch.no_grad():
            return float(self._lesson.held_out_loss(model(inputs), targets))


def _endless(loader: DataLoader) -> Iterator[Any]:
    while True:
        yield from loader


def learn(
    lesson: Lesson,
    clusters: int,
    seed: int,
    *,
    rates: Sequence[float],
    reduce_factor: int,
    every: int,
) -> list[float]:
    """Return the held-out loss after each ``every`` updates; ``rates`` are the learning rates."""
    replicas, losses = Replicas(lesson, clusters, seed, rates[0]), []
    for update, rate in enumerate(rates, 1):
        replicas.update(rate)
        if update % reduce_factor == 0:
            replicas.average()
        if update % every == 0:
            losses.append(replicas.loss())
    return losses


def _digits_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    digits()
    from model import datasets  # noqa: PLC0415

    train_set, held_out = datasets(seed)
    return train_set, held_out


def _sequences(seed: int) -> tuple[TensorDataset, TensorDataset]:
    made = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, KINDS, (SEQUENCES + HELD_OUT, LENGTH), generator=made)
    whole = torch.cat([drawn, drawn.sort(1).values], 1)
    train, held_out = whole.split([SEQUENCES, HELD_OUT])
    return _next_tokens(train), _next_tokens(held_out)


def _next_tokens(whole: torch.Tensor) -> TensorDataset:
    return TensorDataset(whole[:, :-1].contiguous(), whole[:, 1:].contiguous())


def _known_places(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of the second half; the first half of a sequence is random."""
    return token_loss(logits[:, LENGTH - 1 :], targets[:, LENGTH - 1 :])


DIGITS = Lesson(
    "digits CNN",
    digits,
    _digits_data,
    nn.functional.cross_entropy,
    nn.functional.cross_entropy,
    8,
    torch.optim.AdamW,
)
SORTING = Lesson(
    "GPT that sorts",
    lambda: GPT(KINDS, WIDTH, LAYERS, 2 * LENGTH - 1),
    _sequences,
    token_loss,
    _known_places,
    8,
    torch.optim.AdamW,
)
