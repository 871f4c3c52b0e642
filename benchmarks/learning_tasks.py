"""Small tasks on which learning is compared with one process: models, data, losses and settings."""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workloads import Block, digits

from ravnest import set_seed

Data = tuple[TensorDataset, TensorDataset]


@dataclass(frozen=True, eq=False)
class Task:
    """Model, data and training settings."""

    name: str
    make: Callable[[], nn.Module]
    data: Callable[[int], Data]
    """Training and validation data of a seed; a sample is the inputs of the model and the labels."""
    loss: Callable[[torch.Tensor, Any], torch.Tensor]
    """Loss of an output and a batch."""
    batch: int
    epochs: int
    rate: float
    """Largest learning rate."""
    clip: float | None = None
    split: bool = True
    """True if the batches can be split into micro-batches."""
    whole_batches: bool = False
    """Leave out the last batch of an epoch if it is smaller."""

    def loaders(self, seed: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
        """Return training and validation batches, in an order that depends only on the seed."""
        train, validation = self.data(seed)
        order = torch.Generator().manual_seed(seed)
        return (
            DataLoader(train, self.batch, shuffle=True, generator=order, drop_last=self.whole_batches),
            DataLoader(validation, 256),
        )

    def batches(self, seed: int) -> Iterator[Any]:
        """Yield the batches of all epochs."""
        loader, _ = self.loaders(seed)
        for _ in range(self.epochs):
            yield from loader

    def first(self, seed: int) -> nn.Module:
        """Return the model before training."""
        set_seed(seed)
        return self.make()

    def one_cycle(self, seed: int) -> dict[str, Any]:
        """Return the settings of the learning-rate schedule."""
        updates = self.epochs * len(self.loaders(seed)[0])
        return {"max_lr": self.rate, "total_steps": updates, "cycle_momentum": False}

    def validation_loss(self, model: nn.Module, seed: int) -> float:
        """Return the mean loss over the validation data."""
        model.eval()
        total = count = 0.0
        with torch.no_grad():
            for batch in self.loaders(seed)[1]:
                total += len(batch[0]) * float(self.loss(model(*batch[:-1]), batch))
                count += len(batch[0])
        return total / count


TEXT_FILES = ("argparse.py", "ast.py", "calendar.py", "configparser.py", "csv.py", "datetime.py")
TEXT_LENGTH = 32


@cache
def _python_text() -> torch.Tensor:
    """Return the bytes of some modules of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join((folder / name).read_bytes() for name in TEXT_FILES if (folder / name).exists())
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def _windows(text: torch.Tensor, count: int, draw: torch.Generator) -> TensorDataset:
    starts = torch.randint(0, len(text) - TEXT_LENGTH - 1, (count, 1), generator=draw)
    found = text[starts + torch.arange(TEXT_LENGTH + 1)]
    return TensorDataset(found[:, :-1].contiguous(), found[:, 1:].contiguous())


def text_data(seed: int) -> Data:
    """Return pieces of Python's text, and of the last tenth of it for validation."""
    text, draw = _python_text(), torch.Generator().manual_seed(seed)
    end = len(text) * 9 // 10
    return _windows(text[:end], 1600, draw), _windows(text[end:], 256, draw)


class TiedGPT(nn.Module):
    """Byte-level decoder whose output layer has the weights of the embedding."""

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        nn.init.normal_(self.embed.weight, std=0.05)
        self.positions = nn.Parameter(torch.randn(TEXT_LENGTH, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next byte at each position."""
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return the cross entropy over all positions."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[-1].flatten())


def class_loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return the cross entropy of the labels."""
    return nn.functional.cross_entropy(logits, batch[-1])


def square_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return the mean squared error."""
    return nn.functional.mse_loss(output, batch[-1])


def sine_data(seed: int) -> Data:
    """Return noisy samples of a sine over two periods."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(1536, 1, generator=draw) * 2 - 1
    y = torch.sin(2 * torch.pi * x) + 0.1 * torch.randn(x.shape, generator=draw)
    return TensorDataset(x[:1024], y[:1024]), TensorDataset(x[1024:], y[1024:])


def sine_model() -> nn.Module:
    """Return an MLP of six linear layers."""
    widths = [1, *[32] * 5, 1]
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


WORDS, KINDS, PHRASE = 24, 3, 16


def phrase_data(seed: int) -> Data:
    """Return phrases of different lengths with their masks; the label is the most frequent kind."""
    draw = torch.Generator().manual_seed(seed)
    count = 1536
    words = torch.randint(1, WORDS, (count, PHRASE), generator=draw)
    lengths = torch.randint(PHRASE // 2, PHRASE + 1, (count, 1), generator=draw)
    mask = torch.arange(PHRASE) < lengths
    kinds = nn.functional.one_hot(words % KINDS, KINDS) * mask[..., None]
    labels = kinds.sum(1).argmax(1)
    tensors = words * mask, mask, labels
    return (
        TensorDataset(*(tensor[:1280] for tensor in tensors)),
        TensorDataset(*(tensor[1280:] for tensor in tensors)),
    )


class PhraseClassifier(nn.Module):
    """BERT-like encoder; the first position is classified."""

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.positions = nn.Parameter(torch.randn(PHRASE, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 2, inner=2, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, KINDS)

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the logits of the kinds."""
        x = self.embed(words) + self.positions
        for block in self.blocks:
            x = block(x, mask[:, None, None, :])
        return self.head(self.norm(x)[:, 0])


def digits_data(seed: int) -> Data:
    """Return scikit-learn's digits."""
    digits()
    from model import datasets  # noqa: PLC0415

    train, validation = datasets(seed)
    return train, validation


class DigitsViT(nn.Module):
    """Vision transformer over 16 patches of 2 x 2 pixels."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.positions = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 2, inner=2, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of the digits."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


TAGS, SENTENCE = 4, 12


def sentence_data(seed: int) -> Data:
    """Return sentences; the tag of a word depends on it and on the word before."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 4 * TAGS, (1536, SENTENCE), generator=draw)
    tags = (words + words.roll(1, 1)) % TAGS
    tags[:, 0] = words[:, 0] % TAGS
    return TensorDataset(words[:1280], tags[:1280]), TensorDataset(words[1280:], tags[1280:])


class Tagger(nn.Module):
    """LSTM of three layers that tags each word."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(4 * TAGS, width)
        self.first = nn.LSTM(width, width, batch_first=True)
        self.second = nn.LSTM(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, width)
        self.between = nn.Linear(width, width)
        self.head = nn.Linear(width, TAGS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tags at each position."""
        x, _ = self.first(self.embed(words))
        x, _ = self.second(x)
        x = torch.relu(self.hidden(self.norm(x)))
        return self.head(torch.relu(self.between(x)))


TASKS = (
    Task("GPT, tied weights, clipping", TiedGPT, text_data, token_loss, 16, 1, 3e-3, clip=1.0),
    Task("sine regression, MLP", sine_model, sine_data, square_loss, 32, 8, 1e-2),
    Task("BERT-like classifier", PhraseClassifier, phrase_data, class_loss, 32, 4, 2e-3),
    Task("ViT, digits", DigitsViT, digits_data, class_loss, 64, 6, 5e-3),
    Task("LSTM tagger", Tagger, sentence_data, token_loss, 32, 3, 5e-3),
    Task("CNN with batch norm, digits", digits, digits_data, class_loss, 64, 6, 1e-3, split=False),
)
