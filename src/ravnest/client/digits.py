"""The job of ``ravnest demo``: a small CNN that classifies handwritten digits."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ravnest.jobs.job import Job

_SIDE = 8
_CLASSES = 10


def network() -> nn.Module:
    """Return a CNN that maps images of 8 x 8 pixels to one score per digit."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64 * 16, _CLASSES),
    )


def digits() -> tuple[TensorDataset, TensorDataset, str]:
    """Return training data, validation data and a description of the data."""
    if find_spec("sklearn") is None:
        images, labels = _synthetic_patterns(1800)
        description = "1800 noisy patterns of 10 classes (scikit-learn, which has digits, is missing)"
    else:
        images, labels = _scanned_digits()
        description = f"{len(images)} handwritten digits"
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(42))
    images, labels = images[order], labels[order]
    held_out = len(images) // 4
    train = TensorDataset(images[held_out:], labels[held_out:])
    return train, TensorDataset(images[:held_out], labels[:held_out]), description


def _scanned_digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits  # noqa: PLC0415  # an optional dependency

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16.0, dtype=torch.float32)
    return images.reshape(-1, 1, _SIDE, _SIDE), torch.tensor(labels)


def _synthetic_patterns(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy copies of one random pattern per class, which the network can learn."""
    generator = torch.Generator().manual_seed(42)
    patterns = torch.rand(_CLASSES, 1, _SIDE, _SIDE, generator=generator)
    labels = torch.arange(count) % _CLASSES
    noise = torch.randn(count, 1, _SIDE, _SIDE, generator=generator)
    return patterns[labels] + 0.3 * noise, labels


def digits_job(train: TensorDataset, validation: TensorDataset, *, epochs: int, providers: int) -> Job:
    """Return a job that waits for ``providers`` providers and uses all of them."""
    torch.manual_seed(42)
    return Job(
        model=network(),
        example_args=(torch.rand(64, 1, _SIDE, _SIDE),),
        train_data=train,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW,
        optimizer_params={"lr": 2e-3},
        lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR,
        lr_scheduler_params={"T_max": epochs},
        epochs=epochs,
        batch_size=64,
        val_data=validation,
        name="digits",
        min_providers=providers,
        max_providers=providers,
    )


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Return the share of samples that the model classifies correctly."""
    model.eval()
    images, labels = data.tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())
