"""The Root's decisions about checkpoints: when to take one, which one to continue from, what to keep."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ravnest.runtime.control.checkpoint_policy import CheckpointPolicy
from ravnest.runtime.control.resume_choice import choose_resume, merge_offers
from ravnest.runtime.control.stored_checkpoints import StoredCheckpoints
from ravnest.types import BEGINNING, CheckpointId
from ravnest.wire.messages import CheckpointStored, HeldCheckpoint, ResumeFrom, ResumeOffer

C1, C2, C3 = (CheckpointId(update, 0) for update in (1, 2, 3))


def held(
    holder: int, *ids: CheckpointId, run: str = "r", attempt: str = "a"
) -> tuple[HeldCheckpoint, ...]:
    return tuple(HeldCheckpoint(run, each, holder, attempt) for each in ids)


def choose(offer: ResumeOffer, stages: int = 2) -> ResumeFrom:
    return choose_resume(offer, stages, "new")


def test_the_newest_checkpoint_that_all_stages_have_is_chosen() -> None:
    offer = ResumeOffer({0: held(0, C1, C2, C3), 1: held(1, C1, C2)}, "r")
    assert choose(offer) == ResumeFrom("r", C2, {}, taken="a", attempt="new", alone=(0, 1))


def test_a_phase_end_is_newer_than_the_update_before_it() -> None:
    end = CheckpointId(2, 1)
    offer = ResumeOffer({0: held(0, C2, end), 1: held(1, end, C2)}, "r")
    assert choose(offer).checkpoint == end


def test_a_stage_without_its_own_gets_it_from_the_replica() -> None:
    offer = ResumeOffer({0: held(0, C1, C2) + held(1, C1), 1: held(0, C2)}, "r")
    decision = choose(offer)
    assert (decision.checkpoint, decision.sources, decision.alone) == (C2, {1: 0}, (0,))


def test_the_nearest_replica_is_the_source() -> None:
    offer = ResumeOffer({0: held(0, C1), 1: held(1, C1), 2: held(0, C1) + held(1, C1)}, "r")
    assert choose(offer, 3).sources == {2: 1}


def test_stages_with_a_replica_do_not_send_another_one() -> None:
    offer = ResumeOffer({0: held(0, C1) + held(1, C1), 1: held(1, C1)}, "r")
    assert choose(offer).alone == (1,)


def test_without_a_common_checkpoint_the_run_begins_at_the_beginning() -> None:
    for checkpoints in ({}, {0: held(0, C1)}, {0: held(0, C1), 1: held(1, C2)}):
        decision = choose(ResumeOffer(checkpoints, "r"))
        assert (decision.run, decision.checkpoint, decision.sources) == ("r", BEGINNING, {})


def test_states_of_different_attempts_are_not_mixed() -> None:
    offer = ResumeOffer(
        {
            0: held(0, C1) + held(0, C2, attempt="b"),
            1: held(1, C1, C2),
        },
        "r",
    )
    assert (choose(offer).checkpoint, choose(offer).taken) == (C1, "a")
    # The replica of the right attempt replaces the own state of the other one.
    offer = ResumeOffer({0: held(0, C2, attempt="b"), 1: held(1, C2) + held(0, C2, attempt="b")}, "r")
    decision = choose(offer)
    assert (decision.checkpoint, decision.taken, decision.sources) == (C2, "b", {1: 0})


def test_checkpoints_of_other_runs_are_left_alone() -> None:
    checkpoints = {0: held(0, C2, run="old") + held(0, C1), 1: held(1, C2, run="old") + held(1, C1)}
    assert choose(ResumeOffer(checkpoints, "r")).checkpoint == C1
    fresh = choose(ResumeOffer(checkpoints))
    assert (fresh.run, fresh.checkpoint) == ("new", BEGINNING)
    newest = choose(ResumeOffer(checkpoints, any_run=True))
    assert (newest.run, newest.checkpoint) == ("old", C2)


def test_offers_are_merged_towards_the_root() -> None:
    leaf = ResumeOffer({2: held(2, C1), 1: held(2, C1)}, "r", lost="node_1 was lost", made=9)
    stem = ResumeOffer({1: held(1, C2), 0: held(1, C2)}, any_run=True, made=8)
    root = ResumeOffer({0: held(0, C2)})
    whole = merge_offers(root, merge_offers(stem, merge_offers(leaf, None)))
    assert (whole.wanted, whole.any_run, whole.lost) == ("r", True, "node_1 was lost")
    assert whole.made == 9, "the Leaf makes an update first"
    assert {stage: set(each) for stage, each in whole.held.items()} == {
        0: set(held(0, C2) + held(1, C2)),
        1: set(held(1, C2) + held(2, C1)),
        2: set(held(2, C1)),
    }


ids = st.builds(CheckpointId, st.integers(1, 4), st.integers(0, 1))
some = st.lists(st.tuples(ids, st.sampled_from("ab")), max_size=4, unique=True)


@given(st.lists(some, min_size=3, max_size=3), st.lists(some, min_size=3, max_size=3))
def test_the_choice_can_be_loaded_and_nothing_newer_could(
    own: list[list[tuple[CheckpointId, str]]], replicas: list[list[tuple[CheckpointId, str]]]
) -> None:
    found = [
        {(each, attempt, holder) for holder, kept in ((s, own[s]), (1 if s == 0 else s - 1, replicas[s]))
         for each, attempt in kept}
        for s in range(3)
    ]  # fmt: skip
    offer = ResumeOffer(
        {s: tuple(HeldCheckpoint("r", c, h, a) for c, a, h in sorted(found[s])) for s in range(3)}, "r"
    )
    decision = choose(offer, 3)
    common = set.intersection(*({(c, a) for c, a, _ in each} for each in found))
    assert decision.checkpoint == max((c for c, _ in common), default=BEGINNING)
    for stage in range(3) if common else ():
        source = decision.sources.get(stage, stage)
        assert (decision.checkpoint, decision.taken, source) in found[stage]
        assert (stage in decision.alone) == (
            {h for c, a, h in found[stage] if (c, a) == (decision.checkpoint, decision.taken)} == {stage}
        )


# Outcomes


def test_the_outcome_of_a_checkpoint_is_reported_when_it_is_known_here_and_behind() -> None:
    for stored_here, stored_behind in itertools.product((True, False), repeat=2):
        here, behind = CheckpointStored(C1, stored_here, 0.5), CheckpointStored(C1, stored_behind, 2.0)
        report = CheckpointStored(C1, stored_here and stored_behind, 2.0)
        known = StoredCheckpoints(is_leaf=False)
        assert known.settled_here(here) is None
        assert known.settled_behind(behind) == report
        known = StoredCheckpoints(is_leaf=False)
        assert known.settled_behind(behind) is None
        assert known.settled_here(here) == report


def test_the_leaf_reports_at_once() -> None:
    known = StoredCheckpoints(is_leaf=True)
    for outcome in (CheckpointStored(C1, True, 1.0), CheckpointStored(C2, False)):
        assert known.settled_here(outcome) == outcome


def test_checkpoints_that_nobody_takes_do_not_pile_up() -> None:
    known = StoredCheckpoints(is_leaf=False)
    for update in range(1000):
        known.settled_behind(CheckpointStored(CheckpointId(update, 0), True))
    assert len(known._behind) < 20
    assert known.settled_here(CheckpointStored(CheckpointId(999, 0), True)) is not None


# Policy


def policy(updates: int | None = None, seconds: float = 60.0, cost: float = 0.0) -> CheckpointPolicy:
    return CheckpointPolicy(updates, seconds, 0, 0.0, cost)


def test_checkpoints_follow_a_number_of_updates() -> None:
    rule = policy(updates=3)
    taken = []
    for update in range(1, 10):
        if rule.due_after_update(update, 0.0):
            taken.append(update)
            rule.settled += 1
    assert taken == [3, 6, 9]


def test_checkpoints_follow_a_time() -> None:
    rule = policy(seconds=10.0)
    assert not rule.due_after_update(1, 9.9)
    assert rule.due_after_update(2, 10.0)
    rule.settled += 1
    assert not rule.due_after_update(3, 19.9)
    assert rule.due_after_update(4, 20.0)


def test_expensive_checkpoints_are_rare() -> None:
    rule = policy(seconds=10.0, cost=0.5)
    assert not rule.due_after_update(1, 49.0)
    assert not rule.due_after_epoch(1, 49.0)
    assert rule.due_after_epoch(1, 50.0)


def test_a_node_that_reports_nonsense_does_not_stop_checkpoints() -> None:
    for cost in (1e9, float("inf")):
        assert policy(cost=cost).due_after_update(1, 3600.0)
    assert policy(cost=float("nan")).due_after_update(1, 3600.0)


def test_short_epochs_have_no_checkpoint_each() -> None:
    rule = policy()
    assert not rule.due_after_epoch(1, 1.0)
    assert rule.due_after_epoch(2, 2.0)


def test_the_checkpoint_of_an_epoch_can_follow_the_next_update_instead() -> None:
    rule = policy()
    rule.postpone_after_epoch(1.0)
    assert not rule.due_after_update(1, 1.0), "none is due so early"
    rule.postpone_after_epoch(2.0)
    assert rule.taken == 0, "one that nobody takes is not waited for"
    assert rule.due_after_update(2, 2.0)
    assert rule.taken == 1


def test_the_next_checkpoint_waits_until_all_have_stored_the_last_one() -> None:
    rule = policy(updates=1)
    assert rule.due_after_update(1, 0.0)
    assert not rule.due_after_update(2, 100.0)
    assert not rule.due_after_epoch(2, 100.0)
    rule.settled += 1
    assert rule.due_after_update(3, 100.0)


def test_a_node_that_leaves_waits_for_one_checkpoint_less() -> None:
    rule = policy(updates=1)
    assert rule.due_after_update(1, 0.0)
    rule.wanted = True
    assert rule.due_after_update(2, 1.0)
    assert not rule.wanted
    rule.wanted = True
    assert not rule.due_after_update(3, 2.0), "two are being stored"
    rule.settled += 1
    assert rule.due_after_update(4, 3.0)


def test_an_outcome_that_never_comes_does_not_stop_checkpoints_for_good() -> None:
    rule = policy(updates=1)
    assert rule.due_after_update(1, 0.0)
    assert not rule.due_after_update(2, 899.0)
    assert rule.due_after_update(3, 900.0)


def test_after_a_recovery_the_first_checkpoint_waits_for_replicas() -> None:
    rule = policy(updates=1)
    rule.resume(4, 1)
    assert not rule.due_after_update(5, 1.0)
    rule.settled += 1
    assert rule.due_after_update(6, 1.0)
    rule = policy(updates=1)
    rule.resume(0, 0)
    assert rule.due_after_update(1, 1.0)


def test_a_node_that_leaves_gets_a_checkpoint_at_once() -> None:
    rule = policy()
    rule.wanted = True
    assert rule.due_after_update(1, 0.0)
    rule.settled += 1
    assert not rule.due_after_update(2, 0.0)
