"""Speed against work done: a provider that offers more than it computes is planned with what it has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from checkpoint_cases import provider, training_pair
from server_cases import Caller, Case, FakePlanner, losses, offer, opened, spec

from ravnest.schemas.providers import Assignment, Heartbeat, StageNeeds
from ravnest.server.db.records import StageTimesRecord
from ravnest.server.scheduling.planning import PlannedJob
from ravnest.server.scheduling.speed import (
    LEAST_SHARE,
    MeasuredStage,
    first_seconds,
    measured_rates,
    stretch_of,
)
from ravnest.server.scheduling.stragglers import TimedRecord
from ravnest.telemetry import TimingRecord


def stages(*given: tuple[float, float, float]) -> list[MeasuredStage]:
    """Return stages of providers a, b, c and so on, from offer, work and seconds."""
    return [MeasuredStage("abcdefgh"[n], *each) for n, each in enumerate(given)]


def test_providers_that_compute_as_they_offer_keep_their_rates() -> None:
    """Each reaches a tenth of its offer with this model."""
    found = measured_rates(stages((100, 50, 5), (200, 100, 5), (50, 10, 2)))
    assert found == {"a": 100, "b": 200, "c": 50}


def test_a_provider_that_offers_too_much_has_the_rate_of_its_work() -> None:
    found = measured_rates(stages((100, 50, 5), (1000, 500, 50), (50, 25, 5)))
    assert found == {"a": 100, "b": pytest.approx(100), "c": 50}


def test_no_rate_exceeds_the_offer_whatever_times_are_stated() -> None:
    found = measured_rates(stages((100, 50, 1e-9), (100, 50, 5), (100, 50, 5)))
    assert found == {"a": 100, "b": 100, "c": 100}


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_one_that_offers_too_little_does_not_make_others_slow(count: int) -> None:
    honest = [(100.0, 50.0, 5.0)] * (count - 1)
    found = measured_rates(stages((1.0, 50.0, 5.0), *honest))
    assert found["a"] == 1.0
    assert set(found.values()) == {1.0, 100.0}


def test_of_two_providers_nothing_is_concluded() -> None:
    assert measured_rates(stages((100, 50, 5), (100, 50, 50))) == {}
    assert measured_rates(stages((100, 50, 5), (100, 50, 50), (100, 0, 5))) == {}


def test_a_rate_is_never_zero() -> None:
    found = measured_rates(stages((100, 50, 5), (100, 50, 1e9), (100, 50, 5)))
    assert found["b"] == 100 * LEAST_SHARE


def test_a_slowdown_of_an_earlier_plan_does_not_count_twice() -> None:
    """It is known by then, and plans of the job count it besides the rate."""

    def times(attempt: int, stage: int, name: str, first: float, now: float) -> StageTimesRecord:
        return StageTimesRecord("job-1", attempt, 0, stage, name, 0.0, first, now, now)

    before = [times(0, 0, "a", 1.0, 1.0), times(0, 1, "b", 1.0, 3.0)]
    after = [times(1, 0, "a", 2.0, 0.0), times(1, 1, "b", 6.0, 0.0)]
    assert [first_seconds(each, [*before, *after]) for each in after] == [2.0, 2.0]
    assert [first_seconds(each, before) for each in before] == [1.0, 1.0]


def timings(interval: float, *computes: float, seconds: int = 120) -> list[TimedRecord]:
    """Return what a Root reports about stages that compute a micro-batch in so many seconds.

    ``interval`` is the time between two micro-batches, by the server's clock. Reports arrive every 6 s.
    """
    return [
        (float(time), TimingRecord(stage, round(6 / interval), each / 3, each * 2 / 3, 0.0, 0.0, 0.0))
        for time in range(6, seconds + 1, 6)
        for stage, each in enumerate(computes)
    ]


def test_times_that_explain_the_pace_are_believed() -> None:
    assert stretch_of(timings(0.5, 0.5, 0.4)) == 1.0, "stages overlap"
    assert stretch_of(timings(1.0, 0.5, 0.5)) == 1.0, "they do not overlap"
    assert stretch_of(timings(1.5, 0.5, 0.5)) == 1.0, "messages take time too"
    assert stretch_of([]) == 1.0
    assert stretch_of(timings(6.0, 0.1, 0.1, seconds=30)) == 1.0, "too few"


def test_a_cluster_that_is_slower_than_its_times_explain_is_noticed() -> None:
    assert stretch_of(timings(2.0, 0.1, 0.1)) == pytest.approx(5.0)


def test_pauses_do_not_count() -> None:
    before = [(time if time < 60 else time + 500, each) for time, each in timings(0.5, 0.2, 0.2)]
    assert stretch_of(before) == 1.0


def test_a_cluster_whose_times_are_too_short_gains_nothing() -> None:
    """A provider alone in its cluster states a tenth of the time that the server sees."""
    honest = [MeasuredStage(name, 100, 50, 5) for name in "ab"]
    liar = MeasuredStage("c", 1000, 500, 5, stretch_of(timings(2.0, 0.2)))
    assert measured_rates([*honest, liar])["c"] == pytest.approx(200)


# The service


class WorkPlanner(FakePlanner):
    """Planner whose stages have work in proportion to the offers."""

    def _assignment(self, job: str, planned: PlannedJob, node: int, count: int) -> Assignment:
        found = super()._assignment(job, planned, node, count)
        return found.model_copy(update={"needs": StageNeeds(work=10.0 if node else 50.0)})


@dataclass
class Run:
    """A job of one cluster. Its Root has five times the work and the offer of the other two."""

    case: Case
    rita: Caller
    job: str
    nodes: list[Caller]
    sent: int = 0
    update: int = 0

    def train(self, *seconds: float, until: int = 220) -> None:
        """Report every ten seconds how long each stage takes; the server looks at the first and last."""
        providers = self.case.server.provider_service
        reports = until // 10
        for number in range(reports):
            self.case.pass_time(10)
            self.update += 1
            records = losses(0.5, first=self.update - 1)
            for stage, each in enumerate(seconds):
                records += [asdict(TimingRecord(stage, 5, each / 3, each * 2 / 3, 0.0, 0.0, 0.0))] * 4
            report = {
                "assignment": providers.reply(self.nodes[0].id).assignment,
                "phase": "training",
                "records": records,
                "first_record": self.sent,
            }
            self.sent += len(records)
            providers.heartbeat(self.nodes[0].id, Heartbeat.model_validate({"report": report}))
            for other in self.nodes[1:]:
                providers.heartbeat(other.id, Heartbeat())
            if number in (0, reports - 1):
                self.case.server.run_matching()

    def rates(self) -> list[float]:
        """Return the GFLOP/s that plans count with."""
        with self.case.server.db.read() as db:
            found = [db.providers.get(each.id) for each in self.nodes]
        return [each.offer.compute for each in found if each is not None]

    def warnings(self) -> list[str]:
        events = self.rita.get(f"/api/jobs/{self.job}/events")
        return [each["reason"] for each in events if "and its stage runs at" in each["reason"]]


def started(case: Case, *nodes: Caller) -> Run:
    """Return a job that these providers train, the strongest first."""
    rita = case.requester()
    job = case.submit(
        rita, training=spec().training.model_copy(update={"epochs": 1000, "batch_size": 1})
    )
    case.match()
    assert case.planner.asked[-1] == tuple(each.id for each in nodes)
    for phase in ("fetched", "training"):
        for each in nodes:
            each.report(phase)
    return Run(case, rita, job, list(nodes))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with opened(tmp_path, planner=WorkPlanner(size=3, needs=3)) as case:
        mallory = case.provider("mallory", address="127.0.0.1:9005", compute=500.0)
        yield started(case, mallory, provider(case, "alice", 0), provider(case, "bob", 1))


def test_providers_that_compute_as_they_offer_are_believed(run: Run) -> None:
    run.train(1.0, 1.1, 0.9)
    assert run.rates() == [500.0, 100.0, 99.0]
    assert run.warnings() == []


def test_the_work_of_a_provider_counts_for_later_plans(run: Run) -> None:
    """The strongest offer had most of the work of every plan, whatever its provider could do."""
    run.train(10.0, 1.0, 1.0, until=100)
    assert run.rates() == [500.0, 100.0, 99.0], "the first times are not known yet"
    run.train(10.0, 1.0, 1.0)
    assert run.rates() == [pytest.approx(50.0), 100.0, 99.0]
    (warning,) = run.warnings()
    assert warning.startswith("mallory offers 500 GFLOP/s, and its stage runs at 50 GFLOP/s")
    run.rita.post(f"/api/jobs/{run.job}/cancel")
    mallory, alice, bob = run.nodes
    for each in run.nodes:
        each.heartbeat()
    run.case.submit(run.rita)
    run.case.match()
    assert run.case.planner.asked[-1] == (alice.id, bob.id, mallory.id), "it is the weakest now"


def test_a_larger_offer_does_not_raise_the_rate(run: Run) -> None:
    run.train(10.0, 1.0, 1.0)
    run.nodes[0].post(
        "/api/providers", offer("mallory", address="127.0.0.1:9005", compute=1e6).model_dump()
    )
    assert run.rates()[0] == pytest.approx(50.0)
    run.nodes[0].post(
        "/api/providers", offer("mallory", address="127.0.0.1:9005", compute=20.0).model_dump()
    )
    assert run.rates()[0] == 20.0, "it may offer less"


def test_better_work_raises_a_rate_up_to_the_offer(run: Run) -> None:
    run.train(10.0, 1.0, 1.0)
    with run.case.server.db.read() as db:
        record = db.providers.get(run.nodes[0].id)
    assert record is not None
    assert (record.offer.compute, record.stated) == (pytest.approx(50.0), 500.0)
    run.rita.post(f"/api/jobs/{run.job}/cancel")
    for each in run.nodes:
        each.heartbeat()
    alice, bob, mallory = run.nodes[1], run.nodes[2], run.nodes[0]
    again = started(run.case, alice, bob, mallory)
    again.train(5.0, 1.0, 0.2)
    assert again.rates() == [100.0, 99.0, pytest.approx(500.0)], "its share is that of the others"


def test_stages_are_read_without_the_bodies_of_assignments(case: Case) -> None:
    _, job, _, _ = training_pair(case)
    with case.server.db.read() as db:
        bodies = [db.assignments.body(each.id) for each in db.assignments.of_job(job)]
        found = db.assignments.stages(job)
    assert [found[each.id].number for each in bodies] == [0, 1]
    assert [found[each.id].work for each in bodies] == [each.needs.work for each in bodies]
