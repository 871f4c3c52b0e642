"""Providers that leave on purpose: the server gets their last records, and state that only they have."""

from pathlib import Path

import pytest
from checkpoint_cases import complete, provider, took, training_pair, uploaded
from server_cases import Caller, Case, FakePlanner, losses, opened
from takeover_cases import leave, recoveries, state_of, view

WHY = "the offered hours are over"


def upload_last(caller: Caller, update: int, stages: int, *others: int) -> None:
    """Carry out the last upload: the checkpoint of the own stage, and the replicas of others."""
    answer = caller.heartbeat(leaving=WHY)
    own = int(answer["assignment"].rsplit("-")[-1])
    assert (answer["upload"]["rescue"], answer["upload"]["stages"]) == (True, list(others))
    files = [uploaded(caller, stage, update, stages=stages) for stage in (own, *others)]
    report = {"assignment": answer["assignment"], "phase": "training", "checkpoints": files}
    caller.heartbeat(leaving=WHY, report={**report, "upload_done": answer["upload"]})


def test_the_spare_of_a_cluster_of_one_node_starts_from_the_last_checkpoint(tmp_path: Path) -> None:
    with opened(tmp_path, planner=FakePlanner(size=1)) as case:
        rita, alice = case.requester(), provider(case, "alice", 0)
        job = case.submit(rita)
        case.match()
        for each in ("fetched", "training"):
            alice.report(each)
        alice.report("training", records=[took(120)])
        spare = provider(case, "spare", 1)
        answer = alice.heartbeat(leaving=WHY, known=f"{job}-0")
        assert (answer["assignment"], answer["may_leave"]) == (f"{job}-0", True)
        assert spare.heartbeat()["assignment"] is None, "its seed is not there yet"
        upload_last(alice, 125, 1)
        leave(alice)
        assert spare.heartbeat()["assignment"] == f"{job}-0-g1"
        new = spare.get(f"/api/assignments/{job}-0-g1")
        assert (new["resume"], new["seed"]["update"]) == (True, 125)
        spare.get(f"/api/artifacts/{new['seed']['tensors']['sha256']}")
        assert (
            "continues from update 125, the newest checkpoint at the server"
            in (recoveries(rita, job)[-1])
        )


def test_without_a_spare_the_last_checkpoint_of_one_node_is_at_the_server(tmp_path: Path) -> None:
    with opened(tmp_path, planner=FakePlanner(size=1)) as case:
        rita, alice = case.requester(), provider(case, "alice", 0)
        job = case.submit(rita)
        case.match()
        for each in ("fetched", "training"):
            alice.report(each)
        upload_last(alice, 125, 1)
        leave(alice)
        assert complete(case, job) == [(125, 0)]
        assert view(rita, job)["saved_update"] == 125


def test_the_last_losses_of_a_root_that_is_replaced_are_stored(case: Case) -> None:
    rita, job, alice, _ = training_pair(case)
    carol = provider(case, "carol", 2)
    alice.report("training", records=losses(4.0))
    alice.heartbeat(leaving=WHY, known=f"{job}-0")
    carol.report("fetched")
    assert alice.heartbeat(leaving=WHY)["assignment"] is None
    late = {"assignment": f"{job}-0", "phase": "training", "first_record": 1}
    alice.heartbeat(leaving=WHY, report={**late, "records": losses(3.0, 2.0, 1.0, first=1)})
    carol.report("training", records=losses(1.5, 1.0, first=2))
    history = rita.get(f"/api/jobs/{job}/losses")
    assert (history["updates"], history["losses"]) == ([0, 1, 2, 3], [4.0, 3.0, 1.5, 1.0])
    rita.post(f"/api/jobs/{job}/cancel")
    alice.heartbeat(leaving=WHY, report={**late, "first_record": 4, "records": losses(0.5, first=9)})
    assert rita.get(f"/api/jobs/{job}/losses")["updates"] == [0, 1, 2, 3]


def test_a_provider_whose_neighbour_stays_uploads_nothing(case: Case) -> None:
    _, job, _, bob = training_pair(case)
    before = bob.heartbeat(known=f"{job}-1")["upload"]
    provider(case, "carol", 2)
    assert bob.heartbeat(leaving=WHY, known=f"{job}-1")["upload"] == before


@pytest.mark.parametrize("spares", [2, 0])
def test_neighbours_that_leave_together_leave_their_state_at_the_server(case: Case, spares: int) -> None:
    rita, job, alice, bob = training_pair(case)
    for each in (alice, bob):
        each.report("training", records=[took(120)])
    others = [provider(case, name, 2 + n) for n, name in enumerate(("carol", "dave")[:spares])]
    first = alice.heartbeat(leaving=WHY, known=f"{job}-0")
    assert first["may_leave"] is (spares == 0), "bob would keep the state"
    assert bob.heartbeat(leaving=WHY, known=f"{job}-1")["may_leave"]
    upload_last(bob, 125, 2, 0)
    leave(bob)
    leave(alice)
    assert complete(case, job) == [(125, 0)]
    if not spares:
        assert "waits for a provider" in view(rita, job)["reason"]
        others = [provider(case, name, 2 + n) for n, name in enumerate(("carol", "dave"))]
    given = [each.heartbeat()["assignment"] for each in others]
    bodies = [each.get(f"/api/assignments/{name}") for each, name in zip(others, given, strict=True)]
    assert {each["node"] for each in bodies} == {0, 1}
    assert [each["seed"]["update"] for each in bodies] == [125, 125]
    assert "update 125, the newest checkpoint at the server" in recoveries(rita, job)[-1]
    for each in (*others, *others):
        each.report("fetched")
        assert state_of(case, each) == "reserved"
