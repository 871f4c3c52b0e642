"""Decisions of a provider's agent in virtual time: events in, lists of actions out."""

import random
from typing import Any

import pytest

from ravnest.deadlines import (
    HANDOVER,
    LAST_UPLOAD,
    LEAVE_ANSWER,
    POLL_WAIT,
    REPORT_INTERVAL,
    ROOT_REPORT_INTERVAL,
)
from ravnest.errors import JobEndedError, ServerRefusedError
from ravnest.provider import assignment_progress
from ravnest.provider.agent import Agent
from ravnest.provider.events import (
    Action,
    AgentEvent,
    Announce,
    BestUploaded,
    CheckpointsUploaded,
    ConnectionsRejected,
    DeadlinePassed,
    Discard,
    Exclude,
    Exit,
    Fetch,
    Fetched,
    HeartbeatAnswered,
    InterruptReceived,
    Keep,
    Leave,
    Left,
    OfferAccepted,
    RecordsReceived,
    RequestTrace,
    SendHeartbeat,
    SendOffer,
    ServerRefused,
    ServerUnreachable,
    StartWorker,
    Stop,
    Upload,
    UploadBest,
    UploadCheckpoints,
    Uploaded,
    WorkerEnded,
)
from ravnest.provider.outcome import Outcome
from ravnest.schemas.base import Artifact
from ravnest.schemas.checkpoints import CheckpointOrder, UploadedCheckpoint
from ravnest.schemas.jobs import BestFiles, ResultFile
from ravnest.schemas.providers import (
    MOST_RECORDS,
    AssignmentReport,
    ExcludedNode,
    Heartbeat,
    HeartbeatReply,
    TlsRejections,
)
from ravnest.telemetry import BestRecord, CheckpointRecord, LossRecord, QueueRecord, WorkerRecord

TITLE = "node_0, Root of cluster 0 in job j"
FILES = (ResultFile(name="node_0.json", artifact=Artifact(sha256="0" * 64, size=1)),)


def losses(*values: float | None) -> tuple[WorkerRecord, ...]:
    return tuple(LossRecord(i, 0, value, 1, 0) for i, value in enumerate(values))


class Middle(random.Random):
    """Draws the middle of every range."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


class Scene:
    """An agent, its clock, and the heartbeats in flight."""

    def __init__(self, **options: object) -> None:
        self.agent = Agent(jitter=Middle(), **options)  # type: ignore[arg-type]
        self.now = 100.0
        self.sent: dict[int, Heartbeat] = {}
        self.announced: list[str] = []

    def give(self, event: AgentEvent) -> list[Action]:
        """Return the actions of an event; heartbeats and lines are collected instead."""
        others: list[Action] = []
        for action in self.agent.handle(event, self.now):
            match action:
                case SendHeartbeat(number, heartbeat):
                    self.sent[number] = heartbeat
                case Announce(line):
                    self.announced.append(line)
                case _:
                    others.append(action)
        return others

    @property
    def poll(self) -> int:
        return next(n for n, beat in self.sent.items() if beat.report is None)

    @property
    def report_number(self) -> int:
        return next(n for n, beat in self.sent.items() if beat.report is not None)

    @property
    def report(self) -> AssignmentReport:
        report = self.sent[self.report_number].report
        assert report is not None
        return report

    def answer(self, number: int, assignment: str | None, known: int = 0, **fields: Any) -> list[Action]:
        del self.sent[number]
        reply = HeartbeatReply(assignment=assignment, records_known=known, **fields)
        return self.give(HeartbeatAnswered(number, reply))

    def order(self, assignment: str | None, reason: str = "") -> list[Action]:
        """Answer the poll; if a report overtook it, answer the next poll too."""
        before = self.poll
        del self.sent[before]
        reply = HeartbeatReply(assignment=assignment, reason=reason)
        actions = self.give(HeartbeatAnswered(before, reply))
        if any(beat.report is None for beat in self.sent.values()):
            assert actions == []
            actions = self.give(HeartbeatAnswered(self.poll, reply))
        return actions

    def later(self, seconds: float | None = None) -> list[Action]:
        """Move the clock to the agent's deadline, or by some seconds."""
        if seconds is None:
            assert self.agent.deadline is not None
            self.now = max(self.now, self.agent.deadline)
        else:
            self.now += seconds
        return self.give(DeadlinePassed())

    def begin(self, assignment: str = "a") -> None:
        assert self.give(OfferAccepted()) == []
        assert self.answer(self.poll, assignment) == [Fetch(assignment)]
        self.later(1)

    def answer_report(self, assignment: str | None, known: int = 0, **fields: Any) -> list[Action]:
        """Answer the report in flight."""
        return self.answer(self.report_number, assignment, known, **fields)

    def train(self, assignment: str = "a", *, is_root: bool = True) -> None:
        self.begin(assignment)
        self.answer_report(assignment)
        assert self.give(Fetched(assignment, is_root=is_root, node_title=TITLE)) == []
        assert self.answer_report(assignment, may_train=True) == [StartWorker(assignment)]
        self.answer_report(assignment, may_train=True)
        self.later(1)

    def finish_training(self, assignment: str = "a") -> list[Action]:
        """End the worker; return what follows after the result is kept."""
        keep, *others = self.give(WorkerEnded(assignment))
        assert isinstance(keep, Keep)
        return others


