"""A provider process that is started again, with the agent and the server as they are."""

from typing import Any

from checkpoint_cases import training_pair
from server_cases import Case, losses, offer
from takeover_cases import phase

from ravnest.deadlines import REPORT_INTERVAL
from ravnest.provider.agent import Agent
from ravnest.provider.events import (
    AgentEvent,
    DeadlinePassed,
    Fetch,
    Fetched,
    HeartbeatAnswered,
    OfferAccepted,
    RecordsReceived,
    SendHeartbeat,
    StartWorker,
)
from ravnest.schemas.providers import HeartbeatReply
from ravnest.telemetry import LossRecord, PhaseRecord


class AgentAtServer:
    """An agent whose heartbeats a server answers at once."""

    def __init__(self, case: Case, provider: str) -> None:
        self._agent = Agent()
        self._case, self._provider = case, provider
        self.acted: list[Any] = []

    def give(self, event: AgentEvent) -> None:
        """Handle an event, and the answers to the heartbeats that follow from it."""
        for action in self._agent.handle(event, self._case.time.now):
            if isinstance(action, SendHeartbeat):
                self.give(HeartbeatAnswered(action.number, self._answer(action)))
            else:
                self.acted.append(action)

    def _answer(self, action: SendHeartbeat) -> HeartbeatReply:
        return self._case.server.provider_service.answer(self._provider, action.heartbeat)

    def later(self) -> None:
        self._case.time.now += REPORT_INTERVAL
        self.give(DeadlinePassed())


def test_the_records_of_a_provider_that_is_started_again_reach_the_server(case: Case) -> None:
    rita, job, alice, _ = training_pair(case)
    alice.report("training", records=[phase("train"), *losses(4.0, 3.0, 2.0)])
    alice.post("/api/providers", offer("alice", address="127.0.0.1:9000"))
    own = f"{job}-0"
    again = AgentAtServer(case, alice.id)
    again.give(OfferAccepted())
    assert Fetch(own) in again.acted
    again.give(Fetched(own, is_root=True, node_title="node_0"))
    again.later()
    assert StartWorker(own) in again.acted
    repeated = tuple(LossRecord(update, 0, 1.0, 1, 0) for update in (1, 2, 3))
    again.give(RecordsReceived(own, (PhaseRecord("rejoin", 0), *repeated)))
    again.later()
    history = rita.get(f"/api/jobs/{job}/losses")
    assert (history["updates"], history["losses"]) == ([0, 1, 2, 3], [4.0, 1.0, 1.0, 1.0])
    with case.server.db.read() as db:
        assert [each.phase for each in db.telemetry.newest(own, PhaseRecord, 4)] == ["rejoin", "train"]
