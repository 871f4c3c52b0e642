"""All-reduce over all rings of one node, over links.

The arithmetic runs in the thread of the link on which a chunk arrived: the chunk is in the cache of
that core, and another change of thread costs more than the sum. Sending never blocks, so a ring waits
for its previous member only.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ravnest.averaging.ring import PIECE_BYTES, OutgoingChunk, RingReduce, RingShare, Roundtrip
from ravnest.averaging.sinks import Sink
from ravnest.averaging.trimmed_mean import AHEAD, CONTRIBUTION_HOP, TrimmedReduce, TrimmedShare
from ravnest.errors import LinkClosedError, WireError
from ravnest.transport.base import Link
from ravnest.wire.messages import Message, RingChunk, RoundId

_ROUNDS_AHEAD = 2
"""Future rounds for which early chunks are buffered: the next one and its retry."""
_VALUES = frozenset({"values"})


def _nbytes(values: Tensor) -> int:
    return values.nbytes


@dataclass(frozen=True)
class TrimmedPart:
    """The other members of a ring whose trimmed mean is taken: all send their values to each other."""

    contributors: frozenset[int]
    """Positions of the members whose values count."""
    positions: Mapping[int, int]
    """Positions of the other members, by node."""
    links: tuple[Link, ...] = ()
    """Links to the other members."""


@dataclass(frozen=True)
class RingPart:
    """Input of a node to one ring, and its neighbours there."""

    vector: Tensor
    weight: float
    position: int
    members: int
    predecessor: int
    """The node that sends chunks to this one; the node itself if it is alone."""
    successor: Link | None
    """Link to the node that receives chunks; None if the node is alone."""
    roundtrip: Roundtrip | None = None
    """Effect of the links' codec on values; None if they travel unchanged."""
    sink: Sink | None = None
    """Destination of the average, which may overwrite the vector; None for new memory.

    Not to be reused if the round ends with a problem: a chunk may still be written to it.
    """
    bytes_of: Callable[[Tensor], int] = _nbytes
    """Encoded size of values with the links' codec."""
    trimmed: TrimmedPart | None = None
    """The other members, if the trimmed mean is taken; None: sums are passed around the ring."""

    @property
    def senders(self) -> Collection[int]:
        """The nodes that send chunks to this one."""
        if self.trimmed is not None:
            return self.trimmed.positions
        return (self.predecessor,) if self.members > 1 else ()

    @property
    def receivers(self) -> tuple[Link, ...]:
        """Links to the nodes that receive the chunks of this one."""
        if self.trimmed is not None:
            return self.trimmed.links
        return () if self.successor is None else (self.successor,)


@dataclass(frozen=True)
class AllReduceResult:
    """Result of an all-reduce at this node."""

    round: RoundId
    averages: Mapping[int, Tensor]
    """Averages by ring, in the memory of the sinks; empty if there is a problem."""
    digests: Mapping[int, str]
    """Digests of the averages by ring, the same for all members."""
    sent_bytes: int
    """Bytes of values sent."""
    problem: str = ""
    """Why there is no average."""
    peer: int | None = None
    """The node that caused the problem, if one did."""


@dataclass(frozen=True)
class _Arrival:
    """A chunk, and the node that sent it."""

    peer: int
    piece: RingChunk
    values: Tensor


@dataclass
class _Ring:
    """One ring of the running all-reduce."""

    number: int
    part: RingPart
    reduce: RingReduce | TrimmedReduce
    inbox: deque[_Arrival]
    """Chunks that no thread has taken yet."""
    busy: bool = True
    """A thread works on the ring, and empties the inbox before it stops."""
    digest: str = ""


@dataclass
class _Exchange:
    """The running all-reduce."""

    id: RoundId
    rings: dict[int, _Ring]
    on_end: Callable[[AllReduceResult], None]
    sent_bytes: int = 0
    ended: bool = False


@dataclass
class _Early:
    """Chunks of a round that has not started here."""

    inboxes: dict[int, deque[_Arrival]] = field(default_factory=dict)
    elements: Counter[tuple[int, int | None]] = field(default_factory=Counter)
    """Number of buffered elements by ring and, of chunks that their authors send, by node."""
    problem: tuple[str, int] | None = None
    """An error of a peer, and its node; the round fails when it starts."""


