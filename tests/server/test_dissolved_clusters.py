"""A job of several clusters that loses a node without a spare: its data moves to the other clusters."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import complete, provider, took, uploaded
from server_cases import Caller, Case, FakePlanner, Time, opened

from ravnest.plan.infeasible import Infeasible
from ravnest.schemas.jobs import JobSpec
from ravnest.schemas.providers import Assignment
from ravnest.server.scheduling.link_tests import NO_LINKS, ProviderLinks
from ravnest.server.scheduling.planning import Candidates, PlannedJob
from ravnest.server.scheduling.remainder import RemainderError
from ravnest.server.settings import ServerSettings
from ravnest.telemetry import RoundRecord

AFTER, REQUEUE = 10.0, 60.0
SETTINGS = ServerSettings(replan_after=AFTER, requeue_after=REQUEUE, rescue_grace=20.0, lost_after=1e9)


@dataclass
class EvenPlanner(FakePlanner):
    """Planner whose plans for up to three providers have the same rate: no gain without a fourth."""

    infeasible: set[int] = field(default_factory=set)
    """Numbers of providers for which there is no plan."""
    divides: bool = True
    """The rest of an epoch can be divided between new clusters."""

    def plan(
        self, spec: JobSpec, providers: Candidates, links: ProviderLinks = NO_LINKS
    ) -> PlannedJob | Infeasible:
        found = super().plan(spec, providers, links)
        if len(providers) in self.infeasible:
            return Infeasible("too little RAM")
        if isinstance(found, PlannedJob) and len(providers) < 4:
            rate = 1.0 / len(found.plan.clusters)
            rated = tuple(replace(each, samples_per_second=rate) for each in found.plan.clusters)
            return replace(found, plan=replace(found.plan, clusters=rated))
        return found

    def ship(self, job: str, planned: PlannedJob) -> tuple[Assignment, ...]:
        if not self.divides and planned.start is not None and planned.start.before:
            raise RemainderError("too many samples")
        return super().ship(job, planned)


@dataclass
class Clusters:
    """A job of two clusters with two nodes each."""

    case: Case
    job: str
    rita: Caller
    nodes: list[Caller]

    @property
    def state(self) -> str:
        return str(self.rita.get(f"/api/jobs/{self.job}")["state"])

    @property
    def recoveries(self) -> list[str]:
        events = self.rita.get(f"/api/jobs/{self.job}/events")
        return [each["reason"] for each in events if each["kind"] == "recovery"]

    def lose(self, number: int) -> None:
        caller = self.nodes[number]
        caller.call("DELETE", f"/api/providers/{caller.id}?reason=gone")
        self.case.match()

    def wait(self, seconds: float) -> None:
        self.case.pass_time(seconds)
        self.case.match()

    def rescue(self, number: int, update: int) -> None:
        """Upload what a rescue asks of a node: its own checkpoint, and a lost neighbour's replica."""
        caller = self.nodes[number]
        order = caller.heartbeat()["upload"]
        assert order["rescue"]
        stages = [number % 2, *order["stages"]]
        named = [uploaded(caller, stage, update, cluster=number // 2) for stage in stages]
        caller.report("training", checkpoints=named, upload_done=order)
        self.case.match()


@pytest.fixture
def planner() -> EvenPlanner:
    return EvenPlanner()


@pytest.fixture
def case(tmp_path: Path, planner: EvenPlanner) -> Iterator[Case]:
    with opened(tmp_path, settings=SETTINGS, planner=planner) as found:
        yield found


def start(case: Case, ram: float = 4.0, **changes: Any) -> Clusters:
    rita = case.requester()
    names = ("alice", "bob", "carol", "dave")
    nodes = [provider(case, name, n, ram=ram) for n, name in enumerate(names)]
    job = case.submit(rita, **changes)
    case.match()
    for phase in ("fetched", "training"):
        for each in nodes:
            each.report(phase)
    for each in nodes:
        each.report("training", records=[took(100)])
    case.match()
    return Clusters(case, job, rita, nodes)


def test_a_cluster_dissolves_and_its_data_moves_to_the_others(case: Case) -> None:
    run = start(case)
    run.lose(3)
    run.rescue(2, 90)
    run.wait(AFTER)
    for each in run.nodes[:2]:
        each.heartbeat()
    assert run.state == "training", "dave may come back, and the others train"
    assert not (run.nodes[0].heartbeat()["upload"] or {"rescue": False})["rescue"]
    run.wait(REQUEUE - AFTER)
    assert run.state == "training", "the others upload their checkpoints first"
    run.nodes[0].report("training", records=[took(110)])
    run.rescue(0, 100)
    assert run.state == "training"
    run.rescue(1, 100)
    assert run.state == "shipping"
    found = run.rita.get(f"/api/jobs/{run.job}")["assignments"]
    assert [(each["provider_name"], each["cluster"]) for each in found] == [
        ("alice", 0),
        ("bob", 0),
        ("carol", 1),
    ]
    begin = case.planner.starts[-1]
    assert begin is not None
    assert [each.id.update for each in begin.checkpoints] == [100, 100]
    assert [(each.checkpoint.id.update, each.is_current) for each in begin.before] == [
        (100, True),
        (90, True),
    ], "the rest of both clusters, and the mean of their states"
    assert complete(case, run.job) == [(100, 0), (90, 1)]
    assert run.recoveries[-1] == (
        "training continues from update 100; the rest of the epoch in progress is divided between the "
        "new clusters; the weights are the mean of clusters 0, 1"
    )
    assert any(
        "planned anew without node_3: nobody took its place for 60 s, and its cluster's share of the "
        "data moves to the other nodes: 3 providers can train it" in text
        for text in run.recoveries
    )


def average(number: int, *clusters: int, committed: bool = True) -> dict[str, Any]:
    """Return the record of a round of averaging."""
    return asdict(RoundRecord(number, 1, "background", committed, clusters, 0.1, 10, ""))


def test_a_cluster_that_has_missed_a_round_is_not_part_of_the_state(case: Case) -> None:
    run = start(case)
    run.nodes[0].report("training", records=[took(100), average(3, 0, 1)], first_record=0)
    run.lose(3)
    run.rescue(2, 90)
    later = [average(4, 0), average(5, committed=False)]
    run.nodes[0].report("training", records=later, first_record=2)
    run.wait(REQUEUE)
    run.rescue(0, 130)
    run.rescue(1, 130)
    begin = case.planner.starts[-1]
    assert begin is not None
    assert [each.is_current for each in begin.before] == [True, False]
    assert run.recoveries[-1].endswith(
        "; what cluster 1 has learned since its last average is left out, and these samples are trained "
        "again"
    )


def test_a_rest_that_cannot_be_divided_begins_the_epoch_anew(case: Case, planner: EvenPlanner) -> None:
    planner.divides = False
    run = start(case, on_insufficient="fail")
    run.lose(3)
    run.rescue(2, 90)
    run.wait(AFTER)
    run.rescue(0, 100)
    run.rescue(1, 100)
    begin = planner.starts[-1]
    assert begin is not None
    assert begin.restart_epoch
    assert not begin.before
    assert run.recoveries[-1] == (
        "training continues from update 100; an epoch in progress begins anew, because the clusters "
        "have other shares of the data; the rest of an epoch cannot be divided: too many samples"
    )


def test_a_provider_that_is_back_in_time_interrupts_nobody(case: Case) -> None:
    run = start(case)
    run.lose(3)
    run.rescue(2, 90)
    run.wait(REQUEUE - 1)
    erin = provider(case, "erin", 4)
    assert erin.heartbeat()["assignment"] == f"{run.job}-3-g1"
    run.wait(REQUEUE)
    assert run.nodes[0].heartbeat()["assignment"] == f"{run.job}-0"
    assert not any("planned anew" in text for text in run.recoveries)


def test_a_spare_that_comes_while_the_others_upload_ends_that(case: Case) -> None:
    run = start(case)
    run.lose(3)
    run.rescue(2, 90)
    run.wait(REQUEUE)
    run.rescue(0, 100)
    erin = provider(case, "erin", 4)
    case.match()
    assert erin.heartbeat()["assignment"] == f"{run.job}-3-g1"
    assert run.nodes[1].heartbeat()["upload"] is None or not run.nodes[1].heartbeat()["upload"]["rescue"]
    assert run.state == "training"


def test_uploads_of_the_others_are_not_waited_for_without_a_limit(case: Case) -> None:
    run = start(case)
    run.lose(3)
    run.rescue(2, 90)
    run.wait(REQUEUE)
    assert run.state == "training"
    run.wait(SETTINGS.rescue_grace + 1)
    assert run.state == "shipping"


def test_with_fail_the_cluster_dissolves_at_once(case: Case) -> None:
    run = start(case, on_insufficient="fail")
    run.lose(3)
    assert run.state == "training"
    run.rescue(2, 90)
    run.wait(AFTER)
    run.rescue(0, 100)
    run.rescue(1, 100)
    assert run.state == "shipping"


@pytest.mark.parametrize("planner", [EvenPlanner(infeasible={3})])
@pytest.mark.parametrize("limit", ["fail", 30.0])
def test_without_a_plan_only_the_cluster_is_given_up(case: Case, limit: Any) -> None:
    run = start(case, on_insufficient=limit)
    run.lose(3)
    run.rescue(2, 90)
    run.wait(AFTER)
    run.wait(30 - AFTER)
    found = run.rita.get(f"/api/jobs/{run.job}")
    assert found["state"] == "training"
    assert "failed: node_3 of cluster 1 (dave)" in found["reason"]
    assert "no plan without it exists: too little RAM" in found["reason"]
    assert run.nodes[0].heartbeat()["assignment"] == f"{run.job}-0", "the other cluster goes on"
    run.wait(SETTINGS.ending_grace)
    assert run.nodes[2].heartbeat()["assignment"] is None


@pytest.mark.parametrize("planner", [EvenPlanner(infeasible={3}, ram=10**9)])
def test_a_trained_model_does_not_wait_for_the_lost_cluster(case: Case) -> None:
    run = start(case, ram=0.5)  # too small for the lost place, once they have finished
    run.lose(3)
    run.rescue(2, 90)
    run.wait(2 * REQUEUE)
    assert run.state == "training"
    alice, bob = run.nodes[:2]
    bob.report("finished")
    content = b"trained"
    artifact = {"sha256": alice.upload(content), "size": len(content)}
    alice.report("finished", result=[{"name": "node_0.safetensors", "artifact": artifact}])
    case.match()
    run.wait(SETTINGS.ending_grace)
    found = run.rita.get(f"/api/jobs/{run.job}")
    assert found["state"] == "done"
    assert "another cluster has trained the model to the end" in found["reason"]


def test_a_server_killed_while_the_others_upload_finds_the_truth(
    tmp_path: Path, planner: EvenPlanner
) -> None:
    time = Time()
    with opened(tmp_path, time=time, planner=planner, settings=SETTINGS) as case:
        run = start(case)
        run.lose(3)
        run.rescue(2, 90)
        run.wait(REQUEUE)
        run.rescue(0, 100)
    with opened(tmp_path, time=time, planner=planner, settings=SETTINGS) as case:
        run.case = case
        for caller in (run.rita, *run.nodes):
            caller.client = case.client
        case.match()
        run.rescue(2, 90)
        run.wait(REQUEUE)
        run.rescue(0, 120)
        run.rescue(1, 120)
        assert run.state == "shipping"
        assert complete(case, run.job)[0] == (120, 0)