@pytest.fixture
def scene() -> Scene:
    return Scene()


# A job from start to end


def test_an_idle_provider_polls(scene: Scene) -> None:
    assert scene.give(OfferAccepted()) == []
    assert list(scene.sent.values()) == [Heartbeat(known=None, wait=POLL_WAIT)]
    assert scene.answer(scene.poll, None) == []
    assert not scene.sent  # not at once
    assert scene.later() == []
    assert scene.poll == 2


def test_a_root_fetches_trains_uploads_and_finishes(scene: Scene) -> None:
    scene.begin()
    assert scene.report == AssignmentReport(assignment="a", phase="fetching")
    assert scene.sent[scene.poll].known == "a"
    scene.answer_report("a")
    assert scene.give(Fetched("a", is_root=True, node_title=TITLE)) == []
    assert scene.report.phase == "fetched"
    assert scene.answer_report("a", may_train=True) == [StartWorker("a")]
    assert scene.report.phase == "training"
    scene.answer_report("a", may_train=True)
    assert scene.finish_training() == [Upload("a")]
    assert scene.report.phase == "uploading"
    scene.answer_report("a")
    assert scene.give(Uploaded("a", FILES)) == []
    assert scene.report == AssignmentReport(assignment="a", phase="finished", result=FILES)
    assert scene.answer_report(None) == [Discard("a")]
    assert scene.announced[-1] == f"{TITLE}: finished"


def test_other_nodes_have_nothing_to_upload(scene: Scene) -> None:
    scene.train(is_root=False)
    assert scene.finish_training() == []
    assert scene.report.phase == "finished"


def test_the_worker_is_told_once_which_nodes_the_server_excludes(scene: Scene) -> None:
    one, other = (ExcludedNode(node=node, generation=0) for node in (1, 2))
    scene.begin()
    assert scene.answer_report("a", excluded=(one,)) == [], "there is no worker yet"
    scene.give(Fetched("a", is_root=True, node_title=TITLE))
    scene.answer_report("a", may_train=True, excluded=(one,))
    assert scene.answer_report("a", may_train=True, excluded=(one,)) == [Exclude("a", (one,))]
    scene.give(RecordsReceived("a", losses(1.0)))
    scene.later(10)
    assert scene.answer_report("a", 1, may_train=True, excluded=(one,)) == []
    scene.give(RecordsReceived("a", losses(1.0)))
    scene.later(10)
    both = (one, other)
    assert scene.answer_report("a", 2, may_train=True, excluded=both) == [Exclude("a", both)]


def test_the_worker_is_asked_once_for_each_request_of_a_trace(scene: Scene) -> None:
    scene.begin()
    assert scene.answer_report("a", trace=5) == [], "there is no worker yet"
    scene.give(Fetched("a", is_root=True, node_title=TITLE))
    scene.answer_report("a", may_train=True)
    for order, expected in ((5, [RequestTrace("a", 5)]), (5, []), (4, []), (6, [RequestTrace("a", 6)])):
        assert scene.answer_report("a", may_train=True, trace=order) == expected
        scene.give(RecordsReceived("a", losses(1.0)))
        scene.later(10)


def test_the_next_job_begins_when_the_last_is_over(scene: Scene) -> None:
    scene.train(is_root=False)
    scene.give(WorkerEnded("a"))
    assert scene.answer_report("b") == [Discard("a"), Fetch("b")]


@pytest.mark.parametrize("phase", ["fetch", "train", "upload"])
def test_a_failure_is_reported_until_the_server_wants_another_assignment(
    scene: Scene, phase: str
) -> None:
    if phase == "fetch":
        scene.begin()
        scene.answer_report("a")
        failed: AgentEvent = Fetched("a", failure="no room")
    else:
        scene.train()
        failed = WorkerEnded("a", "no room")
    if phase == "upload":
        scene.give(WorkerEnded("a"))
        scene.answer_report("a")
        failed = Uploaded("a", failure="no room")
    assert scene.give(failed) == []
    cause = "job" if phase == "train" else "machine"
    expected = AssignmentReport(assignment="a", phase="failed", reason="no room", cause=cause)
    assert scene.report == expected
    scene.answer_report("a")
    assert not any(beat.report for beat in scene.sent.values())
    assert scene.order("a") == []
    scene.later(REPORT_INTERVAL)
    assert scene.report == expected
    assert scene.answer_report(None) == [Discard("a")]


# Files of all providers


def test_the_worker_starts_once_all_providers_have_their_files(scene: Scene) -> None:
    scene.begin()
    scene.answer_report("a")
    assert scene.give(Fetched("a", is_root=True, node_title=TITLE)) == []
    assert scene.answer_report("a") == []
    for _ in range(20):  # a slow download elsewhere
        assert scene.later(POLL_WAIT) == []
        assert scene.answer(scene.poll, "a") == []
        scene.later(1)
    assert not scene.sent[scene.poll].may_train
    assert scene.answer(scene.poll, "a", may_train=True) == [StartWorker("a")]
    assert scene.report.phase == "training"
    scene.later(1)
    assert scene.sent[scene.poll].may_train, "the next poll waits for other news"


