"""Reception of checkpoints that neighbours send: their replicas, or this node's own state."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from ravnest.errors import StageFormatError
from ravnest.runtime.control.state_blocks import BlockWriter, ExpectedFile
from ravnest.store.checkpoint import CheckpointFolder, CheckpointManifest
from ravnest.store.node_spec import NodeSpec
from ravnest.transport.base import Link, try_send
from ravnest.types import CheckpointId
from ravnest.wire.messages import Message, ReplicaStored, StateBlock

logger = logging.getLogger(__name__)


class ReplicaReceiver:
    """Files that arrive in blocks, one per neighbour; in link threads."""

    def __init__(
        self,
        spec: NodeSpec,
        own: CheckpointFolder,
        replicas: Mapping[int, CheckpointFolder],
        complete: Callable[[], CheckpointId | None],
    ) -> None:
        """``replicas``: folders by the stage of the neighbour.

        ``complete`` returns the newest checkpoint that all stages have, which is kept.
        """
        self._spec = spec
        self._own = own
        self._replicas = replicas
        self._complete = complete
        self._lock = threading.Lock()
        self._writers: dict[int, BlockWriter] | None = {}
        """Files that arrive, by the stage that sends them; None: closed."""

    def take(self, link: Link, head: StateBlock, message: Message) -> CheckpointManifest | None:
        """Write a block of a replica or, with ``restore``, of this node's own state.

        Return the manifest of a checkpoint that has arrived as a whole. ``StageFormatError`` or
        ``OSError`` if this node's own state cannot be stored.
        """
        sender = link.peer.stage
        stage = self._spec.stage if head.restore else sender
        if head.stage != stage or sender not in self._replicas:
            logger.warning("node_%d sent the state of stage %d; ignored", link.peer.node, head.stage)
            return None
        try:
            with self._lock:
                if self._writers is None:
                    return None
                manifest = self._writer(self._writers, sender, head).take(message)
        except (StageFormatError, OSError) as error:
            if head.restore:
                raise
            try_send(link, ReplicaStored(head.stage, head.checkpoint, f"{error}"[:1000]))
            return None
        if manifest is not None and not head.restore:
            try_send(link, ReplicaStored(head.stage, head.checkpoint))
        return manifest

    def close(self) -> None:
        """Remove what has not arrived as a whole; take nothing from now on."""
        with self._lock:
            writers, self._writers = self._writers or {}, None
            for writer in writers.values():
                writer.abandon()

    def _writer(self, writers: dict[int, BlockWriter], sender: int, head: StateBlock) -> BlockWriter:
        """Return the writer of a block.

        A neighbour restores before it sends replicas, so that one writer per neighbour suffices.
        """
        writer = writers.get(sender)
        if writer is None or head.offset == 0:
            if writer is not None:
                writer.abandon()
            spec, folder = self._spec, self._own if head.restore else self._replicas[sender]
            expected = ExpectedFile(spec.plan, spec.cluster, head.stage, spec.stages)
            writer = writers[sender] = BlockWriter(folder, expected, self._complete)
        return writer
