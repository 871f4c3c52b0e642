"""A node and its trainer, made from an assignment."""

from __future__ import annotations

import torch

from ravnest.jobs.naming import optimizer_class, scheduler_class
from ravnest.provider.workplace import WorkerSettings, Workplace
from ravnest.runtime.node import Node
from ravnest.runtime.trainer import Trainer
from ravnest.seed import set_seed

_CONNECT_SECONDS = 300.0
"""For the others to have their parts too."""


def warm_up(cores: int) -> None:
    """Have torch load what it loads at first use, so that it is not taken for the job's memory."""
    torch.set_num_threads(cores)
    weight = torch.ones(8, 8, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    (weight @ weight).sum().backward()
    optimizer.step()


def train(place: Workplace, settings: WorkerSettings) -> None:
    """Train the node of a workplace to the end."""
    assignment = place.read_assignment()
    training = assignment.training
    set_seed(training.seed)
    train_loader = loader(place, assignment.train, training, shuffle=training.shuffle)
    val_loader = loader(place, assignment.validation, training, shuffle=False)
    scheduler = training.scheduler
    with Node(
        name=f"node_{assignment.node}",
        optimizer=optimizer_class(training.optimizer.name),
        optimizer_params=training.optimizer.params,
        lr_scheduler=None if scheduler is None else scheduler_class(scheduler.name),
        lr_scheduler_params={} if scheduler is None else scheduler.params,
        lr_step_on_epoch_change=training.lr_step_on_epoch_change,
        criterion=criterion(place, training),
        update_frequency=training.update_frequency,
        reduce_factor=training.reduce_factor,
        labels=train_loader,
        test_labels=val_loader,
        loss_filename=place.losses,
        compression=training.compression or False,
        average_optim=training.average_optim,
        schedule=training.schedule,
        recompute=training.recompute,
        clip_grad_norm=training.clip_grad_norm,
        look_ahead=training.look_ahead,
        listen=settings.listen,
        connect_timeout=_CONNECT_SECONDS,
        folder=place.node_data,
        trained_folder=place.trained,
        progress=False,
    ) as node:
        trainer = Trainer(
            node=node,
            train_loader=train_loader,
            val_loader=val_loader,
            val_freq=training.val_freq,
            save=True,
            epochs=training.epochs,
            batch_size=training.batch_size,
        )
        trainer.train()
        if assignment.validation is not None:
            trainer.evaluate()
