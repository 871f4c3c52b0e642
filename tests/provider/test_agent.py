"""What a provider decides, in virtual time: events in, lists of actions out."""

import random

import pytest

from ravnest.provider.agent import POLL_SECONDS, REPORT_SECONDS, Agent
from ravnest.provider.assignment_progress import MOST_LOSSES
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
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import ResultFile
from ravnest.schemas.providers import AssignmentReport, Heartbeat, HeartbeatReply, TlsRejections

PLACE = "node_0, Root of cluster 0 in job j"
FILES = (ResultFile(name="node_0.json", artifact=Artifact(sha256="0" * 64, size=1)),)


class Middle(random.Random):
    """Draws the middle of every range."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


class Scene:
    """An agent, its clock, and heartbeats that wait for an answer."""

    def __init__(self, **options: object) -> None:
        self.agent = Agent(jitter=Middle(), **options)  # type: ignore[arg-type]
        self.now = 100.0
        self.sent: dict[int, Heartbeat] = {}
        self.said: list[str] = []

    def give(self, event: Event) -> list[Action]:
        """The actions of an event, without heartbeats and lines, which are kept."""
        kept: list[Action] = []
        for action in self.agent.handle(event, self.now):
            match action:
                case SendHeartbeat(number, heartbeat):
                    self.sent[number] = heartbeat
                case Say(line):
                    self.said.append(line)
                case _:
                    kept.append(action)
        return kept

    @property
    def poll(self) -> int:
        return next(n for n, beat in self.sent.items() if beat.report is None)

    @property
    def telling(self) -> int:
        return next(n for n, beat in self.sent.items() if beat.report is not None)

    @property
    def report(self) -> AssignmentReport:
        report = self.sent[self.telling].report
        assert report is not None
        return report

    def answer(self, number: int, assignment: str | None, known: int = 0) -> list[Action]:
        del self.sent[number]
        return self.give(Answered(number, HeartbeatReply(assignment=assignment, losses_known=known)))

    def order(self, assignment: str | None, reason: str = "") -> list[Action]:
        """Other orders by the poll; one that was overtaken by a report is asked again."""
        before = self.poll
        del self.sent[before]
        orders = HeartbeatReply(assignment=assignment, reason=reason)
        actions = self.give(Answered(before, orders))
        if any(beat.report is None for beat in self.sent.values()):
            assert actions == []
            actions = self.give(Answered(self.poll, orders))
        return actions

    def later(self, seconds: float | None = None) -> list[Action]:
        """Go to the agent's deadline, or on by some seconds."""
        if seconds is None:
            assert self.agent.deadline is not None
            self.now = max(self.now, self.agent.deadline)
        else:
            self.now += seconds
        return self.give(DeadlinePassed())

    def begin(self, assignment: str = "a") -> None:
        assert self.give(Began()) == []
        assert self.answer(self.poll, assignment) == [Fetch(assignment)]
        self.later(1)

    def tell(self, assignment: str | None, known: int = 0) -> list[Action]:
        """Let the server answer the report that is under way."""
        return self.answer(self.telling, assignment, known)

    def train(self, assignment: str = "a", *, is_root: bool = True) -> None:
        self.begin(assignment)
        self.tell(assignment)
        fetched = Fetched(assignment, is_root=is_root, place=PLACE)
        assert self.give(fetched) == [StartWorker(assignment)]
        self.tell(assignment)
        self.later(1)


@pytest.fixture
def scene() -> Scene:
    return Scene()


# A job from the beginning to the end


def test_an_idle_provider_polls(scene: Scene) -> None:
    assert scene.give(Began()) == []
    assert list(scene.sent.values()) == [Heartbeat(known=None, wait=POLL_SECONDS)]
    assert scene.answer(scene.poll, None) == []
    assert not scene.sent  # not at once, whatever the server does
    assert scene.later() == []
    assert scene.poll == 2


