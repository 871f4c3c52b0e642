"""Validation loss of pipelines relative to one process, at equal samples and equal initial weights.

Six small tasks train in one process, with Ravnest at its defaults (`schedule="auto"`) and with
`schedule="async"`: a byte-level GPT with tied weights on Python's own standard library, a sine
regression, a BERT-like classifier with an attention mask, the demo's CNN with batch norm and a ViT on
scikit-learn's digits, and an LSTM tagger. All use AdamW with warm-up and decay (OneCycle) per update;
the GPT clips its gradients. Nodes are threads of one process over the in-memory network. They state a
low computing speed, so that the plan splits batches as it does for models whose steps take seconds.
Batch norm couples the samples of a batch, so that its batches are not split and `auto` chooses `async`;
there `look_ahead` is measured too. Each run is evaluated in one process from the merged stages.
Run as a script to print the report; arguments choose tasks by the first word of their names.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workloads import NODE_DATA, Block, digits, free_addresses

from ravnest import Node, Trainer, clusterize, model_fusion, set_seed
from ravnest.transport.memory import MemoryNetwork

SEEDS = int(os.environ.get("RAVNEST_BENCH_SEEDS", "3"))
STAGES = (3, 8)
DEADLINE = 300.0
GIGAFLOPS = 0.2
"""Stated computing speed of the nodes."""
SPLIT_GOAL, WHOLE_GOAL = 0.01, 0.05
"""Largest accepted relative difference to one process, of batches that are split and that are not."""

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

    def loaders(self, seed: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
        """Return training and validation batches, in an order that depends only on the seed."""
        train, validation = self.data(seed)
        order = torch.Generator().manual_seed(seed)
        return (
            DataLoader(train, self.batch, shuffle=True, generator=order),
            DataLoader(validation, 256),
        )

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


def train_alone(task: Task, seed: int) -> float:
    """Return the validation loss of one process."""
    model = task.first(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, **task.one_cycle(seed))
    loader, _ = task.loaders(seed)
    for _ in range(task.epochs):
        for batch in loader:
            optimizer.zero_grad()
            task.loss(model(*batch[:-1]), batch).backward()
            if task.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), task.clip)
            optimizer.step()
            scheduler.step()
    return task.validation_loss(model, seed)


class Pipeline:
    """Stages of a task's model on disk, trained once per call of ``train``."""

    def __init__(self, task: Task, stages: int, folder: Path) -> None:
        """Split the model for ``stages`` equal nodes."""
        self._task, self._folder = task, folder
        node_data = folder / NODE_DATA
        node_data.mkdir(parents=True)
        benchmarks = {"ram": 4, "bandwidth": 1000, "compute": GIGAFLOPS}
        nodes = {
            str(number): {"IP": address, "benchmarks": benchmarks}
            for number, address in enumerate(free_addresses(stages))
        }
        (node_data / "node_configs.json").write_text(json.dumps(nodes), encoding="utf-8")
        example = next(iter(task.loaders(0)[0]))[:-1]
        with contextlib.redirect_stdout(io.StringIO()):
            plan = clusterize(task.first(0), tuple(example), clusters=1, folder=node_data)
        (cluster,) = plan.clusters
        self._names = [f"node_{stage.node.id}" for stage in cluster.stages]
        self.schedule = plan.schedule
        """Schedule of ``auto``."""
        self.microbatches = cluster.microbatches
        """Micro-batches of a batch."""

    def train(self, seed: int, **settings: Any) -> float:
        """Return the validation loss; ``settings`` are further keywords of the nodes."""
        task, folder = self._task, self._folder
        network, model = MemoryNetwork(), task.first(seed)
        scheduler_params = task.one_cycle(seed)
        errors: list[BaseException] = []
        split: list[int] = []

        def provide(name: str) -> None:
            loader, _ = task.loaders(seed)
            try:
                with Node(
                    name,
                    model=model,
                    optimizer=torch.optim.AdamW,
                    optimizer_params={"lr": task.rate},
                    lr_scheduler=torch.optim.lr_scheduler.OneCycleLR,
                    lr_scheduler_params=scheduler_params,
                    lr_step_on_epoch_change=False,
                    criterion=task.loss,
                    labels=loader,
                    clip_grad_norm=task.clip,
                    seed=seed,
                    folder=folder / NODE_DATA,
                    trained_folder=folder / "trained",
                    loss_filename=folder / "losses.txt",
                    progress=False,
                    transport=network.transport(),
                    **settings,
                ) as node:
                    Trainer(node, train_loader=loader, epochs=task.epochs, save=True).train()
                    if node.is_root:
                        split.append(node._controller()._split().parts(task.batch))
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=provide, args=(n,), daemon=True) for n in self._names]
        with contextlib.redirect_stdout(io.StringIO()):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE)
        assert not errors, errors
        assert split == [self.microbatches], f"{split} micro-batches instead of {self.microbatches}"
        trained = task.first(seed)
        path = model_fusion(0, folder=folder / "trained")
        trained.load_state_dict(torch.load(path, weights_only=True))
        return task.validation_loss(trained, seed)


