"""Jobs from submission to end over the HTTP API, with failures and restarts."""

import dataclasses
import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from server_cases import (
    FILES,
    Caller,
    Case,
    FakePlanner,
    Time,
    artifact,
    losses,
    opened,
    spec,
    validation,
)

from ravnest.errors import JobError
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobSpec
from ravnest.telemetry import (
    PhaseRecord,
    QueueRecord,
    RoundRecord,
    TimingRecord,
    ValidationRecord,
    WarningRecord,
)


def providers(case: Case, *names: str) -> list[Caller]:
    """Providers from strong to weak, so that node i is the i-th of them."""
    return [
        case.provider(name, compute=100.0 - i, address=f"127.0.0.1:{9000 + i}")
        for i, name in enumerate(names)
    ]


def state(requester: Caller, job: str) -> str:
    return str(requester.get(f"/api/jobs/{job}")["state"])


def states(case: Case) -> list[str]:
    return [each["state"] for each in case.admin().get("/api/providers")]


def finish(provider: Caller, **fields: Any) -> None:
    sha = provider.upload(f"trained by {provider.id}".encode())
    size = len(f"trained by {provider.id}".encode())
    files = [{"name": "node_0.safetensors", "artifact": {"sha256": sha, "size": size}}]
    provider.report("finished", result=files, **fields)


def transitions(requester: Caller, job: str) -> list[tuple[str, str]]:
    events = requester.get(f"/api/jobs/{job}/events")
    moves = [(each["before"], each["after"]) for each in events if each["subject"] == job]
    return [move for move in moves if move[0] != move[1]]


def test_a_job_from_its_submission_to_its_result(case: Case) -> None:
    rita = case.requester()
    alice, bob = providers(case, "alice", "bob")
    job = case.submit(rita)
    assert alice.heartbeat() == {
        "assignment": None,
        "may_train": False,
        "records_known": 0,
        "link_test": None,
        "upload": None,
        "may_leave": False,
        "keep": [],
        "reason": alice_reason(case),
    }
    case.match()
    assert state(rita, job) == "shipping"
    assert states(case) == ["reserved", "reserved"]
    assignment = alice.heartbeat()["assignment"]
    assert alice.get(f"/api/assignments/{assignment}")["node"] == 0

    alice.report("fetching")
    alice.report("training")
    assert state(rita, job) == "shipping"
    bob.report("training")
    assert state(rita, job) == "training"
    assert states(case) == ["training", "training"]

    assert alice.report("training", records=losses(3.0, 2.5))["records_known"] == 2
    more = [*losses(2.0, first=2), validation(0, 0.5)]
    assert alice.report("training", first_record=2, records=more)["records_known"] == 4
    view = rita.get(f"/api/jobs/{job}")
    assert view["progress"] == {
        "schedule": None,
        "staleness": 0,
        "updates": 3,
        "epochs": 2,
        "loss": 2.0,
        "diverged": False,
        "validation": 0.5,
        "epoch": 1,
        "metric": "accuracy",
        "metrics": {},
        "samples_per_second": None,
        "seconds_left": None,
        "total_updates": None,
    }
    assert [each["provider_name"] for each in view["assignments"]] == ["alice", "bob"]
    assert view["plan"] == "a plan"
    history = rita.get(f"/api/jobs/{job}/losses?first=1")
    assert (history["updates"], history["losses"]) == ([1, 2], [2.5, 2.0])
    assert history["validations"] == [validation(0, 0.5)]
    assert rita.get(f"/api/jobs/{job}/result", 409)["detail"].startswith(f"{job} has no result")

    finish(alice)
    assert alice.heartbeat()["assignment"] is None
    assert state(rita, job) == "training"
    bob.report("finished")
    assert state(rita, job) == "done"
    assert states(case) == ["offered", "offered"]
    result = rita.get(f"/api/jobs/{job}/result")
    trained = result["files"][0]["artifact"]["sha256"]
    assert rita.get(f"/api/artifacts/{trained}") == f"trained by {alice.id}".encode()
    assert transitions(rita, job) == [
        ("", "submitted"),
        ("submitted", "planned"),
        ("planned", "shipping"),
        ("shipping", "training"),
        ("training", "done"),
    ]
    assert all(event["reason"] for event in case.events())