def test_a_job_that_ends_before_all_have_their_files_starts_no_worker(scene: Scene) -> None:
    scene.begin()
    scene.answer_report("a")
    scene.give(Fetched("a", node_title=TITLE))
    assert scene.answer_report(None) == [Discard("a")]


# Results


def test_a_result_is_kept_with_the_records_that_the_server_does_not_have(scene: Scene) -> None:
    scene.train()
    records = losses(3.0, 2.0, 1.0)
    scene.give(RecordsReceived("a", records))
    scene.answer_report("a", known=2)
    keep, upload = scene.give(WorkerEnded("a"))
    assert upload == Upload("a")
    assert keep == Keep("a", Outcome(is_root=True, title=TITLE, first_record=2, records=records[2:]))


def test_a_restarted_provider_uploads_the_result_that_it_kept(scene: Scene) -> None:
    outcome = Outcome(is_root=True, title=TITLE, first_record=2, records=losses(3.0, 2.0, 1.0)[2:])
    scene = Scene(kept={"a": outcome})
    scene.give(OfferAccepted())
    assert scene.answer(scene.poll, "a") == [Upload("a")]
    assert (scene.report.phase, scene.report.first_record) == ("uploading", 2)
    scene.answer_report("a", known=3)
    assert scene.give(Uploaded("a", FILES)) == []
    assert scene.report == AssignmentReport(
        assignment="a", phase="finished", result=FILES, first_record=3
    )
    assert scene.answer_report(None) == [Discard("a")]


def test_a_restarted_provider_reports_the_end_of_a_node_without_files() -> None:
    scene = Scene(kept={"a": Outcome(is_root=False, title=TITLE)})
    scene.give(OfferAccepted())
    assert scene.answer(scene.poll, "a") == []
    assert scene.report.phase == "finished"


def test_a_kept_result_that_the_server_does_not_want_is_removed() -> None:
    scene = Scene(kept={"a": Outcome(is_root=True, title=TITLE)})
    scene.give(OfferAccepted())
    assert not [a for a in scene.give(ServerUnreachable(scene.poll, "gone")) if a == Discard("a")]
    scene.sent.clear()
    scene.later()
    assert scene.answer(scene.poll, "b") == [Discard("a"), Fetch("b")]


def test_an_upload_is_tried_until_it_succeeds_and_the_reason_is_told_once(scene: Scene) -> None:
    scene.train()
    scene.finish_training()
    scene.answer_report("a", may_train=True)
    full = "the server's disk has 0.0 GB left, not enough for 0.1 GB"
    for _ in range(50):
        assert scene.give(Uploaded("a", failure=full, again=True)) == []
        actions: list[Action] = []
        while not actions:
            for number in list(scene.sent):
                scene.answer(number, "a", may_train=True)
            actions = scene.later()
        assert actions == [Upload("a")]
    assert len([line for line in scene.announced if full in line]) == 1
    scene.give(Uploaded("a", FILES))
    assert (scene.report.phase, scene.report.reason) == ("finished", "")


def test_the_server_is_told_why_a_result_is_late(scene: Scene) -> None:
    scene.train()
    scene.finish_training()
    scene.answer_report("a", may_train=True)
    scene.give(Uploaded("a", failure="the disk is full", again=True))
    assert (scene.report.phase, scene.report.reason) == ("uploading", "the disk is full")


@pytest.mark.parametrize("status", [500, 502, 503, 504, 507])
def test_a_report_that_meets_an_error_of_the_server_is_sent_again(scene: Scene, status: int) -> None:
    scene.train(is_root=False)
    scene.finish_training()
    pauses = []
    for _ in range(6):
        expected = scene.report
        number = scene.report_number
        del scene.sent[number]
        assert scene.give(ServerRefused(number, status, "trouble")) == []
        before = scene.now
        while not any(beat.report for beat in scene.sent.values()):
            scene.later()
        pauses.append(scene.now - before)
        assert scene.report == expected
    assert pauses == [1, 2, 4, 8, 10, 10]
    assert scene.answer_report(None) == [Discard("a")]


def test_a_report_waits_for_as_long_as_the_server_asks_for(scene: Scene) -> None:
    scene.train(is_root=False)
    scene.finish_training()
    number, before = scene.report_number, scene.now
    del scene.sent[number]
    scene.give(ServerRefused(number, 429, "too often", retry_after=5.0))
    while not any(beat.report for beat in scene.sent.values()):
        scene.later()
    assert scene.now - before == 5


def test_a_result_that_the_server_has_lost_is_uploaded_again(scene: Scene) -> None:
    scene.train()
    scene.finish_training()
    scene.answer_report("a", may_train=True)
    scene.give(Uploaded("a", FILES))
    number = scene.report_number
    del scene.sent[number]
    assert scene.give(ServerRefused(number, 422, "the result names files that were not uploaded")) == []
    assert scene.later() == [Upload("a")]


@pytest.mark.parametrize("phase", ["uploading", "finished"])
def test_a_provider_that_leaves_keeps_a_result_that_is_not_acknowledged(
    scene: Scene, phase: str
) -> None:
    scene.train()
    scene.finish_training()
    scene.answer_report("a", may_train=True)
    if phase == "finished":
        scene.give(Uploaded("a", FILES))
        assert scene.give(InterruptReceived()) == [Leave("its owner stopped it")]
    else:
        assert scene.give(InterruptReceived()) == [Stop("a")]
        assert scene.give(Uploaded("a", failure="stopped")) == [Leave("its owner stopped it")]
    assert any("the result" in line and "kept" in line for line in scene.announced)


