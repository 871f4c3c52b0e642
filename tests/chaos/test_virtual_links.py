"""Links under fault plans in virtual time: nothing lost, repeated or wrong, and nothing hangs.

A failing seed is printed as the line of its plan; ``FaultPlan.parse`` reads it.
"""

from __future__ import annotations

from collections import Counter

import pytest
from fault_plan import FaultKind, FaultPlan
from virtual_links import VirtualLink, VirtualWorld, virtual_world

from ravnest.deadlines import LINK_OUTAGE

NODES, MESSAGES = 3, 12
CHAIN = [(node, node + 1) for node in range(NODES - 1)]
BUSY = 20.0
"""Virtual seconds in which messages are sent and faults begin."""
END = BUSY + 3 * LINK_OUTAGE
"""Time at which a link has delivered everything, or has ended at both sides."""
PASSING = (FaultKind.STOP, FaultKind.PARTITION, FaultKind.ONE_WAY, FaultKind.DELAY)
"""Faults after which links continue."""
TAMPERING = (FaultKind.CORRUPT, FaultKind.DUPLICATE, FaultKind.REORDER)
"""Faults that a link notices, and that may end it."""


def run(monkeypatch: pytest.MonkeyPatch, plan: FaultPlan) -> VirtualWorld:
    with monkeypatch.context() as patched:
        world = virtual_world(patched, plan, NODES, MESSAGES, BUSY)
        for time in range(int(BUSY) + 10, int(END), 10):
            world.run(float(time))
            if world.settled(MESSAGES):
                break
    return world


def drawn(seed: int, kinds: tuple[FaultKind, ...], count: int = 6) -> FaultPlan:
    return FaultPlan.random(seed, range(NODES), count, end=BUSY, kinds=kinds, links=CHAIN, longest=9.0)


def correct(link: VirtualLink, plan: FaultPlan) -> None:
    """Check that what arrived is what was sent, from its begin and in order."""
    for side in (0, 1):
        received = link.boxes[side].received
        assert received == [(n, float(n)) for n in range(len(received))], str(plan)
        assert len(received) <= link.sent[1 - side], str(plan)


def whole(link: VirtualLink, plan: FaultPlan) -> None:
    """Check that everything has arrived and the link is still there."""
    correct(link, plan)
    for side in (0, 1):
        assert len(link.boxes[side].received) == MESSAGES, str(plan)
        assert link.links[side].connected, str(plan)
        assert not link.boxes[side].lost, str(plan)


def ended(link: VirtualLink, side: int, plan: FaultPlan) -> None:
    """Check that one side has noticed the end of the link, once."""
    assert not link.links[side].alive, str(plan)
    assert len(link.boxes[side].lost) == 1, str(plan)


def survive_outages(monkeypatch: pytest.MonkeyPatch, seeds: range) -> int:
    streams = 0
    for seed in seeds:
        plan = drawn(seed, PASSING)
        world = run(monkeypatch, plan)
        for link in world.links:
            whole(link, plan)
            streams += link.links[0]._state.connections
    return streams


def notice_tampering(monkeypatch: pytest.MonkeyPatch, seeds: range) -> Counter[str]:
    seen = Counter[str]()
    for seed in seeds:
        plan = drawn(seed, (*TAMPERING, *PASSING), count=4)
        world = run(monkeypatch, plan)
        seen["tampered"] += world.tamperings
        for link in world.links:
            correct(link, plan)
            if link.links[0].alive and link.links[1].alive:
                whole(link, plan)
                seen["whole"] += 1
            else:
                ended(link, 0, plan)
                ended(link, 1, plan)
                seen["ended"] += 1
    return seen


def lose_killed_nodes(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    for seed in seeds:
        plan = drawn(seed, (FaultKind.KILL, *PASSING), count=3)
        world = run(monkeypatch, plan)
        for link in world.links:
            correct(link, plan)
            survivors = [side for side in (0, 1) if link.nodes[side] not in world.killed]
            if len(survivors) == 2:
                whole(link, plan)
            for side in survivors if len(survivors) == 1 else ():
                ended(link, side, plan)


def test_outages_stops_and_delays_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = survive_outages(monkeypatch, range(100))
    assert streams > 300, "connections were lost and replaced"


def test_what_a_broken_machine_changes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = notice_tampering(monkeypatch, range(100))
    assert seen["tampered"] > 100
    assert min(seen["ended"], seen["whole"]) > 20, seen


def test_a_killed_neighbour_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    lose_killed_nodes(monkeypatch, range(60))


def test_a_run_is_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(seed: int) -> list[object]:
        world = run(monkeypatch, drawn(seed, (*TAMPERING, *PASSING)))
        return [(box.received, box.lost) for link in world.links for box in link.boxes]

    assert trace(3) == trace(3)
    assert len({str(trace(seed)) for seed in range(5)}) > 1


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_thousands_of_plans(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    seeds = range(1000 * (part + 1), 1000 * (part + 1) + 300)
    survive_outages(monkeypatch, seeds)
    notice_tampering(monkeypatch, seeds)
    lose_killed_nodes(monkeypatch, seeds)