def alice_reason(case: Case) -> str:
    (first, *_) = [
        each for each in case.admin().get("/api/providers") if each["offer"]["name"] == "alice"
    ]
    return str(first["reason"])


def test_a_provider_has_no_access_to_an_assignment_that_has_ended(case: Case) -> None:
    rita, (alice,) = case.requester(), providers(case, "alice")
    case.submit(rita)
    case.match()
    assignment = alice.heartbeat()["assignment"]
    finish(alice)
    alice.get(f"/api/assignments/{assignment}", 409)
    alice.get(f"/api/artifacts/{artifact('weights').sha256}", 403)
    assert alice.report("finished", assignment=assignment)["assignment"] is None


def test_a_failed_node_fails_its_cluster_and_the_other_nodes_report_why(case: Case) -> None:
    rita, (alice, bob) = case.requester(), providers(case, "alice", "bob")
    job = case.submit(rita)
    case.match()
    for each in (alice, bob):
        each.report("training")
    bob.report("failed", reason="killed: it took more memory than was offered")
    assert state(rita, job) == "training"
    alice.report("failed", reason="the link to node_1 is lost")
    view = rita.get(f"/api/jobs/{job}")
    assert view["state"] == "failed"
    assert "node_1 of cluster 0 (bob): killed: it took more memory" in view["reason"]
    assert "node_0 of cluster 0 (alice): the link to node_1 is lost" in view["reason"]
    assert states(case) == ["offered", "offered"]


def test_the_remaining_nodes_of_a_failed_cluster_are_stopped_after_a_while(case: Case) -> None:
    rita, (alice, bob) = case.requester(), providers(case, "alice", "bob")
    job = case.submit(rita)
    case.match()
    for each in (alice, bob):
        each.report("training")
    bob.report("failed", reason="broken")
    case.pass_time(case.server.settings.ending_grace - 1)
    assert alice.heartbeat()["assignment"] is not None
    case.pass_time(1)
    assert alice.heartbeat()["assignment"] is None
    assert state(rita, job) == "failed"


def best(provider: Caller, content: bytes, epoch: int, value: float) -> dict[str, Any]:
    """Upload a best model and return what a report says about it."""
    artifact = {"sha256": provider.upload(content), "size": len(content)}
    files = [{"name": "node_0.safetensors", "artifact": artifact}]
    return {"epoch": epoch, "metric": "accuracy", "value": value, "files": files}


@pytest.mark.parametrize("ending", ["done", "failed"])
def test_the_best_model_so_far_is_delivered(case: Case, ending: str) -> None:
    rita = case.requester()
    alice, bob = providers(case, "alice", "bob")
    job = case.submit(rita)
    case.match()
    for provider in (alice, bob):
        provider.report("training")
    assert "has no best model: it needs keep_best" in rita.get(f"/api/jobs/{job}/best", 409)["detail"]
    first = best(alice, b"first", 1, 0.5)
    alice.report("training", best=first)
    found = rita.get(f"/api/jobs/{job}/best")
    assert (found["cluster"], found["files"]) == (0, first["files"])
    second = best(alice, b"second", 3, 0.75)
    bob.report("training", best=second)  # not a Root
    assert rita.get(f"/api/jobs/{job}")["best"]["epoch"] == 1
    alice.report("training", best=second)
    assert rita.get(f"/api/jobs/{job}")["best"]["epoch"] == 1, "it is checked once in a minute"
    case.pass_time(0 if ending == "failed" else 60)
    alice.report("training", best=second, records=losses(3.0))
    if ending == "done":
        finish(alice, best=second)
        bob.report("finished")
    else:
        alice.report("failed", reason="the loss is nan", best=second)
        bob.report("failed", reason="the loss is nan")
    view = rita.get(f"/api/jobs/{job}")
    assert (view["state"], view["best"]) == (
        ending, {"cluster": 0, "epoch": 3, "metric": "accuracy", "value": 0.75}
    )  # fmt: skip
    (file,) = rita.get(f"/api/jobs/{job}/best")["files"]
    assert rita.get(f"/api/artifacts/{file['artifact']['sha256']}") == b"second"


