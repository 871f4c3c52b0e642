"""Link tests of a provider's agent: started and stopped as the server says, never beside a job."""

from __future__ import annotations

import random

from ravnest.provider.agent import Agent
from ravnest.provider.events import (
    Action,
    AgentEvent,
    Announce,
    DeadlinePassed,
    Fetch,
    Fetched,
    HeartbeatAnswered,
    InterruptReceived,
    Leave,
    LinkTestEnded,
    OfferAccepted,
    SendHeartbeat,
    StartLinkTest,
    StartWorker,
    StopLinkTest,
)
from ravnest.schemas.link_tests import LinkTestOrder
from ravnest.schemas.providers import Heartbeat, HeartbeatReply


def order(test: str = "link-1") -> LinkTestOrder:
    return LinkTestOrder(
        id=test,
        listens=True,
        node=0,
        peer=1,
        peer_name="bob",
        addresses=("10.0.0.1:9000",),
        tls=True,
    )


class Scene:
    """An agent whose polls are answered with link tests."""

    def __init__(self) -> None:
        self.agent = Agent(jitter=random.Random(1))
        self.now = 100.0
        self.beats: list[tuple[int, Heartbeat]] = []
        self.lines: list[str] = []
        self.give(OfferAccepted())

    def give(self, event: AgentEvent) -> list[Action]:
        others: list[Action] = []
        for action in self.agent.handle(event, self.now):
            match action:
                case SendHeartbeat(number, heartbeat):
                    self.beats.append((number, heartbeat))
                case Announce(line):
                    self.lines.append(line)
                case _:
                    others.append(action)
        return others

    def answer(
        self,
        test: LinkTestOrder | None = None,
        assignment: str | None = None,
        *,
        may_train: bool = False,
    ) -> list[Action]:
        """Answer the newest heartbeat, then let the time of the next poll come."""
        number, _ = self.beats[-1]
        reply = HeartbeatReply(assignment=assignment, link_test=test, may_train=may_train)
        actions = self.give(HeartbeatAnswered(number, reply))
        self.now += 2
        return actions + self.give(DeadlinePassed())


def test_a_test_is_started_once_and_known_to_the_server() -> None:
    scene = Scene()
    assert scene.answer(order()) == [StartLinkTest(order())]
    assert scene.lines == ["measures the link to bob"]
    assert scene.beats[-1][1].link_test == "link-1"
    assert scene.answer(order()) == []
    assert scene.give(LinkTestEnded("link-1")) == []
    assert scene.answer(order()) == []  # the server has not heard of its end yet
    assert scene.answer(None) == []
    assert scene.beats[-1][1].link_test is None


def test_a_test_that_the_server_does_not_want_any_more_is_stopped() -> None:
    scene = Scene()
    scene.answer(order())
    assert scene.answer(None) == [StopLinkTest("link-1")]
    assert scene.answer(None) == []


def test_the_next_test_waits_for_the_end_of_the_last() -> None:
    scene = Scene()
    scene.answer(order())
    assert scene.answer(order("link-2")) == [StopLinkTest("link-1")]
    assert scene.give(LinkTestEnded("link-1")) == [StartLinkTest(order("link-2"))]
    assert scene.answer(None) == [StopLinkTest("link-2")]


def test_an_assignment_ends_a_test() -> None:
    scene = Scene()
    scene.answer(order())
    assert scene.answer(order(), assignment="a") == [Fetch("a"), StopLinkTest("link-1")]
    scene.give(Fetched("a", node_title="node_0"))
    assert scene.answer(assignment="a", may_train=True) == []  # the test has the port
    assert scene.give(LinkTestEnded("link-1")) == [StartWorker("a")]


def test_no_test_starts_beside_an_assignment() -> None:
    scene = Scene()
    assert scene.answer(order(), assignment="a") == [Fetch("a")]


def test_a_provider_that_leaves_starts_no_test() -> None:
    scene = Scene()
    assert scene.give(InterruptReceived()) == [Leave("its owner stopped it")]
    assert scene.answer(order()) == []
