"""Voluntary new plans: the decision by predicted gain, and the service with providers that join."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_cases import complete, provider, took, training_pair, uploaded
from server_cases import Caller, Case, FakePlanner, Time, losses, offer, opened, spec

from ravnest.plan.cluster_cost import about_clusters, samples_factor
from ravnest.plan.infeasible import Infeasible
from ravnest.plan.profile import ModelProfile, TensorProfile, UnitCost
from ravnest.schemas.jobs import JobSpec
from ravnest.schemas.providers import Assignment, Heartbeat, HeartbeatReply, StageNeeds
from ravnest.server.scheduling.improvement import (
    LEAST_GAIN,
    PAYBACK,
    RESTART,
    KeepPlan,
    MoveCost,
    OtherPlan,
    PresentStage,
    ReplacePlan,
    RunningPlan,
    decide_before_plan,
    decide_improvement,
    planned_rate,
    predicted_gain,
    present_rate,
)
from ravnest.server.scheduling.link_tests import NO_LINKS, ProviderLinks
from ravnest.server.scheduling.planning import Candidates, PlannedJob, plan_job
from ravnest.server.scheduling.shipping import stage_needs
from ravnest.server.scheduling.stragglers import NO_SLOWDOWNS, Slowdowns, with_slowdowns
from ravnest.server.settings import ServerSettings
from ravnest.store.plain_data import encode
from ravnest.telemetry import ScheduleRecord, TimingRecord
from ravnest.types import CheckpointId

# The decision

COST = MoveCost(shipping=20.0, repeated=10.0, restart=30.0)


def running(**changes: Any) -> RunningPlan:
    own: dict[str, Any] = {"trained": 600.0, "remaining": 3600.0, "share_left": 0.5, "idle": "carol"}
    return RunningPlan(**(own | changes))


def other(gain: float, clusters: int = 1) -> OtherPlan:
    return OtherPlan(clusters, 2 * clusters, gain)


PRICE = "60 s (20 s for shipping, 30 s for the restart, 10 s for updates that are repeated)"


@pytest.mark.parametrize(
    ("job", "plan", "decision"),
    [
        (
            running(),
            other(2.0, clusters=2),
            ReplacePlan(
                "a plan with 4 providers in 2 clusters is predicted to be 100% faster; it saves 30 min "
                f"of 60 min, and the move costs about {PRICE}; idle: carol. {about_clusters(2)}"
            ),
        ),
        (running(), other(1.1), "gain"),
        (running(), other(0.9), "gain"),
        (running(), "p1 and p2 cannot reach each other", "infeasible"),
        (running(share_left=0.05), None, "ends"),
        (running(remaining=150.0), None, "short"),
        (running(trained=300.0), None, "begins"),
        (running(remaining=1000.0), other(1.2), "pays"),
        (running(remaining=1200.0), other(1.2), ReplacePlan),
        (running(idle="", slow="the stage of bob takes 3.0 times as long"), other(1.5), ReplacePlan),
    ],
)
def test_decisions(job: RunningPlan, plan: OtherPlan | str | None, decision: object) -> None:
    early = decide_before_plan(job, COST)
    assert (early is not None) == (plan is None)
    found = early if plan is None else decide_improvement(job, COST, plan)
    if isinstance(decision, str):
        assert isinstance(found, KeepPlan)
        assert found.kind == decision
        assert "the plan stays; idle and spare: carol; " in found.reason
    elif decision is ReplacePlan:
        assert isinstance(found, ReplacePlan)
        assert job.idle in found.reason
        assert job.slow in found.reason
    else:
        assert found == decision


def test_a_move_with_the_least_gain_has_paid_before_the_next_one() -> None:
    trained = PAYBACK * COST.seconds
    assert trained * (1 - 1 / LEAST_GAIN) == pytest.approx(COST.seconds)
    assert decide_before_plan(running(trained=trained + 1), COST) is None
    assert decide_before_plan(running(trained=trained - 1), COST) is not None


def test_the_present_plan_counts_by_its_slowest_stage_or_link() -> None:
    stages = [PresentStage(10.0, 8.0, 100.0, 100.0), PresentStage(20.0, 20.0, 100.0, 50.0)]
    last = PresentStage(5.0, 12.0, 100.0, 1.0)
    assert present_rate([[*stages, last]]) == pytest.approx(1 / 0.24), "12 Mbit at 50 Mbit/s"
    assert present_rate([stages]) == pytest.approx(1 / 0.2)
    assert present_rate([stages, stages]) == pytest.approx(2 / 0.2)
    assert present_rate([[replace(last, work=0.0)]]) is None


def _plan(rate: float, *seconds: float) -> Any:
    stages = [SimpleNamespace(compute_seconds=each, link_seconds=0.0) for each in seconds]
    return SimpleNamespace(clusters=[SimpleNamespace(stages=stages)], samples_per_second=rate)


def test_the_gain_is_that_over_the_present_cuts() -> None:
    cuts = [[PresentStage(10.0, 0.0, 100.0, 1.0), PresentStage(10.0, 0.0, 25.0, 1.0)]]
    best = _plan(8.0, 0.16, 0.16)
    assert predicted_gain(best, best, cuts) == pytest.approx(0.4 / 0.16), "a straggler: other cuts"
    assert predicted_gain(_plan(16.0, 0.08), best, cuts) == pytest.approx(2 * 0.4 / 0.16)
    two = _plan(16.0, 0.08)
    two.clusters *= 2
    more_samples = samples_factor(2)
    assert predicted_gain(two, best, cuts) == pytest.approx(2 * 0.4 / 0.16 / more_samples)
    assert predicted_gain(two, two, [*cuts, *cuts]) == pytest.approx(0.4 / 0.08)
    unknown = [[replace(each, work=0.0) for each in cuts[0]]]
    assert predicted_gain(best, best, unknown) == 1.0


MODEL = ModelProfile(
    units=tuple(UnitCost(1e10, 0, 0, *(1000,) * 4) for _ in range(24)),
    state=tuple(
        TensorProfile(f"layer{unit}.weight", 1000, trainable=True, averaged=True, units=(unit,))
        for unit in range(24)
    ),
    batch_size=4,
    input_bytes=0,
    smallest_rows=1,
)


def _real_plan(slow: Slowdowns, count: int = 3) -> PlannedJob:
    offers = [(f"p{n}", offer(f"p{n}", address=f"127.0.0.1:{9000 + n}")) for n in range(count)]
    chosen, links = with_slowdowns(offers, NO_LINKS, slow)
    planned = plan_job(spec(clusters=1), MODEL, chosen, links)
    assert isinstance(planned, PlannedJob)
    return planned


def test_the_gain_of_other_cuts_with_real_plans() -> None:
    before = _real_plan(NO_SLOWDOWNS)
    stages = before.plan.clusters[0].stages
    needs = [stage_needs(before.plan, stage) for stage in stages]

    def present(slow: Slowdowns) -> list[list[PresentStage]]:
        factors = [slow.compute.get(before.providers[stage.node.id], 1.0) for stage in stages]
        return [
            [
                PresentStage(need.work, need.traffic, 50.0 / factor, 100.0)
                for need, factor in zip(needs, factors, strict=True)
            ]
        ]

    assert present_rate(present(NO_SLOWDOWNS)) == pytest.approx(planned_rate(before.plan), rel=1e-6)
    assert predicted_gain(before.plan, before.plan, present(NO_SLOWDOWNS)) == pytest.approx(1.0)
    slow = Slowdowns({"p1": 3.0})
    after = _real_plan(slow).plan
    # Eight of 24 units at a third of the speed, against about ten, ten and four.
    assert predicted_gain(after, after, present(slow)) == pytest.approx(24 / 10.5, rel=0.1)


# The service

PER_EPOCH = 8
"""Updates: all samples of the test's data, in batches of one."""
UPDATE = 30.0
"""Seconds of an update."""
CHECK = 30.0
SETTINGS = ServerSettings(improvement_check=CHECK, lost_after=1e9, checkpoint_upload=600.0)


