"""Sending of a replica to a neighbour, piece by piece, in the pauses of training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ravnest.deadlines import BLOCK_WRITTEN
from ravnest.runtime.control.replica_pacer import PIECE_SECONDS, ReplicaPacer
from ravnest.runtime.control.state_blocks import BLOCK, data_bytes, part_of
from ravnest.transport.base import Link
from ravnest.wire.messages import Message


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
        self._seen = -1
        """Messages that were queued on all links when they were found quiet, and pieces since then."""

    def send(self, block: Message) -> bool:
        """Send a block; return False if that fails, or if the rest is of no use."""
        size = data_bytes(block)
        if size == 0:  # the neighbour has the bytes
            self._link.send(block)
            self._seen += 1
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
        pacer = self._pacer
        while not self._hurry.is_set():
            queued = self._queued()
            if queued != self._seen:
                pacer.busy(time.monotonic())
                if self._drained(pacer.pause(time.monotonic())):
                    self._seen = queued
                    pacer.quiet(time.monotonic())
                    continue
            now = time.monotonic()
            pause = pacer.pause(now)
            if pause <= 0:
                return pacer.piece(now)
            self._hurry.wait(min(pause, PIECE_SECONDS))  # the end of a gap is noticed meanwhile
        return BLOCK

    def _send_piece(self, piece: Message) -> bool:
        began = time.monotonic()
        self._link.send(piece)
        self._seen += 1
        if self._hurry.is_set():
            return self._link.wait_written(BLOCK_WRITTEN)
        if not self._link.flush(BLOCK_WRITTEN):
            return False
        now = time.monotonic()
        self._pacer.arrived(
            data_bytes(piece),
            now - began,
            self._link.delay().round_trip,
            now,
            disturbed=self._queued() != self._seen,
        )
        return True

    def _queued(self) -> int:
        return sum(link.queued for link in self._links)

    def _drained(self, seconds: float) -> bool:
        """Wait until everything that was queued has arrived; return False on a timeout."""
        until = time.monotonic() + seconds
        return all(link.flush(max(until - time.monotonic(), 0.0)) for link in self._links)
