"""The shell of averaging at one node: its thread, its links to other clusters, its clock.

Decisions are made by pure state machines: ``Member`` at a Root, ``Participant`` at every node. The
service passes them events and carries out their actions. Its thread never waits for a peer; the
all-reduce runs in the link threads, and the weights belong to the worker's thread.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ravnest.averaging.checks import scales
from ravnest.averaging.deadlines import Deadlines
from ravnest.averaging.events import (
    ClusterJoined,
    ClusterLost,
    Command,
    Reply,
    RoundEnded,
    RoundMessage,
    SendToCluster,
    Tick,
)
from ravnest.averaging.member import (
    EpochEnded,
    Member,
    MemberAction,
    MemberEvent,
    MessageArrived,
    NodeReplied,
    TrainingPaused,
    UpdateMade,
)
from ravnest.averaging.participant import (
    CancelReduce,
    CommandArrived,
    CopyWeights,
    Participant,
    ParticipantAction,
    ParticipantEvent,
    ReduceEnded,
    SendReply,
    SettleCompression,
    Stalled,
    StartReduce,
    StoreAverage,
    WeightsCopied,
)
from ravnest.averaging.peers import REDIAL_SECONDS, Peers
from ravnest.averaging.ports import AveragingConfig, Vectors, WeightsPort
from ravnest.averaging.reducer import NodeReducer
from ravnest.averaging.relay import RelayToNodes, RoundOver
from ravnest.averaging.round_trace import RoundTrace
from ravnest.deadlines import LINK_CLOSE
from ravnest.errors import RavnestError
from ravnest.store.node_spec import NodeSpec
from ravnest.tracing.recorder import SpanRecorder
from ravnest.transport.base import Link, Transport, try_send
from ravnest.transport.generations import Generations
from ravnest.types import RobustMean
from ravnest.wire.messages import Abort, AnyHead, Decision, Goodbye, Hello, Message, RingChunk, RoundId

logger = logging.getLogger(__name__)

_HAS_LEFT = "it has left"


class AveragingService:
    """Averaging at one node; implements ``AveragingPort`` and, for other clusters, ``LinkHandler``."""

    def __init__(  # noqa: PLR0913 - parts of a node, made by its runtime
        self,
        spec: NodeSpec,
        weights: WeightsPort,
        hello: Hello,
        transport: Transport,
        *,
        config: AveragingConfig | None,
        failed: Callable[[str], None],
        deadlines: Deadlines,
        generations: Generations | None = None,
        robust_mean: RobustMean | None = None,
        now: Callable[[], float] = time.monotonic,
        trace: SpanRecorder | None = None,
    ) -> None:
        """``config`` is given at Roots only. ``failed`` is called with unexpected errors.

        ``deadlines`` account for outages of links, and for the time that a lost node has to return.
        ``generations`` knows which process is each node; it outlives the run. ``robust_mean`` must be
        the same at all nodes. ``trace`` records rounds.
        """
        self._trace = RoundTrace(trace)
        self._returns = deadlines.final_return
        self._spec = spec
        self._weights = weights
        self._config = config
        self._failed = failed
        self._now = now
        self._peers = Peers(
            spec, hello, transport, self, generations=generations, on_replaced=self._peer_replaced
        )
        self._participant = Participant(spec.cluster, spec.node, deadlines)
        self._member: Member | None = None
        if config is not None:
            self._member = Member(
                spec.cluster,
                spec.pipeline,
                mode=config.mode,
                reduce_factor=config.reduce_factor,
                deadlines=deadlines,
                planned=spec.samples,
                robust=robust_mean is not None,
            )
        self._reducer = NodeReducer(
            spec, weights, self._peers, hello.codec, self._reduce_ended, deadlines, now, robust_mean
        )
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._samples = 0
        """Samples of all updates, counted in the worker's thread."""
        self._joined: set[Link] = set()
        """Links to Roots that the member has been told about."""
        self._previous: Link | None = None
        self._next: Link | None = None
        name = f"ravnest-averaging-{spec.name}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self, previous: Link | None, following: Link | None) -> None:
        """Start the thread, with links to the neighbours in the pipeline."""
        self._previous, self._next = previous, following
        self._thread.start()
        self._peers.introduce()

    def connect(self, timeout: float, say: Callable[[str], None]) -> None:
        """Connect a Root to the other Roots; continue without those that do not answer in time."""
        missing = self._peers.connect(timeout, say, self._link_opened)
        for cluster in sorted(missing):
            logger.warning(
                "cluster %d has not connected within %.0f s: cluster %d trains without it until it does",
                cluster,
                timeout,
                self._spec.cluster,
            )

    def give_up(self) -> None:
        """Stop waiting for other clusters, because the run has failed."""
        self._peers.give_up()

    def close(self, last: AnyHead | None) -> None:
        """Stop the thread and close the links to other clusters, with ``last`` as the last message."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(LINK_CLOSE)
        self._peers.close(last)

    # Training of this cluster, from any thread

    def continue_from(
        self, updates: int, samples: int, newest: int = -1, *, after_loss: bool = False
    ) -> None:
        """Continue a run from a checkpoint, before the first update: see ``RoundTrigger``.

        Only a Root needs it. ``samples`` and ``newest`` are what ``samples`` and ``newest_round`` were
        when the checkpoint was taken. ``after_loss``: the other clusters were part of the run before;
        the final round waits for them.
        """
        self._samples = samples
        member = self._member
        if member is None:
            return
        self.post(lambda: member.trigger.continue_from(updates, samples, newest, after_loss=after_loss))
        if after_loss and self._returns:
            others = set(range(len(self._spec.roots))) - {self._spec.cluster}
            until = self._now() + self._returns
            self.post(lambda: member.expect(others, until))

    @property
    def samples(self) -> int:
        """Samples since the last average, at a Root; what a checkpoint has to contain of averaging."""
        return 0 if self._member is None else self._samples - self._member.trigger.averaged

    @property
    def newest_round(self) -> int:
        """Number of the newest round whose average was applied, at a Root; -1 before the first."""
        return -1 if self._member is None else self._member.trigger.newest

    def updated(self, samples: int) -> None:
        """Report an update made from ``samples`` samples."""
        self._samples += samples
        self._post_to_member(UpdateMade(samples, self._now()))

    def epoch_ended(self) -> None:
        """Report that all updates of an epoch are made."""
        self._post_to_member(EpochEnded(self._now()))

    def pause(self, *, final: bool, kept: bool = False, call: int = 0) -> None:
        """Request a round that this cluster waits for; ``released`` is called when it is over.

        ``final``: training has ended in this ``call`` of the script; with ``kept``, the average of the
        final round is in a checkpoint, and the cluster only waits until all others have it too.
        """
        assert self._member is not None, "only a Root requests rounds"
        self._post_to_member(TrainingPaused(final, kept, call))

    @property
    def clamped(self) -> int:
        """Values of averages that were clamped to the range of the codec."""
        return self._peers.clamped

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received from other clusters and sent to them."""
        return self._peers.traffic

    def post(self, call: Callable[[], None]) -> None:
        """Queue a call for the service's thread."""
        self._inbox.put(call)

    def _post_to_member(self, event: MemberEvent) -> None:
        if self._member is not None:
            self.post(lambda: self._to_member(event))

    # Messages and links, in link threads

    def on_message(self, link: Link, message: Message) -> None:
        """Take a message of a node of another cluster."""
        if not self._peers.is_member(link.peer) or not self._peers.is_current(link):
            return
        head = message.head
        match head:
            case RingChunk():
                self._reducer.allreduce.take(link, message)
            case Goodbye():
                self.post(lambda: self._link_lost(link, _HAS_LEFT, returns=False))
            case Abort(_, reason, recoverable):
                self.post(lambda: self._link_lost(link, reason, returns=recoverable))
            case _ if isinstance(head, RoundMessage):
                self.post(lambda: self._from_root(link, head))
            case _:
                _warn_unexpected(link, head)

    def on_lost(self, link: Link, reason: str) -> None:
        """Handle the loss of a link to a node of another cluster."""
        if not self._peers.is_member(link.peer):
            return
        if self._peers.is_current(link):  # otherwise rounds use the link to the process after it
            self._reducer.allreduce.lost(link, reason)
        self.post(lambda: self._link_lost(link, reason))

    def on_link(self, link: Link) -> None:
        """Take the link of a node of another cluster that has connected."""
        self._link_opened(link)  # first, because ``connect`` may return after ``keep``
        self._peers.keep(link)

    def _peer_replaced(self, link: Link) -> None:
        """End what waits for a process whose place another one has taken."""
        self._reducer.allreduce.lost(link, f"node_{link.peer.node} was restarted")

    def _link_opened(self, link: Link) -> None:
        self.post(lambda: self._join(link))

    def from_pipeline(self, head: Command | Reply) -> None:
        """Take a message of a round from a neighbour in the pipeline."""
        if isinstance(head, Command):
            self._pass_on(head)
            self.post(lambda: self._to_participant(CommandArrived(head)))
        else:
            self.post(lambda: self._reply(head))

    def _pass_on(self, head: Command) -> None:
        """Send a command to the next node, and settle a Decision before any later message."""
        if self._next is not None:
            try_send(self._next, head)
        if isinstance(head, Decision):
            self._weights.settle(head.round, commit=head.commit)

    # The thread

    def _work(self) -> None:
        while True:
            try:
                call = self._inbox.get(timeout=self._timeout())
            except queue.Empty:
                call = self._check_clock
            if call is None:
                return
            try:
                call()
            except RavnestError as error:
                logger.warning("averaging at %s: %s", self._spec.name, error)
            except Exception as error:  # top of the thread: no error may end it silently
                logger.exception("averaging at %s failed", self._spec.name)
                self._failed(f"averaging at {self._spec.name}: {type(error).__name__}: {error}")

    def _timeout(self) -> float | None:
        """Return the seconds until the next deadline; None if there is none."""
        soonest = min(self._wake(), self._stall())
        return None if soonest == math.inf else max(soonest - self._now(), 0.0)

    def _wake(self) -> float:
        return math.inf if self._member is None else self._member.wake

    def _stall(self) -> float:
        return self._participant.stalls_at(self._reducer.allreduce.progress[1])

    def _check_clock(self) -> None:
        now = self._now()
        if self._wake() <= now:
            self._to_member(Tick())
        if self._stall() <= now:
            self._to_participant(Stalled())

    # Other clusters

    def _join(self, link: Link) -> None:
        """Report a link to a Root to the member once; its messages may precede ``on_link``."""
        if self._member is None or link.peer.stage != 0 or link in self._joined:
            return
        if self._peers.keep(link):
            self._joined = {link, *filter(self._peers.is_current, self._joined)}
            self._to_member(ClusterJoined(link.peer.cluster))

    def _link_lost(self, link: Link, reason: str, *, returns: bool = True) -> None:
        """Handle a lost link; ``returns``: the cluster has not left the run, and may connect again."""
        cluster, own = link.peer.cluster, self._spec.cluster
        self._joined.discard(link)
        if not self._peers.forget(link) or self._member is None or link.peer.stage != 0:
            return
        if reason != _HAS_LEFT:
            logger.warning("cluster %d is gone (%s); cluster %d trains on", cluster, reason, own)
        until = self._now() + self._returns if returns and self._returns else -math.inf
        self._to_member(ClusterLost(cluster, reason, until))
        if cluster < own and returns and not self._peers.closed:
            self._peers.dial_root(cluster, REDIAL_SECONDS, self._link_opened)

    def _from_root(self, link: Link, head: RoundMessage) -> None:
        cluster = link.peer.cluster
        if self._member is None or link.peer.stage != 0:
            _warn_unexpected(link, head)
            return
        if not self._peers.is_current(link):
            return  # it was replaced after the message arrived
        self._join(link)
        if not isinstance(head, Command) and head.cluster != cluster:
            logger.warning("cluster %d sent a message as cluster %d; ignored", cluster, head.cluster)
            return
        self._to_member(MessageArrived(cluster, head))

    # The member, at a Root

    def _to_member(self, event: MemberEvent) -> None:
        assert self._member is not None, "only a Root has a member"
        for action in self._member.handle(event, self._now()):
            self._carry_out(action)

    def _carry_out(self, action: MemberAction) -> None:
        assert self._config is not None, "only a Root has a member"
        match action:
            case SendToCluster(cluster, head):
                link = self._peers.root(cluster)
                if link is None:
                    logger.debug("cluster %d is gone; %s dropped", cluster, type(head).__name__)
                else:
                    try_send(link, head)
            case RelayToNodes(head):
                self._pass_on(head)
                self._to_participant(CommandArrived(head))
            case RoundOver(decision, resume):
                logger.info("cluster %d: %s", self._spec.cluster, decision.reason)
                if resume:
                    self._config.released(decision.commit)
            case RoundEnded(outcome):
                self._config.reported(outcome)

    def _reply(self, head: Reply) -> None:
        """Pass a reply on towards the Root; at the Root, to the member."""
        if self._member is not None:
            # Queued, because the member's last actions may not be carried out yet.
            self._post_to_member(NodeReplied(head))
        elif self._previous is not None:
            self._previous.send(Message(head))

    # The participant, at every node

    def _to_participant(self, event: ParticipantEvent) -> None:
        for action in self._participant.handle(event, self._now()):
            self._perform(action)

    def _perform(self, action: ParticipantAction) -> None:
        match action:
            case CopyWeights(round_id, idle):
                self._trace.copying(round_id.number)
                self._note_round(is_open=True)
                self._weights.copy(
                    idle=idle, then=lambda copy: self.post(lambda: self._copied(round_id, copy))
                )
            case StartReduce():
                self._trace.exchanging()
                self._reducer.start(action)
            case CancelReduce(round_id, reason):
                self._reducer.allreduce.cancel(round_id, reason)
            case StoreAverage(average):
                self._weights.store(average)
            case SettleCompression(round_id, applied):
                self._trace.settled()
                self._note_round(is_open=False)
                self._reducer.compression.settled(round_id, applied=applied)
            case SendReply(head):
                self._reply(head)

    def _note_round(self, *, is_open: bool) -> None:
        if self._config is not None:
            self._config.averaging(is_open)

    def _copied(self, round_id: RoundId, copy: Vectors) -> None:
        self._trace.copied()
        problem, compression = self._weights.fault(copy), self._reducer.compression
        event = WeightsCopied(round_id, copy, problem, compression.codec, compression.base, scales(copy))
        self._to_participant(event)

    def _reduce_ended(self, event: ReduceEnded) -> None:
        # The scales are computed in this thread: the one of the link must go on.
        self.post(lambda: self._reduced(replace(event, scales=scales(event.result.averages))))

    def _reduced(self, event: ReduceEnded) -> None:
        self._trace.exchanged()
        self._to_participant(event)


def _warn_unexpected(link: Link, head: AnyHead) -> None:
    logger.warning("node_%d sent an unexpected %s; ignored", link.peer.node, type(head).__name__)