@dataclass
class RatedPlanner(FakePlanner):
    """Planner whose rates depend on the providers: ``rates`` by their number."""

    rates: dict[int, float] = field(default_factory=dict)

    def plan(
        self, spec: JobSpec, providers: Candidates, links: ProviderLinks = NO_LINKS
    ) -> PlannedJob | Infeasible:
        found = super().plan(spec, providers, links)
        if isinstance(found, PlannedJob) and len(providers) in self.rates:
            clusters = found.plan.clusters
            each = self.rates[len(providers)] / len(clusters)
            rated = tuple(replace(cluster, samples_per_second=each) for cluster in clusters)
            return replace(found, plan=replace(found.plan, clusters=rated))
        return found


WORK = 100.0


@dataclass
class CuttingPlanner(FakePlanner):
    """Planner of one cluster whose stages take equal times; the first plan was for equal providers."""

    computes: list[tuple[float, ...]] = field(default_factory=list)
    """Compute of the providers of each plan."""

    def plan(
        self, spec: JobSpec, providers: Candidates, links: ProviderLinks = NO_LINKS
    ) -> PlannedJob | Infeasible:
        found = super().plan(spec, providers[:2], links)
        assert isinstance(found, PlannedJob)
        self.computes.append(tuple(offer.compute for _, offer in providers[:2]))
        seconds = WORK / sum(self.computes[-1])
        stages: Any = tuple(
            SimpleNamespace(
                node=SimpleNamespace(id=node),
                compute_seconds=seconds,
                link_seconds=0.0,
                memory=SimpleNamespace(weights=1),
            )
            for node in range(2)
        )
        cluster = replace(found.plan.clusters[0], stages=stages, samples_per_second=1 / seconds)
        offers = tuple(offer for _, offer in providers[:2])
        return replace(found, plan=replace(found.plan, clusters=(cluster,)), offers=offers)

    def _assignment(self, job: str, planned: PlannedJob, node: int, count: int) -> Assignment:
        found = super()._assignment(job, planned, node, count)
        return found.model_copy(update={"needs": StageNeeds(work=WORK / 2)})


