"""Takeovers that concern a whole cluster: nodes that had finished, and clusters without any node."""

from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import provider, took, training_pair, upload, uploaded
from server_cases import Caller, Case, FakePlanner, opened
from takeover_cases import finish, leave, phase, recoveries, state_of, view

from ravnest.deadlines import TRAINING_SILENCE


@pytest.fixture
def trio(tmp_path: Path) -> Any:
    """A server whose jobs have clusters of three nodes."""
    with opened(tmp_path, planner=FakePlanner(size=3)) as found:
        yield found


def training_trio(case: Case) -> tuple[Caller, str, Caller, Caller, Caller]:
    """Return a requester, a job, and the providers of Root, Stem and Leaf, which train."""
    rita = case.requester()
    nodes = [provider(case, name, number) for number, name in enumerate(("alice", "bob", "carol"))]
    job = case.submit(rita)
    case.match()
    for name in ("fetched", "training"):
        for each in nodes:
            each.report(name)
    return rita, job, nodes[0], nodes[1], nodes[2]


# A loss after another node has finished


def test_finished_nodes_return_to_their_places_if_another_one_is_lost(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    carol = provider(case, "carol", 2)
    for each in (alice, bob):
        each.report("training", records=[took(120)])
    assert bob.report("finished")["keep"] == [f"{job}-1"], "until the job has a result"
    leave(alice)
    found = view(rita, job)
    assert found["state"] not in ("failed", "done")
    assert carol.heartbeat()["assignment"] == f"{job}-0-g1"
    answer = bob.heartbeat()
    assert (answer["assignment"], answer["keep"]) == (f"{job}-1-g1", [f"{job}-1"])
    new = bob.get(f"/api/assignments/{job}-1-g1")
    assert (new["continues"], new["resume"]) == (f"{job}-1", True)
    assert new["node_spec"]["previous"]["address"] == "127.0.0.1:9002", "where carol listens"
    assert (
        "carol takes the place of node_0 (Root of cluster 0); training continues from update 120"
        in (recoveries(rita, job)[-2])
    )
    for each in (carol, bob):
        each.report("fetched")
    for each in (carol, bob):
        assert each.heartbeat()["may_train"]
        each.report("training")
    bob.report("finished")
    finish(carol)
    assert view(rita, job)["state"] == "done"
    assert bob.heartbeat()["keep"] == []


def test_a_node_that_reports_its_end_after_the_loss_repeats_it(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    leave(alice)
    answer = bob.report("finished")
    assert (answer["assignment"], answer["keep"]) == (f"{job}-1-g1", [f"{job}-1"])
    carol = provider(case, "carol", 2)
    assert carol.heartbeat()["assignment"] == f"{job}-0-g1"
    assert view(rita, job)["state"] != "failed"


def test_a_root_that_is_back_with_the_result_needs_no_repetition(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    bob.report("finished")
    for _ in range(int(TRAINING_SILENCE // 10)):
        case.pass_time(10)
        bob.heartbeat()
    assert state_of(case, alice) == "lost"
    assert bob.report("fetched")["assignment"] == f"{job}-1-g1"
    alice.report("uploading", assignment=f"{job}-0")
    assert bob.heartbeat()["assignment"] is None
    assert state_of(case, bob) == "offered"
    finish(alice)
    assert view(rita, job)["state"] == "done"


def test_a_result_that_never_comes_is_made_again(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    bob.report("finished")
    alice.report("uploading")
    leave(alice)
    assert bob.heartbeat()["keep"] == [f"{job}-1"], "the server does not have the result"
    for _ in range(int(case.server.settings.result_wait // 20) + 1):
        case.pass_time(20)
        bob.heartbeat()
    assert bob.heartbeat()["assignment"] == f"{job}-1-g1"
    carol = provider(case, "carol", 2)
    assert carol.heartbeat()["assignment"] == f"{job}-0-g1"
    assert view(rita, job)["state"] != "failed"


def test_the_files_of_a_finished_node_stay_until_the_job_ends(case: Case) -> None:
    """The start of a server removes files that are granted to nobody."""

    def granted() -> bool:
        with case.server.db.read() as db:
            return db.artifact_grants.totals(f"{job}-1")[1] > 0

    _, job, alice, bob = training_pair(case)
    bob.report("finished")
    assert granted()
    finish(alice)
    assert not granted()


# All nodes of a cluster


def test_spares_of_a_whole_cluster_start_from_the_checkpoint_at_the_server(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    named = [upload(alice, 0, 50), upload(bob, 1, 50)]
    for each in (alice, bob):
        each.report("training", records=[took(50), took(70)])
    case.pass_time(20)
    leave(bob)
    leave(alice)
    carol, dave = provider(case, "carol", 2), provider(case, "dave", 3)
    for each in (carol, dave):
        new = each.get(f"/api/assignments/{each.heartbeat()['assignment']}")
        seed, stage = new["seed"], new["node_spec"]["stage"]
        assert (seed["update"], seed["tensors"]) == (50, named[stage]["tensors"])
        assert new["resume"]
        for file in (seed["tensors"], seed["manifest"]):
            each.get(f"/api/artifacts/{file['sha256']}")
        addresses = {
            new["node_spec"][side]["address"] for side in ("previous", "next") if new["node_spec"][side]
        }
        assert addresses < {"127.0.0.1:9002", "127.0.0.1:9003"}, "where the other spare listens"
    specs = [
        each.get(f"/api/assignments/{each.heartbeat()['assignment']}")["node_spec"]
        for each in (carol, dave)
    ]
    root, leaf = sorted(specs, key=lambda each: each["stage"])
    assert (root["dials_next"], leaf["dials_previous"]) == (True, False), "not both ways"
    expected = "training continues from update 50, the newest checkpoint at the server (20 s old)"
    assert all(expected in text for text in recoveries(rita, job)[-2:])


def test_a_returning_node_has_a_newer_state_than_the_server(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    upload(alice, 0, 50)
    upload(bob, 1, 50)
    for each in (alice, bob):
        each.report("training", records=[took(70)])
    bob.report("failed", cause="passing", reason="killed by SIGKILL")
    leave(alice)
    carol = provider(case, "carol", 2)
    assert carol.heartbeat()["assignment"] == f"{job}-0-g1"
    assert "training continues from update 70" in recoveries(rita, job)[-1]


def test_without_a_checkpoint_at_the_server_a_whole_cluster_starts_anew(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    for each in (alice, bob):
        each.report("training", records=[took(70)])
    leave(bob)
    leave(alice)
    carol, _ = provider(case, "carol", 2), provider(case, "dave", 3)
    new = carol.get(f"/api/assignments/{carol.heartbeat()['assignment']}")
    assert new["seed"] is None
    assert "training continues from the start" in recoveries(rita, job)[-1]


def test_nodes_that_wait_begin_again_if_the_state_of_two_lost_ones_is_at_the_server(trio: Case) -> None:
    rita, job, alice, bob, carol = training_trio(trio)
    nodes = (alice, bob, carol)
    named = [upload(each, stage, 50, stages=3) for stage, each in enumerate(nodes)]
    for each in nodes:
        each.report("training", records=[took(50), took(70)])
    leave(alice)
    leave(bob)
    dave, eve = provider(trio, "dave", 3), provider(trio, "eve", 4)
    found = {each.heartbeat()["assignment"] for each in (dave, eve)}
    assert found == {f"{job}-0-g1", f"{job}-1-g1"}
    answer = carol.heartbeat()
    assert (answer["assignment"], answer["keep"]) == (f"{job}-2-g1", [f"{job}-2"])
    for stage, each in enumerate((dave, eve, carol)):
        new = each.get(f"/api/assignments/{job}-{stage}-g1")
        assert (new["seed"]["update"], new["seed"]["tensors"]) == (50, named[stage]["tensors"])
    texts = recoveries(rita, job)[-3:]
    assert all("update 50, the newest checkpoint at the server" in text for text in texts)


def test_one_lost_node_of_three_is_replaced_from_its_replica(trio: Case) -> None:
    rita, job, alice, bob, carol = training_trio(trio)
    for stage, each in enumerate((alice, bob, carol)):
        upload(each, stage, 50, stages=3)
        each.report("training", records=[took(50), took(70)])
    leave(bob)
    dave = provider(trio, "dave", 3)
    assert dave.get(f"/api/assignments/{dave.heartbeat()['assignment']}")["seed"] is None
    assert alice.heartbeat()["assignment"] == f"{job}-0"
    assert "training continues from update 70" in recoveries(rita, job)[-1]


def test_a_spare_that_has_no_state_yet_begins_again_if_its_neighbour_is_lost_too(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    named = [upload(alice, 0, 50), upload(bob, 1, 50)]
    for each in (alice, bob):
        each.report("training", records=[took(70)])
    carol, dave = provider(case, "carol", 2), provider(case, "dave", 3)
    leave(alice)
    carol.report("fetched")
    carol.report("training", records=[phase("connect")])
    assert carol.get(f"/api/assignments/{job}-0-g1")["seed"] is None, "bob has a replica"
    leave(bob)
    assert carol.heartbeat()["assignment"] == f"{job}-0-g2"
    assert dave.heartbeat()["assignment"] == f"{job}-1-g1"
    for stage, each in enumerate((carol, dave)):
        new = each.get(f"/api/assignments/{each.heartbeat()['assignment']}")
        assert new["seed"]["tensors"] == named[stage]["tensors"]
    assert "update 50, the newest checkpoint at the server" in recoveries(rita, job)[-1]


def test_a_spare_that_has_trained_has_the_state(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    upload(alice, 0, 50)
    upload(bob, 1, 50)
    for each in (alice, bob):
        each.report("training", records=[took(70)])
    carol, dave = provider(case, "carol", 2), provider(case, "dave", 3)
    leave(alice)
    carol.report("fetched")
    carol.report("training", records=[phase("connect"), phase("train")])
    leave(bob)
    assert carol.heartbeat()["assignment"] == f"{job}-0-g1"
    assert dave.get(f"/api/assignments/{job}-1-g1")["seed"] is None
    assert "training continues from update 70" in recoveries(rita, job)[-1]


# Without a spare


def test_finished_nodes_upload_their_checkpoints_before_a_new_plan(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    for each in (alice, bob):
        each.report("training", records=[took(120)])
    bob.report("finished")
    leave(alice)
    case.match()
    bob.report("fetching")
    case.pass_time(case.server.settings.replan_after)
    case.match()
    assert bob.heartbeat()["assignment"] == f"{job}-1-g1", "its checkpoints are awaited"
    order = bob.report("fetched")["upload"]
    assert (order["rescue"], order["stages"]) == (True, [0])
    named = [uploaded(bob, stage, 120) for stage in (0, 1)]
    bob.report("fetched", checkpoints=named, upload_done=order)
    case.match()
    assert bob.heartbeat()["assignment"] == f"{job}-p1-0"
    start = case.planner.starts[-1]
    assert start is not None
    assert [each.id.update for each in start.checkpoints] == [120]
    assert "planned anew" in recoveries(rita, job)[-2]
