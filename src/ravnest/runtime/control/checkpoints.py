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

import torch

from ravnest.deadlines import BLOCK_WRITTEN, LINK_CLOSE
from ravnest.errors import RavnestError, StageFormatError
from ravnest.runtime.control.rendezvous import Links
from ravnest.runtime.control.replica_pacer import ReplicaPacer
from ravnest.runtime.control.replica_receiver import ReplicaReceiver
from ravnest.runtime.control.replica_sender import ReplicaSender
from ravnest.runtime.control.state_blocks import BlockReader, SentFile
from ravnest.runtime.control.stored_checkpoints import StoredCheckpoints
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.stage_state import capture, restore
from ravnest.store.checkpoint import CheckpointFolder, CheckpointManifest
from ravnest.store.checkpoint_state import stored_tensors
from ravnest.store.node_spec import NodeSpec
from ravnest.store.plain_data import NotPlainError, decode, encode
from ravnest.transport.base import Link, try_send
from ravnest.types import BEGINNING, CheckpointId
from ravnest.wire.messages import (
    CheckpointComplete,
    CheckpointStored,
    HeldCheckpoint,
    Message,
    ReplicaStored,
    ResumeFrom,
    StateBlock,
)

logger = logging.getLogger(__name__)

_Taken = tuple[str, CheckpointId, str]
"""Run, checkpoint, and the attempt in which it was taken."""


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
        settled: Callable[[CheckpointId, float], None],
    ) -> None:
        """``seed``: the folder of the checkpoint that the stage was shipped with, if it was.

        ``reported`` is called in a thread of its own when a checkpoint is on this node's disk.
        ``settled`` is called at the Root when all nodes have stored a checkpoint, or one of them could
        not, with the longest time that it took a node from training.
        """
        self._settled = settled
        self._spec = spec
        self._execution = execution
        self._reported = reported
        self._own = CheckpointFolder(folder / spec.name)
        self._seed = CheckpointFolder(seed)
        self._seeds: set[_Taken] = set()
        """Checkpoints that are loaded from there."""
        neighbours = [stage for stage in (spec.stage - 1, spec.stage + 1) if 0 <= stage < spec.stages]
        self._replicas = {
            stage: CheckpointFolder(self._own.path / f"replica_of_stage_{stage}") for stage in neighbours
        }
        self._arriving = ReplicaReceiver(spec, self._own, self._replicas, lambda: self._complete)
        self._links = Links()
        self._acknowledged: SentFile | None = None
        """Newest checkpoint of which the neighbour has a replica."""
        self._sending: BlockReader | None = None
        """Replica whose outcome is open."""
        self._stored = threading.Condition()
        self._safe: CheckpointId | None = None
        """Newest checkpoint that outlives this node: at a neighbour, or here if there is none."""
        self._decision: ResumeFrom | None = None
        """Where training began here, and the name of the attempt."""
        self._known = StoredCheckpoints(is_leaf=spec.stage == spec.stages - 1)
        self._complete: CheckpointId | None = None
        """Newest checkpoint that all stages have, as far as known here; it is kept."""
        self._abandoned = False
        """The node has left its attempt; checkpoints of it that are not finished are dropped."""
        self._adding = threading.Lock()
        """Held while a checkpoint of the attempt is added to the folder."""
        self._failed = False
        """The last checkpoint could not be written; reported once."""
        self._pause = 0.0
        """Seconds for which the last checkpoint stopped the stage."""
        self._background = 0.0
        """Processor time of the last one in the background."""
        self._pacer = ReplicaPacer()
        self._saved: CheckpointId | None = None
        """Newest checkpoint that was written."""
        self._hurry = threading.Event()
        """Set when this node leaves: replicas do not wait for training any more."""
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._work, name=f"ravnest-checkpoints-{spec.name}", daemon=True
        )

    @property
    def complete(self) -> CheckpointId | None:
        """Newest checkpoint that all stages have, as far as known here."""
        return self._complete

    def connect(self, links: Links) -> None:
        """Use these links to the neighbours; before messages arrive."""
        self._links = links

    def start(self) -> None:
        """Start the thread; a replica that is missing is sent first."""
        decision = self._decision
        if decision is not None and decision.checkpoint != BEGINNING:
            self._tasks.put(lambda: self._secure(decision))
        self._thread.start()

    def close(self) -> None:
        """Finish the checkpoint in progress and stop the thread; what takes too long is dropped."""
        self._hurry.set()
        self._tasks.put(None)
        if self._thread.is_alive():
            self._thread.join(LINK_CLOSE)
        with self._adding:
            self._abandoned = True
        self._arriving.close()

    # Before training

    def clean(self) -> None:
        """Remove unfinished files of an earlier process."""
        for folder in (self._own, *self._replicas.values()):
            folder.clean()

    def held(self) -> dict[int, tuple[HeldCheckpoint, ...]]:
        """Return the undamaged checkpoints on this node's disk, by stage; reads all files."""
        own = self._spec.stage
        folders = {own: self._own, **self._replicas}
        held = {
            stage: {
                (manifest.run, manifest.id, manifest.attempt)
                for manifest in folder.usable()
                if self._fits(manifest, stage)
            }
            for stage, folder in folders.items()
        }
        self._seeds = self._usable_seeds(held[own])
        held[own] |= self._seeds
        return {
            stage: tuple(
                HeldCheckpoint(run, each, own, attempt) for run, each, attempt in sorted(checkpoints)
            )
            for stage, checkpoints in held.items()
        }

    def _usable_seeds(self, own: Collection[_Taken]) -> set[_Taken]:
        """Return what the stage was shipped with; nothing after a new run has begun without it."""
        manifests = (each for each in self._seed.usable() if self._fits(each, self._spec.stage))
        seeds = {(manifest.run, manifest.id, manifest.attempt) for manifest in manifests} - set(own)
        runs = {run for run, _, _ in own}
        return {seed for seed in seeds if not runs or seed[0] in runs}

    def _fits(self, manifest: CheckpointManifest, stage: int) -> bool:
        """Return whether a checkpoint belongs to a stage of this plan."""
        spec = self._spec
        found = (manifest.plan, manifest.cluster, manifest.stage, manifest.stages)
        return found == (spec.plan, spec.cluster, stage, spec.stages)

    def newest_run(self) -> str:
        """Return the run of the newest checkpoint here; empty if there is none."""
        usable = self._own.usable()
        return usable[-1].run if usable else ""

    def begin_attempt(self, decision: ResumeFrom) -> None:
        """Take the checkpoints that follow in this attempt; before a state arrives or is loaded."""
        self._decision = decision
        if decision.checkpoint != BEGINNING:
            self._complete = decision.checkpoint
            return
        if self._seeds:
            logger.warning(
                "%s was shipped with a checkpoint and begins without it: Trainer(resume=True) "
                "continues from it",
                self._spec.name,
            )
        for folder in (*self._replicas.values(), self._own):
            folder.set_aside()

    def drop_later(self, decision: ResumeFrom) -> None:
        """Remove what is newer than the checkpoint that training continues from, or of another run."""
        for folder in (self._own, *self._replicas.values()):
            for each in folder.ids():
                try:
                    manifest = folder.manifest(each)
                except StageFormatError:
                    folder.remove(each)
                    continue
                same = each == decision.checkpoint and manifest.attempt == decision.taken
                if manifest.run != decision.run or not (same or each < decision.checkpoint):
                    folder.remove(each)

    def load(self, run: str, checkpoint: CheckpointId) -> Any:
        """Set the stage to a checkpoint and return the rest of the progress that it was saved with."""
        folder = self._folder_with(run, checkpoint)
        manifest = folder.manifest(checkpoint)
        try:
            progress = decode(manifest.progress)
            restore(self._execution, folder.load(manifest), progress["updates"])
        except StageFormatError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
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
                attempt="" if self._decision is None else self._decision.attempt,
            )
            path = self._own.write_tensors(checkpoint, state.tensors)
        except (OSError, NotPlainError, StageFormatError) as error:
            self._fail(checkpoint, error)
            self._settle(checkpoint, stored=False)
            return
        self._pause = time.monotonic() - began
        written = _Written(path, manifest, self._pause)
        self._give_way(checkpoint)
        self._tasks.put(lambda: self._finish(written))

    def _give_way(self, checkpoint: CheckpointId) -> None:
        """End the replica of the checkpoint before, which is stored here."""
        with self._stored:
            before, self._sending = self._sending, None
            self._saved = checkpoint
        if before is not None:
            self._settle(before.checkpoint, stored=True)

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
        """Take a message; return the manifest of a checkpoint that has arrived as a whole.

        ``StageFormatError`` or ``OSError`` if this node's own state cannot be stored.
        """
        match message.head:
            case StateBlock() as head:
                return self._arriving.take(link, head, message)
            case ReplicaStored(checkpoint=checkpoint, problem=problem):
                self._replica_settled(checkpoint, problem)
            case CheckpointStored() as outcome if link is self._links.next:
                with self._stored:
                    report = self._known.settled_behind(outcome)
                self._report(report)
            case CheckpointComplete(checkpoint) if link is self._links.previous:
                self._keep(checkpoint)
        return None

    def _replica_settled(self, checkpoint: CheckpointId, problem: str = "") -> None:
        """Note that a neighbour has a replica, or why not; the checkpoint is as safe as it can be."""
        with self._stored:
            sending = self._sending
            if problem:  # the neighbour's copy may be damaged: the next replica does without it
                self._acknowledged = None
            if sending is None or sending.checkpoint != checkpoint:
                return
            self._sending = None
            if not problem:
                self._acknowledged = sending.sent
                self._safe = checkpoint
                self._stored.notify_all()
        if problem:
            logger.warning("%s: no replica of %s: %s", self._spec.name, checkpoint, problem)
        self._settle(checkpoint, stored=True)

    def _settle(self, checkpoint: CheckpointId, *, stored: bool) -> None:
        """Note whether this node has stored a checkpoint."""
        # What runs in the background takes one of the cores on which the stage computes.
        cost = self._pause + self._background / torch.get_num_threads() + self._pacer.delayed
        with self._stored:
            report = self._known.settled_here(CheckpointStored(checkpoint, stored, cost))
        self._report(report)

    def _report(self, report: CheckpointStored | None) -> None:
        """Report the outcome of a checkpoint at this and all later nodes towards the Root."""
        if report is None:
            return
        if self._links.previous is not None:
            try_send(self._links.previous, report)
            return
        if report.stored:
            self._keep(report.checkpoint)
        # After the others were told, so that they know before the next checkpoint.
        self._settled(report.checkpoint, report.seconds)

    def _keep(self, checkpoint: CheckpointId) -> None:
        """Keep a checkpoint that all nodes have, and tell the nodes behind."""
        with self._stored:
            self._complete = checkpoint
            self._stored.notify_all()
        if self._links.next is not None:
            try_send(self._links.next, CheckpointComplete(checkpoint))

    def wait_for_next(self, ask: Callable[[], None], timeout: float, made: int) -> bool:
        """Call ``ask`` and wait for a checkpoint that outlives this node; return False on a timeout.

        Other nodes drop a checkpoint that they have not stored when this one leaves, so that all must
        have it. ``made``: updates made here; nothing is asked if the newest checkpoint has them all.
        """
        with self._stored:
            saved = self._saved
            if saved is not None and saved.update == made and self._outlasting() == saved:
                return True
            begun = None if self._decision is None else self._decision.checkpoint
            before = max(each or BEGINNING for each in (saved, self._safe, begun))
            ask()
            self._hurry.set()
            return self._stored.wait_for(lambda: self._outlasting() > before, timeout)

    def _outlasting(self) -> CheckpointId:
        """Return the newest checkpoint that outlives this node and that all nodes have."""
        return min(self._safe or BEGINNING, self._complete or BEGINNING)

    # The thread

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except (RavnestError, OSError) as error:
                logger.warning("%s: checkpoint: %s", self._spec.name, error)
            except Exception:  # top of the thread: training must not depend on it
                logger.exception("%s: a checkpoint failed", self._spec.name)

    def _folder_with(self, run: str, checkpoint: CheckpointId) -> CheckpointFolder:
        """Return the folder that holds a checkpoint of this stage."""
        shipped = {(each, number) for each, number, _ in self._seeds}
        return self._seed if (run, checkpoint) in shipped else self._own

    def _secure(self, decision: ResumeFrom) -> None:
        """Send a replica of the checkpoint that training continues from, if there is none."""
        if self._spec.stage in decision.alone:
            folder = self._folder_with(decision.run, decision.checkpoint)
            self._replicate(folder, folder.manifest(decision.checkpoint))
        else:
            self._settle(decision.checkpoint, stored=True)

    def _finish(self, written: _Written) -> None:
        manifest, began = None, time.thread_time()
        try:
            if not self._abandoned:
                manifest = self._add(written)
        except OSError as error:
            self._fail(written.manifest.id, error)
        finally:
            written.path.unlink(missing_ok=True)
            if manifest is None:
                self._settle(written.manifest.id, stored=False)
        if manifest is not None:
            self._failed = False
            self._reported(CheckpointReport(manifest.id, manifest.size, written.seconds))
            self._replicate(self._own, manifest)
        self._background = time.thread_time() - began

    def _add(self, written: _Written) -> CheckpointManifest | None:
        """Make a written file a checkpoint; return None if the node has left the attempt meanwhile."""
        manifest = self._own.finish(written.path, written.manifest)
        with self._adding:
            if self._abandoned:
                return None
            self._own.add(written.path, manifest, self._complete)
        return manifest

    def _replicate(self, folder: CheckpointFolder, manifest: CheckpointManifest) -> None:
        """Send a copy to a neighbour, in the pauses of training; a newer checkpoint ends it."""
        links = self._links
        link, other = links.previous, links.next
        if self._spec.stage == 0:
            link, other = other, link
        reader = BlockReader(folder, manifest, self._acknowledged)
        with self._stored:
            superseded = self._saved is not None and manifest.id < self._saved
            self._sending = None if superseded else reader
        if superseded:
            self._settle(manifest.id, stored=True)
            return
        if link is None:
            self._replica_settled(manifest.id)
            return

        others = () if other is None else (other,)
        self._pacer.begin(manifest.size, time.monotonic())
        sender = ReplicaSender(link, others, self._pacer, self._hurry, lambda: self._sending is reader)
        for block in reader.messages(restore=False):
            if not sender.send(block):
                if self._sending is reader:  # it is not that a newer one has ended it
                    self._replica_settled(manifest.id, f"node_{link.peer.node} does not receive it")
                return