@dataclass
class Run:
    """Providers of a job that train, and report and upload what the server asks for."""

    case: Case
    job: str
    rita: Caller
    nodes: list[Caller]
    """In the order of the nodes: clusters of two."""
    plan: str = "plan"
    update: int = 0
    slow: float = 1.0
    """Factor of the time of the first cluster's last stage."""
    sent: dict[str, int] = field(default_factory=dict)
    """Number of records of each provider."""
    watched: bool = True
    """The server looks at the jobs after each update."""

    @property
    def phase(self) -> int:
        return self.update // PER_EPOCH

    def train(self, updates: int) -> None:
        for _ in range(updates):
            if self.state != "training":
                return
            self.case.pass_time(UPDATE)
            self.update += 1
            replies = [self._report(caller, number) for number, caller in enumerate(self.nodes)]
            for number, reply in enumerate(replies):
                self._upload(self.nodes[number], number, reply)
            if self.watched:
                self.case.server.run_matching()

    def _report(self, caller: Caller, number: int) -> HeartbeatReply:
        """Report without HTTP, which would take most of the test's time."""
        records: list[Any] = []
        if number % 2 == 0:
            if self.update == 1:
                records.append(asdict(ScheduleRecord("sync", 1, "a test")))
            records += losses(0.5, first=self.update - 1)
            records += [asdict(self._timing(stage)) for stage in (0, 1)] * 4
        if self.update % 4 == 0:  # every second one at the end of an epoch
            records.append(took(self.update, self.phase))
        first = self.sent.get(caller.id, 0)
        self.sent[caller.id] = first + len(records)
        providers = self.case.server.provider_service
        report = {
            "assignment": providers.reply(caller.id).assignment,
            "phase": "training",
            "records": records,
            "first_record": first,
        }
        providers.heartbeat(caller.id, Heartbeat.model_validate({"report": report}))
        return providers.reply(caller.id)

    def _timing(self, stage: int) -> TimingRecord:
        factor = self.slow if stage == 1 else 1.0
        return TimingRecord(stage, 5, 1.0 * factor, 2.0 * factor, 0.1, 0.01, 0.01)

    def _upload(self, caller: Caller, number: int, reply: HeartbeatReply) -> None:
        order = reply.upload
        if order is None or self.update % 4:
            return
        if order.at_least <= self.update and order.phases <= self.phase:
            root = {"epoch": self.phase, "batches": self.update % PER_EPOCH}
            named = uploaded(
                caller,
                number % 2,
                self.update,
                plan=self.plan,
                cluster=number // 2,
                id=CheckpointId(self.update, self.phase),
                progress=encode({"updates": {"done": self.update}, "root": root}),
                named={"phase": self.phase},
            )
            caller.report("training", checkpoints=[named], upload_done=order.model_dump())

    @property
    def state(self) -> str:
        with self.case.server.db.read() as db:
            job = db.jobs.get(self.job)
        assert job is not None
        return job.state.value

    def started(self, shipping: float = 0.0) -> None:
        """Have all providers fetch the new plan and train."""
        self.plan += "'"
        self.sent.clear()
        self.case.pass_time(shipping)
        for each in self.nodes:
            each.report("fetched")
        for each in self.nodes:
            each.report("training")
        self.case.match()

    def events(self, *words: str) -> list[str]:
        found = [each["reason"] for each in self.rita.get(f"/api/jobs/{self.job}/events")]
        return [reason for reason in found if all(word in reason for word in words)]


