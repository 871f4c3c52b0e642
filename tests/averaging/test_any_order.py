"""Rounds under losses, joins, silence and answers in any order: what always holds."""

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
from ravnest.averaging.round import ATTEMPTS
from ravnest.wire.messages import Decision, Prepare, RoundId, Start

LIMITS = Deadlines(answer_most=30, reduce_most=60, due_unknown=40, due_most=100)
LONGEST = ATTEMPTS * (LIMITS.answer_most + LIMITS.reduce_most)

STEPS = st.sampled_from(
    ["due"] * 4
    + ["held"] * 8
    + ["reduced"] * 8
    + ["final", "lost", "joined", "nan", "failed", "differs", "pass", "silence", "newer", "again"]
)
SCRIPTS = st.lists(st.tuples(STEPS, st.integers(0, 4), st.integers(0, 4)), max_size=60)


def play(case: Case, count: int, script: list[tuple[str, int, int]]) -> None:
    """Carry the script out; what is odd at some point is handed in all the same."""
    for updates, (step, first, second) in enumerate(script):
        cluster, other = first % count, second % count
        proposed = any(isinstance(send.head, Prepare) for send in case.sends)
        of = case.round if proposed else RoundId(0)
        steps: dict[str, Callable[[], object]] = {
            "due": partial(case.due, cluster, updates, interval=float(other)),
            "final": partial(case.due, cluster, updates, final=True),
            "held": partial(case.held, cluster, other, of=of),
            "nan": partial(case.held, cluster, other, "NaN", of=of),
            "reduced": partial(case.reduced, cluster, of=of),
            "differs": partial(case.reduced, cluster, "other", of=of),
            "failed": partial(case.reduced, cluster, problem="no link", missing=other, of=of),
            "lost": partial(case.lost, cluster),
            "joined": partial(case.joined, cluster),
            "newer": partial(case.held, cluster, of=RoundId(of.number + other, other)),
            "again": partial(case.held, cluster, other, of=RoundId(of.number, max(0, of.attempt - 1))),
            "pass": partial(case.wait, other / 4),
            "silence": partial(case.wait, max(0.0, (case.wake or 0.0) - case.now)),
        }
        steps[step]()


def finish(case: Case, count: int) -> None:
    """Nobody says anything more, and then all others die."""
    case.wait(1e6)
    for cluster in range(count):
        case.lost(cluster)
    case.wait(1e6)


def check(case: Case) -> None:
    """What holds of every order."""
    opened = {send.head.round.number for send in case.sends if isinstance(send.head, Prepare)}
    reported = Counter(outcome.round.number for outcome in case.outcomes)
    assert all(times == 1 for times in reported.values())
    assert opened <= set(reported), "a round was opened and never ended"

    verdicts: dict[tuple[int, RoundId], set[bool]] = defaultdict(set)
    members: dict[RoundId, set[int]] = defaultdict(set)
    proposed: dict[int, list[RoundId]] = defaultdict(list)
    for send in case.sends:
        match send.head:
            case Prepare(of):
                assert not proposed[send.cluster] or of > proposed[send.cluster][-1]
                proposed[send.cluster].append(of)
            case Start(of, weights):
                assert of == proposed[send.cluster][-1]
                assert send.cluster in weights
                assert sum(weights.values()) == pytest.approx(1)
                members[of].add(send.cluster)
            case Decision(of, commit):
                verdicts[send.cluster, of].add(commit)
    assert all(len(found) == 1 for found in verdicts.values()), "a member was told two things"
    for outcome in case.outcomes:
        of = outcome.round
        told = {cluster for (cluster, about), found in verdicts.items() if about == of and True in found}
        assert told == (members[of] if outcome.committed else set())
        assert outcome.committed == (not outcome.reason)
        assert not set(outcome.missing) & told
        assert outcome.describe()
        if outcome.kind != "final":
            assert outcome.seconds <= LONGEST


@settings(max_examples=400, deadline=None)
@given(st.integers(2, 5), st.sampled_from(["background", "blocking"]), SCRIPTS)
def test_every_round_ends_once_and_nobody_is_told_two_things(
    count: int, mode: Mode, script: list[tuple[str, int, int]]
) -> None:
    case = Case(count, mode, deadlines=LIMITS)
    play(case, count, script)
    finish(case, count)
    check(case)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 5), SCRIPTS)
def test_every_blocking_cluster_that_waits_is_answered(
    count: int, script: list[tuple[str, int, int]]
) -> None:
    """A cluster that has said Due is in a round, or told that there is none, in bounded time."""
    case = Case(count, "blocking", deadlines=LIMITS)
    play(case, count, [(step, a, b) for step, a, b in script if step != "final"])
    case.joined(1)
    case.wait(1e6)
    case.done.clear()
    case.due(0, 1000)
    case.wait(LIMITS.due_most + LONGEST)
    assert any(isinstance(send.head, Decision) and send.cluster == 0 for send in case.sends)
