"""Script of every provider: ``python provider.py node_0``, with the name of its node."""

import sys

import torch
from model import datasets
from torch import nn
from torch.utils.data import DataLoader

from ravnest import Node, Trainer, set_seed, shard

set_seed(42)


def preprocess_dataset(name: str) -> tuple[DataLoader, DataLoader]:
    """Return the cluster's share of the training data, and the validation data.

    The order is the same on all nodes of a cluster, so that they see the same batches.
    """
    train_set, val_set = datasets()
    order = torch.Generator().manual_seed(42)
    share = shard(train_set, name)
    return DataLoader(share, 64, shuffle=True, generator=order), DataLoader(val_set, 64)


if __name__ == "__main__":
    train_loader, val_loader = preprocess_dataset(sys.argv[1])

    node = Node(
        name=sys.argv[1],
        optimizer=torch.optim.AdamW,
        optimizer_params={"lr": 2e-3},
        lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR,
        lr_scheduler_params={"T_max": 20},
        criterion=nn.CrossEntropyLoss(),
        labels=train_loader,
        test_labels=val_loader,
    )

    trainer = Trainer(
        node=node,
        train_loader=train_loader,
        val_loader=val_loader,
        val_freq=5,
        epochs=20,
        save=True,
    )

    trainer.train()
    trainer.evaluate()
