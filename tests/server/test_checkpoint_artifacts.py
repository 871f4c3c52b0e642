"""Checkpoints at the server: orders, uploads, complete ones, refusals and retention."""

from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import complete, provider, took, training_pair, upload, uploaded
from server_cases import Caller, Case, Time, opened

from ravnest.schemas.base import Artifact
from ravnest.server.complete_checkpoints import complete_checkpoints, superseded
from ravnest.server.db.records import StageCheckpointRecord
from ravnest.server.settings import ServerSettings
from ravnest.types import CheckpointId

EVERY = 100.0
SETTINGS = ServerSettings(checkpoint_upload=EVERY, unused_files_kept=0.0)


@pytest.fixture
def case(tmp_path: Path) -> Any:
    with opened(tmp_path, settings=SETTINGS) as found:
        yield found


def order(caller: Caller) -> dict[str, Any] | None:
    found: dict[str, Any] | None = caller.heartbeat()["upload"]
    return found


def warnings(case: Case, job: str) -> list[str]:
    events = case.admin().get(f"/api/jobs/{job}/events")
    return [each["reason"] for each in events if each["kind"] == "warning"]


def files_of(case: Case) -> set[str]:
    return {path.name for path in case.server.folder.artifacts.glob("[0-9a-f][0-9a-f]/*")}


# Orders


def test_all_nodes_of_a_cluster_get_the_same_order(case: Case) -> None:
    _, _, alice, bob = training_pair(case)
    wanted = {"at_least": 1, "phases": 0, "rescue": False, "stages": []}
    assert order(alice) == wanted, "the first checkpoint"
    alice.report("training", records=[took(10), took(12)])
    assert order(bob) == wanted == order(alice)


def test_the_next_order_follows_some_time_after_a_complete_checkpoint(case: Case) -> None:
    _, job, alice, bob = training_pair(case)
    assert order(alice) == order(bob) != None  # noqa: E711 - a chain
    upload(alice, 0, 5)
    assert complete(case, job) == []
    assert order(bob) is not None
    upload(bob, 1, 5)
    assert complete(case, job) == [(5, 0)]
    assert (order(alice), order(bob)) == (None, None)
    case.pass_time(EVERY - 1)
    assert order(alice) is None
    alice.report("training", records=[took(7)])
    case.time.now += 1
    assert order(alice) == {"at_least": 8, "phases": 0, "rescue": False, "stages": []} == order(bob)


def test_nodes_that_uploaded_different_checkpoints_get_another_order(case: Case) -> None:
    _, job, alice, bob = training_pair(case)
    first = order(alice)
    for caller, stage, update in ((alice, 0, 5), (bob, 1, 6)):
        named = uploaded(caller, stage, update)
        caller.report("training", checkpoints=[named], upload_done=first, records=[took(update)])
    assert complete(case, job) == []
    assert order(bob) == {"at_least": 7, "phases": 0, "rescue": False, "stages": []}


def test_a_provider_that_does_not_train_gets_no_order(case: Case) -> None:
    rita, alice = case.requester(), provider(case, "alice", 0)
    case.submit(rita)
    case.match()
    alice.report("fetched")
    assert order(alice) is None


def test_a_restarted_server_goes_on_with_what_it_has(tmp_path: Path) -> None:
    time = Time()
    with opened(tmp_path, time=time, settings=SETTINGS) as case:
        _, job, alice, bob = training_pair(case)
        upload(alice, 0, 5)
    with opened(tmp_path, time=time, settings=SETTINGS) as case:
        alice.client = bob.client = case.client
        upload(bob, 1, 5)
        assert complete(case, job) == [(5, 0)]
        assert order(alice) is None


# Uploads


def test_files_belong_to_the_job_and_go_with_the_checkpoint(case: Case) -> None:
    _, job, alice, bob = training_pair(case)
    kept = files_of(case)
    for update in (1, 2, 3, 4):
        upload(alice, 0, update)
        upload(bob, 1, update)
    assert complete(case, job) == [(4, 0), (3, 0)], "the newest two"
    with case.server.db.read() as db:
        assert db.artifact_grants.totals(job)[1] == 8
        assert db.artifact_grants.totals(alice.id) == (0, 0), "uploads do not add up"
    case.server.run_due()
    assert len(files_of(case) - kept) == 8, "files of older ones are deleted"


def test_equal_tensors_of_two_checkpoints_are_one_file(case: Case) -> None:
    _, job, alice, bob = training_pair(case)
    for update in (1, 2, 3):
        upload(alice, 0, update, tensors=b"the same")
        upload(bob, 1, update)
    case.server.run_due()
    with case.server.db.read() as db:
        (first, *_) = complete_checkpoints(db.checkpoints.of_job(job))
    assert all(case.server.artifacts.has(each.tensors.sha256) for each in first.stages)


def test_a_repeated_report_changes_nothing(case: Case) -> None:
    _, job, alice, bob = training_pair(case)
    named = upload(alice, 0, 5)
    for _ in range(3):
        alice.report("training", checkpoints=[named])
    upload(bob, 1, 5)
    assert complete(case, job) == [(5, 0)]
    assert warnings(case, job) == []


def test_a_replica_of_a_neighbour_completes_a_checkpoint(case: Case) -> None:
    _, job, alice, _ = training_pair(case)
    upload(alice, 0, 5)
    upload(alice, 1, 5)
    assert complete(case, job) == [(5, 0)]