def test_other_clusters_continue_and_their_result_counts(case: Case) -> None:
    rita = case.requester()
    alice, bob, carol, dave = providers(case, "alice", "bob", "carol", "dave")
    job = case.submit(rita)
    case.match()
    for each in (alice, bob, carol, dave):
        each.report("training")
    alice.report("training", records=losses(9.0))
    carol.report("training", records=losses(5.0, 4.0))
    alice.report("failed", reason="broken")
    bob.report("failed", reason="node_0 is gone")
    view = rita.get(f"/api/jobs/{job}")
    assert view["state"] == "training"
    assert "failed: node_0 of cluster 0 (alice): broken" in view["reason"]
    assert view["progress"]["loss"] == 4.0
    finish(carol)
    dave.report("finished")
    assert state(rita, job) == "done"
    assert rita.get(f"/api/jobs/{job}/result")["cluster"] == 1


def test_the_result_comes_from_the_lowest_cluster(case: Case) -> None:
    rita = case.requester()
    alice, bob, carol, dave = providers(case, "alice", "bob", "carol", "dave")
    job = case.submit(rita)
    case.match()
    finish(carol)
    finish(alice)
    bob.report("finished")
    dave.report("finished")
    assert rita.get(f"/api/jobs/{job}/result")["cluster"] == 0


def test_a_result_of_files_that_were_not_uploaded_is_refused(case: Case) -> None:
    rita, (alice,) = case.requester(), providers(case, "alice")
    job = case.submit(rita)
    case.match()
    files = [{"name": "node_0.json", "artifact": artifact("weights").model_dump()}]
    answer = alice.report("finished", 422, result=files)
    assert "not uploaded" in answer["detail"]
    assert state(rita, job) == "shipping"
    alice.report("finished")
    assert "no Root has sent a trained model" in rita.get(f"/api/jobs/{job}")["reason"]


def test_connections_that_a_node_rejected_are_recorded_once(case: Case) -> None:
    rita, (alice,) = case.requester(), providers(case, "alice")
    job = case.submit(rita)
    case.match()
    for rejections in (
        {"foreign": 1},
        {"foreign": 1},
        {"foreign": 3, "bare": 1},
        {"foreign": 3, "bare": 1},
    ):
        alice.report("training", tls_rejections=rejections)
    alice.report("training", 422, tls_rejections={"foreign": -1})
    events = rita.get(f"/api/jobs/{job}/events")
    refusals = [each["reason"] for each in events if each["kind"] == "refusal"]
    assert all(f"node_0 of {job}" in reason for reason in refusals)
    expected = ["a connection with a cert", "2 connections with a cert", "a connection without a cert"]
    assert len(refusals) == len(expected)
    assert all(words in reason for words, reason in zip(expected, refusals, strict=True))


def test_a_provider_that_does_not_finish_fetching_fails(case: Case) -> None:
    rita, (alice, bob) = case.requester(), providers(case, "alice", "bob")
    job = case.submit(rita)
    case.match()
    alice.report("training")
    while (assignment := bob.heartbeat()["assignment"]) is not None:
        alice.heartbeat()
        bob.report("fetching", assignment=assignment)
        case.pass_time(25)
    case.pass_time(case.server.settings.ending_grace)
    view = rita.get(f"/api/jobs/{job}")
    assert view["state"] == "failed"
    late = "(bob): it did not fetch its assignment within 10 minutes"
    assert f"{late}; the place was filled 3 times without a new checkpoint" in view["reason"]
    assert states(case) == ["offered", "offered"]