# Records


def test_records_are_reported_from_the_first_unknown_one_and_not_too_often(scene: Scene) -> None:
    scene.train()
    first, second, third = losses(3.0, 2.0, 1.0)
    scene.give(RecordsReceived("a", (first, second)))
    assert (scene.report.first_record, scene.report.records) == (0, (first, second))
    scene.answer_report("a", known=2)
    scene.give(RecordsReceived("a", (third,)))
    assert not any(beat.report for beat in scene.sent.values())
    scene.later(REPORT_INTERVAL)
    assert (scene.report.first_record, scene.report.records) == (2, (third,))


@pytest.mark.parametrize(
    ("is_root", "interval"), [(True, ROOT_REPORT_INTERVAL), (False, REPORT_INTERVAL)]
)
def test_a_root_reports_more_often(scene: Scene, is_root: bool, interval: float) -> None:
    scene.train(is_root=is_root)
    scene.give(RecordsReceived("a", losses(3.0)))
    scene.answer_report("a", known=1)
    scene.give(RecordsReceived("a", losses(2.0)))
    scene.later(0.9 * interval)
    assert not any(beat.report for beat in scene.sent.values())
    scene.later(0.1 * interval)
    assert scene.report.first_record == 1


def test_records_are_reported_again_until_they_are_acknowledged(scene: Scene) -> None:
    scene.train()
    records = losses(3.0, 2.0)
    scene.give(RecordsReceived("a", records))
    scene.answer_report("a", known=1)
    scene.later(REPORT_INTERVAL)
    assert (scene.report.first_record, scene.report.records) == (1, records[1:])
    scene.answer_report("a", known=0)  # the server lost some
    scene.later(REPORT_INTERVAL)
    assert (scene.report.first_record, scene.report.records) == (0, records)


def test_a_restarted_provider_reports_behind_the_records_of_the_process_before() -> None:
    scene = Scene(begun=["a"])
    scene.give(OfferAccepted())
    assert scene.answer(scene.poll, "a", known=50) == [Fetch("a")]
    scene.answer_report("a", known=50)
    scene.give(Fetched("a", is_root=True, node_title=TITLE))
    scene.later(1)
    assert scene.answer_report("a", known=50, may_train=True) == [StartWorker("a")]
    scene.answer_report("a", known=50, may_train=True)
    scene.later(REPORT_INTERVAL)
    records = losses(3.0, 2.0, 1.0)
    scene.give(RecordsReceived("a", records))
    assert (scene.report.first_record, scene.report.records) == (50, records)


def test_a_lost_report_is_sent_again(scene: Scene) -> None:
    scene.train()
    scene.give(RecordsReceived("a", losses(3.0)))
    scene.give(ServerUnreachable(scene.report_number, "gone"))
    scene.sent.pop(scene.report_number)
    scene.later(REPORT_INTERVAL)
    assert scene.report.records == losses(3.0)


def test_many_records_travel_in_several_reports(scene: Scene) -> None:
    scene.train()
    scene.give(RecordsReceived("a", losses(1.0) * (MOST_RECORDS + 5)))
    assert len(scene.report.records) == MOST_RECORDS
    scene.answer_report("a", known=MOST_RECORDS)
    scene.later(REPORT_INTERVAL)
    assert len(scene.report.records) == 5


def test_the_end_is_reported_with_the_last_records(scene: Scene) -> None:
    """The server takes no records of a finished assignment."""
    scene.train(is_root=False)
    scene.give(RecordsReceived("a", losses(1.0) * (2 * MOST_RECORDS + 5)))
    scene.answer_report("a", known=MOST_RECORDS)
    scene.give(WorkerEnded("a"))
    assert scene.report.phase == "training"
    scene.answer_report("a", known=2 * MOST_RECORDS)
    scene.later(REPORT_INTERVAL)
    assert (scene.report.phase, len(scene.report.records)) == ("finished", 5)


def test_a_server_that_acknowledges_nothing_does_not_hold_back_the_end(scene: Scene) -> None:
    scene.train(is_root=False)
    scene.give(RecordsReceived("a", losses(1.0) * (2 * MOST_RECORDS)))
    scene.answer_report("a", known=0)
    scene.give(WorkerEnded("a"))
    scene.later(REPORT_INTERVAL)
    assert scene.report.phase == "finished"


def test_the_agent_keeps_a_bounded_number_of_records(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assignment_progress, "MOST_KEPT_RECORDS", 10)
    monkeypatch.setattr(assignment_progress, "MOST_SAMPLES_WAITING", 5)
    scene.train()
    scene.give(RecordsReceived("a", (QueueRecord(1, 1, 0),) * 20))
    assert len(scene.report.records) == 5, "further queue lengths are dropped on arrival"
    scene.answer_report("a", known=5)
    scene.give(RecordsReceived("a", losses(*map(float, range(25)))))
    scene.later(REPORT_INTERVAL)
    assert scene.report.first_record == 20
    assert scene.report.records == losses(*map(float, range(25)))[-10:]


# Rejected connections


