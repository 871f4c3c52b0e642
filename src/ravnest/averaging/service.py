"""A node's part in averaging, at work: its thread, its links to other clusters, its rounds.

Everything is decided elsewhere and carried out here: by the coordinator and the gathering at Roots
(pure), by the exchange (all rings of the node), by the stage (which copies and changes its weights
in its own thread). The service's thread only passes messages on and never waits for a peer.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ravnest.averaging.allreduce import AllReduce, AllReduceResult, RingPart
from ravnest.averaging.compression import RoundCompression
from ravnest.averaging.peers import PeerError, Peers
from ravnest.averaging.root import AveragingConfig, AveragingRoot
from ravnest.averaging.weights_port import RoundAverage, Vectors, WeightsPort
from ravnest.errors import RavnestError
from ravnest.store.node_spec import NodeSpec, RingSpec
from ravnest.transport.base import Link, Transport
from ravnest.transport.link import try_send
from ravnest.wire.messages import (
    AnyHead,
    Decision,
    Goodbye,
    Hello,
    Message,
    Prepare,
    Prepared,
    Reduced,
    RingChunk,
    RoundId,
    RoundRequest,
    Start,
)

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0
_RETURN_SECONDS = 60.0
"""Of one attempt to find the Root of a cluster that was lost."""
STALL_SECONDS = 30.0
"""Without a single piece a round is given up: the peer lives, but something in between does not."""


@dataclass
class _Current:
    """The round that this node is in."""

    id: RoundId
    assign: bool
    held: Vectors | None = None
    started: float | None = None
    """When it was told to average."""
    faulty: bool = False
    done: bool = False
    prepared: bool = False
    """The average waits for its verdict."""


class AveragingService:
    """One node's service; implements ``LinkHandler`` for links to other clusters."""

    def __init__(
        self,
        place: NodeSpec,
        stage: WeightsPort,
        hello: Hello,
        transport: Transport,
        *,
        rounds: AveragingConfig | None,
        failed: Callable[[str], None],
    ) -> None:
        """``rounds`` belong to Roots. ``failed`` hears of errors of ours: nobody is to wait for ever."""
        self._place = place
        self._stage = stage
        self._failed = failed
        self._peers = Peers(place, hello, transport, self)
        self._council: AveragingRoot | None = None
        if rounds is not None:
            self._council = AveragingRoot(place, rounds, self._peers, told=self._tell, post=self.post)
        self._exchange = AllReduce(stage.sizes())
        self._coding = RoundCompression(hello.codec)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._known: set[Link] = set()
        """Links to Roots that the council has heard of."""
        self._current: _Current | None = None
        self._previous: Link | None = None
        self._next: Link | None = None
        name = f"ravnest-averaging-{place.name}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self, previous: Link | None, following: Link | None) -> None:
        """Begin, now that the neighbours in the pipeline are known."""
        self._previous, self._next = previous, following
        self._thread.start()

    def meet(self, timeout: float, say: Callable[[str], None]) -> None:
        """At a Root: wait for the Roots of the other clusters; go on without those that do not come."""
        missing = self._peers.meet(timeout, say, self._found)
        for cluster in sorted(missing):
            logger.warning(
                "cluster %d has not come within %.0f s: cluster %d trains without it until it does",
                cluster,
                timeout,
                self._place.cluster,
            )

    def give_up(self) -> None:
        """The run has failed: nobody waits for other clusters any more."""
        self._peers.give_up()

    def close(self, last: AnyHead | None) -> None:
        """Leave the other clusters, with a last word where nothing is wrong."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)
        self._peers.close(last)

    # Of the Root's training; from any thread

    def updated(self, samples: int) -> None:
        """The cluster has made an update of so many samples."""
        council, now = self._council, time.monotonic()
        if council is not None:
            self.post(lambda: council.updated(samples, now))

    def epoch_ended(self) -> None:
        """The cluster has made all updates of an epoch."""
        council, now = self._council, time.monotonic()
        if council is not None:
            self.post(lambda: council.epoch_ended(now))

    def ask(self, *, final: bool) -> None:
        """The cluster stands still until the next round is over."""
        council = self._council
        assert council is not None, "the Root asks"
        self.post(lambda: council.ask(final=final))

    @property
    def clamped(self) -> int:
        """Values of averages that were beyond the range of the codec."""
        return self._peers.clamped

    def post(self, call: Callable[[], None]) -> None:
        """Have the service's thread make a call."""
        self._inbox.put(call)

    # Of links; called in their threads

    def on_message(self, link: Link, message: Message) -> None:
        """From a node of another cluster."""
        head = message.head
        match head:
            case RingChunk():
                self._exchange.take(link, message)
            case Goodbye():
                self.post(lambda: self._gone(link, ""))
            case RoundRequest() | Prepared() | Reduced() | Prepare() | Start() | Decision():
                self.post(lambda: self._from_root(link, head))
            case _:
                logger.warning("node_%d has no business to send %s", link.peer.node, type(head).__name__)

    def on_lost(self, link: Link, reason: str) -> None:
        """A node of another cluster is gone."""
        self._exchange.lost(link, reason)
        self.post(lambda: self._gone(link, reason))

    def on_link(self, link: Link) -> None:
        """A node of another cluster has connected."""
        self._peers.keep(link)
        self._found(link)

    def _found(self, link: Link) -> None:
        self.post(lambda: self._met(link))

    def from_pipeline(self, head: Prepare | Start | Decision | Prepared | Reduced) -> None:
        """From the node before or behind in the pipeline."""
        if isinstance(head, Prepare | Start | Decision):
            self._pass_on(head)
            self.post(lambda: self._told(head))
        else:
            self.post(lambda: self._up(head))

    def _pass_on(self, head: Prepare | Start | Decision) -> None:
        """To the node behind, and a verdict to the stage: before whatever the Root says next."""
        if self._next is not None:
            try_send(self._next, head)
        if isinstance(head, Decision):
            self._stage.settle(head.round, commit=head.commit)

    # The thread

    def _work(self) -> None:
        while True:
            try:
                call = self._inbox.get(timeout=self._patience())
            except queue.Empty:
                call = self._look_at_the_clock
            if call is None:
                return
            try:
                call()
            except RavnestError as error:
                logger.warning("averaging at %s: %s", self._place.name, error)
            except Exception as error:  # the top of the thread: nothing may end it in silence
                logger.exception("averaging at %s failed", self._place.name)
                self._failed(f"averaging at {self._place.name}: {type(error).__name__}: {error}")

    def _patience(self) -> float | None:
        """Seconds until something is to be looked at; None if there is nothing to wait for."""
        now = time.monotonic()
        wakes = [self._council.wake if self._council is not None else math.inf, self._stall()]
        soonest = min(wakes)
        return None if soonest == math.inf else max(soonest - now, 0.0)

    def _stall(self) -> float:
        """When the round that is under way has gone too long without a piece."""
        current = self._current
        if current is None or current.started is None or current.done:
            return math.inf
        return max(current.started, self._exchange.progress[1]) + STALL_SECONDS

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        if self._council is not None and self._council.wake <= now:
            self._council.tick()
        current = self._current
        if current is not None and self._stall() <= now:
            self._exchange.cancel(current.id, f"no piece has come for {STALL_SECONDS:.0f} s")

    # Other clusters

    def _met(self, link: Link) -> None:
        """A link is there; its first messages may be quicker than the word of it."""
        if self._council is not None and link.peer.stage == 0 and link not in self._known:
            self._known.add(link)
            self._peers.keep(link)
            self._council.joined(link.peer.cluster)

    def _gone(self, link: Link, reason: str) -> None:
        """``reason`` is empty if it has left, and nothing is wrong."""
        cluster = link.peer.cluster
        self._known.discard(link)
        if not self._peers.forget(link) or self._council is None or link.peer.stage != 0:
            return
        self._council.lost(cluster, reason)
        if cluster < self._place.cluster and reason and not self._peers.closed:
            self._peers.find(cluster, _RETURN_SECONDS, self._found)

    def _from_root(
        self, link: Link, head: RoundRequest | Prepared | Reduced | Prepare | Start | Decision
    ) -> None:
        if self._council is None or link.peer.stage != 0:
            logger.warning("node_%d has no business to send %s", link.peer.node, type(head).__name__)
            return
        self._met(link)
        self._council.heard(link.peer.cluster, head)

    # The round, from the Root on along the pipeline

    def _tell(self, head: Prepare | Start | Decision) -> None:
        """At the Root: the council's word to all nodes of the cluster."""
        self._pass_on(head)
        self._told(head)

    def _told(self, head: Prepare | Start | Decision) -> None:
        match head:
            case Prepare(round_id, assign):
                self._exchange.cancel(RoundId(round_id.number, round_id.attempt - 1), "it is over")
                self._current = _Current(round_id, assign)
                self._stage.hold(
                    idle=assign, then=lambda held: self.post(lambda: self._held(round_id, held))
                )
            case Start():
                self._go(head)
            case Decision():
                self._settled(head)

    def _settled(self, head: Decision) -> None:
        current, self._current = self._current, None
        self._exchange.cancel(head.round, head.reason or "it is over")
        took_part = current is not None and current.id == head.round and current.prepared
        self._coding.settled(head.round, applied=took_part and head.commit)

    def _held(self, round_id: RoundId, held: Vectors) -> None:
        current = self._current
        if current is None or current.id != round_id:
            return
        current.held = held
        problem = self._stage.fault(held)
        current.faulty = bool(problem)
        coding, place = self._coding, self._place
        self._up(Prepared(round_id, place.cluster, place.node, 0, problem, coding.codec, coding.base))

    def _up(self, head: Prepared | Reduced) -> None:
        """The word of a node on its way to the Root, which gathers them."""
        if self._council is not None:
            self._council.collect(head)
        elif self._previous is not None:
            self._previous.send(Message(head))

    def _go(self, head: Start) -> None:
        current = self._current
        if current is None or current.id != head.round or current.held is None:
            return
        current.started = time.monotonic()
        held, current.held = current.held, None
        try:
            parts = self._parts(head, held, moves=not (current.assign or current.faulty))
        except (LookupError, ValueError) as error:  # of a Go that makes no sense
            self._ended(_failed(head, error))
            return
        # Reaching a peer may take a while.
        threading.Thread(target=self._begin, args=(head, parts), daemon=True).start()

    def _parts(self, head: Start, held: Vectors, *, moves: bool) -> dict[int, RingPart]:
        """What this node brings to each ring, but for the links."""
        coding, moving = self._coding, self._stage.moving() if moves else {}
        vectors = coding.outgoing(head, held)
        members = sorted(head.weights)
        position = members.index(self._place.cluster)
        return {
            ring.id: RingPart(
                vectors[ring.id],
                head.weights[self._place.cluster],
                position,
                len(members),
                ring.members[members[position - 1]].node,
                successor=None,
                roundtrip=coding.roundtrip(head, ring.id),
                landing=coding.landing(head, ring.id, vectors[ring.id], moving.get(ring.id, 0)),
                bytes_of=coding.bytes_of(head),
            )
            for ring in self._place.rings
        }

    def _begin(self, head: Start, parts: dict[int, RingPart]) -> None:
        try:
            for ring in self._place.rings:
                parts[ring.id] = replace(parts[ring.id], successor=self._successor(ring, head))
        except RavnestError as error:
            problem = _failed(head, error)
            missing = error.cluster if isinstance(error, PeerError) else None
            self.post(lambda: self._ended(problem, missing))
            return
        self._exchange.start(head.round, parts, lambda done: self.post(lambda: self._ended(done)))

    def _successor(self, ring: RingSpec, head: Start) -> Link | None:
        """A link to the next member; None where there is no other."""
        members = sorted(head.weights)
        after = members[(members.index(self._place.cluster) + 1) % len(members)]
        return None if len(members) == 1 else self._peers.reach(ring.members[after], after)

    def _ended(self, done: AllReduceResult, missing: int | None = None) -> None:
        current = self._current
        if current is None or current.id != done.round:
            return
        current.done = True
        if not done.problem:
            self._stage.prepare(RoundAverage(done.round, done.averages, current.assign, current.faulty))
            current.prepared = True
        if missing is None and done.peer is not None:
            missing = self._peers.cluster_of(done.peer)
        self._up(
            Reduced(
                round=done.round,
                cluster=self._place.cluster,
                node=self._place.node,
                digests=dict(done.digests),
                sent_bytes=done.sent_bytes,
                problem=done.problem,
                missing=missing,
            )
        )


def _failed(head: Start, error: Exception) -> AllReduceResult:
    return AllReduceResult(head.round, {}, {}, 0, str(error) or type(error).__name__)