def test_a_loss_that_is_not_finite_is_shown_as_diverged(case: Case) -> None:
    rita, (alice, bob) = case.requester(), providers(case, "alice", "bob")
    job = case.submit(rita)
    case.match()
    bob.report("training")
    alice.report("training", records=losses(0.5, None))
    progress = rita.get(f"/api/jobs/{job}")["progress"]
    assert (progress["updates"], progress["loss"], progress["diverged"]) == (2, None, True)
    assert rita.get(f"/api/jobs/{job}/losses")["losses"] == [0.5, None]
    alice.report("training", first_record=2, records=losses(0.25, first=2))
    progress = rita.get(f"/api/jobs/{job}")["progress"]
    assert (progress["loss"], progress["diverged"]) == (0.25, False)


def test_a_lost_provider_fails_its_cluster_if_the_job_does_not_wait(case: Case) -> None:
    rita, (alice, bob) = case.requester(), providers(case, "alice", "bob")
    job = case.submit(rita, on_insufficient="fail")
    case.match()
    case.planner.needs = 2
    case.pass_time(20)
    alice.heartbeat()
    case.pass_time(10)
    assert sorted(states(case)) == ["lost", "reserved"]
    assert alice.heartbeat()["assignment"] is not None
    case.match()
    case.pass_time(10)
    alice.heartbeat()
    case.match()
    view = rita.get(f"/api/jobs/{job}")
    assert view["state"] == "failed"
    assert "(bob): the provider was lost: no heartbeat for 30 seconds" in view["reason"]
    assert alice.heartbeat()["assignment"] is None
    assert bob.heartbeat()["assignment"] is None
    assert states(case) == ["offered", "offered"]


def test_a_provider_that_leaves_comes_back_only_with_an_offer(case: Case) -> None:
    (alice,) = providers(case, "alice")
    alice.call("DELETE", f"/api/providers/{alice.id}?reason=Ctrl-C")
    (view,) = case.admin().get("/api/providers")
    assert (view["state"], view["reason"]) == ("lost", "it left: Ctrl-C")
    alice.heartbeat(404)
    alice.post("/api/providers", view["offer"])
    alice.heartbeat()
    assert states(case) == ["offered"]
    case.pass_time(30)
    case.pass_time(3600)
    assert len(states(case)) == 1
    case.pass_time(1)
    assert states(case) == []


def test_a_new_offer_replaces_the_first(case: Case) -> None:
    (alice,) = providers(case, "alice")
    (view,) = case.admin().get("/api/providers")
    alice.post("/api/providers", {**view["offer"], "ram": 1.0})
    assert case.admin().get("/api/providers")[0]["offer"]["ram"] == 1.0
    assert "host:port" in alice.post("/api/providers", {**view["offer"], "address": "x"}, 422)["detail"]
    case.member(ApiRole.PROVIDER).heartbeat(404)


@pytest.mark.parametrize("when", ["submitted", "shipping", "training"])
def test_a_job_can_be_cancelled_in_every_state(case: Case, when: str) -> None:
    rita, (alice,) = case.requester(), providers(case, "alice")
    job = case.submit(rita)
    if when != "submitted":
        case.match()
    if when == "training":
        alice.report("training")
    assert state(rita, job) == when
    assert rita.post(f"/api/jobs/{job}/cancel")["state"] == "cancelled"
    assert rita.post(f"/api/jobs/{job}/cancel")["state"] == "cancelled"
    assert states(case) == ["offered"]
    assert alice.heartbeat()["assignment"] is None


def test_a_job_that_has_ended_cannot_be_cancelled(case: Case) -> None:
    rita, (alice,) = case.requester(), providers(case, "alice")
    job = case.submit(rita)
    case.match()
    finish(alice)
    assert rita.post(f"/api/jobs/{job}/cancel", None, 409)["detail"] == f"{job} is done already"


