"""The job queue: order, providers, reasons, and that no job starves."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.server.scheduling.queue import (
    PATIENCE,
    IdleProvider,
    QueueDecision,
    Refusal,
    WaitingJob,
    decide,
)

steady = settings(deadline=None, derandomize=True)


def pool(count: int) -> list[IdleProvider]:
    """Providers p0, p1, ... from strong to weak."""
    return [IdleProvider(f"p{n}", (100.0 - n) * 8.0) for n in range(count)]


def started(decisions: tuple[QueueDecision, ...]) -> dict[str, tuple[str, ...]]:
    return {each.job: each.providers for each in decisions if each.providers}


def test_a_job_gets_all_idle_providers_up_to_its_maximum() -> None:
    job = WaitingJob("j", "ann", 1.0)
    assert started(decide([job], {}, pool(3))) == {"j": ("p0", "p1", "p2")}
    job = replace(job, max_providers=2)
    assert started(decide([job], {}, pool(3))) == {"j": ("p0", "p1")}


def test_providers_are_ordered_by_strength_then_id() -> None:
    providers = [
        IdleProvider("fast", 100 * 1),
        IdleProvider("b", 20 * 8),
        IdleProvider("a", 40 * 4),
        IdleProvider("large", 10 * 32),
    ]
    (decision,) = decide([WaitingJob("j", "ann", 1.0)], {}, providers)
    assert decision.providers == ("large", "a", "b", "fast")


def test_owners_with_fewer_running_jobs_go_first_then_older_jobs() -> None:
    jobs = [
        WaitingJob("a2", "ann", 2.0, max_providers=1),
        WaitingJob("a1", "ann", 1.0, max_providers=1),
        WaitingJob("b1", "bob", 3.0, max_providers=1),
        WaitingJob("c1", "cid", 4.0, max_providers=1),
    ]
    order = [each.job for each in decide(jobs, {"cid": 2}, pool(9))]
    assert order == ["a1", "b1", "a2", "c1"], "jobs started in the same pass count"


def test_a_job_that_does_not_fit_is_passed_over_until_it_blocks_the_queue() -> None:
    large = WaitingJob("large", "ann", 1.0, min_providers=3)
    small = [WaitingJob(f"s{n}", f"owner{n}", 2.0 + n, max_providers=1) for n in range(5)]
    decisions = decide([large, *small], {}, pool(2), busy=4)
    assert list(started(decisions)) == ["s0", "s1"]
    assert decisions[0] == QueueDecision(
        "large", (), "waits for 1 more provider: it wants 3, 2 are idle, 4 are at work", 2
    )
    large = replace(large, passed_over=2)
    decisions = decide([large, *small], {}, pool(2), busy=4)
    assert list(started(decisions)) == ["s0"]
    assert decisions[0].passed_over == PATIENCE
    assert decisions[2].reason == "waits for its turn: large was passed over 3 times"
    large = replace(large, passed_over=3)
    assert not started(decide([large, *small], {}, pool(2), busy=4))
    assert started(decide([large, *small], {}, pool(3), busy=3)) == {"large": ("p0", "p1", "p2")}


def test_a_job_ahead_of_a_blocking_job_does_not_wait() -> None:
    held = WaitingJob("held", "ann", 1.0, min_providers=5, passed_over=3)
    ahead = WaitingJob("ahead", "bob", 2.0, max_providers=1)
    behind = WaitingJob("behind", "ann", 3.0, max_providers=1)
    assert list(started(decide([held, ahead, behind], {"ann": 1}, pool(2), busy=4))) == ["ahead"]


def test_a_job_that_wants_too_many_providers_blocks_no_other() -> None:
    huge = WaitingJob("huge", "ann", 1.0, min_providers=10, passed_over=3)
    small = WaitingJob("small", "bob", 2.0)
    decisions = decide([huge, small], {}, pool(2), busy=3)
    assert list(started(decisions)) == ["small"]
    assert decisions[0].reason == "waits for 8 more providers: it wants 10, 2 are idle, 3 are at work"
    assert decisions[0].passed_over == 3


def test_a_job_that_the_planner_refuses_waits_with_its_reason() -> None:
    jobs = [WaitingJob("heavy", "ann", 1.0, passed_over=2), WaitingJob("light", "bob", 2.0)]

    def fit(job: WaitingJob, providers: tuple[str, ...]) -> tuple[str, ...] | Refusal:
        return Refusal("needs 9.1 GB") if job.id == "heavy" else providers[:1]

    first, second = decide(jobs, {}, pool(2), busy=1, fit=fit)
    assert first == QueueDecision("heavy", (), "needs 9.1 GB", 3)
    assert second == QueueDecision(
        "light", ("p0",), "gets 1 of 2 idle providers; its owner has no other job running", 0
    )


@pytest.mark.parametrize(("hopeless", "busy", "starts"), [(False, 1, 0), (True, 1, 1), (False, 0, 1)])
def test_a_refused_job_blocks_the_queue_only_if_more_providers_could_help(
    hopeless: bool, busy: int, starts: int
) -> None:
    held = WaitingJob("held", "ann", 1.0, passed_over=3)
    behind = WaitingJob("behind", "bob", 2.0)

    def fit(job: WaitingJob, providers: tuple[str, ...]) -> tuple[str, ...] | Refusal:
        return Refusal("needs 9.1 GB", hopeless) if job is held else providers

    assert len(started(decide([held, behind], {}, pool(2), busy, fit))) == starts


@pytest.mark.parametrize(
    ("wanted", "idle", "busy", "reason"),
    [
        (3, 2, 0, "waits for 1 more provider: it wants 3, 2 are idle"),
        (3, 1, 1, "waits for 2 more providers: it wants 3, 1 is idle, 1 is at work"),
        (1, 0, 0, "waits for 1 provider: it wants 1, none is idle"),
        (2, 0, 3, "waits for 2 providers: it wants 2, none is idle, 3 are at work"),
    ],
)
def test_the_reason_has_both_numbers(wanted: int, idle: int, busy: int, reason: str) -> None:
    (decision,) = decide([WaitingJob("j", "ann", 1.0, min_providers=wanted)], {}, pool(idle), busy)
    assert decision == QueueDecision("j", (), reason, 0)


jobs = st.builds(
    WaitingJob,
    id=st.uuids().map(str),
    owner=st.sampled_from(["ann", "bob", "cid"]),
    submitted=st.integers(0, 5).map(float),
    min_providers=st.integers(1, 5),
    max_providers=st.none() | st.integers(1, 5),
    passed_over=st.integers(0, PATIENCE),
)
providers = st.builds(
    IdleProvider,
    id=st.uuids().map(str),
    strength=st.integers(1, 16).map(float),
)
waiting_lists = st.lists(jobs, max_size=8, unique_by=lambda job: job.id)
pools = st.lists(providers, max_size=8, unique_by=lambda provider: provider.id)
owners = st.dictionaries(st.sampled_from(["ann", "bob", "cid"]), st.integers(0, 3))


@steady
@given(waiting_lists, owners, pools, st.integers(0, 4), st.randoms(use_true_random=False))
def test_every_pass_is_valid(
    waiting: list[WaitingJob],
    running: dict[str, int],
    idle: list[IdleProvider],
    busy: int,
    order: random.Random,
) -> None:
    decisions = decide(waiting, running, idle, busy)
    assert sorted(each.job for each in decisions) == sorted(job.id for job in waiting)
    given_away = [provider for each in decisions for provider in each.providers]
    assert len(given_away) == len(set(given_away)), "no provider twice"
    assert set(given_away) <= {provider.id for provider in idle}
    known = {job.id: job for job in waiting}
    for each in decisions:
        job = known[each.job]
        assert each.reason
        assert job.passed_over <= each.passed_over <= PATIENCE
        if each.providers:
            assert len(each.providers) >= job.min_providers
            limit = job.max_providers or len(idle)
            assert len(each.providers) <= max(limit, job.min_providers)
    order.shuffle(waiting)
    order.shuffle(idle)
    assert decide(waiting, dict(reversed(running.items())), idle, busy) == decisions, "deterministic"


@steady
@given(
    st.integers(1, 5),
    st.lists(
        st.tuples(
            st.integers(0, 6),  # passes since the previous job
            st.sampled_from(["ann", "bob", "cid"]),
            st.integers(1, 5),  # min_providers
            st.none() | st.integers(1, 5),  # max_providers
            st.integers(1, 6),  # passes that the training takes
        ),
        max_size=25,
    ),
)
def test_no_job_starves(size: int, arrivals: list[tuple[int, str, int, int | None, int]]) -> None:
    """Every job that the pool can hold starts in time: all are done after the last pass."""
    coming: list[tuple[int, WaitingJob, int]] = []
    moment = 0
    for number, (gap, owner, least, most, rounds) in enumerate(arrivals):
        moment += gap
        job = WaitingJob(f"j{number:02}", owner, float(moment), min(least, size), most)
        coming.append((moment, job, rounds))
    lengths = {job.id: rounds for _, job, rounds in coming}
    waiting: dict[str, WaitingJob] = {}
    ends: dict[str, tuple[int, WaitingJob, tuple[str, ...]]] = {}
    for now in range(moment + sum(lengths.values()) + 1):
        ends = {name: job for name, job in ends.items() if job[0] > now}
        waiting |= {job.id: job for when, job, _ in coming if when == now}
        taken = {provider for _, _, own in ends.values() for provider in own}
        idle = [provider for provider in pool(size) if provider.id not in taken]
        running: dict[str, int] = {}
        for _, job, _ in ends.values():
            running[job.owner] = running.get(job.owner, 0) + 1
        for each in decide(waiting.values(), running, idle, len(taken)):
            assert each.passed_over <= PATIENCE
            if each.providers:
                job = waiting.pop(each.job)
                ends[each.job] = (now + lengths[each.job], job, each.providers)
            else:
                waiting[each.job] = replace(waiting[each.job], passed_over=each.passed_over)
        assert ends or not waiting, "an idle pool starts something"
    assert not waiting


def test_a_large_job_is_passed_over_three_times_at_most() -> None:
    """One of three providers always has a small job, until the large job blocks the queue."""
    large = WaitingJob("large", "ann", 0.0, min_providers=3)
    passes = 0
    for number in range(50):
        small = WaitingJob(f"s{number}", "bob", 1.0 + number, max_providers=1)
        first, second = decide([large, small], {}, pool(2), busy=1)
        large = replace(large, passed_over=first.passed_over)
        passes += bool(second.providers)
    assert passes == PATIENCE
