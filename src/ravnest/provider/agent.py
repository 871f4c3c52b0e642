"""What a provider does about the server's orders; decides, and touches nothing.

Orders name the assignment that the provider should have, whatever it does now. The agent compares
the two and moves toward the orders: it fetches, starts the worker, uploads what a Root has trained,
or stops. One heartbeat waits at the server for news (the poll); what this provider has to tell
travels in others, which wait for nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from ravnest.provider.assignment_progress import FIRST_PAUSE, AssignmentProgress
from ravnest.provider.events import (
    Action,
    Answered,
    Began,
    DeadlinePassed,
    Discard,
    Event,
    Exit,
    Fetch,
    Fetched,
    InterruptReceived,
    Learned,
    Leave,
    Left,
    OfferRefused,
    Say,
    SendHeartbeat,
    SendOffer,
    StartWorker,
    Stop,
    TurnedAway,
    Unanswered,
    Upload,
    Uploaded,
    WorkerEnded,
)
from ravnest.schemas.providers import Heartbeat, HeartbeatReply, Phase, TlsRejections

POLL_SECONDS = 10.0
"""How long a poll may wait at the server."""
REPORT_SECONDS = 1.0
"""Losses are not told more often."""
_GAP = 0.25
"""Between polls, whatever the server answers."""
_LONGEST_PAUSE = 10.0
"""A server that comes back waits longer than this before it takes us for lost."""
_LOSTNESS = "the provider was restarted while it worked on this"
_STRANGERS = "somebody without a good certificate was turned away; the server is told how often"
_ENDS = (401, 403)
"""Answers after which there is no point in asking again."""
_UNKNOWN = 404


class Agent:
    """A provider's decisions, in virtual time."""

    def __init__(
        self,
        *,
        ends: float | None = None,
        once: bool = False,
        lost: Iterable[str] = (),
        jitter: random.Random | None = None,
    ) -> None:
        """``ends``: when the hours that were offered are over. ``once``: leave after one assignment.

        ``lost``: assignments that an earlier process of this provider was at work on.
        """
        self._ends = ends
        self._once = once
        self._lost = frozenset(lost)
        self._jitter = random.Random() if jitter is None else jitter  # noqa: S311 - no secret
        self._work: AssignmentProgress | None = None
        self._wanted: str | None = None
        self._number = 0
        self._newest = 0
        """The newest heartbeat that was answered."""
        self._poll: int | None = None
        self._telling: int | None = None
        self._news = False
        """There is something that the server was not told."""
        self._away = False
        """The server does not answer."""
        self._pause = FIRST_PAUSE
        self._poll_at: float | None = None
        self._tell_at = 0.0
        self._offering: int | None = None
        self._interrupted = False
        self._leaving: str | None = None
        self._left = False
        self._code = 0

    @property
    def deadline(self) -> float | None:
        """When to come back with ``DeadlinePassed``; None: not at all."""
        times = [self._ends, self._poll_at, None if self._work is None else self._work.again_at]
        if self._news and self._telling is None and not self._away:
            times.append(self._tell_at)
        return min((time for time in times if time is not None), default=None)

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about an event."""
        match event:
            case InterruptReceived() if self._interrupted:
                return [Exit(130)]
            case InterruptReceived():
                self._interrupted = True
            case Left():
                return [Exit(self._code)]
        if self._left:
            return []
        return [*self._react(event, now), *self._settle(now), *self._talk(now)]

    def _react(self, event: Event, now: float) -> list[Action]:
        match event:
            case Began():
                self._poll, self._poll_at = None, now
                return self._is_back()
            case Answered(number, orders):
                return self._answered(number, orders, now)
            case Unanswered(number, reason):
                return self._unanswered(number, reason, now)
            case OfferRefused(number, status, reason):
                return self._refused(number, status, reason, now)
            case InterruptReceived() if self._leaving is None:
                return self._leave("its owner stopped it")
            case DeadlinePassed() if self._ends is not None and now >= self._ends:
                self._ends = None
                return self._leave("the hours that it offered are over")
            case Fetched() | Learned() | TurnedAway() | WorkerEnded() | Uploaded():
                work = self._work
                if work is None or work.assignment != event.assignment:
                    return []
                return self._progress(work, event, now)
            case _:
                return []

    # The server

    def _answered(self, number: int, orders: HeartbeatReply, now: float) -> list[Action]:
        polled = number == self._poll
        actions = self._is_back() if polled else []
        overtaken = number < self._newest
        self._over(number, now if overtaken else now + _GAP)
        if overtaken:  # by a later one: what this says may be older, so that it is asked again
            return actions
        self._newest = number
        if orders.assignment != self._wanted:
            self._wanted = orders.assignment
            if self._work is not None and not self._work.is_over and orders.reason:
                actions.append(Say(f"the server says: {orders.reason}"))
        work = self._work
        if work is not None and work.assignment == orders.assignment:
            work.acknowledged = min(orders.losses_known, len(work.losses))
            self._news |= work.acknowledged < len(work.losses) or (polled and work.is_over)
        return actions

    def _unanswered(self, number: int, reason: str, now: float) -> list[Action]:
        if number == self._telling:
            self._telling, self._news = None, True
            return []
        if number != self._poll:
            return []
        self._over(number, now + self._jittered(self._pause))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if self._away:
            return []
        self._away = True
        busy = self._work is not None and self._work.busy
        what = "; its job goes on, and it tries again" if busy else "; it tries again"
        return [Say(f"the server does not answer: {reason}{what}")]

    def _refused(self, number: int, status: int, reason: str, now: float) -> list[Action]:
        if number == self._telling:  # the poll will say what to do instead
            self._telling = None
            return []
        if number != self._poll:
            return []
        if status in _ENDS:
            self._code = 1
            return [Say(f"the server refuses this provider: {reason}"), *self._leave(reason)]
        if status == _UNKNOWN and number != self._offering:
            again = self._unanswered(number, f"it does not know this provider ({reason})", now)
            self._poll_at, self._poll = None, self._next_number()
            self._offering = self._poll
            return [*again, SendOffer(self._poll)]
        return self._unanswered(number, reason, now)

    def _over(self, number: int, next_poll: float) -> None:
        """A heartbeat is over, with or without an answer."""
        if number == self._poll:
            self._poll, self._poll_at = None, next_poll
        elif number == self._telling:
            self._telling = None

    def _is_back(self) -> list[Action]:
        away, self._away = self._away, False
        self._pause = FIRST_PAUSE
        return [Say("the server is back")] if away else []

    def _jittered(self, pause: float) -> float:
        return pause * self._jitter.uniform(0.5, 1.5)

    # The work

    def _progress(
        self,
        work: AssignmentProgress,
        event: Fetched | Learned | TurnedAway | WorkerEnded | Uploaded,
        now: float,
    ) -> list[Action]:
        if isinstance(event, Learned):
            work.losses += event.losses
            work.figures = event.figures
            self._news = True
            return []
        if isinstance(event, TurnedAway):
            known, work.strangers = work.strangers, event.strangers
            self._news = True
            return [] if known != TlsRejections() else [Say(f"{work.title}: {_STRANGERS}")]
        work.busy = False
        if work.stopping:
            return []
        if isinstance(event, Fetched | Uploaded) and event.again:
            work.again_at = now + self._jittered(work.pause)
            work.pause = min(2 * work.pause, _LONGEST_PAUSE)
            return []
        if event.failure:
            return self._fails(work, event.failure, now)
        match event:
            case Fetched():
                work.is_root, work.place = event.is_root, event.place
                said = Say(f"{event.place}: trains")
                return [said, *self._next(work, "training", StartWorker(work.assignment), now)]
            case WorkerEnded() if work.is_root:
                return self._next(work, "uploading", Upload(work.assignment), now)
            case Uploaded():
                work.result = event.files
        work.phase = "finished"
        self._urgent(now)
        return [Say(f"{work.place}: finished")]

    def _next(self, work: AssignmentProgress, phase: Phase, action: Action, now: float) -> list[Action]:
        work.phase, work.busy = phase, True
        self._urgent(now)
        return [action]

    def _fails(self, work: AssignmentProgress, failure: str, now: float) -> list[Action]:
        work.phase, work.failure = "failed", failure
        self._urgent(now)
        return [Say(f"{work.title}: failed: {failure}")]

    def _urgent(self, now: float) -> None:
        self._news, self._tell_at = True, now

    def _settle(self, now: float) -> list[Action]:
        """Bring what is done in line with what is wanted."""
        if self._left:
            return []
        wanted = None if self._leaving is not None else self._wanted
        actions: list[Action] = []
        work = self._work
        if work is not None and (work.assignment != wanted or work.stopping):
            if work.busy:
                stops, work.stopping = work.stopping, True
                return [] if stops else [Say(f"{work.title}: stops"), Stop(work.assignment)]
            actions.append(Discard(work.assignment))
            if self._once and self._leaving is None:
                self._code = 1 if work.phase == "failed" else 0
                self._leaving = "it was to work on one job"
            work = self._work = None
            self._news = False
        if self._leaving is not None:
            self._left = True
            return [*actions, Leave(self._leaving)]
        if work is None and wanted is not None:
            actions += self._begin(wanted, now)
        elif work is not None and work.again_at is not None and now >= work.again_at:
            work.again_at, work.busy = None, True
            again = Upload if work.phase == "uploading" else Fetch
            actions.append(again(work.assignment))
        return actions

    def _begin(self, assignment: str, now: float) -> list[Action]:
        self._work = AssignmentProgress(assignment)
        self._urgent(now)
        if assignment in self._lost:
            self._work.phase, self._work.failure, self._work.busy = "failed", _LOSTNESS, False
            return [Say(f"the job fails: {_LOSTNESS}")]
        return [Say("the server has a job for this provider; it fetches its part"), Fetch(assignment)]

    def _leave(self, reason: str) -> list[Action]:
        self._leaving = reason
        return [Say(f"leaves: {reason}")]

    # Heartbeats

    def _talk(self, now: float) -> list[Action]:
        """The heartbeats that are due."""
        if self._left:
            return []
        actions: list[Action] = []
        if self._news and self._telling is None and not self._away and now >= self._tell_at:
            if self._work is not None:
                self._telling = self._next_number()
                heartbeat = Heartbeat(report=self._work.report(), known=self._wanted, wait=0)
                actions.append(SendHeartbeat(self._telling, heartbeat))
            self._news = False
            self._tell_at = now + REPORT_SECONDS
        if self._poll is None and self._poll_at is not None and now >= self._poll_at:
            self._poll, self._poll_at = self._next_number(), None
            wait = 0 if self._away else POLL_SECONDS  # one that was away is to be noticed at once
            actions.append(SendHeartbeat(self._poll, Heartbeat(known=self._wanted, wait=wait)))
        return actions

    def _next_number(self) -> int:
        self._number += 1
        return self._number