def test_rejected_connections_are_reported_and_announced_once(scene: Scene) -> None:
    scene.train()
    scene.give(ConnectionsRejected("a", TlsRejections(foreign=1)))
    assert scene.report.tls_rejections == TlsRejections(foreign=1)
    scene.answer_report("a")
    scene.give(ConnectionsRejected("a", TlsRejections(foreign=2)))
    scene.give(ConnectionsRejected("a", TlsRejections(foreign=2, bare=1)))
    scene.later(REPORT_INTERVAL)
    assert scene.report.tls_rejections == TlsRejections(foreign=2, bare=1)
    assert len([line for line in scene.announced if "rejected" in line]) == 1


# Another assignment


def test_a_worker_is_stopped_before_another_job_begins(scene: Scene) -> None:
    scene.train()
    assert scene.order("b") == [Stop("a")]
    assert scene.later(1) == []
    assert scene.give(WorkerEnded("a", "it was stopped")) == [Discard("a"), Fetch("b")]


def test_a_cancelled_job_is_stopped_and_the_reason_announced(scene: Scene) -> None:
    scene.train()
    assert scene.order(None, "the job was cancelled") == [Stop("a")]
    assert any("the job was cancelled" in line for line in scene.announced)
    assert scene.give(WorkerEnded("a", "it was stopped")) == [Discard("a")]


def test_an_assignment_that_is_wanted_again_while_it_stops_starts_again_in_its_folder(
    scene: Scene,
) -> None:
    scene.train()
    scene.order(None)
    scene.later(1)
    scene.order("a")
    assert scene.give(WorkerEnded("a", "it was stopped")) == [Fetch("a")]


def test_an_overtaken_answer_is_ignored(scene: Scene) -> None:
    scene.give(OfferAccepted())
    scene.answer(scene.poll, "a")
    scene.later(1)
    old, new = sorted(scene.sent)
    assert scene.answer(new, "a") == []
    assert scene.answer(old, None) == []
    scene.later()
    assert scene.sent[scene.poll].known == "a"


def test_an_assignment_of_an_earlier_process_is_continued(scene: Scene) -> None:
    scene = Scene(begun=["a", "b"])
    scene.give(OfferAccepted())
    assert scene.answer(scene.poll, "a") == [Discard("b"), Fetch("a")]
    assert scene.report.phase == "fetching"
    assert any("continues the assignment" in line for line in scene.announced)


def test_folders_stay_while_the_server_may_need_them() -> None:
    scene = Scene(begun=["a", "b"])
    scene.give(OfferAccepted())
    assert scene.answer(scene.poll, None, keep=("a",)) == [Discard("b")]
    scene.later()
    assert scene.answer(scene.poll, None, keep=("a",)) == []
    scene.later()
    assert scene.answer(scene.poll, None) == [Discard("a")]


def test_a_worker_that_died_starts_again_as_a_new_assignment_in_the_same_folder(scene: Scene) -> None:
    scene.train()
    scene.give(WorkerEnded("a", "killed by SIGKILL", "passing"))
    assert (scene.report.phase, scene.report.cause) == ("failed", "passing")
    assert scene.answer_report("a-g1", keep=("a",)) == [Fetch("a-g1")], "its folder is not removed"
    scene.answer_report("a-g1", keep=("a",))
    scene.give(Fetched("a-g1", is_root=True, node_title=TITLE))
    assert scene.answer_report("a-g1", may_train=True) == [Discard("a"), StartWorker("a-g1")]


def test_the_folder_of_a_failed_assignment_stays_while_its_place_is_vacant(scene: Scene) -> None:
    scene.train()
    scene.give(WorkerEnded("a", "out of memory", "machine"))
    assert scene.answer_report(None, keep=("a",)) == []
    assert scene.order(None) == [Discard("a")]


def test_the_folder_of_a_finished_node_stays_until_the_job_has_a_result(scene: Scene) -> None:
    scene.train(is_root=False)
    scene.finish_training()
    assert scene.answer_report(None, keep=("a",)) == []
    assert scene.order("b") == [Discard("a"), Fetch("b")]


def test_a_provider_that_leaves_removes_the_folder_of_a_finished_node(scene: Scene) -> None:
    scene.train(is_root=False)
    scene.finish_training()
    scene.answer_report(None, keep=("a",))
    assert scene.give(InterruptReceived()) == [Discard("a"), Leave("its owner stopped it")]


def test_a_finished_node_repeats_its_end_in_the_same_folder(scene: Scene) -> None:
    scene.train(is_root=False)
    scene.finish_training()
    scene.answer_report(None, keep=("a",))
    assert scene.answer(scene.poll, None, keep=("a",)) == [], "a report was answered later"
    assert scene.answer(scene.poll, "a-g1", keep=("a",)) == [Fetch("a-g1")]


def test_a_restarted_provider_keeps_the_folder_of_a_finished_node() -> None:
    scene = Scene(kept={"a": Outcome(is_root=False, title=TITLE)})
    scene.give(OfferAccepted())
    assert scene.answer(scene.poll, None, keep=("a",)) == []
    scene.later()
    assert scene.answer(scene.poll, "a-g1", keep=("a",)) == [Fetch("a-g1")], "it does not send a result"
    scene.answer_report("a-g1")
    scene.give(Fetched("a-g1", is_root=False, node_title=TITLE))
    assert scene.report.phase == "fetched"


