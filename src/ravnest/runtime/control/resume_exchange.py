"""Agreement of a cluster's nodes, before they train, on the checkpoint that they continue from.

Each node offers what it and the nodes behind it can load. The Root decides. State travels from replicas
to nodes that lack it. The Root begins once every node behind it has loaded its state.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ravnest.errors import RunError, RunInterruptedError
from ravnest.runtime.control.checkpoints import Checkpoints
from ravnest.runtime.control.rendezvous import Links
from ravnest.runtime.control.resume_choice import choose_resume, merge_offers
from ravnest.store.checkpoint import CheckpointManifest
from ravnest.store.node_spec import NodeSpec
from ravnest.transport.base import Link
from ravnest.types import BEGINNING, CheckpointId
from ravnest.wire.messages import (
    Abort,
    Goodbye,
    Message,
    ResumeFrom,
    ResumeOffer,
    StateLoaded,
)


@dataclass(frozen=True)
class ResumeWish:
    """Run that a node wants to continue when it starts."""

    run: str = ""
    """Run that the node has left because of a loss."""
    any_run: bool = False
    """Continue the newest run that there is."""
    lost: str = ""
    """Reason for which the node left its run."""
    calls: int = 0
    """Calls of the script that ended before; at the Root."""
    made: int = 0
    """Updates that the node had made when it left the run."""


@dataclass(frozen=True)
class ResumedState:
    """Point at which a node continues."""

    run: str
    checkpoint: CheckpointId
    calls: int
    progress: Any = None
    """Progress as it was stored; None at the beginning."""
    source: str = ""
    """Origin of the state of stages that lacked it, as a sentence."""
    lost: str = ""
    """Reason for which the run was interrupted; known at the Root."""
    made: int = 0
    """Updates made before, as far as nodes that have survived know; known at the Root."""


@dataclass
class ResumeExchange:
    """One node's side of the agreement."""

    spec: NodeSpec
    checkpoints: Checkpoints | None
    """None if the node neither writes nor reads checkpoints."""
    timeout: float
    _events: queue.SimpleQueue[Callable[[], Any]] = field(default_factory=queue.SimpleQueue)
    _early: list[Any] = field(default_factory=list)
    """Messages that arrived before they were awaited."""
    _done: bool = False

    # Link threads

    def on_message(self, message: Message) -> bool:
        """Take a message; return False if it is not one of the agreement."""
        match message.head:
            case ResumeOffer() | ResumeFrom() | StateLoaded():
                self._events.put(lambda: message.head)
            case Goodbye(node) if not self._done:
                self._events.put(lambda: _interrupt(f"node_{node} has closed"))
            case Abort(_, reason, recoverable) if not self._done:
                self._events.put(lambda: _interrupt(reason) if recoverable else _fail(reason))
            case _:
                return False
        return True

    def on_lost(self, link: Link, reason: str) -> None:
        """Note the loss of a neighbour."""
        if not self._done:
            self._events.put(lambda: _interrupt(f"node_{link.peer.node} was lost: {reason}"))

    def on_state(self, manifest: CheckpointManifest) -> None:
        """Note that a checkpoint has arrived from a neighbour."""
        if manifest.stage == self.spec.stage:
            self._events.put(lambda: manifest)

    def on_problem(self, reason: str) -> None:
        """Note that the state of this node cannot be stored here."""
        self._events.put(lambda: _fail(reason))

    # The user's thread

    def agree(self, links: Links, wish: ResumeWish, new_run: str) -> ResumedState:
        """Agree with the other nodes, load the state, and return where training continues."""
        deadline = time.monotonic() + self.timeout
        following = None
        if links.next is not None:
            following = self._await(ResumeOffer, deadline, "the nodes behind it to offer their state")
        offer = merge_offers(self._offer(wish), following)
        if links.previous is None:
            chosen = choose_resume(offer, self.spec.stages, new_run)
            decision = msgspec.structs.replace(chosen, calls=wish.calls)
        else:
            links.previous.send(Message(offer))
            decision = self._await(ResumeFrom, deadline, "the Root to choose a checkpoint")
        if self.checkpoints is not None:
            self.checkpoints.begin_attempt(decision)
        if links.next is not None:
            links.next.send(Message(decision))
        progress = self._load(links, decision, deadline)
        if links.next is not None:
            self._await(StateLoaded, deadline, "the nodes behind it to load their state")
        if links.previous is not None:
            links.previous.send(Message(StateLoaded()))
        self._done = True
        state = ResumedState(
            decision.run, decision.checkpoint, decision.calls, progress, _origin(decision)
        )
        return replace(state, lost=offer.lost, made=offer.made) if links.previous is None else state

    def _offer(self, wish: ResumeWish) -> ResumeOffer:
        held = {}
        if self.checkpoints is not None:
            self.checkpoints.clean()
            held = self.checkpoints.held()
        return ResumeOffer(held, wish.run, wish.any_run, wish.lost, wish.made)

    def _load(self, links: Links, decision: ResumeFrom, deadline: float) -> Any:
        """Bring the stage to the chosen checkpoint; send replicas to those that lack their state."""
        checkpoints, chosen, own = self.checkpoints, decision.checkpoint, self.spec.stage
        if checkpoints is None:
            return None
        if chosen == BEGINNING:
            return None
        for stage, holder in decision.sources.items():
            link = links.previous if stage < own else links.next
            if holder == own and link is not None:
                checkpoints.supply(stage, chosen, link)
        if own in decision.sources:
            self._await(CheckpointManifest, deadline, "its state from a neighbour")
        checkpoints.drop_later(decision)
        return checkpoints.load(decision.run, chosen)

    def _await(self, kind: type[Any], deadline: float, what: str) -> Any:
        while True:
            found = next((each for each in self._early if isinstance(each, kind)), None)
            if found is not None:
                self._early.remove(found)
                return found
            try:
                self._early.append(self._events.get(timeout=max(deadline - time.monotonic(), 0.0))())
            except queue.Empty:
                raise RunError(
                    f"{self.spec.name} has waited {self.timeout:.0f} s for {what}: look at the other "
                    "nodes' output, and start those that are missing"
                ) from None


@dataclass(frozen=True)
class Recovery:
    """Means of a worker for checkpoints and for the loss of a node."""

    checkpoints: Checkpoints | None
    exchange: ResumeExchange
    rejoins: bool
    """If a node is lost, the run is interrupted; otherwise it fails."""
    hands_over: bool
    """If this process fails for a reason of its machine, the others have lost it."""


def _origin(decision: ResumeFrom) -> str:
    """Describe where the state comes from."""
    if decision.checkpoint == BEGINNING:
        return "the original weights: there is no checkpoint yet"
    if not decision.sources:
        return "the nodes' own disks"
    parts = (f"stage {stage} from the replica at stage {h}" for stage, h in decision.sources.items())
    return ", ".join(parts)


def _interrupt(reason: str) -> None:
    raise RunInterruptedError(reason)


def _fail(reason: str) -> None:
    raise RunError(reason)
