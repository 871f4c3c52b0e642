"""Status of a job, derived from its assignments."""

from typing import Any

from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import TlsRejections
from ravnest.server.db.records import AssignmentRecord
from ravnest.server.job_status import failed_clusters, job_status, leading_root


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
