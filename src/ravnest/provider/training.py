"""A node and its trainer, made from an assignment."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch.utils.data import ConcatDataset, DataLoader

from ravnest.deadlines import MEMBER_RETURN, NEIGHBOUR_CONNECT
from ravnest.errors import DataError, StageFormatError
from ravnest.host import TERMINATE
from ravnest.jobs.augmentation import AugmentedBatches, load_augmentation
from ravnest.jobs.dataset_reader import Rows, SharedData, collate_samples
from ravnest.jobs.graph_loss import load_loss
from ravnest.jobs.metrics import load_metrics
from ravnest.jobs.registry import (
    loss_function,
    optimizer_class,
    optimizer_classes,
    optimizer_settings,
    scheduler_class,
)
from ravnest.provider.job_dir import JobDir, WorkerSettings
from ravnest.provider.span_window import SpanWindow, answering
from ravnest.runtime.epoch_batches import EpochBatches
from ravnest.runtime.node import Node
from ravnest.runtime.stage.uncompiled import spare_compiler
from ravnest.runtime.trainer import Trainer
from ravnest.schemas.jobs import BestRule, GraphLoss, TrainingSpec
from ravnest.schemas.providers import Assignment, DataShare, EpochRemainder, ExcludedNode, RowRange
from ravnest.seed import set_seed
from ravnest.telemetry import RecordSink

logger = logging.getLogger(__name__)

_EXCLUSION_PAUSE = 1.0
"""Seconds between two looks for machines that the server excludes."""


def warm_up(cores: int) -> None:
    """Have torch load what it loads at first use, so that it does not count as the job's memory."""
    torch.set_num_threads(cores)
    spare_compiler(optimizer_classes())
    weight = torch.ones(8, 8, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    (weight.grad,) = torch.autograd.grad((weight @ weight).sum(), weight)
    optimizer.step()


def train(job_dir: JobDir, settings: WorkerSettings, sink: RecordSink | None = None) -> None:
    """Train the node of an assignment to the end; ``sink`` receives its telemetry records.

    A job without epochs is only evaluated.
    """
    assignment = job_dir.read_assignment()
    training = assignment.training
    set_seed(training.seed)
    train_loader = loader(
        job_dir, assignment.train, training, shuffle=training.shuffle, drop_last=training.drop_last
    )
    val_loader = loader(job_dir, assignment.validation, training)
    scheduler = training.scheduler
    window = None if sink is None else SpanWindow(sink)
    node = Node(
        name=f"node_{assignment.node}",
        optimizer=optimizer_class(training.optimizer.name),
        optimizer_params=optimizer_settings(training.optimizer, training.parameter_groups),
        lr_scheduler=None if scheduler is None else scheduler_class(scheduler.name),
        lr_scheduler_params={} if scheduler is None else scheduler.params,
        lr_step_on_epoch_change=training.lr_step_on_epoch_change,
        criterion=criterion(job_dir, training),
        update_frequency=training.update_frequency,
        reduce_factor=training.reduce_factor,
        labels=train_loader,
        test_labels=val_loader,
        loss_filename=job_dir.losses,
        compression=training.compression or False,
        average_optim=training.average_optim,
        robust_mean=training.robust_mean,
        schedule=training.schedule,
        micro_batches=training.micro_batches,
        scheduler_steps=scheduler_steps(assignment.train, training),
        recompute=training.recompute,
        clip_grad_norm=training.clip_grad_norm,
        clip_grad_value=training.clip_grad_value,
        plateau_metric=training.plateau_metric,
        ema=training.ema,
        optimizer_state=training.optimizer_state,
        stop_on_nan=training.stop_on_nan,
        metrics=load_metrics(training.metrics, job_dir.metric),
        look_ahead=training.look_ahead,
        listen=settings.listen,
        connect_timeout=MEMBER_RETURN if assignment.resume else NEIGHBOUR_CONNECT,
        folder=job_dir.node_data,
        trained_folder=job_dir.trained,
        save_frozen=False,
        checkpoint_folder=job_dir.checkpoints,
        resume=assignment.resume,
        rejoin_timeout=MEMBER_RETURN,
        hands_over=True,
        spot_checks=assignment.spot_checks,
        progress=False,
        record_sink=sink,
        trace=window,
    )
    with node, handing_over(node), excluding(node, job_dir), answering(window, job_dir):
        trainer = Trainer(
            node=node,
            train_loader=augmented(job_dir, assignment, train_loader),
            val_loader=val_loader,
            val_freq=training.val_freq,
            save=True,
            epochs=max(training.epochs, 1),
            batch_size=training.batch_size,
            early_stopping=_given(training.early_stopping),
            keep_best=_given(training.keep_best),
        )
        if training.epochs:
            trainer.train()
        if assignment.validation is not None:
            trainer.evaluate()


def augmented(job_dir: JobDir, assignment: Assignment, batches: Any) -> Any:
    """Return the training batches of a Root, augmented as the job says; others as they are."""
    found = assignment.training.augmentation
    spec = assignment.node_spec
    if found is None or batches is None or spec.stage > 0:
        return batches
    augment = load_augmentation(*job_dir.augmentation)
    return AugmentedBatches(
        batches, found.inputs, augment, seed=assignment.training.seed, cluster=spec.cluster
    )


def _given(rule: BestRule | None) -> dict[str, Any] | None:
    return None if rule is None else rule.model_dump()


@contextmanager
def handing_over(node: Node) -> Iterator[None]:
    """Have the node leave for one that takes its place when the agent sends ``TERMINATE``.

    A last checkpoint is taken first, so that no update is made twice.
    """

    def leave() -> None:
        node.hand_over()
        # To the main thread: it may wait for a lock, which only its own signals interrupt.
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    def on_signal(*_: object) -> None:
        threading.Thread(target=leave, name="hand over", daemon=True).start()

    before = signal.signal(TERMINATE, on_signal)
    try:
        yield
    finally:
        signal.signal(TERMINATE, before)


@contextmanager
def excluding(node: Node, job_dir: JobDir, pause: float = _EXCLUSION_PAUSE) -> Iterator[None]:
    """Close the node's links to the machines that the server excludes, as the agent writes them."""
    over = threading.Event()

    def follow() -> None:
        known: set[ExcludedNode] = set()
        while True:
            try:
                found = set(job_dir.read_excluded())
            except (OSError, StageFormatError, ValidationError) as error:
                logger.warning("%s does not know which nodes are excluded: %s", node.name, error)
                found = known
            for each in found - known:
                node.exclude(each.node, each.generation)
            known |= found
            if over.wait(pause):
                return

    thread = threading.Thread(target=follow, name="excluded nodes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def scheduler_steps(share: DataShare, training: TrainingSpec) -> float:
    """Return the updates per epoch of one process, divided by those of a cluster with this share."""
    own = max(training.updates_per_epoch(share.samples), 1)
    return training.updates_per_epoch(share.total) / own


def loader(
    job_dir: JobDir,
    share: DataShare | None,
    training: TrainingSpec,
    *,
    shuffle: bool = False,
    drop_last: bool = False,
) -> DataLoader[dict[str, torch.Tensor]] | None:
    """Return the batches of a share, in the same order at Root and Leaf; ``None`` without data."""
    if share is None or not (share.inputs or share.labels):
        return None
    data = SharedData(_rows(job_dir, share.inputs), _rows(job_dir, share.labels))
    if len(data) != share.samples:
        raise DataError(f"the data share should hold {share.samples} samples, but holds {len(data)}")
    generator = torch.Generator().manual_seed(training.seed)
    if share.remainder is None:
        return DataLoader(
            data,
            training.batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            generator=generator,
            collate_fn=collate_samples,
        )
    rest = SharedData(_rows(job_dir, share.remainder.inputs), _rows(job_dir, share.remainder.labels))
    batches = EpochBatches(
        data,
        training.batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        generator=generator,
        epoch=share.remainder.epoch,
        samples=len(data) + remainder_rows(job_dir, share.remainder, len(rest)),
    )
    return DataLoader(
        ConcatDataset([data, rest]),
        batch_sampler=batches,
        generator=generator,
        collate_fn=collate_samples,
    )


def remainder_rows(job_dir: JobDir, rest: EpochRemainder, count: int) -> torch.Tensor:
    """Return the numbers of the samples of an epoch that is not a whole one, out of ``count``."""
    path, size = job_dir.rows_file(rest.rows), 8 * rest.samples
    if path.stat().st_size != size:
        raise DataError(f"{path} has {path.stat().st_size} bytes, not {size}")
    # The numbers come from the server; a wrong one would be another sample, or none.
    rows = torch.from_numpy(np.fromfile(path, dtype="<i8"))
    if not bool(((rows >= 0) & (rows < count)).all()):
        raise DataError(f"{path} names samples that are not there: it has numbers up to {rows.max()}")
    return rows


def _rows(job_dir: JobDir, ranges: Sequence[RowRange]) -> list[Rows]:
    return [Rows(job_dir.data_file(each.artifact), each.start, each.stop) for each in ranges]


def criterion(job_dir: JobDir, training: TrainingSpec) -> Callable[..., Any]:
    """Return the loss: one of torch by its name, or the requester's own as a graph."""
    if isinstance(training.loss, GraphLoss):
        return load_loss(*job_dir.loss)
    return loss_function(training.loss)