def test_a_job_without_enough_providers_waits_for_as_long_as_it_wants(case: Case) -> None:
    case.planner.needs = 2
    rita = case.requester()
    job = case.submit(rita, on_insufficient=100)
    case.match()
    case.pass_time(99)
    assert state(rita, job) == "submitted"
    case.pass_time(1)
    view = rita.get(f"/api/jobs/{job}")
    assert view["state"] == "failed"
    assert "waits for 1 provider" in view["reason"]
    assert "has waited for as long as it wanted" in view["reason"]


def test_a_job_that_waits_for_its_turn_does_not_fail_for_lack_of_providers(case: Case) -> None:
    rita, (alice,) = case.requester(), providers(case, "alice")
    case.submit(rita)
    job = case.submit(rita, on_insufficient=100)
    case.match()
    for _ in range(20):
        alice.heartbeat()
        case.pass_time(10)
    assert state(rita, job) == "submitted"


@pytest.mark.parametrize("limit", [0, -1, "never"])
def test_a_wait_without_meaning_is_refused(case: Case, limit: object) -> None:
    rita = case.requester()
    rita.post("/api/jobs", {**spec().model_dump(mode="json"), "on_insufficient": limit}, 422)


def test_a_job_without_enough_providers_waits_or_fails(case: Case) -> None:
    case.planner.needs = 2
    rita = case.requester()
    waits, fails = case.submit(rita), case.submit(rita, on_insufficient="fail")
    case.match()
    assert "waits for 1 provider" in rita.get(f"/api/jobs/{waits}")["reason"]
    assert state(rita, fails) == "failed"
    providers(case, "alice")
    fails = case.submit(rita, on_insufficient="fail")
    case.match()
    for job, expected in [(waits, "submitted"), (fails, "failed")]:
        view = rita.get(f"/api/jobs/{job}")
        assert (view["state"], view["reason"]) == (expected, "needs 2 providers, 1 are connected")
    case.provider("bob", address="127.0.0.1:9001")
    case.match()
    assert state(rita, waits) == "shipping"


def test_two_jobs_run_one_after_the_other(case: Case) -> None:
    rita, (alice,) = case.requester(), providers(case, "alice")
    first = case.submit(rita)
    case.time.now += 1
    second = case.submit(rita)
    case.match()
    assert (state(rita, first), state(rita, second)) == ("shipping", "submitted")
    finish(alice)
    case.match()
    assert (state(rita, first), state(rita, second)) == ("done", "shipping")
    assert alice.heartbeat()["assignment"] == f"{second}-0"


def test_a_plan_is_cached_while_nothing_changes(case: Case) -> None:
    case.planner.needs = 2
    rita, _alice = case.requester(), providers(case, "alice")
    case.submit(rita)
    case.match()
    case.match()
    assert len(case.planner.asked) == 1


def test_the_plans_of_one_owner_do_not_hold_up_the_jobs_of_others(case: Case) -> None:
    """All waiting jobs were planned, each for up to two minutes, before any of them started."""
    mallory, rita = case.requester("mallory"), case.requester()
    providers(case, "alice", "bob")
    case.planner.needs = 3
    for _ in range(20):
        case.submit(mallory)
        case.time.now += 1
    order: list[str] = []

    def think() -> None:
        case.time.now += 20.0
        order.append("mallory")

    case.planner.while_planning = think
    plan = case.planner.plan

    def plan_for(given: JobSpec, *more: Any) -> Any:
        if given.name != "small":
            return plan(given, *more)
        case.planner.needs, needs = 1, case.planner.needs
        try:
            return plan(given, *more)
        finally:
            case.planner.needs = needs
            order.append("rita")

    job = case.submit(rita, name="small", max_providers=1)
    case.planner.plan = plan_for  # type: ignore[method-assign]
    case.server.run_matching()
    assert state(rita, job) == "shipping"
    assert order.index("rita") <= 5, "mallory's time in a pass is over before"
    assert order.count("mallory") >= 20, "its other jobs are planned afterwards"


