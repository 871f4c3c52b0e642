"""The digits CNN as a job for the providers of a server: ``ravnest submit job:job``."""

import torch
from model import DigitsCNN, datasets
from torch import nn

from ravnest import Job, set_seed


def job() -> Job:
    """Return the job: model, data, loss, optimizer and settings."""
    set_seed(42)
    train_set, val_set = datasets()
    return Job(
        model=DigitsCNN(),
        example_args=(torch.rand(64, 1, 8, 8),),
        train_data=train_set,
        val_data=val_set,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW,
        optimizer_params={"lr": 2e-3},
        lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR,
        lr_scheduler_params={"T_max": 20},
        epochs=20,
        batch_size=64,
        val_freq=5,
        name="digits",
    )
