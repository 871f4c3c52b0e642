"""New plans over the HTTP API: a lost node that no spare replaces, waits, damage and restarts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import complete, provider, took, training_pair, upload, uploaded
from server_cases import Caller, Case, FakePlanner, Time, losses, opened
from takeover_cases import leave, recoveries, view

from ravnest.schemas.jobs import JobState
from ravnest.server.scheduling.replanning import (
    GatherCheckpoints,
    GiveUp,
    GiveUpClusters,
    KeepWaiting,
    PlanAnew,
    PlanAnswer,
    ReplanLimits,
    VacantJob,
    decide_replan,
    needs_answer,
)
from ravnest.server.settings import ServerSettings

AFTER, REQUEUE = 10.0, 60.0
SETTINGS = ServerSettings(replan_after=AFTER, requeue_after=REQUEUE, rescue_grace=20.0, lost_after=1e9)


@pytest.fixture
def case(tmp_path: Path) -> Any:
    with opened(tmp_path, settings=SETTINGS) as found:
        yield found


def rescue(alice: Caller, update: int) -> dict[str, Any]:
    """Upload the own checkpoint and the replica of the Leaf, as the server asks."""
    order: dict[str, Any] = alice.heartbeat()["upload"]
    assert order["rescue"]
    assert order["stages"] == [1]
    named = [uploaded(alice, stage, update) for stage in (0, 1)]
    alice.report("training", checkpoints=named, upload_done=order)
    return order


def wait(case: Case, seconds: float, *callers: Caller) -> None:
    case.pass_time(seconds)
    for caller in callers:
        caller.heartbeat()
    case.match()


def test_a_job_is_planned_anew_without_the_lost_node(case: Case) -> None:
    rita, job, alice, bob = training_pair(case, min_providers=2)
    alice.report("training", records=[took(120), *losses(0.5, first=119)])
    leave(bob)
    case.match()
    rescue(alice, 120)
    case.match()
    assert view(rita, job)["state"] == "training", "bob may come back"
    wait(case, AFTER, alice)
    found = view(rita, job)
    assert found["state"] == "shipping"
    assert [each["provider"] for each in found["assignments"]] == [alice.id]
    assert alice.heartbeat()["assignment"] == f"{job}-p1-0"
    body = alice.get(f"/api/assignments/{job}-p1-0")
    assert (body["resume"], body["attempt"]) == (True, 1)
    assert body["node_spec"]["plan"] != "plan", "nodes of the old plan are no peers"
    start = case.planner.starts[-1]
    assert start is not None
    assert [each.id.update for each in start.checkpoints] == [120]
    assert not start.restart_epoch, "one cluster before and after has the same data"
    texts = recoveries(rita, job)
    assert any("planned anew without node_1: 1 provider can train it" in text for text in texts)
    assert texts[-1] == "training continues from update 120"
    assert found["progress"]["updates"] == 120, "the history stays"


def test_losses_of_all_plans_are_one_history(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    alice.report("training", records=losses(0.5, 0.4, 0.3))
    leave(bob)
    case.match()
    rescue(alice, 2)
    wait(case, AFTER, alice)
    alice.report("fetched")
    alice.report("training", records=losses(0.25, 0.2, first=2))
    history = rita.get(f"/api/jobs/{job}/losses")
    assert (history["updates"], history["losses"]) == ([0, 1, 2, 3], [0.5, 0.4, 0.25, 0.2])
    assert view(rita, job)["progress"]["updates"] == 4


def test_a_spare_that_comes_in_time_takes_the_place(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    leave(bob)
    case.match()
    carol = provider(case, "carol", 2)
    assert carol.heartbeat()["assignment"] == f"{job}-1-g1"
    wait(case, AFTER, alice, carol)
    assert alice.heartbeat()["assignment"] == f"{job}-0"
    assert not any("planned anew" in text for text in recoveries(rita, job))


def test_a_job_without_a_plan_waits_in_place_then_in_the_queue(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    case.planner.needs = 2
    leave(bob)
    case.match()
    rescue(alice, 120)
    wait(case, AFTER, alice)
    assert alice.heartbeat()["assignment"] == f"{job}-0", "the others keep their places first"
    wait(case, REQUEUE - AFTER, alice)
    found = view(rita, job)
    assert found["state"] == "submitted"
    assert "the checkpoint of update 120 is safe here" in found["reason"]
    assert alice.heartbeat()["assignment"] is None
    provider(case, "carol", 2)
    case.match()
    assert view(rita, job)["state"] == "shipping"
    start = case.planner.starts[-1]
    assert start is not None
    assert start.checkpoints[0].id.update == 120


def test_a_job_that_shall_fail_fails_and_keeps_its_checkpoint(case: Case) -> None:
    rita, job, alice, bob = training_pair(case, on_insufficient="fail")
    case.planner.needs = 2
    leave(bob)
    case.match()
    rescue(alice, 120)
    wait(case, AFTER, alice)
    found = view(rita, job)
    assert found["state"] == "failed"
    assert "no plan without it exists: needs 2 providers" in found["reason"]
    assert complete(case, job) == [(120, 0)]


def test_uploads_are_not_waited_for_without_a_limit(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    upload(alice, 0, 50)
    upload(bob, 1, 50)
    leave(bob)
    case.match()
    wait(case, AFTER, alice)
    assert view(rita, job)["state"] == "training", "alice may still upload"
    wait(case, SETTINGS.rescue_grace, alice)
    assert alice.heartbeat()["assignment"] == f"{job}-p1-0"
    start = case.planner.starts[-1]
    assert start is not None
    assert start.checkpoints[0].id.update == 50, "what was uploaded before"


def test_without_any_checkpoint_the_job_starts_from_the_beginning(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    leave(bob)
    case.match()
    alice.report("training", upload_done=alice.heartbeat()["upload"])
    wait(case, AFTER, alice)
    assert alice.heartbeat()["assignment"] == f"{job}-p1-0"
    assert case.planner.starts[-1] is None
    assert "there is no checkpoint yet" in recoveries(rita, job)[-1]


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    for update in (50, 60):
        upload(alice, 0, update)
        upload(bob, 1, update)
    case.planner.damaged = {60}
    leave(bob)
    case.match()
    alice.report("training", upload_done=alice.heartbeat()["upload"])
    wait(case, AFTER, alice)
    assert alice.heartbeat()["assignment"] == f"{job}-p1-0"
    expected = "training continues from update 50; a newer checkpoint is damaged: stage 0 is damaged"
    assert recoveries(rita, job)[-1] == expected


def test_a_server_killed_between_loss_and_new_plan_finds_the_truth(tmp_path: Path) -> None:
    time, planner = Time(), FakePlanner()
    with opened(tmp_path, time=time, planner=planner, settings=SETTINGS) as case:
        rita, job, alice, bob = training_pair(case)
        upload(alice, 0, 5)
        leave(bob)
        case.match()
    with opened(tmp_path, time=time, planner=planner, settings=SETTINGS) as case:
        rita.client = alice.client = case.client
        case.match()
        rescue(alice, 9)
    with opened(tmp_path, time=time, planner=planner, settings=SETTINGS) as case:
        rita.client = alice.client = case.client
        case.match()
        alice.report("training", upload_done=alice.heartbeat()["upload"])
        wait(case, AFTER, alice)
        assert alice.heartbeat()["assignment"] == f"{job}-p1-0"
    with opened(tmp_path, time=time, planner=planner, settings=SETTINGS) as case:
        rita.client = alice.client = case.client
        case.match()
        assert alice.heartbeat()["assignment"] == f"{job}-p1-0"
        start = planner.starts[-1]
        assert start is not None
        assert start.checkpoints[0].id.update == 9
        alice.report("fetched")
        assert alice.report("training")["upload"] is not None


def test_a_job_in_the_queue_keeps_its_checkpoint_over_a_restart(tmp_path: Path) -> None:
    time, planner = Time(), FakePlanner()
    with opened(tmp_path, time=time, planner=planner, settings=SETTINGS) as case:
        rita, job, alice, bob = training_pair(case)
        leave(bob)
        case.match()
        rescue(alice, 9)
        planner.needs = 2
        wait(case, AFTER, alice)
        wait(case, REQUEUE - AFTER, alice)
        assert view(rita, job)["state"] == "submitted"
    with opened(tmp_path, time=time, planner=planner, settings=SETTINGS) as case:
        rita.client = case.client
        assert complete(case, job) == [(9, 0)]
        assert case.server.artifacts.has(_newest_tensors(case, job))
        provider(case, "carol", 2)
        case.match()
        assert view(rita, job)["state"] == "shipping"


def _newest_tensors(case: Case, job: str) -> str:
    with case.server.db.read() as db:
        return db.checkpoints.of_job(job)[-1].tensors.sha256


# The decision

LIMITS = ReplanLimits(replan_after=10.0, requeue_after=60.0)
FITS, NOTHING = PlanAnswer(True, "2 providers can train it"), PlanAnswer(False, "too little RAM")


def lost_job(**changes: Any) -> VacantJob:
    own: dict[str, Any] = {
        "lost": "node_2",
        "why": "node_2 of cluster 0 (bob): killed",
        "waited": 20.0,
        "checkpoint": 120,
        "is_rescued": True,
    }
    return VacantJob(**(own | changes))


SAFE = "the checkpoint of update 120 is safe here"


@pytest.mark.parametrize(
    ("job", "answer", "decision"),
    [
        (
            lost_job(waited=5.0),
            None,
            KeepWaiting("waits for the provider of node_2 or a spare", 10.0),
        ),
        (
            lost_job(is_rescued=False),
            None,
            KeepWaiting("its checkpoints are uploaded: node_2 has no provider", None),
        ),
        (
            lost_job(),
            FITS,
            PlanAnew(f"planned anew without node_2: 2 providers can train it; {SAFE}"),
        ),
        (
            lost_job(),
            NOTHING,
            KeepWaiting(f"waits for a provider for node_2: too little RAM; {SAFE}", 60.0),
        ),
        (
            lost_job(waited=60.0),
            NOTHING,
            PlanAnew(f"waits for providers: too little RAM; {SAFE}"),
        ),
        (
            lost_job(on_insufficient="fail"),
            NOTHING,
            GiveUp("node_2 of cluster 0 (bob): killed; no plan without it exists: too little RAM"),
        ),
        (
            lost_job(replans=3),
            None,
            GiveUp("node_2 of cluster 0 (bob): killed; planned anew 3 times without a new checkpoint"),
        ),
    ],
)
def test_decisions(job: VacantJob, answer: PlanAnswer | None, decision: object) -> None:
    assert needs_answer(job, LIMITS) == (answer is not None)
    assert decide_replan(job, answer, LIMITS) == decision


GO_ON = "waits for a provider for node_2; the other clusters go on"
GATHER = GatherCheckpoints("the other clusters upload their checkpoints: node_2 is given up")
FASTER = PlanAnswer(True, "", gain=1.5)


@pytest.mark.parametrize(
    ("job", "answer", "decision"),
    [
        (lost_job(), FITS, KeepWaiting(GO_ON, 60.0)),
        (lost_job(), FASTER, GATHER),
        (
            lost_job(is_gathered=True),
            FASTER,
            PlanAnew(
                f"planned anew without node_2: 50% faster than the clusters that still train; {SAFE}"
            ),
        ),
        (lost_job(waited=60.0), FITS, GATHER),
        (
            lost_job(waited=70.0, is_gathered=True),
            FITS,
            PlanAnew(
                "planned anew without node_2: nobody took its place for 70 s, and its cluster's share "
                f"of the data moves to the other nodes: 2 providers can train it; {SAFE}"
            ),
        ),
        (lost_job(on_insufficient=30.0), FITS, KeepWaiting(GO_ON, 30.0)),
        (lost_job(on_insufficient=20.0), FITS, GATHER),
        (lost_job(on_insufficient=1e6), FITS, KeepWaiting(GO_ON, 60.0)),
        (lost_job(on_insufficient="fail"), FITS, GATHER),
        (lost_job(waited=1e6), NOTHING, KeepWaiting(GO_ON, None)),
        (lost_job(on_insufficient=30.0), NOTHING, KeepWaiting(GO_ON, 30.0)),
        (
            lost_job(waited=30.0, on_insufficient=30.0),
            NOTHING,
            GiveUpClusters(
                "node_2 of cluster 0 (bob): killed; no plan without it exists: too little RAM"
            ),
        ),
        (lost_job(replans=3), None, KeepWaiting(GO_ON, None)),
        (
            lost_job(replans=3, on_insufficient="fail"),
            None,
            GiveUpClusters(
                "node_2 of cluster 0 (bob): killed; no plan without it exists: planned anew 3 times "
                "without a new checkpoint"
            ),
        ),
        (lost_job(is_rescued=False), None, None),
        (lost_job(waited=5.0), None, None),
    ],
)
def test_decisions_while_other_clusters_train(
    job: VacantJob, answer: PlanAnswer | None, decision: object
) -> None:
    job = replace(job, others_train=True)
    assert needs_answer(job, LIMITS) == (answer is not None)
    found = decide_replan(job, answer, LIMITS)
    assert isinstance(found, KeepWaiting) if decision is None else found == decision


def test_a_cluster_without_a_provider_does_not_hold_up_a_trained_model() -> None:
    job = lost_job(is_delivered=True, is_rescued=False)
    assert not needs_answer(job, LIMITS)
    assert isinstance(decide_replan(job, None, LIMITS), GiveUpClusters)
    assert isinstance(decide_replan(replace(job, waited=5.0), None, LIMITS), KeepWaiting)


def test_new_plans_are_counted_from_the_newest_checkpoint(case: Case) -> None:
    _, job, alice, _ = training_pair(case)
    found = []
    for update in (None, None, 5, 5):
        with case.server._units.begin() as uow:
            record = uow.db.jobs.get(job)
            assert record is not None
            uow.db.jobs._set(job, state=JobState.TRAINING)
            uow.plan_anew(replace(record, state=JobState.TRAINING), "again", update)
            after = uow.db.jobs.get(job)
            assert after is not None
            found.append((after.attempt, after.replans, after.resumed))
    assert found == [(1, 1, -1), (2, 2, -1), (3, 1, 5), (4, 2, 5)]
    assert alice.heartbeat()["assignment"] is None
