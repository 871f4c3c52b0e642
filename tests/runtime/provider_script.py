"""Script of a provider, as documented: ``provider_script.py node_<i> [settings as JSON]``."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn
from training_cases import image_loaders, points, token_loaders, token_loss

from ravnest import Node, Trainer, set_seed

EPOCHS = 4
BATCHES = 5


def rule() -> dict[str, Any]:
    """Return the optimizer and scheduler settings."""
    return {
        "optimizer": torch.optim.AdamW,
        "optimizer_params": {"lr": 1e-2},
        "lr_scheduler": torch.optim.lr_scheduler.StepLR,
        "lr_scheduler_params": {"step_size": 1, "gamma": 0.5},
    }


def loaders(case: str = "mlp") -> tuple[Any, Any]:
    """Return training and validation data, in the same order in all processes."""
    if case == "digits-cnn":
        return image_loaders(BATCHES)
    if case == "tied-gpt":
        return token_loaders(BATCHES)
    order = torch.Generator().manual_seed(42)
    return points(shuffle=True, generator=order), points(12, seed=3)


def criterion(case: str) -> Any:
    """Return the loss function, of outputs and batch or of outputs and targets."""
    return token_loss if case == "tied-gpt" else nn.functional.cross_entropy


class Announcing(Trainer):
    """Trainer that prints a line when training is under way, so that a test can interrupt it."""

    def train(self) -> None:
        if self.node.is_root:
            self.prelim_checks()
            x = torch.rand(5, 4)
            for number in range(self.epochs * BATCHES):
                self.node.forward_compute(x)
                if number == BATCHES:
                    sys.stdout.write("under way\n")
                    sys.stdout.flush()
            return
        sys.stdout.write("under way\n")
        sys.stdout.flush()
        self.prelim_checks()


def main(name: str, given: dict[str, Any]) -> None:
    set_seed(42)
    torch.set_num_threads(1)
    epochs = given.pop("epochs", EPOCHS)
    endless = given.pop("endless", False)
    announced = given.pop("announced", 10**6 if endless else 0)  # micro-batches of such a run
    evaluates = given.pop("evaluate", True)
    raises = given.pop("raises", None)
    case = given.pop("case", "mlp")
    train_loader, val_loader = loaders(case)
    node = Node(
        name=name,
        criterion=criterion(case),
        labels=torch.zeros(5 * announced, dtype=torch.long) if announced else train_loader,
        test_labels=val_loader,
        **(rule() | given),
    )
    kind = Announcing if announced else Trainer
    trainer = kind(
        node=node,
        train_loader=train_loader,
        val_loader=None if announced else val_loader,
        epochs=announced // BATCHES if announced else epochs,
        save=True,
    )
    trainer.train()
    if raises == name:
        raise LookupError("of the user's")
    if evaluates:
        trainer.evaluate()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