def start(case: Case, epochs: int = 1000) -> Run:
    training = spec().training.model_copy(update={"epochs": epochs, "batch_size": 1})
    rita, job, alice, bob = training_pair(case, training=training)
    case.match()
    return Run(case, job, rita, [alice, bob])


@pytest.fixture
def planner() -> FakePlanner:
    return FakePlanner()


@pytest.fixture
def case(tmp_path: Path, planner: FakePlanner) -> Iterator[Case]:
    with opened(tmp_path, settings=SETTINGS, planner=planner) as found:
        yield found


def test_providers_that_join_become_a_cluster_at_the_end_of_an_epoch(case: Case) -> None:
    run = start(case)
    run.train(17)
    carol, dave = provider(case, "carol", 2), provider(case, "dave", 3)
    run.train(1)
    assert run.state == "training"
    assert run.nodes[0].heartbeat()["upload"] == {
        "at_least": 16,
        "phases": 3,
        "rescue": False,
        "stages": [],
    }
    run.train(PER_EPOCH)
    assert run.state == "shipping"
    assert run.update == 24, "the first end of an epoch"
    begin = case.planner.starts[-1]
    assert begin is not None
    assert [each.id for each in begin.checkpoints] == [CheckpointId(24, 3)] * 2
    found = run.rita.get(f"/api/jobs/{run.job}")["assignments"]
    assert [(each["provider_name"], each["cluster"]) for each in found] == [
        ("alice", 0),
        ("bob", 0),
        ("carol", 1),
        ("dave", 1),
    ]
    told = run.events("a plan with 4 providers in 2 clusters", "77% faster; it saves", "carol, dave")
    assert told[0].endswith(about_clusters(2))
    assert told[0].startswith("a plan with 4 providers in 2 clusters is predicted")
    assert run.events("planned anew: ", told[0], "continues from update 24, the end of an epoch")
    run.nodes += [carol, dave]
    run.started()
    asked = len(case.planner.asked)
    run.train(16)
    assert run.state == "training"
    assert len(case.planner.asked) == asked, "nobody is idle, nobody is slow"


