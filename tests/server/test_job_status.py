"""Status of a job, derived from its assignments."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import TlsRejections
from ravnest.server.db.records import AssignmentRecord
from ravnest.server.job_status import (
    PlaceNeeds,
    can_continue,
    degraded,
    failed_clusters,
    holders,
    job_status,
    leading_root,
    lineage,
    may_train,
    repeats_end,
    to_repeat,
    vacant,
)


def assignment(node: int, phase: str, **fields: Any) -> AssignmentRecord:
    return AssignmentRecord(
        **{
            "id": f"j-{node}",
            "job": "j",
            "provider": f"p{node}",
            "node": node,
            "tls_rejections": TlsRejections(),
            "cluster": node // 2,
            "role": "Leaf" if node % 2 else "Root",
            "phase": phase,
            "reason": "",
            "records": 0,
            "losses": 0,
            "has_result": phase == "finished" and node % 2 == 0,
            **fields,
        }
    )


def assignments(*phases: str) -> list[AssignmentRecord]:
    return [assignment(node, phase) for node, phase in enumerate(phases)]


def state(*phases: str) -> JobState:
    return job_status(assignments(*phases), {}).state


def test_a_job_trains_once_all_healthy_nodes_do() -> None:
    assert state("waiting", "waiting") is JobState.SHIPPING
    assert state("training", "fetching") is JobState.SHIPPING
    assert state("training", "training") is JobState.TRAINING
    assert state("uploading", "finished") is JobState.TRAINING
    assert state("failed", "waiting", "training", "training") is JobState.TRAINING
    assert state("failed", "waiting", "training", "waiting") is JobState.SHIPPING


def test_a_job_ends_when_all_its_assignments_have_ended() -> None:
    assert state("finished", "finished") is JobState.DONE
    assert state("finished", "failed") is JobState.DONE
    assert state("failed", "stopped") is JobState.FAILED
    assert state("failed", "training") is not JobState.FAILED
    assert state("failed", "failed", "finished", "finished") is JobState.DONE
    assert state("failed", "failed", "failed", "stopped") is JobState.FAILED


def test_the_result_is_from_the_lowest_root_that_has_one() -> None:
    root = job_status(
        assignments("failed", "failed", "finished", "finished", "finished", "finished"), {}
    ).root
    assert root is not None
    assert root.cluster == 1
    without = [assignment(0, "finished", has_result=False), assignment(1, "finished")]
    status = job_status(without, {})
    assert (status.state, status.reason) == (JobState.FAILED, "no Root has sent a trained model")


def test_the_reason_names_every_failed_node() -> None:
    failed = [assignment(0, "failed", reason="the link is lost"), assignment(1, "failed", provider="p9")]
    reason = job_status(failed, {"p0": "alice"}).reason
    assert "node_0 of cluster 0 (alice): the link is lost" in reason
    assert "node_1 of cluster 0 (p9): it failed without a reason" in reason


def test_a_reason_that_several_nodes_have_is_told_once() -> None:
    failed = [assignment(node, "failed", reason="node_1: the loss is nan") for node in (0, 1)]
    reason = job_status(failed, {"p0": "alice", "p1": "bob"}).reason
    assert reason == "node_0 of cluster 0 (alice), node_1 of cluster 0 (bob): node_1: the loss is nan"


def test_a_job_is_degraded_if_a_cluster_did_not_finish() -> None:
    names = {"p2": "carol"}
    assert not degraded(assignments("finished", "finished", "finished", "finished"), names)
    assert not degraded(assignments("finished", "failed"), names), "its Root has all trained stages"
    found = assignments("finished", "finished", "failed", "stopped")
    found[2] = replace(found[2], reason="the loss is nan")
    assert degraded(found, names) == (
        "1 of 2 clusters did not finish; the model has their training only up to their last averaging "
        "round: node_2 of cluster 1 (carol): the loss is nan"
    )


def test_the_losses_are_from_the_first_healthy_cluster() -> None:
    for phases, cluster in [
        (("training", "training", "training", "training"), 0),
        (("training", "failed", "training", "training"), 1),
        (("failed", "failed", "failed", "failed"), 0),
    ]:
        root = leading_root(assignments(*phases))
        assert root is not None
        assert root.cluster == cluster
    assert leading_root([]) is None
    assert failed_clusters(assignments("training", "failed", "stopped", "training")) == {0}


# Vacant places


def ids(found: Iterable[AssignmentRecord]) -> list[str]:
    return [each.id for each in found]


def later(node: int, generation: int, phase: str, **fields: Any) -> AssignmentRecord:
    return assignment(node, phase, id=f"j-{node}-g{generation}", generation=generation, **fields)


@pytest.mark.parametrize(
    ("phases", "holder"),
    [
        (("training", "waiting"), 0),  # it is handed over: the later one fetches
        (("training", "fetched"), 1),
        (("lost", "waiting"), 1),
        (("training", "lost"), 0),
        (("lost", "lost"), 1),
        (("stopped", "lost"), 1),
    ],
)
def test_the_newest_assignment_that_works_stands_for_its_node(
    phases: tuple[str, str], holder: int
) -> None:
    both = [assignment(0, phases[0]), later(0, 1, phases[1])]
    assert holders(both) == [both[holder]]
    assert lineage(both, 0) == both[::-1]


def test_a_place_is_vacant_until_its_cluster_is_over() -> None:
    assert ids(vacant(assignments("training", "lost"))) == ["j-1"]
    assert ids(vacant(assignments("lost", "lost"))) == ["j-0", "j-1"]
    assert vacant(assignments("failed", "lost")) == []
    assert vacant(assignments("uploading", "lost")) == []
    assert vacant([*assignments("training", "lost"), later(1, 1, "waiting")]) == []


def test_a_job_with_a_vacant_place_is_not_over() -> None:
    assert not state("lost", "lost").is_final
    assert state("lost", "lost", "finished", "finished") is JobState.TRAINING
    assert state("uploading", "lost") is JobState.TRAINING
    assert state("finished", "lost") is JobState.DONE
    assert state("failed", "lost") is JobState.FAILED


def test_the_reason_says_what_a_vacant_place_waits_for() -> None:
    found = [assignment(0, "training"), assignment(1, "lost", reason="it left")]
    reason = job_status(found, {"p1": "bob"}, {1: PlaceNeeds(400_000_000, 120)}).reason
    assert reason == (
        "waits for a provider with at least 400 MB for node_1 (Leaf of cluster 0); training continues "
        "from update 120 when it is there; bob had the place: it left"
    )
    both = [*found, assignment(2, "training"), assignment(3, "training")]
    assert job_status(both, {}).reason.endswith("; the other clusters go on")


def test_a_cluster_goes_on_unless_another_node_has_failed() -> None:
    for others, expected in [("training", True), ("lost", True), ("finished", True), ("failed", False)]:
        found = assignments(others, "training", "finished", "finished")
        assert can_continue(found, found[1]) is expected


def pipeline(*phases: str, **fields: Any) -> list[AssignmentRecord]:
    """Return the assignments of one cluster, from the Root to the Leaf."""
    roles = ["Root", *["Stem"] * (len(phases) - 2), "Leaf"]
    return [
        assignment(node, phase, cluster=0, role=role, has_result=False, **fields)
        for node, (phase, role) in enumerate(zip(phases, roles, strict=True))
    ]


@pytest.mark.parametrize(
    ("phases", "lost", "repeated"),
    [
        (("training", "finished", "finished"), 0, ["j-1", "j-2"]),
        (("training", "training", "finished"), 1, ["j-2"]),
        (("training", "lost", "finished"), 0, ["j-2"]),
        (("uploading", "training", "finished"), 1, []),  # the Root has everything
        (("uploading", "finished", "finished"), 0, ["j-1", "j-2"]),
    ],
)
def test_finished_nodes_repeat_the_end_if_another_one_is_lost(
    phases: tuple[str, ...], lost: int, repeated: list[str]
) -> None:
    found = pipeline(*phases)
    assert ids(to_repeat(found, found[lost])) == repeated
    other = assignment(3, "finished", cluster=1)
    assert ids(to_repeat([*found, other], found[lost])) == repeated, "another cluster is not concerned"


def test_a_node_that_finishes_after_a_loss_repeats_the_end_too() -> None:
    for phases, expected in [
        (("lost", "training", "training"), True),
        (("training", "training", "training"), False),
        (("uploading", "lost", "training"), False),
    ]:
        found = pipeline(*phases)
        assert repeats_end(found, found[2]) is expected
    fetching = [*pipeline("lost", "training", "training"), later(0, 1, "fetched", cluster=0)]
    assert repeats_end(fetching, fetching[2])
    recovered = [*pipeline("lost", "training", "training"), later(0, 1, "training", cluster=0)]
    assert not repeats_end(recovered, recovered[2])
    assert not repeats_end(recovered, recovered[3]), "the Root has everything when it finishes"


def test_a_cluster_of_finished_and_lost_nodes_is_not_over() -> None:
    found = pipeline("lost", "lost", "lost")
    assert job_status(found, {}).state is JobState.SHIPPING
    assert ids(vacant(found)) == ["j-0", "j-1", "j-2"]


def test_a_provider_that_takes_a_place_waits_for_nobody() -> None:
    begun = [assignment(0, "training"), assignment(1, "lost"), later(1, 1, "fetched")]
    slow = [assignment(2, "fetched"), assignment(3, "waiting")]
    assert may_train([*begun, *slow]) == {"j-0", "j-1-g1"}
    fetching = [assignment(0, "training"), assignment(1, "lost"), later(1, 1, "fetching")]
    assert may_train(fetching) == {"j-0"}
    assert may_train(assignments("fetched", "lost")) == set(), "nobody has begun"