def test_a_root_fetches_trains_uploads_and_finishes(scene: Scene) -> None:
    scene.begin()
    assert scene.report == AssignmentReport(assignment="a", phase="fetching")
    assert scene.sent[scene.poll].known == "a"
    scene.tell("a")
    assert scene.give(Fetched("a", is_root=True, place=PLACE)) == [StartWorker("a")]
    assert scene.report.phase == "training"
    scene.tell("a")
    assert scene.give(WorkerEnded("a")) == [Upload("a")]
    assert scene.report.phase == "uploading"
    scene.tell("a")
    assert scene.give(Uploaded("a", FILES)) == []
    assert scene.report == AssignmentReport(assignment="a", phase="finished", result=FILES)
    assert scene.tell(None) == [Discard("a")]
    assert scene.said[-1] == f"{PLACE}: finished"


def test_other_nodes_have_nothing_to_upload(scene: Scene) -> None:
    scene.train(is_root=False)
    assert scene.give(WorkerEnded("a")) == []
    assert scene.report.phase == "finished"


def test_the_next_job_begins_when_the_last_is_over(scene: Scene) -> None:
    scene.train(is_root=False)
    scene.give(WorkerEnded("a"))
    assert scene.tell("b") == [Discard("a"), Fetch("b")]


@pytest.mark.parametrize("phase", ["fetch", "train", "upload"])
def test_a_failure_is_reported_with_its_reason_until_the_orders_change(scene: Scene, phase: str) -> None:
    if phase == "fetch":
        scene.begin()
        scene.tell("a")
        failed: Event = Fetched("a", failure="no room")
    else:
        scene.train()
        failed = WorkerEnded("a", "no room")
    if phase == "upload":
        scene.give(WorkerEnded("a"))
        scene.tell("a")
        failed = Uploaded("a", failure="no room")
    assert scene.give(failed) == []
    expected = AssignmentReport(assignment="a", phase="failed", reason="no room")
    assert scene.report == expected
    scene.tell("a")
    assert not any(beat.report for beat in scene.sent.values())
    assert scene.order("a") == []
    scene.later(REPORT_SECONDS)
    assert scene.report == expected
    assert scene.tell(None) == [Discard("a")]


# Losses


def test_losses_are_told_from_the_first_unknown_one_and_not_too_often(scene: Scene) -> None:
    scene.train()
    scene.give(Learned("a", (3.0, 2.0), ()))
    assert (scene.report.first_loss, scene.report.losses) == (0, (3.0, 2.0))
    scene.tell("a", known=2)
    scene.give(Learned("a", (1.0,), (0.5,)))
    assert not any(beat.report for beat in scene.sent.values())
    scene.later(REPORT_SECONDS)
    report = scene.report
    assert (report.first_loss, report.losses, report.figures) == (2, (1.0,), (0.5,))


def test_losses_are_told_again_until_they_are_acknowledged(scene: Scene) -> None:
    scene.train()
    scene.give(Learned("a", (3.0, 2.0), ()))
    scene.tell("a", known=1)
    scene.later(REPORT_SECONDS)
    assert (scene.report.first_loss, scene.report.losses) == (1, (2.0,))
    scene.tell("a", known=0)  # a server that lost some
    scene.later(REPORT_SECONDS)
    assert (scene.report.first_loss, scene.report.losses) == (0, (3.0, 2.0))


def test_a_report_that_got_lost_is_sent_again(scene: Scene) -> None:
    scene.train()
    scene.give(Learned("a", (3.0,), ()))
    scene.give(Unanswered(scene.telling, "gone"))
    scene.sent.pop(scene.telling)
    scene.later(REPORT_SECONDS)
    assert scene.report.losses == (3.0,)


def test_many_losses_travel_in_parts(scene: Scene) -> None:
    scene.train()
    scene.give(Learned("a", (1.0,) * (MOST_LOSSES + 5), ()))
    assert len(scene.report.losses) == MOST_LOSSES
    scene.tell("a", known=MOST_LOSSES)
    scene.later(REPORT_SECONDS)
    assert len(scene.report.losses) == 5


# Strangers


