"""Averages one node's copy over all its rings: compression, links to the next members, all-reduce."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from ravnest.averaging.allreduce import AllReduce, AllReduceResult, RingPart, TrimmedPart
from ravnest.averaging.checks import check_weights
from ravnest.averaging.compression import RoundCompression
from ravnest.averaging.deadlines import Deadlines
from ravnest.averaging.participant import ReduceEnded, StartReduce
from ravnest.averaging.peers import PeerError, Peers
from ravnest.averaging.ports import WeightsPort
from ravnest.errors import RavnestError
from ravnest.store.node_spec import NodeSpec, RingSpec
from ravnest.transport.base import Link
from ravnest.types import RobustMean
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
        robust_mean: RobustMean | None = None,
    ) -> None:
        self._robust_mean = robust_mean
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
                trimmed=self._trimmed(ring, head),
            )
            for ring in self._spec.rings
        }

    def _trimmed(self, ring: RingSpec, head: Start) -> TrimmedPart | None:
        """Return the members of a ring whose robust mean is taken; None: the weighted mean is taken.

        Each node decides by its own setting, so that no coordinator can turn the robust mean off. Values
        are exchanged directly even if too few contribute to leave some out: in a ring, a member without
        a weight could replace sums.
        """
        if self._robust_mean is None:
            return None
        members = sorted(head.weights)
        contributors = frozenset(p for p, cluster in enumerate(members) if head.weights[cluster] > 0)
        others = {
            ring.members[cluster].node: position
            for position, cluster in enumerate(members)
            if cluster != self._spec.cluster
        }
        return TrimmedPart(contributors, others)

    def _connect(self, head: Start, parts: dict[int, RingPart]) -> None:
        try:
            for ring in self._spec.rings:
                parts[ring.id] = self._linked(ring, head, parts[ring.id])
        except RavnestError as error:
            missing = error.cluster if isinstance(error, PeerError) else None
            self._on_end(ReduceEnded(_failure(head, error), missing))
            return
        self.allreduce.start(head.round, parts, self._ended)

    def _linked(self, ring: RingSpec, head: Start, part: RingPart) -> RingPart:
        """Return a part with the links to the members that receive its chunks."""
        members = sorted(head.weights)
        if part.trimmed is not None:
            others = [cluster for cluster in members if cluster != self._spec.cluster]
            links = tuple(self._link(ring, cluster) for cluster in others)
            return replace(part, trimmed=replace(part.trimmed, links=links))
        after = members[(members.index(self._spec.cluster) + 1) % len(members)]
        return part if len(members) == 1 else replace(part, successor=self._link(ring, after))

    def _link(self, ring: RingSpec, cluster: int) -> Link:
        return self._peers.reach(ring.members[cluster], cluster, self._reach)

    def _ended(self, result: AllReduceResult) -> None:
        missing = None if result.peer is None else self._peers.cluster_of(result.peer)
        self._on_end(ReduceEnded(result, missing))


def _failure(head: Start, error: Exception) -> AllReduceResult:
    return AllReduceResult(head.round, {}, {}, 0, str(error) or type(error).__name__)
