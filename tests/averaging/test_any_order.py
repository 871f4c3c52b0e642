"""Invariants of rounds under losses, joins, silence and replies in any order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_cases import Case

from ravnest.averaging.coordinator import Mode
from ravnest.averaging.deadlines import Deadlines
from ravnest.averaging.two_phase_commit import ATTEMPTS
from ravnest.wire.messages import Decision, Prepare, RoundId, Start

LIMITS = Deadlines(answer_most=30, reduce_most=60, request_unknown=40, request_most=100)
LONGEST = ATTEMPTS * (LIMITS.answer_most + LIMITS.reduce_most)

STEPS = st.sampled_from(
    ["request"] * 4
    + ["prepared"] * 8
    + ["reduced"] * 8
    + ["final", "lost", "joined", "nan", "failed", "differs", "pass", "silence", "newer", "again"]
)
SCRIPTS = st.lists(st.tuples(STEPS, st.integers(0, 4), st.integers(0, 4)), max_size=60)


def play(case: Case, count: int, script: list[tuple[str, int, int]]) -> None:
    """Play the script; events that make no sense at some point are passed in too."""
    for updates, (step, first, second) in enumerate(script):
        cluster, other = first % count, second % count
        any_prepared = any(isinstance(send.head, Prepare) for send in case.sends)
        of = case.round if any_prepared else RoundId(0)
        steps: dict[str, Callable[[], object]] = {
            "request": partial(case.request, cluster, updates, interval=float(other)),
            "final": partial(case.request, cluster, updates, final=True),
            "prepared": partial(case.prepared, cluster, other, of=of),
            "nan": partial(case.prepared, cluster, other, "NaN", of=of),
            "reduced": partial(case.reduced, cluster, of=of),
            "differs": partial(case.reduced, cluster, "other", of=of),
            "failed": partial(case.reduced, cluster, problem="no link", missing=other, of=of),
            "lost": partial(case.lost, cluster),
            "joined": partial(case.joined, cluster),
            "newer": partial(case.prepared, cluster, of=RoundId(of.number + other, other)),
            "again": partial(
                case.prepared, cluster, other, of=RoundId(of.number, max(0, of.attempt - 1))
            ),
            "pass": partial(case.wait, other / 4),
            "silence": partial(case.wait, max(0.0, (case.wake or 0.0) - case.now)),
        }
        steps[step]()


def finish(case: Case, count: int) -> None:
    """Let all clusters fall silent, and then be lost."""
    case.wait(1e6)
    for cluster in range(count):
        case.lost(cluster)
    case.wait(1e6)


def check(case: Case) -> None:
    """Check the invariants."""
    opened = {send.head.round.number for send in case.sends if isinstance(send.head, Prepare)}
    reported = Counter(outcome.round.number for outcome in case.outcomes)
    assert all(times == 1 for times in reported.values())
    assert opened <= set(reported), "a round was opened and never ended"

    decisions: dict[tuple[int, RoundId], set[bool]] = defaultdict(set)
    members: dict[RoundId, set[int]] = defaultdict(set)
    prepared: dict[int, list[RoundId]] = defaultdict(list)
    for send in case.sends:
        match send.head:
            case Prepare(of):
                assert not prepared[send.cluster] or of > prepared[send.cluster][-1]
                prepared[send.cluster].append(of)
            case Start(of, weights):
                assert of == prepared[send.cluster][-1]
                assert send.cluster in weights
                assert sum(weights.values()) == pytest.approx(1)
                members[of].add(send.cluster)
            case Decision(of, commit):
                decisions[send.cluster, of].add(commit)
    assert all(len(found) == 1 for found in decisions.values()), (
        "a member received two different decisions"
    )
    for outcome in case.outcomes:
        of = outcome.round
        committed = {
            cluster for (cluster, about), found in decisions.items() if about == of and True in found
        }
        assert committed == (members[of] if outcome.committed else set())
        assert outcome.committed == (not outcome.reason)
        assert not set(outcome.missing) & committed
        assert outcome.describe()
        if outcome.kind != "final":
            assert outcome.seconds <= LONGEST


@settings(max_examples=400, deadline=None)
@given(st.integers(2, 5), st.sampled_from(["background", "blocking"]), SCRIPTS)
def test_every_round_ends_once_with_one_decision(
    count: int, mode: Mode, script: list[tuple[str, int, int]]
) -> None:
    case = Case(count, mode, deadlines=LIMITS)
    play(case, count, script)
    finish(case, count)
    check(case)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 5), SCRIPTS)
def test_every_blocking_cluster_that_waits_gets_a_decision(
    count: int, script: list[tuple[str, int, int]]
) -> None:
    """A cluster that has requested a round gets a Decision in bounded time."""
    case = Case(count, "blocking", deadlines=LIMITS)
    play(case, count, [(step, a, b) for step, a, b in script if step != "final"])
    case.joined(1)
    case.wait(1e6)
    case.done.clear()
    case.request(0, 1000)
    case.wait(LIMITS.request_most + LONGEST)
    assert any(isinstance(send.head, Decision) and send.cluster == 0 for send in case.sends)