def test_a_second_move_waits_until_the_first_has_paid(case: Case) -> None:
    run = start(case)
    joined = [provider(case, "carol", 2), provider(case, "dave", 3)]
    run.train(24)
    assert run.state == "shipping"
    run.nodes += joined
    run.started(shipping=60.0)
    joined = [provider(case, "erin", 4), provider(case, "frank", 5)]
    moved = run.update
    run.train(32)
    assert run.state == "shipping"
    assert run.update >= moved + PAYBACK * (60 + RESTART) / UPDATE
    assert run.events("the present plan has not paid for itself yet", "erin, frank")
    assert run.events("planned anew: a plan with 6 providers in 3 clusters")
    begin = case.planner.starts[-1]
    assert begin is not None
    assert len(begin.checkpoints) == 3
    assert {each.id.phase * PER_EPOCH for each in begin.checkpoints} == {run.update}


@pytest.mark.parametrize("planner", [RatedPlanner(rates={2: 1.0, 3: 1.25})])
def test_a_provider_that_brings_nothing_is_a_spare(case: Case) -> None:
    run = start(case)
    run.train(17)
    carol = provider(case, "carol", 2)
    run.train(16)
    assert run.state == "training"
    assert carol.heartbeat()["assignment"] is None
    (told,) = run.events("idle and spare: carol")
    assert told == (
        "the plan stays; idle and spare: carol; another plan would be 10% faster, 20% are needed"
    )
    asked = [each for each in case.planner.asked if len(each) == 3]
    assert len(asked) == 1, "the planner is asked once"
    run.case.planner.rates[4] = 1.5  # type: ignore[attr-defined]
    provider(case, "dave", 4)
    run.train(16)
    assert run.events("planned anew: a plan with 4 providers", "32% faster")


def test_questions_to_the_planner_have_a_least_distance(case: Case) -> None:
    run = start(case)
    run.train(17)
    provider(case, "carol", 2)
    run.train(1)
    asked = len(case.planner.asked)
    for number in range(3, 8):
        provider(case, f"p{number}", number)
        run.train(1)
    assert len(case.planner.asked) == asked, "it was asked less than 5 minutes ago"
    run.train(5)
    assert {len(each) for each in case.planner.asked[asked:]} == {8}


@pytest.mark.parametrize("planner", [CuttingPlanner()])
def test_a_straggler_leads_to_other_cuts(case: Case) -> None:
    run = start(case)
    run.train(12)
    run.slow = 3.0
    run.train(16)
    assert run.state == "shipping"
    told = run.events("a plan with 2 providers in 1 cluster", "is predicted to be", "; it saves ")[0]
    assert "the stage of bob takes 3.0 times as long as at first" in told
    planner = case.planner
    assert isinstance(planner, CuttingPlanner)
    alice, bob = planner.computes[-1]
    assert alice == 100.0
    assert bob == pytest.approx(99.0 / 3), "the job is planned with what was measured"
    begin = case.planner.starts[-1]
    assert begin is not None
    assert not begin.restart_epoch, "one cluster before and after: any checkpoint will do"
    assert run.events(
        "planned anew: ", f"training continues from update {begin.checkpoints[0].id.update}"
    )
    run.started()
    run.train(24)
    assert run.state == "training", "it is as slow as planned"


@pytest.mark.parametrize("planner", [CuttingPlanner()])
def test_a_burst_of_load_moves_nothing(case: Case) -> None:
    run = start(case)
    run.train(12)
    asked = len(case.planner.asked)
    for _ in range(4):
        run.slow = 5.0
        run.train(1)
        run.slow = 1.0
        run.train(4)
    assert run.state == "training"
    assert len(case.planner.asked) == asked