def test_checkpoints_of_an_earlier_assignment_are_uploaded_before_training(scene: Scene) -> None:
    scene.begin("a-g1")
    scene.answer_report("a-g1")
    scene.give(Fetched("a-g1", is_root=False, node_title=TITLE))
    order = CheckpointOrder(at_least=5, rescue=True, stages=(0,))
    assert scene.answer_report("a-g1", upload=order) == [UploadCheckpoints("a-g1", order)]


def test_a_provider_for_one_job_stays_in_its_place_after_a_failure() -> None:
    scene = Scene(once=True)
    scene.train()
    scene.give(WorkerEnded("a", "killed by SIGKILL", "passing"))
    assert scene.answer_report("a-g1", keep=("a",)) == [Fetch("a-g1")]


def test_events_of_another_assignment_change_nothing(scene: Scene) -> None:
    scene.train()
    assert scene.give(WorkerEnded("z")) == []
    assert scene.give(RecordsReceived("z", losses(1.0))) == []
    assert scene.give(Uploaded("z", FILES)) == []


# A server that does not answer


def test_pauses_grow_and_are_bounded_while_the_server_is_away(scene: Scene) -> None:
    scene.give(OfferAccepted())
    pauses = []
    for _ in range(8):
        number = scene.poll
        del scene.sent[number]
        scene.give(ServerUnreachable(number, "nothing answers"))
        before = scene.now
        scene.later()
        pauses.append(scene.now - before)
    assert pauses == [1, 2, 4, 8, 10, 10, 10, 10]
    assert len(scene.announced) == 1
    assert scene.sent[scene.poll].wait == 0  # its return is noticed at once
    scene.answer(scene.poll, None)
    assert "again" in scene.announced[-1]
    scene.later()
    assert scene.sent[scene.poll].wait == POLL_WAIT


def test_pauses_are_jittered() -> None:
    waits = set()
    for seed in range(5):
        agent = Agent(jitter=random.Random(seed))
        (send,) = agent.handle(OfferAccepted(), 0.0)
        assert isinstance(send, SendHeartbeat)
        agent.handle(ServerUnreachable(send.number, "gone"), 0.0)
        assert agent.deadline is not None
        assert 0.5 <= agent.deadline <= 1.5
        waits.add(agent.deadline)
    assert len(waits) == 5


def test_training_continues_without_the_server_and_everything_is_reported_later(scene: Scene) -> None:
    scene.train()
    number = scene.poll
    del scene.sent[number]
    assert scene.give(ServerUnreachable(number, "gone")) == []
    scene.give(RecordsReceived("a", losses(3.0)))
    assert scene.finish_training() == [Upload("a")]
    assert not scene.sent
    assert scene.give(Uploaded("a", failure="gone", again=True)) == []
    assert scene.later() == [Upload("a")]  # fails again, and is tried again
    assert scene.give(Uploaded("a", failure="gone", again=True)) == []
    assert not scene.sent or scene.answer(scene.poll, "a") == []
    scene.later()
    scene.later()
    assert (scene.report.phase, scene.report.records) == ("uploading", losses(3.0))


def test_an_interrupted_fetch_is_tried_again(scene: Scene) -> None:
    scene.begin()
    scene.answer_report("a")
    assert scene.give(Fetched("a", failure="gone", again=True)) == []
    assert scene.agent.deadline == scene.now + 1
    assert scene.later() == [Fetch("a")]


def test_a_server_that_forgot_the_provider_gets_the_offer_again(scene: Scene) -> None:
    scene.give(OfferAccepted())
    number = scene.poll
    del scene.sent[number]
    (offer,) = scene.give(ServerRefused(number, 404, "no such provider"))
    assert isinstance(offer, SendOffer)
    scene.give(OfferAccepted())
    assert scene.poll > offer.number


def test_an_offer_that_is_refused_is_not_repeated_at_once(scene: Scene) -> None:
    scene.give(OfferAccepted())
    number = scene.poll
    del scene.sent[number]
    (offer,) = scene.give(ServerRefused(number, 404, "no such provider"))
    assert isinstance(offer, SendOffer)
    assert scene.give(ServerRefused(offer.number, 404, "no such page")) == []
    assert scene.agent.deadline is not None
    assert scene.agent.deadline > scene.now


def test_a_refused_credential_ends_the_provider(scene: Scene) -> None:
    scene.give(OfferAccepted())
    assert scene.give(ServerRefused(scene.poll, 401, "unknown credential")) == [
        Leave("unknown credential")
    ]
    (end,) = scene.give(Left())
    assert isinstance(end, Exit)
    assert isinstance(end.error, ServerRefusedError)
    assert "unknown credential" in str(end.error)


def test_a_refused_report_is_left_to_the_poll(scene: Scene) -> None:
    scene.begin()
    assert scene.give(ServerRefused(scene.report_number, 409, "not yours")) == []


# Leaving


def test_an_idle_provider_leaves_at_once(scene: Scene) -> None:
    scene.give(OfferAccepted())
    assert scene.give(InterruptReceived()) == [Leave("its owner stopped it")]
    assert scene.give(HeartbeatAnswered(1, HeartbeatReply(assignment="late"))) == []
    assert scene.give(Left()) == [Exit()]