class AllReduce:
    """Runs one all-reduce at a time; all methods may be called from any thread."""

    def __init__(
        self,
        max_elements: Mapping[int, int],
        *,
        piece_bytes: int = PIECE_BYTES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_elements`` is the size of each of this node's rings, and bounds its early chunks.

        ``piece_bytes`` must be the same on all nodes.
        """
        self._max_elements = dict(max_elements)
        self._piece_bytes = piece_bytes
        self._now = now
        self._lock = threading.Lock()
        self._running: _Exchange | None = None
        self._newest = RoundId(-1)
        """The last round that was started or cancelled; no round up to it can start."""
        self._early: dict[RoundId, _Early] = {}
        self._pieces = 0
        self._last = now()

    @property
    def progress(self) -> tuple[int, float]:
        """Chunks taken since the start, and the time of the last one (or of the start)."""
        with self._lock:
            return self._pieces, self._last

    def start(
        self, round_id: RoundId, parts: Mapping[int, RingPart], on_end: Callable[[AllReduceResult], None]
    ) -> None:
        """Start a round, and end one that is still running.

        ``on_end`` is called once, in the thread that ends the round, which may be this one. Nothing
        happens if this round or a later one was started or cancelled before.
        """
        reduces = {number: self._reduce(part) for number, part in parts.items()}
        with self._lock:
            if round_id <= self._newest:
                return
            early = self._early.get(round_id, _Early())
            rings = {
                number: _Ring(number, part, reduces[number], early.inboxes.pop(number, deque()))
                for number, part in parts.items()
            }
            before, current = self._running, _Exchange(round_id, rings, on_end)
            self._running = current
            self._forget(round_id)
            self._pieces, self._last = 0, self._now()
        if before is not None:
            self._end(before, f"round {_name(round_id)} has replaced it")
        if early.problem is not None:
            self._end(current, *early.problem)
        for inbox in early.inboxes.values():
            self._end(current, *_stray(inbox[0]))
        if not rings:
            self._end(current)
        for ring in rings.values():
            if current.ended:
                return
            self._send(current, ring, ring.reduce.start())
            self._conclude(current, ring)
            self._work(current, ring)

    def take(self, link: Link, message: Message) -> None:
        """Take a ``RingChunk``: buffer it if its round has not started here, drop it if that is over."""
        piece, values = message.head, message.values.get("values")
        assert isinstance(piece, RingChunk), f"{type(piece).__name__} instead of RingChunk"
        if not isinstance(values, Tensor):
            values = torch.empty(0)  # no chunk is empty, so the ring rejects it
        arrival = _Arrival(link.peer.node, piece, values)
        with self._lock:
            current = self._running
            if piece.round > self._newest:
                self._keep_early(arrival)
                return
            if current is None or current.ended or piece.round != current.id:
                return
            ring = current.rings.get(piece.ring)
            if ring is not None:
                ring.inbox.append(arrival)
                if ring.busy:
                    return
                ring.busy = True
        if ring is None:
            self._end(current, *_stray(arrival))
        else:
            self._work(current, ring)

    def lost(self, link: Link, reason: str) -> None:
        """End the round if one of its rings needs a link that is gone."""
        with self._lock:
            current = self._running
        if current is not None:
            parts = [ring.part for ring in current.rings.values() if ring.part.members > 1]
            if any(link in part.receivers or link.peer.node in part.senders for part in parts):
                self._end(current, reason, link.peer.node)

    def cancel(self, round_id: RoundId, reason: str) -> None:
        """End the running round if its id is at most ``round_id``, and let no such round start."""
        with self._lock:
            current = self._running
            self._forget(max(round_id, self._newest))
        if current is not None and current.id <= round_id:
            self._end(current, reason)

    def _reduce(self, part: RingPart) -> RingReduce | TrimmedReduce:
        elements = max(self._piece_bytes // part.vector.element_size(), 1)
        if part.trimmed is not None:
            contributors = part.trimmed.contributors
            return TrimmedReduce(
                TrimmedShare(
                    part.position,
                    part.members,
                    part.vector,
                    contributors,
                    elements,
                    part.roundtrip,
                    part.sink,
                )
            )
        share = RingShare(
            part.position, part.members, part.vector, part.weight, elements, part.roundtrip, part.sink
        )
        return RingReduce(share)

    def _forget(self, round_id: RoundId) -> None:
        self._newest = round_id
        self._early = {key: early for key, early in self._early.items() if key > round_id}

    def _keep_early(self, arrival: _Arrival) -> None:
        piece = arrival.piece
        early = self._early.get(piece.round)
        if early is None:
            early = self._early[piece.round] = _Early()
            if len(self._early) > _ROUNDS_AHEAD:
                del self._early[min(self._early)]
        # Values that all members send to each other are bounded for each of them, sums altogether.
        author = arrival.peer if piece.hop == CONTRIBUTION_HOP else None
        most = self._max_elements.get(piece.ring, 0)
        if author is not None:
            most = min(most, AHEAD * max(self._piece_bytes // arrival.values.element_size(), 1))
        early.elements[piece.ring, author] += max(arrival.values.numel(), 1)
        if early.elements[piece.ring, author] > most:
            words = f"node_{arrival.peer} sent more chunks of ring {piece.ring} than the ring has"
            early.problem = early.problem or (words, arrival.peer)
        else:
            early.inboxes.setdefault(piece.ring, deque()).append(arrival)

    def _work(self, current: _Exchange, ring: _Ring) -> None:
        """Process the inbox of a ring until it is empty; the caller has set ``busy``."""
        while True:
            with self._lock:
                if current.ended or not ring.inbox:
                    ring.busy = False
                    return
                arrival = ring.inbox.popleft()
                self._pieces, self._last = self._pieces + 1, self._now()
            try:
                outgoing = self._advance(ring, arrival)
            except WireError as error:
                words = f"node_{arrival.peer} sent a wrong chunk of ring {ring.number}: {error}"
                self._end(current, words, arrival.peer)
                continue
            del arrival
            self._send(current, ring, outgoing)
            self._conclude(current, ring)

    def _advance(self, ring: _Ring, arrival: _Arrival) -> list[OutgoingChunk]:
        piece, part = arrival.piece, ring.part
        if arrival.peer not in part.senders:
            expected = " or ".join(f"node_{node}" for node in sorted(part.senders))
            raise WireError(f"chunks of this ring must come from {expected}")
        if part.trimmed is not None and part.trimmed.positions[arrival.peer] != piece.segment:
            raise WireError(f"it sends values of the member at position {piece.segment}")
        return ring.reduce.take(piece.segment, piece.piece, piece.hop, arrival.values)

    def _send(self, current: _Exchange, ring: _Ring, outgoing: list[OutgoingChunk]) -> None:
        links, number = ring.part.receivers, ring.number
        exact = _VALUES if ring.part.roundtrip is None else frozenset[str]()
        for item in outgoing:
            assert links, f"ring {number} has {ring.part.members} members and no link"
            head = RingChunk(current.id, number, item.segment, item.piece, item.hop)
            for link in links:
                try:
                    link.send(Message(head, {"values": item.values}, exact))
                except LinkClosedError as error:
                    self._end(current, str(error), link.peer.node)
                    return
        sent = len(links) * sum(ring.part.bytes_of(item.values) for item in outgoing)
        with self._lock:
            current.sent_bytes += sent

    def _conclude(self, current: _Exchange, ring: _Ring) -> None:
        if ring.reduce.done and not ring.digest:
            digest = ring.reduce.digest
            with self._lock:
                ring.digest = digest
                last = all(other.digest for other in current.rings.values())
            if last:
                self._end(current)

    def _end(self, current: _Exchange, problem: str = "", peer: int | None = None) -> None:
        with self._lock:
            if current.ended:
                return
            current.ended = True
            if self._running is current:
                self._running = None
            sent, rings = current.sent_bytes, current.rings
        averages = {} if problem else {number: ring.reduce.result for number, ring in rings.items()}
        digests = {} if problem else {number: ring.digest for number, ring in rings.items()}
        current.on_end(AllReduceResult(current.id, averages, digests, sent, problem, peer))


def _stray(arrival: _Arrival) -> tuple[str, int]:
    number, peer = arrival.piece.ring, arrival.peer
    return f"node_{peer} sent a chunk of ring {number}, which this node is not in", peer


def _name(round_id: RoundId) -> str:
    return f"{round_id.number}.{round_id.attempt}" if round_id.attempt else str(round_id.number)
