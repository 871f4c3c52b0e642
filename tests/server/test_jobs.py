"""A job from its submission to its end, and what can come between."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest
from server_cases import FILES, Caller, Case, FakePlanner, Time, artifact, opened, spec

from ravnest.errors import JobError
from ravnest.schemas.auth import ApiRole

FOREIGN = "with a certificate of another authority, or one that is no longer good"


def providers(case: Case, *names: str) -> list[Caller]:
    """Strongest first, so that node i is the i-th of them."""
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


def history(requester: Caller, job: str) -> list[tuple[str, str]]:
    events = requester.get(f"/api/jobs/{job}/events")
    moves = [(each["before"], each["after"]) for each in events if each["subject"] == job]
    return [move for move in moves if move[0] != move[1]]


def test_a_job_from_its_submission_to_its_result(case: Case) -> None:
    rita = case.requester()
    alice, bob = providers(case, "alice", "bob")
    job = case.submit(rita)
    assert alice.beat() == {"assignment": None, "losses_known": 0, "reason": alice_reason(case)}
    case.match()
    assert state(rita, job) == "shipping"
    assert states(case) == ["reserved", "reserved"]
    orders = alice.beat()["assignment"]
    assert alice.get(f"/api/assignments/{orders}")["node"] == 0

    alice.report("fetching")
    alice.report("training")
    assert state(rita, job) == "shipping"
    bob.report("training")
    assert state(rita, job) == "training"
    assert states(case) == ["training", "training"]

    assert alice.report("training", first_loss=0, losses=[3.0, 2.5])["losses_known"] == 2
    assert alice.report("training", first_loss=2, losses=[2.0], figures=[0.5])["losses_known"] == 3
    view = rita.get(f"/api/jobs/{job}")
    assert view["progress"] == {"updates": 3, "epochs": 2, "loss": 2.0, "diverged": False, "figure": 0.5}
    assert [place["provider_name"] for place in view["places"]] == ["alice", "bob"]
    assert view["plan"] == "a plan"
    losses = rita.get(f"/api/jobs/{job}/losses?first=1")
    assert losses == {"first": 1, "losses": [2.5, 2.0], "figures": [0.5]}
    assert rita.get(f"/api/jobs/{job}/result", 409)["detail"].startswith(f"{job} has no result")

    finish(alice)
    assert alice.beat()["assignment"] is None
    assert state(rita, job) == "training"
    bob.report("finished")
    assert state(rita, job) == "done"
    assert states(case) == ["offered", "offered"]
    result = rita.get(f"/api/jobs/{job}/result")
    trained = result["files"][0]["artifact"]["sha256"]
    assert rita.get(f"/api/artifacts/{trained}") == f"trained by {alice.id}".encode()
    assert history(rita, job) == [
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


def test_after_its_part_a_provider_has_no_more_business_with_it(case: Case) -> None:
    rita, (alice,) = case.requester(), providers(case, "alice")
    case.submit(rita)
    case.match()
    part = alice.beat()["assignment"]
    finish(alice)
    alice.get(f"/api/assignments/{part}", 409)
    alice.get(f"/api/artifacts/{artifact('weights').sha256}", 403)
    assert alice.report("finished", assignment=part)["assignment"] is None


def test_a_node_that_fails_fails_its_cluster_and_the_rest_may_say_why(case: Case) -> None:
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


def test_what_is_left_of_a_failed_cluster_is_stopped_in_the_end(case: Case) -> None:
    rita, (alice, bob) = case.requester(), providers(case, "alice", "bob")
    job = case.submit(rita)
    case.match()
    for each in (alice, bob):
        each.report("training")
    bob.report("failed", reason="broken")
    case.pass_time(case.server.settings.ending_grace - 1)
    assert alice.beat()["assignment"] is not None
    case.pass_time(1)
    assert alice.beat()["assignment"] is None
    assert state(rita, job) == "failed"


def test_other_clusters_go_on_and_their_result_counts(case: Case) -> None:
    rita = case.requester()
    alice, bob, carol, dave = providers(case, "alice", "bob", "carol", "dave")
    job = case.submit(rita)
    case.match()
    for each in (alice, bob, carol, dave):
        each.report("training")
    alice.report("training", losses=[9.0])
    carol.report("training", losses=[5.0, 4.0])
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


def test_the_result_is_that_of_the_lowest_cluster(case: Case) -> None:
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


def test_strangers_that_a_node_turned_away_are_written_down_once(case: Case) -> None:
    rita, (alice,) = case.requester(), providers(case, "alice")
    job = case.submit(rita)
    case.match()
    for strangers in (
        {"foreign": 1},
        {"foreign": 1},
        {"foreign": 3, "bare": 1},
        {"foreign": 3, "bare": 1},
    ):
        alice.report("training", strangers=strangers)
    alice.report("training", 422, strangers={"foreign": -1})
    events = rita.get(f"/api/jobs/{job}/events")
    assert [each["reason"] for each in events if each["kind"] == "refusal"] == [
        f"node_0 of {job} turned away a connection {FOREIGN}",
        f"node_0 of {job} turned away 2 connections {FOREIGN}",
        f"node_0 of {job} turned away a connection without a certificate",
    ]


def test_a_provider_that_lives_but_does_not_fetch_holds_nobody_up_for_ever(case: Case) -> None:
    rita, (alice, bob) = case.requester(), providers(case, "alice", "bob")
    job = case.submit(rita)
    case.match()
    alice.report("training")
    for _ in range(61):
        assert state(rita, job) == "shipping"
        alice.beat()
        bob.report("fetching")
        case.pass_time(10)
    alice.report("failed", reason="node_1 did not come")
    view = rita.get(f"/api/jobs/{job}")
    assert view["state"] == "failed"
    assert "(bob): it has not fetched its part within 10 minutes" in view["reason"]
    assert states(case) == ["offered", "offered"]


def test_a_loss_that_is_no_number_is_told_as_such(case: Case) -> None:
    rita, (alice, bob) = case.requester(), providers(case, "alice", "bob")
    job = case.submit(rita)
    case.match()
    bob.report("training")
    alice.report("training", losses=[0.5, None])
    progress = rita.get(f"/api/jobs/{job}")["progress"]
    assert (progress["updates"], progress["loss"], progress["diverged"]) == (2, None, True)
    assert rita.get(f"/api/jobs/{job}/losses")["losses"] == [0.5, None]
    alice.report("training", first_loss=2, losses=[0.25])
    progress = rita.get(f"/api/jobs/{job}")["progress"]
    assert (progress["loss"], progress["diverged"]) == (0.25, False)


def test_a_lost_provider_fails_its_cluster(case: Case) -> None:
    rita, (alice, bob) = case.requester(), providers(case, "alice", "bob")
    job = case.submit(rita)
    case.match()
    case.pass_time(20)
    alice.beat()
    case.pass_time(10)
    assert sorted(states(case)) == ["lost", "reserved"]
    assert alice.beat()["assignment"] is not None
    case.pass_time(10)
    view = rita.get(f"/api/jobs/{job}")
    assert view["state"] == "failed"
    assert "(bob): the provider was lost: it was not heard of for 30 seconds" in view["reason"]
    assert alice.beat()["assignment"] is None
    assert bob.beat()["assignment"] is None
    assert states(case) == ["offered", "offered"]


def test_a_provider_that_leaves_comes_back_only_with_an_offer(case: Case) -> None:
    (alice,) = providers(case, "alice")
    alice.call("DELETE", f"/api/providers/{alice.id}?reason=Ctrl-C")
    (view,) = case.admin().get("/api/providers")
    assert (view["state"], view["reason"]) == ("lost", "it left: Ctrl-C")
    alice.beat(404)
    alice.post("/api/providers", view["offer"])
    alice.beat()
    assert states(case) == ["offered"]
    case.pass_time(30)
    case.pass_time(3600)
    assert len(states(case)) == 1
    case.pass_time(1)
    assert states(case) == []


def test_an_offer_with_other_figures_replaces_the_first(case: Case) -> None:
    (alice,) = providers(case, "alice")
    (view,) = case.admin().get("/api/providers")
    alice.post("/api/providers", {**view["offer"], "ram": 1.0})
    assert case.admin().get("/api/providers")[0]["offer"]["ram"] == 1.0
    assert "host:port" in alice.post("/api/providers", {**view["offer"], "address": "x"}, 422)["detail"]
    case.member(ApiRole.PROVIDER).beat(404)


@pytest.mark.parametrize("when", ["submitted", "shipping", "training"])
def test_a_job_is_cancelled_whatever_it_does(case: Case, when: str) -> None:
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
    assert alice.beat()["assignment"] is None


def test_a_job_that_has_ended_cannot_be_cancelled(case: Case) -> None:
    rita, (alice,) = case.requester(), providers(case, "alice")
    job = case.submit(rita)
    case.match()
    finish(alice)
    assert rita.post(f"/api/jobs/{job}/cancel", None, 409)["detail"] == f"{job} is done already"


def test_a_job_waits_for_what_it_lacks_or_fails_as_asked(case: Case) -> None:
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
        assert (view["state"], view["reason"]) == (expected, "needs 2 providers, 1 are there")
    case.provider("bob", address="127.0.0.1:9001")
    case.match()
    assert state(rita, waits) == "shipping"


def test_two_jobs_one_after_the_other(case: Case) -> None:
    rita, (alice,) = case.requester(), providers(case, "alice")
    first = case.submit(rita)
    case.time.now += 1
    second = case.submit(rita)
    case.match()
    assert (state(rita, first), state(rita, second)) == ("shipping", "submitted")
    finish(alice)
    case.match()
    assert (state(rita, first), state(rita, second)) == ("done", "shipping")
    assert alice.beat()["assignment"] == f"{second}-0"


def test_a_plan_is_not_made_again_while_nothing_changed(case: Case) -> None:
    case.planner.needs = 2
    rita, _alice = case.requester(), providers(case, "alice")
    case.submit(rita)
    case.match()
    case.match()
    assert len(case.planner.asked) == 1


def test_a_job_that_cannot_be_planned_fails_and_hurts_no_other(case: Case) -> None:
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
def test_a_provider_that_is_lost_meanwhile_gets_nothing(case: Case, hook: str) -> None:
    rita, (alice, bob) = case.requester(), providers(case, "alice", "bob")
    job = case.submit(rita)

    def lose() -> None:
        setattr(case.planner, hook, lambda: None)
        case.server.steward.leave(bob.id, "no time")

    setattr(case.planner, hook, lose)
    case.match()
    case.match()
    assert [place["provider_name"] for place in rita.get(f"/api/jobs/{job}")["places"]] == ["alice"]
    assert alice.beat()["assignment"] == f"{job}-0"
    assert sorted(states(case)) == ["lost", "reserved"]


@pytest.mark.parametrize("hook", ["while_planning", "while_shipping"])
def test_a_job_that_is_cancelled_meanwhile_stays_so(case: Case, hook: str) -> None:
    rita, _ = case.requester(), providers(case, "alice")
    job = case.submit(rita)
    setattr(case.planner, hook, lambda: rita.post(f"/api/jobs/{job}/cancel"))
    case.match()
    assert state(rita, job) == "cancelled"
    assert states(case) == ["offered"]


def test_shipping_that_fails_gives_the_providers_back(case: Case) -> None:
    rita, _ = case.requester(), providers(case, "alice")
    job = case.submit(rita)

    def fail() -> None:
        raise OSError("no space left")

    case.planner.while_shipping = fail
    case.match()
    view = rita.get(f"/api/jobs/{job}")
    assert (view["state"], view["reason"]) == ("failed", "it cannot be shipped: OSError: no space left")
    assert states(case) == ["offered"]


def test_a_killed_server_comes_back_with_the_same_state(tmp_path: Path) -> None:
    time = Time()
    with opened(tmp_path, time=time) as case:
        rita, (alice, bob) = case.requester(), providers(case, "alice", "bob")
        job = case.submit(rita)
        case.match()
        alice.report("training", losses=[1.0])
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
        assert alice.report("training", first_loss=0, losses=[1.0, 0.5])["losses_known"] == 2
        finish(alice)
        bob.report("finished")
        assert state(rita, job) == "done"


def test_a_job_that_was_being_planned_waits_again_after_a_restart(tmp_path: Path) -> None:
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


def test_artifacts_of_members_outlive_a_restart_and_others_do_not(tmp_path: Path) -> None:
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


def test_files_travel_in_parts_both_ways(case: Case) -> None:
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
    part = rita.get(f"/api/artifacts/{sha}", 206, headers={"Range": "bytes=5000000-"})
    assert part == content[5_000_000:]
    rita.call(
        "PUT", where.replace(sha[:8], "00000000"), 422, content=b"x", params={"offset": 0, "size": 1}
    )
    rita.get("/api/artifacts/nonsense", 422)


def test_a_job_names_the_files_it_lacks(case: Case) -> None:
    rita = case.member(ApiRole.REQUESTER)
    rita.upload(FILES["units"])
    answer = rita.post("/api/jobs", spec(), 422)
    assert "3 files were not uploaded" in answer["detail"]
    assert artifact("labels").sha256 in answer["detail"]
    assert artifact("units").sha256 not in answer["detail"]
