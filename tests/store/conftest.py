"""One small model, split once: tied weights, batch norm, dropout, keyword input, named tuple output."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from ravnest.split import Split, split
from ravnest.store.bundle import save_stage


class Scores(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


class TiedModel(nn.Module):
    """The embedding of the first stage is the output layer of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, tokens: torch.Tensor, *, mask: torch.Tensor) -> Scores:
        hidden = (self.embed(tokens) * mask[..., None]).sum(1)
        hidden = torch.relu(self.norm(self.body(hidden)))
        hidden = self.dropout(hidden) * self.scale
        return Scores(self.head(hidden), hidden)


class Example(NamedTuple):
    model: TiedModel
    split: Split
    tokens: torch.Tensor
    mask: torch.Tensor


@pytest.fixture(scope="session")
def example() -> Example:
    """The model, its three stages, and a batch of four."""
    torch.manual_seed(3)
    model = TiedModel()
    tokens, mask = torch.randint(0, 11, (4, 5)), torch.rand(4, 5)
    stages = split(model, (tokens,), {"mask": mask}, stages=3)
    return Example(model, stages, tokens, mask)


@pytest.fixture(scope="session")
def saved(example: Example, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the bundles of the stages, ``0`` to ``2``; tests must not change it."""
    folder = tmp_path_factory.mktemp("bundles")
    for stage in example.split.stages:
        save_stage(folder / str(stage.spec.index), stage)
    return folder


@pytest.fixture
def last(saved: Path, tmp_path: Path) -> Path:
    """A copy of the last stage's bundle, which a test may damage."""
    return Path(shutil.copytree(saved / "2", tmp_path / "bundle"))
