"""A small CNN and the handwritten digits of scikit-learn."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class DigitsCNN(nn.Module):
    """Three convolutions with batch norm, then two linear layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.norm2 = nn.BatchNorm2d(32)
        self.conv3 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.norm3 = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Linear(64 * 4, 128)
        self.dropout = nn.Dropout(0.2)
        self.output = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.norm1(self.conv1(images)))
        features = self.pool(torch.relu(self.norm2(self.conv2(features))))
        features = self.pool(torch.relu(self.norm3(self.conv3(features))))
        hidden = torch.relu(self.hidden(features.flatten(1)))
        return self.output(self.dropout(hidden))


def datasets(seed: int = 42) -> tuple[TensorDataset, TensorDataset]:
    """Return training and validation data."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    train_x, test_x, train_y, test_y = train_test_split(
        pixels, torch.tensor(labels), test_size=0.25, random_state=seed, stratify=labels
    )
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def loaders(seed: int = 42, batch_size: int = 64) -> tuple[DataLoader, DataLoader]:
    """Return loaders of all data, in an order that depends only on the seed."""
    train_set, val_set = datasets(seed)
    order = torch.Generator().manual_seed(seed)
    train_loader = DataLoader(train_set, batch_size, shuffle=True, generator=order)
    return train_loader, DataLoader(val_set, batch_size)


def example() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Return the model and an example batch, for ``ravnest plan model:example``."""
    return DigitsCNN(), (torch.rand(64, 1, 8, 8),)
