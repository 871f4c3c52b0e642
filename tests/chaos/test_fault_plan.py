"""Fault plans: drawn from seeds, printed and read back."""

from __future__ import annotations

import pytest
from fault_plan import LASTING, OF_LINKS, SIZED, Fault, FaultKind, FaultPlan, Moment


def drawn(seed: int, **options: object) -> FaultPlan:
    given = {"nodes": range(4), "count": 30, "end": 60.0, "kinds": list(FaultKind)} | options
    return FaultPlan.random(seed, **given)  # type: ignore[arg-type]


def test_a_seed_gives_the_same_plan_again_and_another_seed_another() -> None:
    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in range(100)}) == 100


@pytest.mark.parametrize("in_updates", [False, True])
def test_a_plan_is_read_back_from_its_line(in_updates: bool) -> None:
    for seed in range(200):
        plan = drawn(seed, in_updates=in_updates)
        assert "\n" not in str(plan)
        assert FaultPlan.parse(str(plan)) == plan


def test_the_line_is_readable() -> None:
    line = (
        "seed=7 | kill node_3 @12.5s; partition node_0>node_1 @40.0u for 3.0s; "
        "clock_jump node_2 @1.0s by -3600.0"
    )
    plan = FaultPlan.parse(line)
    assert plan.faults[0] == Fault(FaultKind.KILL, 3, Moment(12.5))
    assert plan.faults[1] == Fault(FaultKind.PARTITION, 0, Moment(40, in_updates=True), 1, 3.0)
    assert plan.faults[2] == Fault(FaultKind.CLOCK_JUMP, 2, Moment(1), size=-3600)
    assert str(plan) == line
    assert FaultPlan.parse("seed=3 | ") == FaultPlan(3, ())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kill node_1 @1s", "begins with 'seed="),
        ("seed=x | ", "begins with 'seed="),
        ("seed=1 | kill node_1", "is not a fault"),
        ("seed=1 | kill node_1 @1s extra", "is not a fault"),
        ("seed=1 | explode node_1 @1s", "explode"),
        ("seed=1 | kill node_1>node_2 @1s", "kill has no second node"),
        ("seed=1 | partition node_1 @1s for 1s", "partition needs a second node"),
        ("seed=1 | partition node_1>node_1 @1s for 1s", "not node_1 twice"),
        ("seed=1 | stop node_1 @1s", "stop needs a duration"),
        ("seed=1 | delay node_1>node_2 @1s for 1s", "delay needs a size"),
        ("seed=1 | kill node_1 @-1s", "negative time"),
    ],
)
def test_what_is_no_plan_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FaultPlan.parse(line)


def test_faults_are_in_order_within_their_bounds_and_of_all_kinds() -> None:
    links = [(0, 1), (1, 2)]
    faults = [
        fault
        for seed in range(50)
        for fault in drawn(seed, start=5.0, end=9.0, links=links, longest=2.0).faults
    ]
    assert {fault.kind for fault in faults} == set(FaultKind)
    for fault in faults:
        assert 5 <= fault.moment.at <= 9
        assert fault.seconds is None or fault.seconds <= 2
        assert (fault.seconds is not None) == (fault.kind in LASTING)
        assert (fault.size is not None) == (fault.kind in SIZED)
        if fault.kind in OF_LINKS:
            assert fault.peer is not None
            assert tuple(sorted((fault.node, fault.peer))) in links
    times = [fault.moment.at for fault in drawn(3).faults]
    assert times == sorted(times)


def test_one_kind_less_leaves_the_times_and_nodes_of_the_others() -> None:
    """Each fault draws the same number of times, whatever its kind."""
    kills = drawn(5, kinds=[FaultKind.KILL])
    stops = drawn(5, kinds=[FaultKind.STOP])
    assert [(f.moment, f.node) for f in kills.faults] == [(f.moment, f.node) for f in stops.faults]