def test_a_job_that_cannot_be_planned_fails_and_others_start(case: Case) -> None:
    rita, _ = case.requester(), providers(case, "alice")
    case.planner.error = JobError("its data does not add up")
    bad = case.submit(rita)
    case.match()
    view = rita.get(f"/api/jobs/{bad}")
    assert (view["state"], view["reason"]) == (
        "failed",
        "it cannot be planned: its data does not add up",
    )
    case.planner.error = None
    good = case.submit(rita)
    case.match()
    assert state(rita, good) == "shipping"


@pytest.mark.parametrize("hook", ["while_planning", "while_shipping"])
def test_a_provider_that_is_lost_meanwhile_gets_no_assignment(case: Case, hook: str) -> None:
    rita, (alice, bob) = case.requester(), providers(case, "alice", "bob")
    job = case.submit(rita)

    def lose() -> None:
        setattr(case.planner, hook, lambda: None)
        case.server.provider_service.leave(bob.id, "no time")

    setattr(case.planner, hook, lose)
    case.match()
    case.match()
    assert [each["provider_name"] for each in rita.get(f"/api/jobs/{job}")["assignments"]] == ["alice"]
    assert alice.heartbeat()["assignment"] == f"{job}-0"
    assert sorted(states(case)) == ["lost", "reserved"]


@pytest.mark.parametrize("hook", ["while_planning", "while_shipping"])
def test_a_job_that_is_cancelled_meanwhile_stays_cancelled(case: Case, hook: str) -> None:
    rita, _ = case.requester(), providers(case, "alice")
    job = case.submit(rita)
    setattr(case.planner, hook, lambda: rita.post(f"/api/jobs/{job}/cancel"))
    case.match()
    assert state(rita, job) == "cancelled"
    assert states(case) == ["offered"]


def test_a_failure_in_shipping_releases_the_providers(case: Case) -> None:
    rita, _ = case.requester(), providers(case, "alice")
    job = case.submit(rita)

    def fail() -> None:
        raise OSError("no space left")

    case.planner.while_shipping = fail
    case.match()
    view = rita.get(f"/api/jobs/{job}")
    assert (view["state"], view["reason"]) == ("failed", "it cannot be shipped: OSError: no space left")
    assert states(case) == ["offered"]


def test_a_restarted_server_has_the_same_state(tmp_path: Path) -> None:
    time = Time()
    with opened(tmp_path, time=time) as case:
        rita, (alice, bob) = case.requester(), providers(case, "alice", "bob")
        job = case.submit(rita)
        case.match()
        alice.report("training", records=losses(1.0))
        bob.report("training")
        before = rita.get(f"/api/jobs/{job}"), case.admin().get("/api/providers")
    time.now += 3600
    with opened(tmp_path, time=time) as case:
        alice, bob, rita = (dataclasses.replace(each, client=case.client) for each in (alice, bob, rita))
        after = rita.get(f"/api/jobs/{job}"), case.admin().get("/api/providers")
        assert after[0] == before[0]
        assert [each | {"seen": 0} for each in after[1]] == [each | {"seen": 0} for each in before[1]]
        case.pass_time(29)
        assert states(case) == ["training", "training"]
        assert alice.report("training", records=losses(1.0, 0.5))["records_known"] == 2
        finish(alice)
        bob.report("finished")
        assert state(rita, job) == "done"


def test_a_planned_job_returns_to_the_queue_after_a_restart(tmp_path: Path) -> None:
    planner = FakePlanner()

    def die() -> None:
        raise KeyboardInterrupt

    with opened(tmp_path, planner=planner) as case:
        rita, _ = case.requester(), providers(case, "alice")
        job = case.submit(rita)
        planner.while_shipping = die
        with pytest.raises(KeyboardInterrupt):
            case.match()
        assert (state(rita, job), states(case)) == ("planned", ["reserved"])
    with opened(tmp_path) as case:
        rita = dataclasses.replace(rita, client=case.client)
        assert (state(rita, job), states(case)) == ("submitted", ["offered"])
        case.match()
        assert state(rita, job) == "shipping"


