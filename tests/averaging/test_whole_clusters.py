"""Clusters that train and fail at any time average, agree and finish, whichever coordinates."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from whole_clusters import RETURN, World

from ravnest.averaging.coordinator import Mode
from ravnest.deadlines import ROUND_ANSWER

END = 100_000.0
SOON = ROUND_ANSWER - 30.0
"""Time in which they finish if nothing waits for a deadline but that of a lost cluster."""
SEEDS = 1000
"""Random worlds for each mode, some ms each."""


@pytest.mark.parametrize("mode", ["background", "blocking"])
def test_undisturbed_clusters_average_and_agree_at_the_end(mode: Mode) -> None:
    world = World(3, mode, updates=20, seed=1)
    world.run(END)
    *rounds, final = world.outcomes
    assert (final.kind, final.committed, sorted(final.weights)) == ("final", True, [0, 1, 2])
    assert world.applied[final.round] == {0, 1, 2}
    assert len(rounds) >= 6
    averaged = [outcome for outcome in rounds if outcome.committed]
    assert len(averaged) >= 5
    assert all(world.applied[outcome.round] == set(outcome.weights) for outcome in averaged)
    assert all(root.done for root in world.roots.values())
    assert all(root.member.trigger.samples == 0 for root in world.roots.values())


def test_a_fast_cluster_does_not_wait_for_a_slow_one() -> None:
    world = World(2, "background", updates=30, seed=2)
    world.roots[0].speed, world.roots[1].speed = 0.1, 10.0
    world.run(20.0)
    assert world.roots[0].left == 0
    world.run(END)
    assert all(root.done for root in world.roots.values())
    assert world.outcomes[-1].committed


@settings(max_examples=150, deadline=None)
@example(5, "background", 84348, [(7.0, 0), (7.0, 3), (7.0, 4)])
@given(
    st.integers(2, 5),
    st.sampled_from(["background", "blocking"]),
    st.integers(0, 2**32),
    st.lists(st.tuples(st.floats(0, 25), st.integers(0, 4)), max_size=4),
)
def test_the_surviving_clusters_finish(
    clusters: int, mode: Mode, seed: int, deaths: list[tuple[float, int]]
) -> None:
    world = World(clusters, mode, updates=15, seed=seed)
    dying = {cluster % clusters for _, cluster in deaths}
    if dying == set(range(clusters)):
        dying.discard(0)
    for at, cluster in deaths:
        if cluster % clusters in dying:
            world.after(at, partial(world.kill, cluster % clusters))
    world.run(END)
    living = {c for c, root in world.roots.items() if root.alive}
    assert living == set(range(clusters)) - dying
    assert all(world.roots[c].done for c in living), "a cluster waits for ever"
    # If all members of a round died, including the coordinator, its number may be used again.
    for round_id, clusters_in_it in world.applied.items():
        members = [set(outcome.weights) for outcome in world.outcomes if outcome.round == round_id]
        assert any(clusters_in_it & living <= each for each in members)
    averaged = [outcome.round for outcome in world.outcomes if living & set(outcome.weights)]
    assert len(set(averaged)) == len(averaged), "two rounds have the same id"
    if not deaths:
        assert world.applied[world.outcomes[-1].round] == living


def check_restarts(world: World) -> None:
    """Nobody waits for ever, and no process applies a round twice or one that it was not a member of."""
    assert all(root.done for root in world.roots.values()), "a cluster waits for ever"
    averaged = [outcome for outcome in world.outcomes if outcome.committed]
    for cluster, root in world.roots.items():
        assert root.applied == sorted(set(root.applied))
        own = {outcome.round for outcome in averaged if cluster in outcome.weights}
        assert set(root.applied) <= own


@pytest.mark.parametrize("mode", ["background", "blocking"])
@pytest.mark.parametrize("restarted", [0, 1, 2])
def test_a_restarted_cluster_is_in_the_next_round_and_all_agree_at_the_end(
    mode: Mode, restarted: int
) -> None:
    world = World(3, mode, updates=40, seed=3)
    world.run(8.0)
    rounds = len(world.outcomes)
    world.restart(restarted)
    world.run(END)
    check_restarts(world)
    after = [outcome for outcome in world.outcomes[rounds:] if outcome.committed]
    with_it = [restarted in outcome.weights for outcome in after]
    assert with_it.index(True) <= 2, "it takes part as soon as it is back"
    final = world.outcomes[-1]
    assert (final.kind, final.committed, sorted(final.weights)) == ("final", True, [0, 1, 2])
    assert all(root.applied[-1] == final.round for root in world.roots.values())


@pytest.mark.parametrize("mode", ["background", "blocking"])
def test_clusters_that_are_restarted_at_any_time_finish(mode: Mode) -> None:
    for seed in range(SEEDS):
        drawn = Random(seed)
        clusters = drawn.randint(2, 4)
        world = World(clusters, mode, updates=12, seed=seed, leaves=True)
        for _ in range(drawn.randint(1, 5)):
            cluster, at = drawn.randrange(clusters), drawn.uniform(0, 25)
            again = partial(world.restart, cluster, drawn.randint(0, 12))
            world.after(at, again if drawn.random() < 0.8 else partial(world.kill_and_restart, cluster))
        world.run(SOON + RETURN)
        check_restarts(world)
        assert len({root.parameters for root in world.roots.values()}) == 1, "they agree at the end"
