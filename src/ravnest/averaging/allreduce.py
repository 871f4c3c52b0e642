"""All rings of one node in one round, over links.

The arithmetic runs in the thread of the link that a piece came by: it holds the piece in its cache,
and another change of thread costs more than adding a piece up. Sending never blocks, so rings wait for
nobody but the member before.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ravnest.averaging.ring import PIECE_BYTES, OutgoingChunk, RingReduce, RingShare, Roundtrip
from ravnest.averaging.sinks import Sink
from ravnest.errors import LinkClosedError, WireError
from ravnest.transport.base import Link
from ravnest.wire.messages import Message, RingChunk, RoundId

_ROUNDS_AHEAD = 2
"""Of which pieces are kept before they start here: the next one, and that one tried again."""


_VALUES = frozenset({"values"})


def _nbytes(values: Tensor) -> int:
    return values.nbytes


@dataclass(frozen=True)
class RingPart:
    """What a node brings to one ring, and its neighbours there."""

    vector: Tensor
    weight: float
    position: int
    members: int
    predecessor: int
    """The node that the pieces come from; this one where it is alone."""
    successor: Link | None
    """To whom they go; None where it is alone."""
    roundtrip: Roundtrip | None = None
    """Of the links' codec; None where values travel as they are."""
    landing: Sink | None = None
    """What becomes of the average, else it goes to new memory; may use up the vector.

    For no other use if the round ends with a problem: a piece may still be on its way into it.
    """
    bytes_of: Callable[[Tensor], int] = _nbytes
    """What values cost on the way, with the links' codec."""


@dataclass(frozen=True)
class AllReduceResult:
    """How a round ended for this node."""

    round: RoundId
    averages: Mapping[int, Tensor]
    """By ring, where they have landed; none where there is a problem."""
    digests: Mapping[int, str]
    """Of the averages, the same on all members."""
    sent_bytes: int
    """Of values."""
    problem: str = ""
    """Why there is no average."""
    peer: int | None = None
    """The node that the problem came from, where it came from one."""


@dataclass(frozen=True)
class _Arrival:
    peer: int
    piece: RingChunk
    values: Tensor


@dataclass
class _Ring:
    number: int
    part: RingPart
    reduce: RingReduce
    inbox: deque[_Arrival]
    """Pieces that nobody works on yet."""
    busy: bool = True
    """A thread works on it, and will look into the inbox before it leaves."""
    digest: str = ""


@dataclass
class _Round:
    id: RoundId
    rings: dict[int, _Ring]
    on_end: Callable[[AllReduceResult], None]
    sent_bytes: int = 0
    ended: bool = False


@dataclass
class _Early:
    """Pieces of a round that has not started here."""

    inboxes: dict[int, deque[_Arrival]] = field(default_factory=dict)
    elements: Counter[int] = field(default_factory=Counter)
    """Kept, by ring."""
    problem: tuple[str, int] | None = None
    """What a node did, and which; the round fails when it starts."""