def test_a_busy_provider_asks_the_server_and_stops_its_worker_first(scene: Scene) -> None:
    scene.train()
    assert scene.give(InterruptReceived()) == []
    assert scene.sent[scene.report_number].leaving == "its owner stopped it"
    assert scene.answer_report("a", may_leave=True) == [Stop("a", hand_over=True)]
    assert scene.give(WorkerEnded("a", "it was stopped")) == [Leave("its owner stopped it")]
    assert scene.give(Left()) == [Exit()]


def test_a_provider_that_leaves_works_until_another_one_has_its_files(scene: Scene) -> None:
    scene.train()
    scene.give(InterruptReceived())
    assert scene.answer_report("a", may_leave=False) == []
    for known in (1, 2):
        scene.later(REPORT_INTERVAL)
        scene.give(RecordsReceived("a", losses(1.0)))
        assert scene.answer_report("a", known=known, may_leave=False) == []
    scene.later(REPORT_INTERVAL)
    assert scene.order(None) == [Stop("a", hand_over=True)]
    expected = [Discard("a"), Leave("its owner stopped it")]
    assert scene.give(WorkerEnded("a", "it was stopped")) == expected


@pytest.mark.parametrize(("answers", "limit"), [(False, LEAVE_ANSWER), (True, HANDOVER)])
def test_a_provider_that_leaves_does_not_wait_forever(scene: Scene, answers: bool, limit: float) -> None:
    scene.train()
    begin = scene.now
    scene.give(InterruptReceived())
    if answers:
        scene.answer_report("a", may_leave=False)
    while not (actions := scene.later()):
        for number in [n for n, beat in scene.sent.items() if beat.leaving and answers]:
            scene.answer(number, "a")
        scene.sent.clear()
    assert actions == [Stop("a", hand_over=True)]
    assert scene.now - begin == limit
    assert scene.give(WorkerEnded("a", "it was stopped")) == [Leave("its owner stopped it")]


def test_a_provider_whose_server_is_away_leaves_at_once(scene: Scene) -> None:
    scene.train()
    number = scene.poll
    del scene.sent[number]
    scene.give(ServerUnreachable(number, "gone"))
    assert scene.give(InterruptReceived()) == [Stop("a", hand_over=True)]


def test_a_training_that_ends_while_its_provider_wants_to_leave_is_kept(scene: Scene) -> None:
    scene.train()
    scene.give(InterruptReceived())
    scene.answer_report("a", may_leave=False)
    actions = scene.give(WorkerEnded("a"))
    assert Upload("a") in actions
    assert actions[-1] == Stop("a")
    assert scene.give(Uploaded("a", failure="stopped")) == [Leave("its owner stopped it")]


def test_a_provider_that_leaves_reports_its_last_records_first(scene: Scene) -> None:
    scene.train()
    scene.give(InterruptReceived())
    scene.answer_report("a", may_leave=False)
    scene.later(REPORT_INTERVAL)
    assert scene.order(None) == [Stop("a", hand_over=True)]
    records = losses(2.0, 1.0)
    scene.give(RecordsReceived("a", records))
    assert scene.give(WorkerEnded("a", "it was stopped")) == []
    scene.later(REPORT_INTERVAL)
    assert scene.report.records == records
    assert scene.answer_report(None) == [Discard("a"), Leave("its owner stopped it")]


def test_a_provider_that_leaves_does_not_wait_forever_for_its_last_report(scene: Scene) -> None:
    scene.train()
    scene.give(InterruptReceived())
    scene.answer_report("a", may_leave=True)
    scene.give(RecordsReceived("a", losses(2.0)))
    begin = scene.now
    assert scene.give(WorkerEnded("a", "it was stopped")) == []
    while not (actions := scene.later()):
        scene.sent.clear()
    assert (actions, scene.now - begin) == ([Leave("its owner stopped it")], LEAVE_ANSWER)


def test_the_answer_to_a_poll_does_not_acknowledge_the_last_upload(scene: Scene) -> None:
    leave_with_a_last_upload(scene)
    scene.later(REPORT_INTERVAL)
    scene.give(CheckpointsUploaded("a", LAST, (), is_done=True))
    scene.later(REPORT_INTERVAL)
    report = scene.report_number
    assert scene.answer(scene.poll, "a", upload=LAST) == []
    assert scene.poll > report
    assert scene.answer(scene.poll, "a", upload=LAST) == [], "the report may be on its way"
    assert scene.answer(report, "a", upload=LAST) == [Leave("its owner stopped it")]


LAST = CheckpointOrder(rescue=True)


def leave_with_a_last_upload(scene: Scene) -> None:
    """Leave with checkpoints that nobody else has, until the worker has ended."""
    scene.train()
    scene.give(InterruptReceived())
    assert scene.answer_report("a", may_leave=True, upload=LAST) == [Stop("a", hand_over=True)]
    upload = UploadCheckpoints("a", LAST, is_last=True)
    assert scene.give(WorkerEnded("a", "it was stopped")) == [upload]
    assert any("uploads its last checkpoint" in line for line in scene.announced)