# The tasks

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


class EncoderBlock(nn.Module):
    """Transformer block: attention within a mask (or everywhere) and an MLP of twice the width."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Mix positions, then channels."""
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.reshape(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class PhraseClassifier(nn.Module):
    """BERT-like encoder; the first position is classified."""

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.positions = nn.Parameter(torch.randn(PHRASE, width) * 0.02)
        self.blocks = nn.ModuleList(EncoderBlock(width) for _ in range(layers))
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
        self.blocks = nn.ModuleList(EncoderBlock(width) for _ in range(layers))
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


@dataclass(frozen=True)
class Row:
    """Losses of one pipeline, by seed."""

    task: Task
    stages: int
    schedule: str
    microbatches: int
    alone: list[float]
    losses: list[float]

    @property
    def difference(self) -> float:
        """Relative difference of the mean loss to one process."""
        return statistics.fmean(self.losses) / statistics.fmean(self.alone) - 1

    def __str__(self) -> str:
        goal = SPLIT_GOAL if self.task.split else WHOLE_GOAL
        each = [loss / one - 1 for loss, one in zip(self.losses, self.alone, strict=True)]
        default = "default" in self.schedule
        return (
            f"| {self.task.name} | {self.stages} | {self.microbatches} | {self.schedule} | "
            f"{statistics.fmean(self.alone):.4f} | {statistics.fmean(self.losses):.4f} | "
            f"{'**' if default else ''}{self.difference:+.2%}{'**' if default else ''} | "
            f"{min(each):+.2%} to {max(each):+.2%} | {f'{goal:.0%}' if default else ''} |"
        )


def _rows(task: Task) -> list[Row]:
    alone = [train_alone(task, seed) for seed in range(SEEDS)]
    rows = []
    for stages in STAGES:
        with tempfile.TemporaryDirectory() as scratch:
            pipeline = Pipeline(task, stages, Path(scratch))
            variants: dict[str, dict[str, Any]] = {f"{pipeline.schedule} (default)": {}}
            if pipeline.schedule == "async":
                variants["async, `look_ahead`"] = {"look_ahead": True}
            elif stages == min(STAGES):  # the delay is one update with any number of stages
                variants["async"] = {"schedule": "async"}
            for name, settings in variants.items():
                begin = time.perf_counter()
                losses = [pipeline.train(seed, **settings) for seed in range(SEEDS)]
                rows.append(Row(task, stages, name, pipeline.microbatches, alone, losses))
                print(rows[-1], f"{time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return rows


def measure(tasks: Sequence[str] = ()) -> str:
    """Return the report as Markdown; ``tasks`` are first words of names, by default all."""
    torch.set_num_threads(1)
    chosen = [task for task in TASKS if not tasks or task.name.split()[0].strip(",") in tasks]
    lines = [
        f"Mean validation loss of {SEEDS} seeds; above 0% means a larger loss than in one process.",
        "",
        "| task | stages | micro-batches per batch | schedule | one process | pipeline | difference "
        "| all seeds | goal, at most |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|",
        *(str(row) for task in chosen for row in _rows(task)),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(measure(sys.argv[1:]))
