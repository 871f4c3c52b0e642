"""Sending of a replica to a neighbour, piece by piece, in the pauses of training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ravnest.deadlines import BLOCK_WRITTEN
from ravnest.runtime.control.replica_pacer import LOOK_SECONDS, ReplicaPacer
from ravnest.runtime.control.state_blocks import BLOCK, data_bytes, part_of
from ravnest.transport.base import Link
from ravnest.wire.messages import Message

_LEAST_BYTES = 4 << 10
"""Bytes between two looks that do not count: acknowledgements, heartbeats and the like."""


class ReplicaSender:
    """Link on which one replica is sent, and the other links that share the machine's connection."""

    def __init__(
        self,
        link: Link,
        others: Sequence[Link],
        pacer: ReplicaPacer,
        hurry: threading.Event,
        is_wanted: Callable[[], bool],
    ) -> None:
        """``pacer`` has begun this replica. ``hurry``: set when training does not count any more.

        ``is_wanted`` returns False when the rest of the replica is of no use.
        """
        self._link = link
        self._links = (link, *others)
        self._hurry = hurry
        self._is_wanted = is_wanted
        self._pacer = pacer
        self._looked_at = self._sent_bytes()
        """Bytes that all links had sent at the last look."""

    def send(self, block: Message) -> bool:
        """Send a block; return False if that fails, or if the rest is of no use."""
        size = data_bytes(block)
        if size == 0:  # the neighbour has the bytes
            self._link.send(block)
            return self._link.wait_written(BLOCK_WRITTEN) and self._is_wanted()
        sent = 0
        while sent < size:
            limit = self._await_turn()
            if not self._is_wanted():
                return False
            if not self._send_piece(part_of(block, sent, limit)):
                return False
            sent += limit
        return self._is_wanted()

    def _await_turn(self) -> int:
        """Wait until a piece may be sent; return its size."""
        while not self._hurry.is_set():
            self._look(0)
            now = time.monotonic()
            pause = self._pacer.pause(now)
            if pause <= 0:
                return self._pacer.piece(now)
            self._hurry.wait(min(pause, LOOK_SECONDS))
        return BLOCK

    def _send_piece(self, piece: Message) -> bool:
        began = time.monotonic()
        self._link.send(piece)
        if self._hurry.is_set():
            return self._link.wait_written(BLOCK_WRITTEN)
        if not self._link.flush(BLOCK_WRITTEN):
            return False
        now, count = time.monotonic(), data_bytes(piece)
        disturbed = self._look(count)
        round_trip = self._link.delay().round_trip
        self._pacer.arrived(count, now - began, round_trip, now, disturbed=disturbed)
        return True

    def _look(self, own: int) -> bool:
        """Return whether training has sent anything since the last look, besides ``own`` bytes."""
        total = self._sent_bytes()
        count = total - self._looked_at - own
        self._looked_at = total
        if count <= _LEAST_BYTES:
            return False
        self._pacer.training_sent(count, time.monotonic())
        return True

    def _sent_bytes(self) -> int:
        return sum(link.sent_bytes for link in self._links)
