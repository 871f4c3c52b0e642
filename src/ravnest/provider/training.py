"""A node and its trainer, made from an assignment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from ravnest.errors import DataError
from ravnest.jobs.dataset_reader import Rows, SharedData
from ravnest.jobs.graph_loss import load_loss
from ravnest.jobs.registry import loss_function, optimizer_class, scheduler_class
from ravnest.provider.job_dir import JobDir, WorkerSettings
from ravnest.runtime.node import Node
from ravnest.runtime.trainer import Trainer
from ravnest.schemas.jobs import GraphLoss, TrainingSpec
from ravnest.schemas.providers import DataShare, RowRange
from ravnest.seed import set_seed

_CONNECT_SECONDS = 300.0
"""For the others to have their parts too."""


def warm_up(cores: int) -> None:
    """Have torch load what it loads at first use, so that it is not taken for the job's memory."""
    torch.set_num_threads(cores)
    weight = torch.ones(8, 8, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    (weight.grad,) = torch.autograd.grad((weight @ weight).sum(), weight)
    optimizer.step()


def train(place: JobDir, settings: WorkerSettings) -> None:
    """Train the node of a workplace to the end."""
    assignment = place.read_assignment()
    training = assignment.training
    set_seed(training.seed)
    train_loader = loader(
        place, assignment.train, training, shuffle=training.shuffle, drop_last=training.drop_last
    )
    val_loader = loader(place, assignment.validation, training)
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


def loader(
    place: JobDir,
    share: DataShare | None,
    training: TrainingSpec,
    *,
    shuffle: bool = False,
    drop_last: bool = False,
) -> DataLoader[dict[str, torch.Tensor]] | None:
    """The batches of a share, in the same order at Root and Leaf; None where a node needs none."""
    if share is None or not (share.inputs or share.labels):
        return None
    data = SharedData(_rows(place, share.inputs), _rows(place, share.labels))
    if len(data) != share.samples:
        raise DataError(f"a share of {share.samples} samples came with {len(data)}")
    return DataLoader(
        data,
        training.batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        generator=torch.Generator().manual_seed(training.seed),
    )


def _rows(place: JobDir, slices: Sequence[RowRange]) -> list[Rows]:
    return [Rows(place.piece(each.artifact), each.start, each.stop) for each in slices]


def criterion(place: JobDir, training: TrainingSpec) -> Callable[..., Any]:
    """The loss: one of torch by its name, or the requester's own as a graph."""
    if isinstance(training.loss, GraphLoss):
        return load_loss(*place.loss)
    return loss_function(training.loss)