@pytest.mark.parametrize(
    ("updates", "words"),
    [(13, "a move does not pay: 90 s are left, a move costs"), (15, "a move does not pay any more: 6%")],
)
def test_a_job_that_ends_soon_keeps_its_plan(case: Case, updates: int, words: str) -> None:
    run = start(case, epochs=2)
    run.train(updates)
    provider(case, "carol", 2), provider(case, "dave", 3)
    case.match()
    case.match()
    assert run.state == "training"
    told = run.events("the plan stays; idle and spare: carol, dave; ")
    assert len(told) == 1, "it is said once"
    assert words in told[0]
    assert not [each for each in case.planner.asked if len(each) > 2]


def test_the_time_that_the_workers_took_to_start_counts(case: Case) -> None:
    run = start(case, epochs=2)
    case.pass_time(210.0)
    run.train(9)
    provider(case, "carol", 2), provider(case, "dave", 3)
    case.match()
    assert run.events("a move does not pay: 4 min are left", "4 min for the restart")


def test_jobs_that_wait_have_the_idle_providers_first(case: Case) -> None:
    run = start(case)
    run.train(17)
    case.planner.needs = 9
    waiting = case.submit(run.rita)
    provider(case, "carol", 2), provider(case, "dave", 3)
    run.train(10)
    assert run.state == "training"
    assert run.rita.get(f"/api/jobs/{waiting}")["state"] == "submitted"
    assert not run.events("spare")


def test_a_provider_that_leaves_again_ends_the_move(case: Case) -> None:
    run = start(case)
    run.train(17)
    carol, dave = provider(case, "carol", 2), provider(case, "dave", 3)
    run.train(1)
    assert run.events("a plan with 4 providers in 2 clusters")
    for each in (carol, dave):
        each.call("DELETE", f"/api/providers/{each.id}?reason=gone")
    run.train(10)
    assert run.state == "training"
    assert run.nodes[0].heartbeat()["assignment"] == f"{run.job}-0"


def test_a_restarted_server_decides_again(tmp_path: Path) -> None:
    time, planner = Time(), FakePlanner()
    with opened(tmp_path, time=time, planner=planner, settings=SETTINGS) as case:
        run = start(case)
        run.train(17)
        joined = [provider(case, "carol", 2), provider(case, "dave", 3)]
        run.train(1)
        assert run.events("a plan with 4 providers in 2 clusters")
    with opened(tmp_path, time=time, planner=planner, settings=SETTINGS) as case:
        run.case = case
        for each in (run.rita, *run.nodes, *joined):
            each.client = case.client
        run.train(16)
        assert run.state == "shipping"
        assert run.update % PER_EPOCH == 0
        assert (run.update, 0) in complete(case, run.job)


def test_a_checkpoint_in_the_middle_of_the_next_epoch_is_not_the_start(case: Case) -> None:
    """It may arrive before the server acts; its samples would be used twice."""
    run = start(case)
    run.train(17)
    provider(case, "carol", 2), provider(case, "dave", 3)
    run.train(1)
    run.watched = False
    run.train(6)
    assert complete(case, run.job)[0] == (24, 0)
    run.train(3)
    case.server.checkpoint_service._orders.clear()
    case.pass_time(SETTINGS.checkpoint_upload)
    run.train(1)
    assert complete(case, run.job)[:2] == [(28, 0), (24, 0)]
    case.match()
    assert run.state == "shipping"
    begin = case.planner.starts[-1]
    assert begin is not None
    assert {each.id.update for each in begin.checkpoints} == {24}


def test_a_checkpoint_that_is_waited_for_is_noticed_at_once(tmp_path: Path) -> None:
    rarely = replace(SETTINGS, improvement_check=1e9)
    with opened(tmp_path, settings=rarely) as case:
        run = start(case)
        run.train(17)
        provider(case, "carol", 2), provider(case, "dave", 3)
        run.train(6)
        run.watched = False
        requested = case.server._matching_thread._requested
        requested.clear()
        run.train(1)
        assert run.update == 24
        assert requested.is_set()
