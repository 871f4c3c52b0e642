"""Checkpoints of a node: written by its worker, finished and copied to a neighbour in the background."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ravnest.deadlines import BLOCK_WRITTEN, LINK_CLOSE
from ravnest.errors import RavnestError, StageFormatError
from ravnest.runtime.control.rendezvous import Links
from ravnest.runtime.control.state_blocks import BlockReader, BlockWriter, ExpectedFile, SentFile
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.stage_state import capture, restore
from ravnest.store.checkpoint import CheckpointFolder, CheckpointManifest
from ravnest.store.checkpoint_state import stored_tensors
from ravnest.store.node_spec import NodeSpec
from ravnest.store.plain_data import NotPlainError, decode, encode
from ravnest.transport.base import Link, try_send
from ravnest.types import CheckpointId
from ravnest.wire.messages import HeldCheckpoint, Message, ReplicaStored, StateBlock

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointReport:
    """A checkpoint of this node that is complete on its disk."""

    id: CheckpointId
    bytes: int
    seconds: float
    """Time for which the stage stopped."""


@dataclass(frozen=True)
class _Written:
    """Tensors in a file that is not a checkpoint yet."""

    path: Path
    manifest: CheckpointManifest
    seconds: float


class Checkpoints:
    """Checkpoints of this node's stage, and replicas of its neighbours'.

    The worker's thread writes, link threads receive replicas, and a thread of its own finishes files and
    sends replicas: to the previous node, from the Root to the next.
    """

    def __init__(
        self,
        folder: Path,
        seed: Path,
        spec: NodeSpec,
        execution: StageExecution,
        reported: Callable[[CheckpointReport], None],
    ) -> None:
        """``seed``: the folder of the checkpoint that the stage was shipped with, if it was.

        ``reported`` is called in a thread of its own when a checkpoint is complete.
        """
        self._spec = spec
        self._execution = execution
        self._reported = reported
        self._own = CheckpointFolder(folder / spec.name)
        self._seed = CheckpointFolder(seed)
        self._seeds: set[tuple[str, CheckpointId]] = set()
        """Runs and checkpoints that are loaded from there."""
        neighbours = [stage for stage in (spec.stage - 1, spec.stage + 1) if 0 <= stage < spec.stages]
        self._replicas = {
            stage: CheckpointFolder(self._own.path / f"replica_of_stage_{stage}") for stage in neighbours
        }
        self._writers: dict[int, BlockWriter] = {}
        self._links = Links()
        self._acknowledged: SentFile | None = None
        """Newest checkpoint of which the neighbour has a replica."""
        self._sending: SentFile | None = None
        self._stored = threading.Condition()
        self._safe: CheckpointId | None = None
        """Newest checkpoint that outlives this node: at a neighbour, or here if there is none."""
        self._failed = False
        """The last checkpoint could not be written; reported once."""
        self.cost = 0.0
        """Seconds for which the last checkpoint stopped the stage."""
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._work, name=f"ravnest-checkpoints-{spec.name}", daemon=True
        )

    def start(self, links: Links) -> None:
        """Start the thread; ``links`` are the links to the neighbours."""
        self._links = links
        self._thread.start()

    def close(self) -> None:
        """Finish the checkpoint in progress and stop the thread."""
        self._tasks.put(None)
        if self._thread.is_alive():
            self._thread.join(LINK_CLOSE)
        for writer in self._writers.values():
            writer.abandon()

    # Before training

    def held(self) -> dict[int, tuple[HeldCheckpoint, ...]]:
        """Return the undamaged checkpoints on this node's disk, by stage; reads all files."""
        own = self._spec.stage
        folders = {own: self._own, **self._replicas}
        held = {
            stage: {
                (manifest.run, manifest.id)
                for manifest in folder.usable()
                if self._fits(manifest, stage)
            }
            for stage, folder in folders.items()
        }
        self._seeds = self._usable_seeds(held[own])
        held[own] |= self._seeds
        return {
            stage: tuple(HeldCheckpoint(run, each, own) for run, each in sorted(checkpoints))
            for stage, checkpoints in held.items()
        }

    def _usable_seeds(self, own: Collection[tuple[str, CheckpointId]]) -> set[tuple[str, CheckpointId]]:
        """Return what the stage was shipped with; nothing after a new run has begun without it."""
        manifests = (each for each in self._seed.usable() if self._fits(each, self._spec.stage))
        seeds = {(manifest.run, manifest.id) for manifest in manifests} - set(own)
        runs = {run for run, _ in own}
        return {(run, checkpoint) for run, checkpoint in seeds if not runs or run in runs}

    def _fits(self, manifest: CheckpointManifest, stage: int) -> bool:
        """Return whether a checkpoint belongs to a stage of this plan."""
        spec = self._spec
        found = (manifest.plan, manifest.cluster, manifest.stage, manifest.stages)
        return found == (spec.plan, spec.cluster, stage, spec.stages)

    def newest_run(self) -> str:
        """Return the run of the newest checkpoint here; empty if there is none."""
        usable = self._own.usable()
        return usable[-1].run if usable else ""

    def begin_new_run(self) -> None:
        """Set the checkpoints of earlier runs aside."""
        if self._seeds:
            logger.warning(
                "%s was shipped with a checkpoint and begins without it: Trainer(resume=True) "
                "continues from it",
                self._spec.name,
            )
        for folder in (*self._replicas.values(), self._own):
            folder.set_aside()

    def drop_later(self, run: str, checkpoint: CheckpointId) -> None:
        """Remove what is newer than the checkpoint that training continues from, or of another run."""
        for folder in (self._own, *self._replicas.values()):
            for each in folder.ids():
                try:
                    keep = each <= checkpoint and folder.manifest(each).run == run
                except StageFormatError:
                    keep = False
                if not keep:
                    folder.remove(each)

    def load(self, run: str, checkpoint: CheckpointId) -> Any:
        """Set the stage to a checkpoint and return the rest of the progress that it was saved with."""
        folder = self._seed if (run, checkpoint) in self._seeds else self._own
        manifest = folder.manifest(checkpoint)
        try:
            progress = decode(manifest.progress)
            restore(self._execution, folder.load(manifest), progress["updates"])
        except (NotPlainError, KeyError, TypeError) as error:
            raise StageFormatError(f"the checkpoint of {checkpoint} is damaged: {error}") from error
        return progress

    def supply(self, stage: int, checkpoint: CheckpointId, link: Link) -> None:
        """Send a neighbour's replica back to it."""
        folder = self._replicas[stage]
        reader = BlockReader(folder, folder.manifest(checkpoint))
        for message in reader.messages(restore=True):
            link.send(message)
            if not link.wait_written(BLOCK_WRITTEN):
                raise StageFormatError(f"the state of stage {stage} could not be sent")

    # The worker's thread

    def save(self, run: str, checkpoint: CheckpointId, progress: dict[str, Any]) -> None:
        """Write the state of the stage as it is now; the rest happens in the background.

        A checkpoint that cannot be written is reported, and training continues.
        """
        began = time.monotonic()
        spec = self._spec
        try:
            state = capture(self._execution)
            manifest = CheckpointManifest(
                spec.plan,
                run,
                spec.node,
                spec.cluster,
                spec.stage,
                spec.stages,
                checkpoint,
                stored_tensors(self._execution.module.spec),
                encode({**progress, "updates": state.updates}),
            )
            path = self._own.write_tensors(checkpoint, state.tensors)
        except (OSError, NotPlainError, StageFormatError) as error:
            self._fail(checkpoint, error)
            return
        self.cost = time.monotonic() - began
        written = _Written(path, manifest, self.cost)
        self._tasks.put(lambda: self._finish(written))

    def _fail(self, checkpoint: CheckpointId, error: Exception) -> None:
        level = logging.INFO if self._failed else logging.WARNING
        self._failed = True
        logger.log(
            level,
            "%s: no checkpoint after %s: %s; the one before stays valid",
            self._spec.name,
            checkpoint,
            error,
        )

    # Messages, in link threads

    def on_message(self, link: Link, message: Message) -> CheckpointManifest | None:
        """Take a block or an acknowledgement; return the manifest of a complete checkpoint."""
        match message.head:
            case StateBlock() as head:
                return self._take_block(link, head, message)
            case ReplicaStored(checkpoint=checkpoint, problem=problem):
                if problem:
                    logger.warning("%s: no replica of %s: %s", self._spec.name, checkpoint, problem)
                else:
                    self._replica_stored(checkpoint)
        return None

    def _take_block(self, link: Link, head: StateBlock, message: Message) -> CheckpointManifest | None:
        """Write a block of a replica or, with ``restore``, of this node's own state."""
        spec = self._spec
        sender = link.peer.stage
        stage = spec.stage if head.restore else sender
        if head.stage != stage or sender not in self._replicas:
            logger.warning("node_%d sent the state of stage %d; ignored", link.peer.node, head.stage)
            return None
        folder = self._own if head.restore else self._replicas[sender]
        # A neighbour restores before it sends replicas, so that one writer per neighbour suffices.
        writer = self._writers.get(sender)
        if writer is None or head.offset == 0:
            if writer is not None:
                writer.abandon()
            expected = ExpectedFile(spec.plan, spec.cluster, stage, spec.stages)
            writer = self._writers[sender] = BlockWriter(folder, expected)
        try:
            manifest = writer.take(message)
        except (StageFormatError, OSError) as error:
            try_send(link, ReplicaStored(head.stage, head.checkpoint, f"{error}"[:1000]))
            return None
        if manifest is not None and not head.restore:
            try_send(link, ReplicaStored(head.stage, head.checkpoint))
        return manifest

    def _replica_stored(self, checkpoint: CheckpointId) -> None:
        with self._stored:
            if self._sending is not None and self._sending.checkpoint == checkpoint:
                self._acknowledged = self._sending
            self._safe = checkpoint
            self._stored.notify_all()

    def wait_for_next(self, ask: Callable[[], None], timeout: float) -> bool:
        """Call ``ask`` and wait for a checkpoint that outlives this node; return False on a timeout."""
        with self._stored:
            before = self._safe
            ask()
            return self._stored.wait_for(lambda: self._safe != before, timeout)

    # The thread

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except (RavnestError, OSError) as error:
                logger.warning("%s: checkpoint: %s", self._spec.name, error)
            except Exception:  # top of the thread: training must not depend on it
                logger.exception("%s: a checkpoint failed", self._spec.name)

    def _finish(self, written: _Written) -> None:
        try:
            manifest = self._own.commit(written.path, written.manifest)
        except OSError as error:
            written.path.unlink(missing_ok=True)
            self._fail(written.manifest.id, error)
            return
        self._failed = False
        self._reported(CheckpointReport(manifest.id, manifest.size, written.seconds))
        self._replicate(manifest)

    def _replicate(self, manifest: CheckpointManifest) -> None:
        """Send a copy to a neighbour, one block at a time, so that activations pass in between."""
        link = self._links.next if self._spec.stage == 0 else self._links.previous
        if link is None:
            self._replica_stored(manifest.id)
            return
        reader = BlockReader(self._own, manifest, self._acknowledged)
        for message in reader.messages(restore=False):
            if (head := message.head) and isinstance(head, StateBlock) and head.is_last:
                self._sending = reader.sent
            link.send(message)
            if not link.wait_written(BLOCK_WRITTEN):
                return
