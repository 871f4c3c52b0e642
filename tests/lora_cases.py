"""A small text classifier of Transformers with a LoRA adapter of peft, and data that it can learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from zoo_models.vision import torchvision_schemas


def libraries() -> tuple[Any, Any]:
    """Return transformers and peft; skip the test if one is missing."""
    torchvision_schemas()  # transformers imports torchvision, of whichever build
    return pytest.importorskip("transformers"), pytest.importorskip("peft")


def base_model() -> nn.Module:
    """Return a BERT with random weights, without dropout."""
    transformers, _ = libraries()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def lora_model() -> nn.Module:
    """Return the same BERT with an adapter; the base and the old classifier are frozen."""
    _, peft = libraries()
    base = base_model()
    torch.manual_seed(1)
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["query", "value"]
    )
    model: nn.Module = peft.get_peft_model(base, config)
    return model


def sentences(count: int = 40) -> list[dict[str, torch.Tensor]]:
    """Return token sequences; the label says whether token 5 is among them."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(6, 32, (count, 8), generator=generator)
    ids[::2, 3] = 5
    mask = torch.ones_like(ids)
    labels = (ids == 5).any(1).long()
    return [
        {"input_ids": one, "attention_mask": two, "labels": label}
        for one, two, label in zip(ids, mask, labels, strict=True)
    ]
