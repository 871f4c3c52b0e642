"""What becomes of a job, by what is known of its parts."""

from typing import Any

from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import TlsRejections
from ravnest.server.db.records import AssignmentRecord
from ravnest.server.job_status import failed_clusters, judge, leading_root


def part(node: int, phase: str, **fields: Any) -> AssignmentRecord:
    return AssignmentRecord(
        **{
            "id": f"j-{node}",
            "job": "j",
            "provider": f"p{node}",
            "node": node,
            "strangers": TlsRejections(),
            "cluster": node // 2,
            "role": "Leaf" if node % 2 else "Root",
            "phase": phase,
            "reason": "",
            "figures": (),
            "losses": 0,
            "has_result": phase == "finished" and node % 2 == 0,
            **fields,
        }
    )


def parts(*phases: str) -> list[AssignmentRecord]:
    return [part(node, phase) for node, phase in enumerate(phases)]


def state(*phases: str) -> JobState:
    return judge(parts(*phases), {}).state


def test_a_job_trains_once_all_that_can_do() -> None:
    assert state("waiting", "waiting") is JobState.SHIPPING
    assert state("training", "fetching") is JobState.SHIPPING
    assert state("training", "training") is JobState.TRAINING
    assert state("uploading", "finished") is JobState.TRAINING
    assert state("failed", "waiting", "training", "training") is JobState.TRAINING
    assert state("failed", "waiting", "training", "waiting") is JobState.SHIPPING


def test_a_job_ends_when_all_its_parts_have() -> None:
    assert state("finished", "finished") is JobState.DONE
    assert state("finished", "failed") is JobState.DONE
    assert state("failed", "stopped") is JobState.FAILED
    assert state("failed", "training") is not JobState.FAILED
    assert state("failed", "failed", "finished", "finished") is JobState.DONE
    assert state("failed", "failed", "failed", "stopped") is JobState.FAILED


def test_the_result_is_of_the_lowest_root_that_has_one() -> None:
    root = judge(parts("failed", "failed", "finished", "finished", "finished", "finished"), {}).root
    assert root is not None
    assert root.cluster == 1
    without = [part(0, "finished", has_result=False), part(1, "finished")]
    verdict = judge(without, {})
    assert (verdict.state, verdict.reason) == (JobState.FAILED, "no Root has sent a trained model")


def test_the_reasons_of_all_that_failed_are_told() -> None:
    failed = [part(0, "failed", reason="the link is lost"), part(1, "failed", provider="p9")]
    reason = judge(failed, {"p0": "alice"}).reason
    assert "node_0 of cluster 0 (alice): the link is lost" in reason
    assert "node_1 of cluster 0 (p9): it failed and did not say why" in reason


def test_the_losses_are_those_of_the_first_cluster_that_has_not_failed() -> None:
    for phases, cluster in [
        (("training", "training", "training", "training"), 0),
        (("training", "failed", "training", "training"), 1),
        (("failed", "failed", "failed", "failed"), 0),
    ]:
        root = leading_root(parts(*phases))
        assert root is not None
        assert root.cluster == cluster
    assert leading_root([]) is None
    assert failed_clusters(parts("training", "failed", "stopped", "training")) == {0}