def test_strangers_are_told_to_the_server_and_once_to_the_owner(scene: Scene) -> None:
    scene.train()
    scene.give(TurnedAway("a", TlsRejections(foreign=1)))
    assert scene.report.strangers == TlsRejections(foreign=1)
    scene.tell("a")
    scene.give(TurnedAway("a", TlsRejections(foreign=2)))
    scene.give(TurnedAway("a", TlsRejections(foreign=2, bare=1)))
    scene.later(REPORT_SECONDS)
    assert scene.report.strangers == TlsRejections(foreign=2, bare=1)
    assert len([line for line in scene.said if "turned away" in line]) == 1


# Other orders


def test_a_worker_is_stopped_before_another_job_begins(scene: Scene) -> None:
    scene.train()
    assert scene.order("b") == [Stop("a")]
    assert scene.later(1) == []
    assert scene.give(WorkerEnded("a", "it was stopped")) == [Discard("a"), Fetch("b")]


def test_a_job_that_is_cancelled_is_stopped_and_the_reason_said(scene: Scene) -> None:
    scene.train()
    assert scene.order(None, "the job was cancelled") == [Stop("a")]
    assert "the server says: the job was cancelled" in scene.said
    assert scene.give(WorkerEnded("a", "it was stopped")) == [Discard("a")]


def test_a_job_that_is_wanted_again_while_it_stops_begins_anew(scene: Scene) -> None:
    scene.train()
    scene.order(None)
    scene.later(1)
    scene.order("a")
    assert scene.give(WorkerEnded("a", "it was stopped")) == [Discard("a"), Fetch("a")]


def test_an_answer_that_was_overtaken_is_not_obeyed(scene: Scene) -> None:
    scene.give(Began())
    scene.answer(scene.poll, "a")
    scene.later(1)
    old, new = sorted(scene.sent)
    assert scene.answer(new, "a") == []
    assert scene.answer(old, None) == []
    scene.later()
    assert scene.sent[scene.poll].known == "a"


def test_a_job_of_an_earlier_process_of_this_provider_fails(scene: Scene) -> None:
    scene = Scene(lost=["a"])
    scene.give(Began())
    assert scene.answer(scene.poll, "a") == []
    assert scene.report.phase == "failed"
    assert "restarted" in scene.report.reason


def test_what_belongs_to_another_assignment_changes_nothing(scene: Scene) -> None:
    scene.train()
    assert scene.give(WorkerEnded("z")) == []
    assert scene.give(Learned("z", (1.0,), ())) == []
    assert scene.give(Uploaded("z", FILES)) == []


# A server that is away


def test_pauses_grow_and_are_bounded_while_the_server_is_away(scene: Scene) -> None:
    scene.give(Began())
    pauses = []
    for _ in range(8):
        number = scene.poll
        del scene.sent[number]
        scene.give(Unanswered(number, "nothing answers"))
        before = scene.now
        scene.later()
        pauses.append(scene.now - before)
    assert pauses == [1, 2, 4, 8, 10, 10, 10, 10]
    assert len(scene.said) == 1
    assert scene.sent[scene.poll].wait == 0  # so that its return is noticed at once
    scene.answer(scene.poll, None)
    assert scene.said[-1] == "the server is back"
    scene.later()
    assert scene.sent[scene.poll].wait == POLL_SECONDS


def test_pauses_are_jittered() -> None:
    waits = set()
    for seed in range(5):
        agent = Agent(jitter=random.Random(seed))
        (send,) = agent.handle(Began(), 0.0)
        assert isinstance(send, SendHeartbeat)
        agent.handle(Unanswered(send.number, "gone"), 0.0)
        assert agent.deadline is not None
        assert 0.5 <= agent.deadline <= 1.5
        waits.add(agent.deadline)
    assert len(waits) == 5