def test_only_granted_artifacts_survive_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as case:
        rita = case.requester()
        stray = tmp_path / "stray"
        stray.write_bytes(b"nobody's")
        lost = case.server.artifacts.add(stray)
    with opened(tmp_path) as case:
        rita = dataclasses.replace(rita, client=case.client)
        digests = [artifact(name).sha256 for name in FILES]
        assert rita.post("/api/artifacts/missing", {"digests": digests}) == {"digests": []}
        assert not case.server.artifacts.has(lost.sha256)


def test_files_are_uploaded_and_downloaded_in_ranges(case: Case) -> None:
    rita = case.member(ApiRole.REQUESTER)
    content = bytes(range(256)) * 20_000
    sha = hashlib.sha256(content).hexdigest()
    where = f"/api/artifacts/{sha}/upload"
    params: dict[str, int] = {"offset": 0, "size": len(content)}
    assert rita.call("PUT", where, content=content[:3_000_000], params=params) == {"received": 3_000_000}
    assert rita.get(where) == {"received": 3_000_000}
    rita.get(f"/api/artifacts/{sha}", 403)
    rita.call("PUT", where, 409, content=content, params=params)
    params["offset"] = 3_000_000
    rita.call("PUT", where, content=content[3_000_000:], params=params)
    assert rita.get(where) == {"received": len(content)}
    assert rita.get(f"/api/artifacts/{sha}") == content
    rest = rita.get(f"/api/artifacts/{sha}", 206, headers={"Range": "bytes=5000000-"})
    assert rest == content[5_000_000:]
    rita.call(
        "PUT", where.replace(sha[:8], "00000000"), 422, content=b"x", params={"offset": 0, "size": 1}
    )
    rita.get("/api/artifacts/nonsense", 422)


def test_a_submission_without_its_files_is_refused_with_their_names(case: Case) -> None:
    rita = case.member(ApiRole.REQUESTER)
    rita.upload(FILES["units"])
    answer = rita.post("/api/jobs", spec(), 422)
    assert "3 files were not uploaded" in answer["detail"]
    assert artifact("labels").sha256 in answer["detail"]
    assert artifact("units").sha256 not in answer["detail"]


# --- records of workers --------------------------------------------------------------------------


def round_record(number: int, *, committed: bool) -> dict[str, Any]:
    record = RoundRecord(number, 1, "background", committed, (0, 1), 0.5, 1000, "cluster 1 is missing")
    return asdict(record)


def timing(stage: int, forward: float) -> dict[str, Any]:
    return asdict(TimingRecord(stage, 10, forward, 0.2, 0.01, 0.0, 0.0))


def test_the_view_of_a_job_has_the_newest_records_of_each_cluster(case: Case) -> None:
    rita = case.requester()
    alice, bob, carol, dave = providers(case, "alice", "bob", "carol", "dave")
    job = case.submit(rita)
    case.match()
    queue = asdict(QueueRecord(in_flight=2, window=3, inbox=1))
    phase = asdict(PhaseRecord("train", epoch=1))
    alice.report(
        "training",
        records=[
            phase,
            *losses(3.0, 2.0),
            timing(0, 0.9),
            timing(1, 0.8),
            timing(0, 0.1),
            validation(0, 0.5),
            round_record(7, committed=True),
            queue,
        ],
    )
    bob.report("training", records=[queue])
    carol.report("training", records=losses(1.5))
    dave.report("training", records=[asdict(WarningRecord("a slow link"))])
    view = rita.get(f"/api/jobs/{job}")
    first, second = view["clusters"]
    assert first == {
        "cluster": 0,
        "loss": losses(2.0, first=1)[0],
        "validation": validation(0, 0.5),
        "round": {**round_record(7, committed=True), "clusters": [0, 1]},
        "timings": [timing(0, 0.1), timing(1, 0.8)],
        "pace": None,
    }
    assert (second["cluster"], second["loss"]["loss"], second["timings"]) == (1, 1.5, [])
    assert [each["queue"] for each in view["assignments"]] == [queue, queue, None, None]
    assert [each["worker_phase"] for each in view["assignments"]] == [phase, None, None, None]
    (warning,) = view["warnings"]
    assert (warning["node"], warning["message"]) == (3, "a slow link")
    (listed,) = rita.get("/api/jobs")
    assert (listed["clusters"], listed["warnings"], listed["progress"]) == ([], [], view["progress"])


