"""A pipeline trains batches of different lengths as one process does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from local_cluster import LocalCluster, form
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from training_cases import TiedGPT, train_alone

from ravnest import set_seed


def padded(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad a batch to its longest sequence; padded positions do not count."""
    ids = pad_sequence(samples, batch_first=True)
    labels = pad_sequence([sample.sort().values for sample in samples], True, -100.0)
    return ids, labels


def loaders() -> tuple[DataLoader, DataLoader]:
    made = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 9, (38,), generator=made).tolist()
    samples = [torch.randint(0, 16, (length,), generator=made) for length in lengths]
    order = torch.Generator().manual_seed(1)
    train = DataLoader(samples, 4, shuffle=True, generator=order, collate_fn=padded)  # type: ignore[arg-type]
    return train, DataLoader(samples[:6], 4, collate_fn=padded)  # type: ignore[arg-type]


def token_loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[-1].flatten())


def test_batches_padded_to_their_longest_sample_train_as_in_one_process(tmp_path: Path) -> None:
    set_seed(3)
    model = TiedGPT()
    example = (torch.randint(0, 16, (4, 8)),)
    names = form(tmp_path, copy.deepcopy(model), example, 3, varying={"tokens": [1]})
    assert {ids.shape[1] for ids, _ in loaders()[0]} > {8}
    cluster = LocalCluster(tmp_path, names)
    settings = {"criterion": token_loss, "schedule": "sync", "micro_batches": 2}
    cluster.train(loaders, node=settings, epochs=2, save=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_alone(model, loaders()[0], token_loss, optimizer, epochs=2)
    found = cluster.fused()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