def test_checkpoints_that_nobody_else_has_are_uploaded_before_the_provider_leaves(scene: Scene) -> None:
    leave_with_a_last_upload(scene)
    scene.later(1)
    assert scene.give(CheckpointsUploaded("a", LAST, (), is_done=True)) == [], "the server is told first"
    scene.later(REPORT_INTERVAL)
    assert (scene.report.upload_done, scene.report.phase) == (LAST, "training")
    assert scene.answer_report("a", upload=LAST) == [Leave("its owner stopped it")]


def test_a_last_upload_that_fails_is_tried_again_until_its_deadline(scene: Scene) -> None:
    leave_with_a_last_upload(scene)
    begin = scene.now
    assert scene.give(CheckpointsUploaded("a", LAST)) == []
    scene.later(REPORT_INTERVAL)
    again = UploadCheckpoints("a", LAST, is_last=True)
    assert scene.answer_report("a", upload=LAST) == [again]
    scene.give(ServerUnreachable(scene.poll, "gone"))
    while not (actions := scene.later()):
        scene.sent.clear()
    assert actions == [Leave("its owner stopped it")]
    assert scene.now - begin == LAST_UPLOAD
    assert "does not have its last checkpoint" in scene.announced[-1]


def test_a_provider_that_leaves_waits_without_spinning(scene: Scene) -> None:
    """The deadline of the wish is over; the end of the worker is an event."""
    scene.train()
    scene.give(InterruptReceived())
    assert scene.answer_report("a", may_leave=True) == [Stop("a", hand_over=True)]
    scene.later(1)
    assert scene.agent.deadline is None or scene.agent.deadline > scene.now
    scene.give(WorkerEnded("a", "it was stopped"))
    assert scene.agent.deadline is None


def test_the_second_interrupt_ends_at_once(scene: Scene) -> None:
    scene.train()
    scene.give(InterruptReceived())
    assert scene.give(InterruptReceived()) == [Exit(interrupted=True)]


def test_the_second_interrupt_ends_at_once_while_the_provider_leaves(scene: Scene) -> None:
    scene.give(OfferAccepted())
    scene.give(InterruptReceived())
    assert scene.give(InterruptReceived()) == [Exit(interrupted=True)]


def test_hours_end() -> None:
    scene = Scene(ends=150.0)
    scene.train()
    scene.now = 150.0
    assert scene.later(0) == []
    assert scene.answer_report("a", may_leave=True) == [Stop("a", hand_over=True)]
    assert scene.give(WorkerEnded("a", "stopped")) == [Leave("the offered hours are over")]


@pytest.mark.parametrize("failure", ["", "no room"])
def test_one_job_only(failure: str) -> None:
    scene = Scene(once=True)
    scene.train(is_root=False)
    scene.give(WorkerEnded("a", failure))
    assert scene.answer_report(None) == [Discard("a"), Leave("it was started for one job")]
    (end,) = scene.give(Left())
    assert isinstance(end, Exit)
    if failure:
        assert isinstance(end.error, JobEndedError)
        assert failure in str(end.error)
    else:
        assert end.error is None


# Checkpoints


def test_checkpoints_are_uploaded_while_the_worker_trains() -> None:
    scene = Scene()
    scene.train()
    order = CheckpointOrder(at_least=5)
    upload = UploadCheckpoints("a", order)
    assert scene.answer(scene.poll, "a") == [], "a report was answered later, so it polls again"
    assert scene.answer(scene.poll, "a", upload=order, may_train=True) == [upload]
    assert scene.give(CheckpointsUploaded("a", order)) == [], "there is none yet"
    record = CheckpointRecord(5, 0, 10, 0.1)
    assert scene.give(RecordsReceived("a", (record,))) == [upload]
    named = UploadedCheckpoint(
        run="run",
        update=5,
        phase=0,
        stage=0,
        cluster=0,
        plan="plan",
        tensors=FILES[0].artifact,
        manifest=FILES[0].artifact,
    )
    if any(beat.report is not None for beat in scene.sent.values()):
        scene.answer_report("a", upload=order, may_train=True)
    assert scene.give(CheckpointsUploaded("a", order, (named,), is_done=True)) == []
    scene.later(1)
    assert (scene.report.checkpoints, scene.report.upload_done) == ((named,), order)
    assert scene.sent[scene.poll].upload == order, "the server does not answer at once again"
    assert scene.give(WorkerEnded("a"))[-1] == Upload("a"), "the end of training is not delayed"


def test_the_best_model_is_uploaded_while_the_worker_trains() -> None:
    scene = Scene()
    scene.train()
    found = BestFiles(epoch=2, metric="f1", value=0.5, files=FILES)
    record = BestRecord(2, "f1", 0.5)
    assert scene.give(RecordsReceived("a", (record,))) == [UploadBest("a")]
    assert scene.give(RecordsReceived("a", (record,))) == [], "one at a time"
    assert scene.give(BestUploaded("a", found)) == [UploadBest("a")], "the next one is there already"
    assert scene.give(BestUploaded("a", again=True)) == [], "it waits for an answer of the server"
    assert scene.answer_report("a", may_train=True) == [UploadBest("a")]
    scene.give(BestUploaded("a"))
    assert scene.report.best == found
    better = BestFiles(epoch=3, metric="f1", value=0.75, files=FILES)
    assert scene.finish_training() == [Upload("a")]
    scene.give(Uploaded("a", FILES, better))
    scene.answer_report("a", may_train=True)
    assert scene.report.best == better