@pytest.mark.parametrize(
    ("stage", "changes", "why"),
    [
        (0, {"plan": "another"}, "another plan"),
        (0, {"cluster": 1}, "another plan or cluster"),
        (7, {}, "neither its own nor a neighbour's"),
        (0, {"named": {"update": 9}}, "its manifest describes another checkpoint"),
        (0, {"stages": 3}, "its manifest describes another checkpoint"),
        (0, {"size": 1}, "its manifest describes other tensors"),
        (0, {"tensors": b"x" * (17 << 20)}, "stage 0 has 16777566 at most"),
    ],
)
def test_a_checkpoint_that_is_not_one_of_the_node_is_not_used(
    case: Case, stage: int, changes: dict[str, Any], why: str
) -> None:
    _, job, alice, _ = training_pair(case)
    named = uploaded(alice, stage, 5, **changes)
    for _ in range(2):
        alice.report("training", checkpoints=[named])
    (warning,) = warnings(case, job)
    assert why in warning
    with case.server.db.read() as db:
        assert db.checkpoints.of_job(job) == []


def test_a_manifest_that_is_not_one_is_not_used(case: Case) -> None:
    _, job, alice, _ = training_pair(case)
    good = uploaded(alice, 0, 5)
    for content in (b"not JSON", b"[" * 100_000, b"{}"):
        manifest = {"sha256": alice.upload(content), "size": len(content)}
        alice.report("training", checkpoints=[good | {"manifest": manifest}])
    assert len(warnings(case, job)) == 3
    with case.server.db.read() as db:
        assert db.checkpoints.of_job(job) == []


def test_a_checkpoint_of_files_of_others_is_not_used(case: Case) -> None:
    """Knowing the digest of a file is not enough."""
    _, job, alice, bob = training_pair(case)
    named = uploaded(bob, 0, 5)
    alice.report("training", checkpoints=[named])
    with case.server.db.read() as db:
        assert db.checkpoints.of_job(job) == []


# Retention


def ended_job(case: Case, rita: Caller, alice: Caller, update: int) -> str:
    job = case.submit(rita)
    case.match()
    alice.report("fetched")
    alice.report("training")
    plan = alice.get(f"/api/assignments/{job}-0")["node_spec"]["plan"]
    upload(alice, 0, update, plan=plan, stages=1)
    rita.post(f"/api/jobs/{job}/cancel")
    case.pass_time(1)
    return job


def test_the_newest_checkpoints_of_some_ended_jobs_stay_for_some_days(tmp_path: Path) -> None:
    settings = ServerSettings(ended_jobs_resumable=2, unused_files_kept=0.0, lost_after=1e9)
    with opened(tmp_path, settings=settings) as case:
        rita, alice = case.requester(), provider(case, "alice", 0)
        jobs = [ended_job(case, rita, alice, update) for update in (1, 2, 3)]
        assert [complete(case, job) for job in jobs] == [[], [(2, 0)], [(3, 0)]]
        case.pass_time(settings.checkpoints_kept + 1)
        assert [complete(case, job) for job in jobs] == [[], [], []]
        with case.server.db.read() as db:
            assert all(db.artifact_grants.totals(job) == (0, 0) for job in jobs)


def test_stages_of_two_attempts_of_a_run_are_not_one_checkpoint(case: Case) -> None:
    """After a loss, updates are made again, and may have another result."""
    _, job, alice, bob = training_pair(case)
    upload(alice, 0, 5, attempt="one", named={"taken": "one"})
    upload(bob, 1, 5, attempt="two", named={"taken": "two"})
    assert complete(case, job) == []
    upload(alice, 0, 5, attempt="two", named={"taken": "two"})
    assert complete(case, job) == [(5, 0)]


# Pure


def stage_checkpoint(
    update: int, stage: int, *, attempt: int = 0, cluster: int = 0
) -> StageCheckpointRecord:
    file = Artifact(sha256="0" * 64, size=1)
    return StageCheckpointRecord(
        "job", "plan", "run", "", CheckpointId(update, 0), cluster, stage, 2, attempt, 0.0, file, file
    )


def test_parts_newer_than_the_newest_complete_checkpoint_are_kept() -> None:
    both = [stage_checkpoint(update, stage) for update in (1, 2, 3) for stage in (0, 1)]
    part, old = stage_checkpoint(4, 0), stage_checkpoint(0, 1)
    assert superseded([*both, part, old]) == [*both[:2], old]


def test_a_stage_cannot_displace_the_checkpoints_of_others() -> None:
    """A provider that invents later and later updates only fills its own places."""
    honest = [stage_checkpoint(5, 1)]
    invented = [stage_checkpoint(10**9 + number, 0) for number in range(10)]
    dropped = superseded([*honest, *invented])
    assert not set(honest) & set(dropped)
    assert len(dropped) == 6


def test_a_new_plan_keeps_the_old_checkpoint_until_it_has_its_own() -> None:
    old = [stage_checkpoint(7, stage) for stage in (0, 1)]
    part = stage_checkpoint(8, 0, attempt=1)
    assert superseded([*old, part]) == []
    new = [part, stage_checkpoint(8, 1, attempt=1)]
    assert superseded([*old, *new]) == old
    assert [each.attempt for each in complete_checkpoints([*old, *new])] == [1, 0]
