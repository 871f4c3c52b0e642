"""Takeover of lost nodes over the HTTP API: vacant places, spares, returns, waits and restarts."""

from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import provider, training_pair
from cryptography import x509
from server_cases import Caller, Case, FakePlanner, Time, losses, offer, opened, validation
from takeover_cases import finish, leave, phase, recoveries, state_of, view

from ravnest.deadlines import LOST_AFTER, REJOIN_SILENCE, TRAINING_SILENCE
from ravnest.server.unit_of_work import UnitOfWorkFactory
from ravnest.server.web.curves import loss_buckets
from ravnest.telemetry import CheckpointRecord, RecoveryRecord
from ravnest.transport.certificates import signing_request


def fail(caller: Caller, cause: str = "passing", reason: str = "killed by SIGKILL") -> Any:
    return caller.report("failed", cause=cause, reason=reason)


def checkpoint(update: int) -> dict[str, Any]:
    return asdict(CheckpointRecord(update, phase=0, bytes=10, seconds=0.1))


# A spare


def test_the_certificate_of_a_spare_names_its_generation(case: Case) -> None:
    """Nodes compare it with the Hello: the machine before cannot pass for one that came later."""
    _rita, job, _alice, bob = training_pair(case)
    carol = provider(case, "carol", 2)
    request = {"csr": signing_request("node_1-g5")[0].decode()}
    names = []
    for each, assignment in ((bob, f"{job}-1"), (carol, f"{job}-1-g1")):
        signed = each.post(f"/api/assignments/{assignment}/certificate", request)["certificate"]
        names.append(x509.load_pem_x509_certificate(signed.encode()).subject.rfc4514_string())
        if each is bob:
            leave(bob)
    assert names == ["CN=node_1", "CN=node_1-g1"]