def test_warnings_and_failed_rounds_are_events_of_the_job(case: Case) -> None:
    rita, (alice,) = case.requester(), providers(case, "alice")
    job = case.submit(rita)
    case.match()
    records = [
        asdict(WarningRecord("a slow link")),
        round_record(7, committed=True),
        round_record(8, committed=False),
    ]
    alice.report("training", records=records)
    alice.report("training", records=records)
    alice.report("training", first_record=3, records=[asdict(WarningRecord("x" * 9000))] * 400)
    events = [
        (each["kind"], each["reason"])
        for each in rita.get(f"/api/jobs/{job}/events")
        if each["kind"] in ("warning", "round")
    ]
    assert [kind for kind, _ in events[:2]] == ["warning", "round"]
    assert "node_0: a slow link" in events[0][1]
    assert "round 8" in events[1][1]
    assert "cluster 1 is missing" in events[1][1]
    assert len(events) < 50, "a report adds a limited number of events"


@pytest.mark.parametrize(
    ("committed", "words"),
    [(True, "left clusters out: no reply within 120 s"), (False, "the clusters end without it")],
)
def test_a_final_round_without_a_cluster_is_an_event_of_the_job(
    case: Case, committed: bool, words: str
) -> None:
    rita, (alice,) = case.requester(), providers(case, "alice")
    job = case.submit(rita)
    case.match()
    record = RoundRecord(9, 1, "final", committed, (0, 1), 120.0, 0, "no reply within 120 s")
    alice.report("training", records=[asdict(record)])
    events = [e["reason"] for e in rita.get(f"/api/jobs/{job}/events") if e["kind"] == "round"]
    assert len(events) == 1
    assert words in events[0]


def test_a_gap_in_the_records_is_requested_once_and_then_accepted(case: Case) -> None:
    rita, (alice,) = case.requester(), providers(case, "alice")
    job = case.submit(rita)
    case.match()
    assert alice.report("training", records=losses(4.0))["records_known"] == 1
    late = {"first_record": 3, "records": losses(1.0, first=3)}
    assert alice.report("training", **late)["records_known"] == 1
    assert alice.report("training", **late)["records_known"] == 4
    history = rita.get(f"/api/jobs/{job}/losses")
    assert (history["updates"], history["losses"]) == ([0, 3], [4.0, 1.0])
    events = rita.get(f"/api/jobs/{job}/events")
    assert ["2 records" in each["reason"] for each in events if each["kind"] == "warning"] == [True]


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "loss", "update": -1, "epoch": 0, "loss": 1.0, "microbatches": 1, "staleness": 0},
        {"kind": "loss", "update": 2**70, "epoch": 0, "loss": 1.0, "microbatches": 1, "staleness": 0},
        {"kind": "unknown"},
        {**asdict(ValidationRecord(0, 0, "accuracy", 0.5, 1)), "name": "x" * 100_000},
        {**asdict(RoundRecord(0, 1, "final", True, (), 1.0, 1, "")), "clusters": [0] * 100_000},
    ],
)
def test_hostile_records_are_refused(case: Case, record: dict[str, Any]) -> None:
    rita, (alice,) = case.requester(), providers(case, "alice")
    job = case.submit(rita)
    case.match()
    alice.report("training", 422, records=[record])
    assert state(rita, job) == "shipping"