class AllReduce:
    """Runs one round at a time; all methods may be called from any thread."""

    def __init__(
        self,
        most_elements: Mapping[int, int],
        *,
        piece_bytes: int = PIECE_BYTES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``most_elements`` of the vector of each ring that this node is in: no more is kept early.

        ``piece_bytes`` must be the same on all nodes.
        """
        self._most_elements = dict(most_elements)
        self._piece_bytes = piece_bytes
        self._now = now
        self._lock = threading.Lock()
        self._round: _Round | None = None
        self._newest = RoundId(-1)
        """The last that was started or cancelled: nothing up to it can start any more."""
        self._early: dict[RoundId, _Early] = {}
        self._pieces = 0
        self._last = now()

    @property
    def progress(self) -> tuple[int, float]:
        """Pieces taken since the round started, and when that or the last of them was."""
        with self._lock:
            return self._pieces, self._last

    def start(
        self, round_id: RoundId, parts: Mapping[int, RingPart], on_end: Callable[[AllReduceResult], None]
    ) -> None:
        """Begin; ``on_end`` is called once, by the thread that ends the round, which may be this one.

        It ends a round that is still running. Nothing happens if this round, or a later one, was
        started or cancelled before.
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
            before, current = self._round, _Round(round_id, rings, on_end)
            self._round = current
            self._forget(round_id)
            self._pieces, self._last = 0, self._now()
        if before is not None:
            self._end(before, f"round {_name(round_id)} took its place")
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
        """A ``RingChunk`` has arrived; kept if its round has not started here, dropped if it is over."""
        piece, values = message.head, message.values.get("values")
        assert isinstance(piece, RingChunk), f"a {type(piece).__name__} is no piece"
        if not isinstance(values, Tensor):
            values = torch.empty(0)  # which no piece has
        arrival = _Arrival(link.peer.node, piece, values)
        with self._lock:
            current = self._round
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
        """A link is gone; the round ends if one of its rings needs that peer."""
        with self._lock:
            current = self._round
        if current is not None:
            parts = [ring.part for ring in current.rings.values() if ring.part.members > 1]
            if any(part.successor is link or part.predecessor == link.peer.node for part in parts):
                self._end(current, reason, link.peer.node)

    def cancel(self, round_id: RoundId, reason: str) -> None:
        """Nothing up to this round is of interest any more; ends it if it is running."""
        with self._lock:
            current = self._round
            self._forget(max(round_id, self._newest))
        if current is not None and current.id <= round_id:
            self._end(current, reason)

    def _reduce(self, part: RingPart) -> RingReduce:
        elements = max(self._piece_bytes // part.vector.element_size(), 1)
        share = RingShare(
            part.position, part.members, part.vector, part.weight, elements, part.roundtrip, part.landing
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
        early.elements[piece.ring] += max(arrival.values.numel(), 1)
        if early.elements[piece.ring] > self._most_elements.get(piece.ring, 0):
            words = f"node_{arrival.peer} sent more of ring {piece.ring} than there is of it"
            early.problem = early.problem or (words, arrival.peer)
        else:
            early.inboxes.setdefault(piece.ring, deque()).append(arrival)

    def _work(self, current: _Round, ring: _Ring) -> None:
        """Work on a ring until there is nothing to do; the caller has made it busy."""
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
                words = f"node_{arrival.peer} sent a wrong piece of ring {ring.number}: {error}"
                self._end(current, words, arrival.peer)
                continue
            del arrival
            self._send(current, ring, outgoing)
            self._conclude(current, ring)

    def _advance(self, ring: _Ring, arrival: _Arrival) -> list[OutgoingChunk]:
        piece, expected = arrival.piece, ring.part.predecessor
        if arrival.peer != expected:
            raise WireError(f"it should come from node_{expected}")
        return ring.reduce.take(piece.segment, piece.piece, piece.hop, arrival.values)

    def _send(self, current: _Round, ring: _Ring, outgoing: list[OutgoingChunk]) -> None:
        link, number = ring.part.successor, ring.number
        exact = _VALUES if ring.part.roundtrip is None else frozenset[str]()
        for item in outgoing:
            assert link is not None, f"ring {number} has {ring.part.members} members and no successor"
            head = RingChunk(current.id, number, item.segment, item.piece, item.hop)
            try:
                link.send(Message(head, {"values": item.values}, exact))
            except LinkClosedError as error:
                self._end(current, str(error), link.peer.node)
                return
        sent = sum(ring.part.bytes_of(item.values) for item in outgoing)
        with self._lock:
            current.sent_bytes += sent

    def _conclude(self, current: _Round, ring: _Ring) -> None:
        if ring.reduce.done and not ring.digest:
            digest = ring.reduce.digest
            with self._lock:
                ring.digest = digest
                last = all(other.digest for other in current.rings.values())
            if last:
                self._end(current)

    def _end(self, current: _Round, problem: str = "", peer: int | None = None) -> None:
        with self._lock:
            if current.ended:
                return
            current.ended = True
            if self._round is current:
                self._round = None
            sent, rings = current.sent_bytes, current.rings
        averages = {} if problem else {number: ring.reduce.result for number, ring in rings.items()}
        digests = {} if problem else {number: ring.digest for number, ring in rings.items()}
        current.on_end(AllReduceResult(current.id, averages, digests, sent, problem, peer))


def _stray(arrival: _Arrival) -> tuple[str, int]:
    number, peer = arrival.piece.ring, arrival.peer
    return f"node_{peer} sent a piece of ring {number}, which this node is not in", peer


def _name(round_id: RoundId) -> str:
    return f"{round_id.number}.{round_id.attempt}" if round_id.attempt else str(round_id.number)
