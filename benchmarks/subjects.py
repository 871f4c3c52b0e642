"""Models for the measurements of cost, memory and splitting: random weights, small but real."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from zoo_models.vision import torchvision_models, torchvision_schemas

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Subject:
    """Model with example inputs, created anew at each call of ``make``."""

    name: str
    make: Callable[[], Example]

    def build(self, seed: int = 0) -> Example:
        """Return the model, its arguments and keyword arguments, which depend only on the seed."""
        torch.manual_seed(seed)
        return self.make()


def loss_of(output: Any) -> torch.Tensor:
    """Return the model's own loss if it has one, else the mean square of its output."""
    if isinstance(output, torch.Tensor):
        return output.square().mean()
    loss: torch.Tensor = output.loss
    return loss


def digits_cnn(batch: int) -> Example:
    """Return the model of the demo."""
    folder = str(Path(__file__).resolve().parent.parent / "examples" / "digits")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from model import DigitsCNN  # noqa: PLC0415

    return DigitsCNN(), (torch.rand(batch, 1, 8, 8),), {}


def mlp(batch: int, width: int, layers: int = 4) -> Example:
    """Return linear layers of one width with ReLU."""
    inner = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*inner, nn.Linear(width, 10)), (torch.randn(batch, width),), {}


def resnet(depth: int, batch: int, size: int) -> Example:
    """Return the torchvision ResNet with its 1000 classes."""
    model = torchvision_models().get_model(f"resnet{depth}", weights=None)
    return model, (torch.randn(batch, 3, size, size),), {}


def vit(batch: int, size: int = 64) -> Example:
    """Return a small torchvision Vision Transformer."""
    model = torchvision_models().VisionTransformer(
        image_size=size,
        patch_size=8,
        num_layers=6,
        num_heads=4,
        hidden_dim=192,
        mlp_dim=768,
        dropout=0.1,
        num_classes=100,
    )
    return model, (torch.randn(batch, 3, size, size),), {}


def gpt2(batch: int, length: int, width: int = 256, layers: int = 4) -> Example:
    """Return the transformers GPT-2 with tied embeddings and the language-model loss."""
    torchvision_schemas()
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    config = GPT2Config(
        vocab_size=4000, n_positions=length, n_embd=width, n_layer=layers, n_head=4, use_cache=False
    )
    text = torch.randint(0, 4000, (batch, length))
    return GPT2LMHeadModel(config), (), {"input_ids": text, "labels": text}


def bert(batch: int, length: int, *, base: bool = False) -> Example:
    """Return the transformers BERT with the masked-language-model loss, small or of BERT-base's size."""
    torchvision_schemas()
    from transformers import BertConfig, BertForMaskedLM  # noqa: PLC0415

    small = {
        "vocab_size": 4000,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    }
    text = torch.randint(5, 4000, (batch, length))
    mask = torch.ones_like(text)
    mask[:, -3:] = 0
    inputs = {"input_ids": text, "attention_mask": mask, "labels": text}
    return BertForMaskedLM(BertConfig(**({} if base else small))), (), inputs


class Tagger(nn.Module):
    """Embedding, a two-layer LSTM or GRU with dropout, a linear layer."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.recurrent = kind(width, width, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, 50)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.embed(text))
        return self.head(hidden)


def lstm(batch: int, length: int, width: int = 128) -> Example:
    """Return a tagger with LSTM layers."""
    return Tagger(nn.LSTM, width), (torch.randint(0, 1000, (batch, length)),), {}


def gru(batch: int, length: int, width: int = 128) -> Example:
    """Return a tagger with GRU layers."""
    return Tagger(nn.GRU, width), (torch.randint(0, 1000, (batch, length)),), {}
