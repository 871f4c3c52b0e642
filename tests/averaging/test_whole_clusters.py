"""Clusters that train and fail at any time average, agree and finish, whichever coordinates."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from whole_clusters import World

from ravnest.averaging.coordinator import Mode

END = 100_000.0


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
