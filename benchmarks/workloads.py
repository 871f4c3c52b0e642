"""Workloads of the compared pipelines: models, endless batches, and their stages on disk."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ravnest import clusterize, set_seed

NODE_DATA = "node_data"
_BATCHES = 8
"""Number of different batches of a loader, which repeat."""

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """Model with its training settings."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    """Inputs and targets of one batch, which is one update."""
    micro_batches: int
    """Micro-batches in a batch."""

    @property
    def samples(self) -> int:
        """Samples in a batch."""
        return len(self.batch()[0])

    def model(self) -> nn.Module:
        """Return the model, with the same weights at each call."""
        set_seed(1)
        return self.make()

    def loader(self) -> Endless:
        """Return the batches, the same at each call."""
        torch.manual_seed(2)
        return Endless([self.batch() for _ in range(_BATCHES)])

    def form(self, folder: Path, addresses: Sequence[str], bandwidth: float = 1000) -> list[str]:
        """Split the model for a node at each address; return their names, Root first."""
        (names,) = self.form_clusters(folder, addresses, 1, bandwidth)
        return names

    def form_clusters(
        self, folder: Path, addresses: Sequence[str], clusters: int, bandwidth: float = 1000
    ) -> list[list[str]]:
        """Split the model for several clusters, as the planner chooses them."""
        node_data = folder / NODE_DATA
        node_data.mkdir(parents=True)
        benchmarks = {"ram": 4, "bandwidth": bandwidth}
        configs = {
            str(i): {"IP": address, "benchmarks": benchmarks} for i, address in enumerate(addresses)
        }
        (node_data / "node_configs.json").write_text(json.dumps(configs), encoding="utf-8")
        model = self.model()
        with contextlib.redirect_stdout(io.StringIO()):
            plan = clusterize(model, (self.batch()[0],), clusters=clusters, folder=node_data)
        return [[f"node_{stage.node.id}" for stage in each.stages] for each in plan.clusters]


class Endless(list[Batch]):
    """Endless loader; each iteration starts from the first batch."""

    def __iter__(self) -> Iterator[Batch]:
        return itertools.cycle(self[number] for number in range(len(self)))


def loss_of(output: torch.Tensor, targets: Any) -> torch.Tensor:
    """Return the cross entropy over all positions; accepts targets, or a batch that ends with them."""
    if isinstance(targets, list | tuple):
        targets = targets[-1]
    return nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def free_addresses(count: int) -> list[str]:
    """Return a free loopback address."""
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def free_ports(count: int) -> list[int]:
    """Return free ports below those that the system gives to outgoing connections.

    Nodes listen at them later, or again after a restart; meanwhile no connection takes them.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(range(12_000, 32_000), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"{count} free ports were not found")


class Block(nn.Module):
    """Transformer block: attention, causal or within a mask, and an MLP."""

    def __init__(self, width: int, heads: int, *, inner: int = 4, causal: bool = True) -> None:
        """``inner`` is the width of the MLP's hidden layer, as a multiple of ``width``."""
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, inner * width), nn.GELU(), nn.Linear(inner * width, width)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Mix positions, then channels."""
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.reshape(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal
        )
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Decoder with separate weights at both ends: torch's pipelines do not support tied weights."""

    def __init__(self, vocabulary: int, width: int, layers: int, length: int, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token at each position."""
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mlp() -> nn.Module:
    """Return six linear layers: width 512 outside, 2048 inside; 76 MB of weights."""
    return _mlp(2048)


def _mlp(width: int) -> nn.Module:
    widths = [512, *[width] * 5, 512]
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def wide_mlp() -> nn.Module:
    """Return six linear layers with width 4096 inside: 285 MB of weights."""
    return _mlp(4096)


def small_gpt() -> nn.Module:
    """Return a GPT with six layers of width 128."""
    return GPT(vocabulary=512, width=128, layers=6, length=64)


def digits() -> nn.Module:
    """Return the model of the demo."""
    folder = str(Path(__file__).resolve().parent.parent / "examples" / "digits")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from model import DigitsCNN  # noqa: PLC0415

    return DigitsCNN()


def _classes(shape: tuple[int, ...], classes: int) -> Batch:
    return torch.rand(shape), torch.randint(0, classes, shape[:1])


def _text(batch: int, length: int, vocabulary: int) -> Batch:
    text = torch.randint(0, vocabulary, (batch, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


DIGITS = Workload("digits CNN, batch 64", digits, lambda: _classes((64, 1, 8, 8), 10), 1)
MLP = Workload("6-layer MLP 512/2048, batch 512", mlp, lambda: _classes((512, 512), 512), 8)
SLIM_MLP = Workload("6-layer MLP 512/2048, batch 8", mlp, lambda: _classes((8, 512), 512), 1)
WIDE_MLP = Workload("6-layer MLP 512/4096, batch 8", wide_mlp, lambda: _classes((8, 512), 512), 1)
SMALL_GPT = Workload("GPT, 6 layers of 128, batch 64 x 64", small_gpt, lambda: _text(64, 64, 512), 8)
MEDIUM_GPT = Workload(
    "GPT, 6 layers of 384, batch 16 x 64",
    lambda: GPT(512, 384, 6, 64),
    lambda: _text(16, 64, 512),
    8,
)
THIN_GPT = Workload(
    "GPT, 3 layers of 48, batch 512 x 32",
    lambda: GPT(64, 48, 3, 32, heads=1),
    lambda: _text(512, 32, 64),
    8,
)
"""GPT with one layer per node: little computation for its traffic. Heads are as wide as GPT-2's."""
WORKLOADS = {w.name: w for w in (DIGITS, MLP, SLIM_MLP, WIDE_MLP, SMALL_GPT, MEDIUM_GPT, THIN_GPT)}