def test_a_spare_takes_the_place_of_a_lost_node(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    carol = provider(case, "carol", 2)
    alice.report("training", records=[checkpoint(120)])
    bob.report("training", records=[checkpoint(120)])
    assert alice.get(f"/api/assignments/{job}-0/peers") == {"addresses": ["127.0.0.1:9001"]}
    leave(bob)
    assert state_of(case, carol) == "reserved"
    assert alice.get(f"/api/assignments/{job}-0/peers") == {"addresses": ["127.0.0.1:9002"]}
    assert alice.heartbeat()["assignment"] == f"{job}-0", "the rest of the cluster stays"
    assert carol.heartbeat()["assignment"] == f"{job}-1-g1"
    assert "carol takes the place of node_1 (Leaf of cluster 0)" in view(rita, job)["reason"]
    new = carol.get(f"/api/assignments/{job}-1-g1")
    assert (new["resume"], new["continues"]) == (True, None)
    spec = new["node_spec"]
    assert (spec["generation"], spec["address"], spec["plan"]) == (1, "127.0.0.1:9002", "plan")
    assert spec["previous"]["address"] == "127.0.0.1:9000"
    for each in (new["stage"], new["weights"]):
        carol.get(f"/api/artifacts/{each['sha256']}")
    assert not carol.report("fetching")["may_train"]
    assert carol.report("fetched")["may_train"], "the others train already"
    carol.report("training")
    found = view(rita, job)
    assert (found["state"], found["reason"]) == ("training", "all nodes are training")
    nodes = [(each["provider_name"], each["generation"]) for each in found["assignments"]]
    assert nodes == [("alice", 0), ("carol", 1)]
    assert recoveries(rita, job) == [
        "node_1 (Leaf of cluster 0) has lost its provider bob: the provider was lost: it left: gone",
        "carol takes the place of node_1 (Leaf of cluster 0); training continues from update 120; bob "
        "had it: the provider was lost: it left: gone",
    ]
    finish(alice)
    carol.report("finished")
    assert view(rita, job)["state"] == "done"


def test_a_provider_that_was_replaced_is_an_ordinary_one_again(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    carol = provider(case, "carol", 2)
    for _ in range(int(TRAINING_SILENCE // 10)):
        case.pass_time(10)
        for each in (alice, carol):
            each.heartbeat()
    assert state_of(case, bob) == "lost"
    assert carol.heartbeat()["assignment"] == f"{job}-1-g1"
    late = bob.report("training", assignment=f"{job}-1", records=[checkpoint(7)])
    assert (late["assignment"], late["keep"]) == (None, [])
    assert state_of(case, bob) == "offered"
    bob.get(f"/api/assignments/{job}-1", 409)
    assert view(rita, job)["checkpoint"] is None, "the late report does not count"
    leave(carol)
    assert bob.heartbeat()["assignment"] == f"{job}-1-g2", "it takes the place as any spare"


def test_a_root_can_be_replaced_and_its_losses_stay(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    carol = provider(case, "carol", 2)
    alice.report("training", records=[*losses(4.0, 3.0, 2.0), validation(0, 0.5)])
    leave(alice)
    assert view(rita, job)["progress"]["loss"] == 2.0
    case.pass_time(1.0)
    carol.report("training", records=[*losses(2.5, 1.5, 1.0, first=1), validation(1, 0.75)])
    history = rita.get(f"/api/jobs/{job}/losses")
    assert (history["updates"], history["losses"]) == ([0, 1, 2, 3], [4.0, 2.5, 1.5, 1.0])
    assert [each["value"] for each in history["validations"]] == [0.5, 0.75]
    assert [len(history[name]) for name in ("times", "epochs", "staleness")] == [4, 4, 4]
    assert history["times"][0] < history["times"][1], "the others arrived after the takeover"
    since = history["validation_times"][1]
    later = rita.get(f"/api/jobs/{job}/losses?first=4&since={since}")
    assert (later["updates"], [each["value"] for each in later["validations"]]) == ([], [0.75])
    assert view(rita, job)["progress"]["updates"] == 4
    assert view(rita, job)["clusters"][0]["loss"]["loss"] == 1.0
    with case.server.db.read() as db:
        buckets = loss_buckets(db, job, 300).buckets
    assert [(each.last, each.mean) for each in buckets] == [(0, 4.0), (1, 2.5), (2, 1.5), (3, 1.0)]
    finish(carol)
    bob.report("finished")
    assert view(rita, job)["state"] == "done"


def test_vacant_places_come_before_jobs_that_wait(case: Case) -> None:
    rita, job, _, bob = training_pair(case)
    case.planner.needs = 1
    second = case.submit(rita)
    leave(bob)
    carol = provider(case, "carol", 2)
    case.match()
    assert carol.heartbeat()["assignment"] == f"{job}-1-g1"
    assert view(rita, second)["state"] == "submitted"


def test_the_worker_of_a_provider_that_is_there_starts_again_in_its_folder(case: Case) -> None:
    rita, job, _, bob = training_pair(case)
    provider(case, "carol", 2, compute=1e6)
    answer = fail(bob)
    assert (answer["assignment"], answer["keep"]) == (f"{job}-1-g1", [f"{job}-1"])
    new = bob.get(f"/api/assignments/{job}-1-g1")
    assert (new["continues"], new["resume"]) == (f"{job}-1", True)
    bob.report("fetched")
    assert bob.heartbeat()["keep"] == []
    bob.report("failed", assignment=f"{job}-1", cause="job")
    assert bob.heartbeat()["assignment"] == f"{job}-1-g1", "the report of the earlier one is late"
    assert view(rita, job)["state"] == "training"


def test_after_a_failure_of_the_machine_another_one_is_preferred(case: Case) -> None:
    _, job, _, bob = training_pair(case)
    carol = provider(case, "carol", 2)
    assert fail(bob, "machine", "out of memory")["assignment"] is None
    assert carol.heartbeat()["assignment"] == f"{job}-1-g1"
    assert fail(carol, "machine", "out of memory")["assignment"] is None
    assert bob.heartbeat()["assignment"] == f"{job}-1-g2"


def test_an_error_of_the_job_ends_it_once_a_second_provider_has_it(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    carol = provider(case, "carol", 2)
    fail(bob, "job", "the labels do not fit the loss")
    carol.report("training", assignment=f"{job}-1-g1")
    fail(carol, "job", "the labels do not fit the loss")
    case.pass_time(case.server.settings.ending_grace)
    assert alice.heartbeat()["assignment"] is None
    found = view(rita, job)
    assert found["state"] == "failed"
    assert "(carol): the labels do not fit the loss" in found["reason"]
    with case.server.db.read() as db:
        assert not db.assignments.unreliable([alice.id, bob.id, carol.id]), "the job is to blame"


def test_one_provider_cannot_end_a_job_that_another_can_train(case: Case) -> None:
    """A provider that called its failure one of the job ended it, and stayed the first choice."""
    rita, job, alice, mallory = training_pair(case)
    carol = provider(case, "carol", 2)
    assert fail(mallory, "job", "the loss is nan")["assignment"] is None
    assert carol.heartbeat()["assignment"] == f"{job}-1-g1"
    assert mallory.heartbeat()["assignment"] is None
    assert view(rita, job)["state"] != "failed"
    carol.report("training")
    leave(carol)
    case.match()
    assert mallory.heartbeat()["assignment"] is None, "it does not confirm itself"
    dave = provider(case, "dave", 3)
    case.match()
    dave.report("training")
    finish(alice)
    dave.report("finished")
    assert view(rita, job)["state"] == "done"
    with case.server.db.read() as db:
        found = db.assignments.unreliable([alice.id, mallory.id, carol.id, dave.id])
    assert found == {mallory.id}, "it comes last from now on"


def test_a_provider_that_is_lost_again_and_again_does_not_end_the_job(case: Case) -> None:
    """It got its place back until the place was given up, although others were idle."""
    rita, job, alice, mallory = training_pair(case)
    carol = provider(case, "carol", 2)
    for generation in (1, 2):
        assert fail(mallory)["assignment"] == f"{job}-1-g{generation}"
    assert fail(mallory)["assignment"] is None
    assert carol.heartbeat()["assignment"] == f"{job}-1-g3"
    carol.report("training")
    finish(alice)
    carol.report("finished")
    assert view(rita, job)["state"] == "done"


def test_an_error_of_the_job_ends_it_at_once_if_nobody_can_confirm_it(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    fail(bob, "job", "the loss is nan")
    assert "(bob): the loss is nan" in view(rita, job)["reason"]
    fail(alice, "job", "node_1: the loss is nan")
    found = view(rita, job)
    assert found["state"] == "failed"
    with case.server.db.read() as db:
        assert db.assignments.unreliable([alice.id, bob.id]) == {bob.id}


def test_a_spare_that_cannot_take_the_place_does_not_keep_a_failed_job_waiting(case: Case) -> None:
    case.planner.ram = 3_000_000_000
    rita, job, alice, bob = training_pair(case)
    provider(case, "carol", 2, ram=1.0)
    fail(bob, "job", "the loss is nan")
    fail(alice, "job", "node_1: the loss is nan")
    found = view(rita, job)
    assert found["state"] == "failed"
    assert "(bob): the loss is nan" in found["reason"]


def test_a_node_that_was_told_of_a_failure_takes_its_place_again(case: Case) -> None:
    """Else a node that tells its neighbours that the job fails would have them all suspected."""
    rita, job, alice, mallory = training_pair(case)
    carol = provider(case, "carol", 2)
    reason = "node_1: the loss is nan"
    assert fail(alice, "job", reason)["assignment"] == f"{job}-0-g1"
    fail(mallory, "job", reason)
    assert carol.heartbeat()["assignment"] == f"{job}-1-g1"
    assert mallory.heartbeat()["assignment"] is None
    for each in (alice, carol):
        each.report("training")
    finish(alice)
    carol.report("finished")
    assert view(rita, job)["state"] == "done"


def test_a_place_is_given_up_after_three_refills_without_a_checkpoint(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    for generation in range(1, 4):
        assert fail(bob)["assignment"] == f"{job}-1-g{generation}"
    assert fail(bob)["assignment"] is None
    case.pass_time(case.server.settings.ending_grace)
    found = view(rita, job)
    assert found["state"] == "failed"
    assert "killed by SIGKILL; the place was filled 3 times without a new checkpoint" in found["reason"]
    assert "is given up" in recoveries(rita, job)[-1]
    assert alice.heartbeat()["assignment"] is None


def test_a_new_checkpoint_of_all_nodes_starts_the_count_again(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    for generation in range(1, 10):
        alice.report("training", first_record=generation - 1, records=[checkpoint(generation)])
        if generation % 3:
            bob.report("training", records=[checkpoint(generation)])
        assert fail(bob)["assignment"] == f"{job}-1-g{generation}"
    alone = [checkpoint(100 + number) for number in range(4)]
    alice.report("training", first_record=9, records=alone)
    while bob.heartbeat()["assignment"] is not None:
        fail(bob)
    case.pass_time(case.server.settings.ending_grace)
    assert view(rita, job)["state"] == "failed", "a checkpoint of one node alone is no progress"


def test_a_spare_that_does_not_fetch_is_replaced(case: Case) -> None:
    _, job, alice, bob = training_pair(case)
    carol = provider(case, "carol", 2)
    dave = provider(case, "dave", 3)
    leave(bob)
    carol.report("fetching")
    for _ in range(62):
        case.pass_time(10)
        for each in (alice, carol, dave):
            each.heartbeat()
    assert dave.heartbeat()["assignment"] == f"{job}-1-g2"
    assert carol.heartbeat()["assignment"] is None


@pytest.mark.parametrize("phase_of_bob", ["waiting", "fetching", "fetched"])
def test_a_node_that_is_lost_before_training_is_replaced_too(case: Case, phase_of_bob: str) -> None:
    rita = case.requester()
    alice, bob = provider(case, "alice", 0), provider(case, "bob", 1)
    job = case.submit(rita)
    case.match()
    alice.report("fetched")
    if phase_of_bob != "waiting":
        bob.report(phase_of_bob)
    leave(bob)
    assert not alice.heartbeat()["may_train"], "there is nobody to train with"
    carol = provider(case, "carol", 2)
    assert not carol.get(f"/api/assignments/{job}-1-g1")["resume"], "nobody has begun"
    assert not alice.heartbeat()["may_train"]
    carol.report("fetched")
    assert alice.heartbeat()["may_train"]
    assert carol.heartbeat()["may_train"]


# Waiting


def test_a_job_without_a_spare_waits_and_says_for_what(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    for each in (alice, bob):
        each.report("training", records=[checkpoint(120)])
    leave(bob)
    case.pass_time(20)
    alice.heartbeat()
    case.pass_time(20)
    found = view(rita, job)
    assert found["state"] == "training"
    assert found["reason"] == (
        "waits for a provider for node_1 (Leaf of cluster 0); training continues from update 120 when "
        "it is there; bob had the place: the provider was lost: it left: gone"
    )
    assert found["assignments"][1]["phase"] == "lost"
    assert alice.heartbeat()["assignment"] == f"{job}-0"
    assert len(recoveries(rita, job)) == 1
    carol = provider(case, "carol", 2)
    assert carol.heartbeat()["assignment"] == f"{job}-1-g1"


def test_a_spare_must_have_the_memory_of_the_place(tmp_path: Path) -> None:
    with opened(tmp_path, planner=FakePlanner(ram=2 * 10**9)) as case:
        rita, job, _, bob = training_pair(case)
        small = provider(case, "small", 2, ram=1.0)
        leave(bob)
        assert small.heartbeat()["assignment"] is None
        assert "waits for a provider with at least 2.0 GB for node_1" in view(rita, job)["reason"]
        large = provider(case, "large", 3, ram=3.0)
        assert large.heartbeat()["assignment"] == f"{job}-1-g1"


def test_other_clusters_go_on_meanwhile(case: Case) -> None:
    rita = case.requester()
    alice, bob, carol, dave = (provider(case, name, n) for n, name in enumerate(("a", "b", "c", "d")))
    job = case.submit(rita)
    case.match()
    for each in (alice, bob, carol, dave):
        each.report("training")
    leave(bob)
    assert "the other clusters go on" in view(rita, job)["reason"]
    carol.report("training", records=losses(1.0))
    dave.report("finished")
    assert dave.heartbeat()["assignment"] == f"{job}-1-g1", "a provider that has finished is a spare"
    finish(carol)
    assert view(rita, job)["state"] == "training", "the other cluster trains"
    dave.report("training")
    finish(alice)
    dave.report("finished")
    assert rita.get(f"/api/jobs/{job}/result")["cluster"] == 0


@pytest.mark.parametrize("limit", ["fail", 100])
def test_a_job_that_does_not_wait_forever_fails_its_cluster(case: Case, limit: str | int) -> None:
    rita, job, alice, bob = training_pair(case, on_insufficient=limit)
    case.planner.needs = 2
    leave(bob)
    if limit == 100:
        for _ in range(9):
            case.pass_time(10)
            alice.heartbeat()
        assert "waits for a provider" in view(rita, job)["reason"]
        case.pass_time(10)
    else:
        case.match()
        for _ in range(7):
            case.pass_time(10)
            alice.heartbeat()
        case.match()
    case.pass_time(case.server.settings.ending_grace)
    found = view(rita, job)
    assert found["state"] == "failed"
    assert "(bob): the provider was lost: it left: gone; no " in found["reason"]
    assert state_of(case, alice) == "offered"


def test_a_place_that_was_filled_in_time_is_not_given_up(case: Case) -> None:
    rita, job, alice, bob = training_pair(case, on_insufficient=100)
    leave(bob)
    case.pass_time(20)
    alice.heartbeat()
    carol = provider(case, "carol", 2)
    carol.report("training")
    for _ in range(20):
        case.pass_time(10)
        alice.heartbeat()
        carol.heartbeat()
    assert view(rita, job)["reason"] == "all nodes are training"


def test_a_cancelled_job_needs_no_spare(case: Case) -> None:
    rita, job, _, bob = training_pair(case)
    leave(bob)
    rita.post(f"/api/jobs/{job}/cancel")
    assert provider(case, "carol", 2).heartbeat()["assignment"] is None
    bob.post("/api/providers", offer("bob", address="127.0.0.1:9001"))
    assert bob.heartbeat()["keep"] == []


def test_two_places_of_a_cluster_are_filled_together(case: Case) -> None:
    _, job, alice, bob = training_pair(case)
    leave(bob)
    leave(alice)
    carol = provider(case, "carol", 2)
    assert carol.heartbeat()["assignment"] is None
    dave = provider(case, "dave", 3)
    found = {carol.heartbeat()["assignment"], dave.heartbeat()["assignment"]}
    assert found == {f"{job}-0-g1", f"{job}-1-g1"}


# Returning


def silence(case: Case, *others: Caller) -> None:
    for _ in range(int(TRAINING_SILENCE // 10)):
        case.pass_time(10)
        for each in others:
            each.heartbeat()


def test_a_provider_that_was_only_away_keeps_its_place(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    silence(case, alice)
    assert state_of(case, bob) == "lost"
    answer = bob.report("training", assignment=f"{job}-1", records=[checkpoint(7)])
    assert answer["assignment"] == f"{job}-1"
    assert answer["records_known"] == 1
    assert state_of(case, bob) == "training"
    assert view(rita, job)["reason"] == "all nodes are training"
    assert "bob is back in the place of node_1" in recoveries(rita, job)[-1]


@pytest.mark.parametrize("noticed", [True, False])
def test_a_restarted_provider_continues_its_assignment(case: Case, noticed: bool) -> None:
    _, job, alice, bob = training_pair(case)
    assert not bob.get(f"/api/assignments/{job}-1")["resume"]
    if noticed:
        silence(case, alice)
    bob.post("/api/providers", offer("bob", address="127.0.0.1:9001"))
    assert bob.heartbeat()["assignment"] == f"{job}-1"
    assert bob.get(f"/api/assignments/{job}-1")["resume"]
    bob.report("fetching")
    assert bob.report("fetched")["may_train"]


@pytest.mark.parametrize("noticed", [True, False])
def test_a_provider_that_is_back_at_another_address_gets_a_new_assignment(
    case: Case, noticed: bool
) -> None:
    _, job, alice, bob = training_pair(case)
    if noticed:
        silence(case, alice)
    bob.post("/api/providers", offer("bob", address="127.0.0.1:9077"))
    answer = bob.heartbeat()
    assert (answer["assignment"], answer["keep"]) == (f"{job}-1-g1", [f"{job}-1"])
    new = bob.get(f"/api/assignments/{job}-1-g1")
    assert (new["node_spec"]["address"], new["continues"]) == ("127.0.0.1:9077", f"{job}-1")


@pytest.mark.parametrize("noticed", [True, False])
def test_a_provider_that_is_back_with_a_result_delivers_it_from_any_address(
    case: Case, noticed: bool
) -> None:
    rita, job, alice, bob = training_pair(case)
    if noticed:
        silence(case, bob)
        assert state_of(case, alice) == "lost"
    alice.post("/api/providers", offer("alice", address="127.0.0.1:9077", trained=[f"{job}-0"]))
    assert alice.heartbeat()["assignment"] == f"{job}-0"
    finish(alice)
    bob.report("finished")
    assert view(rita, job)["state"] == "done"


def test_a_result_of_a_place_that_another_provider_took_is_not_wanted_any_more(case: Case) -> None:
    _, job, alice, bob = training_pair(case)
    carol = provider(case, "carol", 2)
    leave(bob)
    assert carol.heartbeat()["assignment"] == f"{job}-1-g1"
    bob.post("/api/providers", offer("bob", address="127.0.0.1:9077", trained=[f"{job}-1"]))
    assert bob.heartbeat()["assignment"] is None
    assert alice.heartbeat()["assignment"] == f"{job}-0"


# Leaving


def test_a_provider_that_leaves_hands_over_to_a_spare(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    carol = provider(case, "carol", 2)
    answer = bob.heartbeat(leaving="Ctrl-C", known=f"{job}-1")
    assert (answer["assignment"], answer["may_leave"]) == (f"{job}-1", False)
    assert carol.heartbeat()["assignment"] == f"{job}-1-g1"
    assert "carol takes the place of node_1" in recoveries(rita, job)[-1]
    assert "bob leaves (Ctrl-C)" in recoveries(rita, job)[-1]
    carol.report("fetching")
    bob.report("training", records=[checkpoint(9)])
    assert view(rita, job)["reason"] == "all nodes are training", "it goes on meanwhile"
    assert not bob.heartbeat(leaving="Ctrl-C")["may_leave"]
    assert carol.report("fetched")["may_train"]
    answer = bob.heartbeat(leaving="Ctrl-C", known=f"{job}-1")
    assert (answer["assignment"], answer["may_leave"]) == (None, True)
    second = case.submit(rita)
    case.match()
    assert bob.heartbeat(leaving="Ctrl-C")["assignment"] is None, "it gets no other work"
    assert view(rita, second)["state"] == "submitted"
    leave(bob)
    carol.report("training")
    finish(alice)
    carol.report("finished")
    assert view(rita, job)["state"] == "done"


def test_without_a_spare_a_provider_may_leave_at_once(case: Case) -> None:
    _, job, _, bob = training_pair(case)
    answer = bob.heartbeat(leaving="Ctrl-C", known=f"{job}-1")
    assert (answer["assignment"], answer["may_leave"]) == (f"{job}-1", True)


def test_an_idle_provider_may_leave_at_once(case: Case) -> None:
    assert provider(case, "carol", 2).heartbeat(leaving="Ctrl-C")["may_leave"]


def test_a_spare_that_is_lost_before_it_has_fetched_changes_nothing(case: Case) -> None:
    rita, job, _, bob = training_pair(case)
    carol = provider(case, "carol", 2)
    bob.heartbeat(leaving="Ctrl-C")
    leave(carol)
    assert view(rita, job)["reason"] == "all nodes are training"
    assert bob.heartbeat(leaving="Ctrl-C", known=f"{job}-1")["may_leave"]


def test_a_provider_that_does_not_wait_for_the_spare_leaves_it_the_place(case: Case) -> None:
    rita, job, _, bob = training_pair(case)
    carol = provider(case, "carol", 2)
    bob.heartbeat(leaving="Ctrl-C")
    leave(bob)
    assert carol.heartbeat()["assignment"] == f"{job}-1-g1"
    assert "carol takes the place" in view(rita, job)["reason"]


def test_a_spare_is_released_if_the_training_ends_before_the_handover(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    carol = provider(case, "carol", 2)
    bob.heartbeat(leaving="Ctrl-C")
    bob.report("finished")
    assert carol.heartbeat()["assignment"] is None
    assert state_of(case, carol) == "offered"
    finish(alice)
    assert view(rita, job)["state"] == "done"


# Detection


def test_a_provider_that_its_neighbours_miss_is_lost_within_seconds(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    carol = provider(case, "carol", 2)
    bob.heartbeat()
    case.pass_time(REJOIN_SILENCE)
    assert state_of(case, bob) == "training", "silence alone is no evidence"
    alice.report("training", records=[phase("rejoin"), phase("connect")])
    case.server.run_due()
    assert state_of(case, bob) == "lost"
    assert carol.heartbeat()["assignment"] == f"{job}-1-g1"
    words = f"its neighbours wait for it, and no request for {REJOIN_SILENCE:.0f} seconds"
    assert words in recoveries(rita, job)[0]


def test_neighbours_that_wait_are_not_the_missing_ones(case: Case) -> None:
    _, _, alice, bob = training_pair(case)
    for each in (alice, bob):
        each.report("training", records=[phase("rejoin")])
    case.pass_time(LOST_AFTER - 1)
    assert (state_of(case, alice), state_of(case, bob)) == ("training", "training")


def test_a_cluster_that_trains_again_misses_nobody(case: Case) -> None:
    _, _, alice, bob = training_pair(case)
    alice.report("training", records=[phase("rejoin"), phase("train")])
    bob.heartbeat()
    case.pass_time(LOST_AFTER - 1)
    assert state_of(case, bob) == "training"


def test_a_provider_with_an_open_poll_is_there(case: Case) -> None:
    _, _, alice, bob = training_pair(case)
    alice.report("training", records=[phase("rejoin")])
    liveness = case.server.provider_service.liveness
    with liveness.polling(bob.id, lambda: case.time.now):
        case.pass_time(5 * REJOIN_SILENCE)
        assert state_of(case, bob) == "training"
    case.pass_time(REJOIN_SILENCE)
    assert state_of(case, bob) == "lost"


# What requesters see


def test_recoveries_are_counted_and_told(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    record = RecoveryRecord("node_1 has left", 120, 3, "stage 1 from the replica at stage 0", 6.14)
    alice.report("training", records=[checkpoint(120), asdict(record), checkpoint(140)])
    bob.report("training", records=[checkpoint(120)])
    found = view(rita, job)
    assert found["recoveries"] == 1
    time = case.time.now
    assert found["checkpoint"] == {"cluster": 0, "update": 120, "time": time}
    assert recoveries(rita, job) == [
        "node_0: training continues from update 120 after a loss (node_1 has left); 3 updates are "
        "repeated; state: stage 1 from the replica at stage 0; 6.1 s"
    ]
    (listed,) = rita.get("/api/jobs")
    assert (listed["recoveries"], listed["checkpoint"]) == (1, None)


# Restarts


class KilledError(BaseException):
    """The server ends here, as with kill -9."""


def killed_after(monkeypatch: pytest.MonkeyPatch, commits: int) -> None:
    """Kill the server after so many further commits."""
    begin = UnitOfWorkFactory.begin
    left = [commits]

    def counted(self: UnitOfWorkFactory) -> Any:
        if left[0] == 0:
            raise KilledError
        left[0] -= 1
        return begin(self)

    monkeypatch.setattr(UnitOfWorkFactory, "begin", counted)


@dataclass
class Takeover:
    """A takeover whose first step can be repeated after a restart, as providers do."""

    case: Case
    job: str
    alice: Caller
    bob: Caller
    carol: Caller

    def begin(self, step: str) -> None:
        own = f"{self.job}-1"
        match step:
            case "loss":
                leave(self.bob)
            case "silence":
                silence(self.case, self.alice, self.carol)
            case "failure":
                self.bob.report("failed", assignment=own, cause="machine", reason="out of memory")
            case "handover":
                self.bob.heartbeat(leaving="Ctrl-C", known=own)

    def on(self, case: Case) -> "Takeover":
        callers = (self.alice, self.bob, self.carol)
        return Takeover(case, self.job, *(replace(each, client=case.client) for each in callers))


@pytest.mark.parametrize("commits", range(5))
@pytest.mark.parametrize("step", ["loss", "silence", "failure", "handover"])
def test_a_server_that_is_killed_during_a_takeover_finds_the_truth_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, commits: int
) -> None:
    time = Time()
    with opened(tmp_path, time=time) as case:
        rita, job, alice, bob = training_pair(case)
        takeover = Takeover(case, job, alice, bob, provider(case, "carol", 2))
        # The event loop of the test client ends with the server, maybe before its answer is asked for.
        with monkeypatch.context() as patch, suppress(KilledError, RuntimeError, CancelledError):
            killed_after(patch, commits)
            takeover.begin(step)
    with opened(tmp_path, time=time) as case:
        takeover, rita = takeover.on(case), replace(rita, client=case.client)
        takeover.begin(step)
        alice, carol = takeover.alice, takeover.carol
        assert carol.heartbeat()["assignment"] == f"{job}-1-g1"
        if step == "handover":
            leave(takeover.bob)
        assert carol.report("fetched")["may_train"]
        assert alice.heartbeat()["assignment"] == f"{job}-0"
        carol.report("training")
        assert view(rita, job)["reason"] == "all nodes are training"
        taken = [each for each in recoveries(rita, job) if "takes the place" in each]
        assert len(taken) == 1
        finish(alice)
        carol.report("finished")
        assert view(rita, job)["state"] == "done"


def test_a_restarted_server_remembers_who_is_missed(tmp_path: Path) -> None:
    time = Time()
    with opened(tmp_path, time=time) as case:
        _, _, alice, bob = training_pair(case)
        alice.report("training", records=[phase("train"), phase("rejoin"), phase("connect")])
    with opened(tmp_path, time=time) as case:
        alice = replace(alice, client=case.client)
        grace = case.server.settings.restart_grace - LOST_AFTER
        case.pass_time(grace)
        alice.heartbeat()
        assert state_of(case, bob) == "training"
        case.pass_time(REJOIN_SILENCE)
        assert state_of(case, bob) == "lost"


def test_a_wait_with_a_limit_counts_from_the_restart(tmp_path: Path) -> None:
    time = Time()
    with opened(tmp_path, time=time) as case:
        rita, job, alice, bob = training_pair(case, on_insufficient=100)
        leave(bob)
        case.pass_time(20)
    with opened(tmp_path, time=time) as case:
        rita, alice = (replace(each, client=case.client) for each in (rita, alice))
        for _ in range(9):
            case.pass_time(10)
            alice.heartbeat()
        assert view(rita, job)["state"] == "training"
        case.pass_time(10)
        case.pass_time(case.server.settings.ending_grace)
        assert view(rita, job)["state"] == "failed"