def test_the_worker_trains_on_and_all_is_told_when_the_server_is_back(scene: Scene) -> None:
    scene.train()
    number = scene.poll
    del scene.sent[number]
    assert scene.give(Unanswered(number, "gone")) == []
    scene.give(Learned("a", (3.0,), ()))
    assert scene.give(WorkerEnded("a")) == [Upload("a")]
    assert not scene.sent
    assert scene.give(Uploaded("a", failure="gone", again=True)) == []
    assert scene.later() == [Upload("a")]  # which fails again, and is tried again
    assert scene.give(Uploaded("a", failure="gone", again=True)) == []
    assert not scene.sent or scene.answer(scene.poll, "a") == []
    scene.later()
    scene.later()
    assert (scene.report.phase, scene.report.losses) == ("uploading", (3.0,))


def test_a_fetch_that_the_server_broke_off_is_tried_again(scene: Scene) -> None:
    scene.begin()
    scene.tell("a")
    assert scene.give(Fetched("a", failure="gone", again=True)) == []
    assert scene.agent.deadline == scene.now + 1
    assert scene.later() == [Fetch("a")]


def test_a_server_that_forgot_the_provider_gets_the_offer_again(scene: Scene) -> None:
    scene.give(Began())
    number = scene.poll
    del scene.sent[number]
    (offer,) = scene.give(OfferRefused(number, 404, "no such provider"))
    assert isinstance(offer, SendOffer)
    scene.give(Began())
    assert scene.poll > offer.number


def test_an_offer_that_is_refused_is_not_repeated_at_once(scene: Scene) -> None:
    scene.give(Began())
    number = scene.poll
    del scene.sent[number]
    (offer,) = scene.give(OfferRefused(number, 404, "no such provider"))
    assert isinstance(offer, SendOffer)
    assert scene.give(OfferRefused(offer.number, 404, "no such page")) == []
    assert scene.agent.deadline is not None
    assert scene.agent.deadline > scene.now


def test_a_credential_that_is_not_taken_ends_it(scene: Scene) -> None:
    scene.give(Began())
    assert scene.give(OfferRefused(scene.poll, 401, "unknown credential")) == [
        Leave("unknown credential")
    ]
    assert scene.give(Left()) == [Exit(1)]


def test_a_report_that_is_refused_is_left_to_the_poll(scene: Scene) -> None:
    scene.begin()
    assert scene.give(OfferRefused(scene.telling, 409, "not yours")) == []


# Leaving


def test_an_idle_provider_leaves_at_once(scene: Scene) -> None:
    scene.give(Began())
    assert scene.give(InterruptReceived()) == [Leave("its owner stopped it")]
    assert scene.give(Answered(1, HeartbeatReply(assignment="late"))) == []
    assert scene.give(Left()) == [Exit(0)]


def test_a_provider_at_work_stops_first(scene: Scene) -> None:
    scene.train()
    assert scene.give(InterruptReceived()) == [Stop("a")]
    assert scene.give(WorkerEnded("a", "it was stopped")) == [
        Discard("a"),
        Leave("its owner stopped it"),
    ]
    assert scene.give(Left()) == [Exit(0)]


def test_the_second_interrupt_ends_at_once(scene: Scene) -> None:
    scene.train()
    scene.give(InterruptReceived())
    assert scene.give(InterruptReceived()) == [Exit(130)]


def test_the_second_interrupt_ends_at_once_while_the_server_is_told(scene: Scene) -> None:
    scene.give(Began())
    scene.give(InterruptReceived())
    assert scene.give(InterruptReceived()) == [Exit(130)]


def test_hours_end() -> None:
    scene = Scene(ends=150.0)
    scene.train()
    scene.now = 150.0
    assert scene.later(0) == [Stop("a")]
    assert scene.give(WorkerEnded("a", "stopped")) == [
        Discard("a"),
        Leave("the hours that it offered are over"),
    ]


@pytest.mark.parametrize(("failure", "code"), [("", 0), ("no room", 1)])
def test_one_job_only(failure: str, code: int) -> None:
    scene = Scene(once=True)
    scene.train(is_root=False)
    scene.give(WorkerEnded("a", failure))
    assert scene.tell(None) == [Discard("a"), Leave("it was to work on one job")]
    assert scene.give(Left()) == [Exit(code)]
