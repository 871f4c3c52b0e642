"""The end of training waits for clusters that may return, and all end with the same parameters."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
from round_cases import Case, asked, decided, weights
from whole_clusters import RETURN, World

from ravnest.averaging.coordinator import Mode
from ravnest.averaging.deadlines import Deadlines
from ravnest.averaging.events import ClusterJoined, ClusterLost, SendToCluster, Tick
from ravnest.averaging.member import Member, TrainingPaused
from ravnest.averaging.relay import RoundOver
from ravnest.deadlines import NODE_RETURN, RETURN_MARGIN
from ravnest.wire.messages import Decision

SEEDS = 400
"""Random worlds for each mode, some ms each."""
UPDATES, LAST = 60, 3
"""Updates of a run, and those of its last 5%."""
SOON = 200.0
"""Time after which they have ended if nobody waits for a deadline."""


def world_near_the_end(mode: Mode, seed: int) -> World:
    """Return a world in which one cluster has 5% of its training left."""
    world = World(2 + seed % 3, mode, updates=UPDATES, seed=seed, leaves=True)
    first = world.random.choice(list(world.roots.values()))
    until = 0.0
    while first.left > LAST:
        until += 0.25
        world.run(until)
    return world


def parameters(world: World) -> set[str]:
    """Return the parameters of the clusters that have ended; all have that have not failed."""
    assert all(root.done for root in world.roots.values() if not root.failed), "a cluster waits for ever"
    return {root.parameters for root in world.roots.values() if not root.failed}


@pytest.mark.parametrize("mode", ["background", "blocking"])
def test_clusters_that_lose_nodes_in_the_last_moments_agree(mode: Mode) -> None:
    """Kills before, in and after the final round, of one cluster or several, also twice."""
    late = 0
    for seed in range(SEEDS):
        world, drawn = world_near_the_end(mode, seed), Random(seed)
        for _ in range(drawn.randint(1, 4)):
            killed = drawn.randrange(len(world.roots))
            world.after(drawn.uniform(0, 12), partial(world.kill_and_restart, killed))
        began = world.now
        world.run(began + SOON)
        late += not all(root.done for root in world.roots.values())
        world.run(began + SOON + RETURN)
        assert len(parameters(world)) == 1, seed
    # One that dies before it learns that the others end waits for them in vain, and ends late.
    assert late < 0.05 * SEEDS


@pytest.mark.parametrize("mode", ["background", "blocking"])
def test_nobody_waits_for_a_cluster_that_says_that_it_has_failed(mode: Mode) -> None:
    for seed in range(SEEDS // 4):
        world, drawn = world_near_the_end(mode, seed), Random(seed)
        failed = drawn.randrange(len(world.roots))
        at = drawn.uniform(0, 5)
        world.after(at, partial(world.kill, failed, returns=True))
        world.after(at + drawn.uniform(0, 20), partial(world.fail, failed))
        world.roots[failed].failed = True
        world.run(world.now + SOON)
        assert len(parameters(world)) == 1, seed


@pytest.mark.parametrize("mode", ["background", "blocking"])
def test_a_cluster_that_does_not_return_is_given_up(mode: Mode) -> None:
    for seed in range(SEEDS // 4):
        world, drawn = world_near_the_end(mode, seed), Random(seed)
        lost = drawn.randrange(len(world.roots))
        world.after(drawn.uniform(0, 5), partial(world.kill, lost, returns=True))
        world.roots[lost].failed = True
        world.run(world.now + SOON + RETURN)
        assert len(parameters(world)) == 1, seed


class TestWaits:
    def test_the_final_round_waits_for_a_lost_cluster_until_its_time_is_over(self) -> None:
        case = Case(3)
        case.lost(2, until=50.0)
        case.request(0, final=True)
        assert asked(case.request(1, final=True)) == []
        assert case.wake == 50.0
        assert asked(case.wait(49.0)) == []
        assert asked(case.wait(1.0)) == [0, 1]

    def test_a_cluster_that_returns_is_waited_for_as_long_as_it_trains(self) -> None:
        case = Case(2)
        case.lost(1, until=50.0)
        case.request(0, final=True)
        case.joined(1)
        assert case.wait(10_000.0) == []
        assert asked(case.request(1, final=True)) == [0, 1]

    def test_a_cluster_that_has_left_is_not_waited_for(self) -> None:
        case = Case(3)
        case.lost(2)
        case.request(0, final=True)
        assert asked(case.request(1, final=True)) == [0, 1]

    def test_a_lost_cluster_that_says_that_it_has_failed_is_not_waited_for_any_longer(self) -> None:
        case = Case(3)
        case.lost(2, until=50.0)
        case.request(0, final=True)
        case.request(1, final=True)
        assert asked(case.lost(2, "its checkpoints are damaged")) == [0, 1]

    @pytest.mark.parametrize("reducing", [False, True])
    def test_a_member_that_is_lost_and_may_return_voids_the_final_round(self, reducing: bool) -> None:
        case = Case(3)
        for cluster in range(3):
            case.request(cluster, final=True)
        if reducing:
            case.all_prepare(0, 1, 2)
        assert case.lost(2, until=50.0)[:-1] == [], "no Decision: training stays paused"
        assert case.outcomes == [], "the round is not over"
        case.joined(2)
        assert asked(case.request(2, final=True)) == [0, 1, 2]

    def test_other_rounds_do_not_wait(self) -> None:
        case = Case(3)
        case.lost(2, until=50.0)
        assert asked(case.request(0)) == [0, 1]

    def test_a_new_coordinator_waits_for_those_that_the_member_has_lost(self) -> None:
        root = Member(1, (10,), mode="background", reduce_factor=1)
        root.handle(ClusterJoined(0), 0.0)
        root.handle(ClusterLost(0, "no heartbeat", 40.0), 1.0)
        assert root.handle(TrainingPaused(final=True), 2.0) == []
        assert root.wake == 40.0
        assert any(isinstance(each, RoundOver) for each in root.handle(Tick(), 40.0))

    def test_a_process_that_continues_a_run_waits_for_clusters_that_it_has_not_seen(self) -> None:
        root = Member(0, (0,), mode="background", reduce_factor=1)
        root.expect({1, 2}, 40.0)
        root.handle(ClusterJoined(1), 1.0)
        root.handle(ClusterLost(1, "it has left"), 2.0)
        assert root.handle(TrainingPaused(final=True), 3.0) == []
        assert root.wake == 40.0, "cluster 2 may return, cluster 1 has left"

    def test_the_wait_outlasts_that_of_the_cluster_itself(self) -> None:
        assert Deadlines.outlasting(60.0, NODE_RETURN).final_return == NODE_RETURN + RETURN_MARGIN
        assert Deadlines.outlasting(100.0, 5.0).final_return == 5.0 + RETURN_MARGIN + 40.0
        assert Deadlines.outlasting(60.0).final_return == 0.0


class TestEnd:
    def averaged(self, clusters: int = 2) -> Case:
        """Return a case after the final round."""
        case = Case(clusters)
        for cluster in range(clusters):
            case.request(cluster, final=True, call=1)
        case.all_prepare(*range(clusters))
        case.all_reduce(*range(clusters))
        assert case.outcome.committed
        return case

    def test_clusters_are_released_when_all_have_the_average_in_a_checkpoint(self) -> None:
        case = self.averaged()
        assert case.request(0, final=True, kept=True, call=1) == []
        (first, second) = case.request(1, final=True, kept=True, call=1)
        for cluster, action in enumerate((first, second)):
            assert isinstance(action, SendToCluster)
            assert isinstance(action.head, Decision)
            assert (action.cluster, action.head.commit, action.head.assign) == (cluster, False, True)
        assert len(case.outcomes) == 1, "it is not a round"

    def test_a_cluster_without_the_average_gets_it_from_those_that_have_it(self) -> None:
        case = self.averaged(3)
        case.request(1, final=True, kept=True, call=1)
        case.request(2, final=True, kept=True, call=1)
        case.joined(0)
        case.request(0, 3, final=True, call=1)  # it was killed and has trained to the end once more
        assert weights(case.all_prepare(0, 1, 2, samples=8)) == {0: 0.0, 1: 1.0, 2: 0.0}

    def test_a_source_that_is_lost_is_waited_for(self) -> None:
        case = self.averaged()
        case.request(1, final=True, kept=True, call=1)
        case.request(0, final=True, call=1)
        case.lost(1, until=50.0)
        assert case.outcomes[-1].committed, "nobody ends alone"
        case.joined(1)
        case.request(1, final=True, kept=True, call=1)
        assert weights(case.all_prepare(0, 1)) == {0: 0.0, 1: 1.0}

    def test_clusters_with_the_average_wait_for_a_lost_one(self) -> None:
        case = self.averaged()
        case.lost(1, until=50.0)
        assert decided(case.request(0, final=True, kept=True, call=1)) == {}
        assert decided(case.wait(50.0)) == {0: False}

    def test_a_restarted_cluster_does_not_hold_up_those_in_a_later_call(self) -> None:
        case = self.averaged()
        case.request(0, final=True, kept=True, call=1)
        case.request(1, final=True, kept=True, call=1)
        case.request(0, 16, call=2)
        case.lost(1, until=50.0)
        case.joined(1)
        assert decided(case.request(1, final=True, kept=True, call=1)) == {1: False}
        assert asked(case.request(0, 32, final=True, call=2)) == [], "it waits for cluster 1"

    def test_a_restarted_cluster_is_released_if_the_others_were(self) -> None:
        case = self.averaged()
        case.request(0, final=True, kept=True, call=1)
        case.request(1, final=True, kept=True, call=1)
        case.lost(1, until=50.0)
        case.joined(1)
        assert decided(case.request(1, final=True, kept=True, call=1)) == {1: False}

    def test_in_the_next_call_a_released_cluster_is_waited_for(self) -> None:
        case = self.averaged()
        case.request(0, final=True, kept=True, call=1)
        case.request(1, final=True, kept=True, call=1)
        assert asked(case.request(0, 16, final=True, call=2)) == []
