"""Averages one node's copy over all its rings: compression, links to the next members, all-reduce."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from ravnest.averaging.allreduce import AllReduce, AllReduceResult, RingPart
from ravnest.averaging.checks import check_weights
from ravnest.averaging.compression import RoundCompression
from ravnest.averaging.deadlines import Deadlines
from ravnest.averaging.participant import ReduceEnded, StartReduce
from ravnest.averaging.peers import PeerError, Peers
from ravnest.averaging.ports import WeightsPort
from ravnest.errors import RavnestError
from ravnest.store.node_spec import NodeSpec, RingSpec
from ravnest.transport.base import Link
from ravnest.wire.messages import Start


class NodeReducer:
    """The all-reduce of one node; ``on_end`` is called in any thread."""

    def __init__(
        self,
        spec: NodeSpec,
        weights: WeightsPort,
        peers: Peers,
        codec: str,
        on_end: Callable[[ReduceEnded], None],
        deadlines: Deadlines,
        now: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._peers = peers
        self._on_end = on_end
        self._reach = deadlines.reach
        self.compression = RoundCompression(codec)
        self.allreduce = AllReduce(weights.sizes(), now=now)

    def start(self, order: StartReduce) -> None:
        """Start the all-reduce of a copy; its memory receives the result."""
        try:
            parts = self._parts(order)
        except (
            LookupError,
            ValueError,
        ) as error:  # the Start has wrong weights, or an unknown base or codec
            self._on_end(ReduceEnded(_failure(order.head, error)))
            return
        # A thread of its own, because connecting to a peer may take a while.
        threading.Thread(target=self._connect, args=(order.head, parts), daemon=True).start()

    def _parts(self, order: StartReduce) -> dict[int, RingPart]:
        """Return the node's input to each ring, without the links."""
        head, compression = order.head, self.compression
        check_weights(head.weights)
        moving = self._weights.moving() if order.moves else {}
        vectors = compression.outgoing(head, order.copy)
        members = sorted(head.weights)
        position = members.index(self._spec.cluster)
        return {
            ring.id: RingPart(
                vectors[ring.id],
                head.weights[self._spec.cluster],
                position,
                len(members),
                ring.members[members[position - 1]].node,
                successor=None,
                roundtrip=compression.roundtrip(head, ring.id),
                sink=compression.sink(head, ring.id, vectors[ring.id], moving.get(ring.id, 0)),
                bytes_of=compression.bytes_of(head),
            )
            for ring in self._spec.rings
        }

    def _connect(self, head: Start, parts: dict[int, RingPart]) -> None:
        try:
            for ring in self._spec.rings:
                parts[ring.id] = replace(parts[ring.id], successor=self._successor(ring, head))
        except RavnestError as error:
            missing = error.cluster if isinstance(error, PeerError) else None
            self._on_end(ReduceEnded(_failure(head, error), missing))
            return
        self.allreduce.start(head.round, parts, self._ended)

    def _successor(self, ring: RingSpec, head: Start) -> Link | None:
        """Return a link to the next member of a ring; None if there is no other member."""
        members = sorted(head.weights)
        after = members[(members.index(self._spec.cluster) + 1) % len(members)]
        return None if len(members) == 1 else self._peers.reach(ring.members[after], after, self._reach)

    def _ended(self, result: AllReduceResult) -> None:
        missing = None if result.peer is None else self._peers.cluster_of(result.peer)
        self._on_end(ReduceEnded(result, missing))


def _failure(head: Start, error: Exception) -> AllReduceResult:
    return AllReduceResult(head.round, {}, {}, 0, str(error) or type(error).__name__)
