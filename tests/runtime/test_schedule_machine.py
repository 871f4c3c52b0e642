"""The schedule of a node: scripted orders for each rule, random orders for what always holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_cases import Phase, Pipeline

from ravnest.runtime.schedule.events import (
    Action,
    Admit,
    BackwardArrived,
    ClipNormArrived,
    CombineNorms,
    CompleteGradients,
    Done,
    Event,
    Fail,
    Finished,
    ForwardArrived,
    FreeVersion,
    NormsArrived,
    PhaseBegun,
    PhaseEnded,
    ResultArrived,
    RunBackward,
    RunForward,
    RunPhaseEnd,
    RunStep,
    RunWeights,
    SendBackward,
    SendClipNorm,
    SendForward,
    SendNorms,
    SendPhaseBegin,
    SendPhaseEnd,
    SendResult,
    SendShared,
    SharedArrived,
    WeightsInterrupted,
    WindowSet,
)
from ravnest.runtime.schedule.machine import READ_AHEAD, ScheduleMachine
from ravnest.runtime.schedule.notation import format_runs
from ravnest.runtime.schedule.progress import StageTraits
from ravnest.types import MicrobatchId, Schedule


def B(index: int, phase: int = 0) -> MicrobatchId:  # noqa: N802 - short, as it prints
    return MicrobatchId(phase, index)


def machine(
    position: int,
    count: int = 3,
    *,
    schedule: Schedule = "async",
    window: int = 4,
    begun: bool = True,
    **traits: Any,
) -> ScheduleMachine:
    made = ScheduleMachine(
        position, count, schedule=schedule, window=window, traits=StageTraits(**traits)
    )
    if begun:
        made.handle(PhaseBegun(0, True), 0.0)
    return made


def arrivals(*numbers: int, update_size: int, phase: int = 0) -> list[Event]:
    """Return arrivals of micro-batches; each update is one batch of ``update_size`` micro-batches."""
    ends = [(number + 1) % update_size == 0 for number in numbers]
    return [
        ForwardArrived(B(number, phase), ends_batch=end, ends_update=end)
        for number, end in zip(numbers, ends, strict=True)
    ]


def backwards(*numbers: int, phase: int = 0) -> list[Event]:
    return [BackwardArrived(B(number, phase)) for number in numbers]


def feed(to: ScheduleMachine, *events: Event) -> list[Action]:
    """Return the actions that follow from the last event."""
    actions: list[Action] = []
    for event in events:
        actions = to.handle(event, 0.0)
        assert not any(isinstance(action, Fail) for action in actions), actions
    return actions


def run(to: ScheduleMachine, *events: Event) -> list[Action]:
    """Return all actions that follow from the events; every computation is done at once."""
    actions: list[Action] = []
    for event in events:
        more = to.handle(event, 0.0)
        actions += more
        while more and isinstance(
            more[-1], RunForward | RunBackward | RunWeights | RunStep | RunPhaseEnd
        ):
            more = to.handle(Done(), 0.0)
            actions += more
    return actions


def failure(to: ScheduleMachine, event: Event) -> str:
    """Return the reason for which an event ends the run."""
    (action,) = to.handle(event, 0.0)
    assert isinstance(action, Fail)
    return action.reason


def _backward(actions: list[Action]) -> RunBackward:
    (backward,) = (action for action in actions if isinstance(action, RunBackward))
    return backward


class TestPasses:
    def test_a_stem_forwards_what_arrives_and_sends_it_on(self) -> None:
        stem = machine(1)
        assert feed(stem, ForwardArrived(B(0))) == [RunForward(B(0), version=0, trains=True, update=0)]
        assert feed(stem, Done()) == [SendForward(B(0))]

    def test_one_computation_at_a_time(self) -> None:
        stem = machine(1)
        feed(stem, ForwardArrived(B(0)))
        assert feed(stem, ForwardArrived(B(1))) == []
        assert feed(stem, Done()) == [SendForward(B(0)), RunForward(B(1), 0, True, update=1)]

    def test_gradients_leave_before_the_update(self) -> None:
        stem = machine(1)
        run(stem, ForwardArrived(B(0)))
        assert feed(stem, BackwardArrived(B(0))) == [RunBackward(B(0), 0)]
        assert feed(stem, Done()) == [SendBackward(B(0)), RunStep(update=0, batches=1)]
        assert feed(stem, Done()) == [FreeVersion(0)]

    def test_an_update_goes_before_waiting_passes(self) -> None:
        stem = machine(1)
        run(stem, ForwardArrived(B(0)))
        feed(stem, BackwardArrived(B(0)), ForwardArrived(B(1)))
        assert feed(stem, Done())[-1] == RunStep(0, 1)
        assert feed(stem, Done()) == [FreeVersion(0), RunForward(B(1), 1, True, update=1)]

    def test_a_backward_goes_before_a_forward_but_they_take_turns(self) -> None:
        stem = machine(1)
        run(stem, *arrivals(0, 1, 2, update_size=9))
        feed(stem, *arrivals(3, 4, update_size=9), *backwards(0, 1))
        order = [feed(stem, Done()) for _ in range(4)]
        assert format_runs(action for actions in order for action in actions) == "0B 4F 1B"

    def test_the_leaf_turns_round_at_once(self) -> None:
        leaf = machine(2)
        feed(leaf, ForwardArrived(B(0)))
        feed(leaf, ForwardArrived(B(1)))
        assert feed(leaf, Done()) == [RunBackward(B(0), 0)]
        assert feed(leaf, Done()) == [SendBackward(B(0)), RunStep(0, 1)]
        assert feed(leaf, Done()) == [FreeVersion(0), RunForward(B(1), 1, True, update=1)]

    def test_a_node_alone_is_root_and_leaf(self) -> None:
        alone = machine(0, 1)
        actions = run(alone, ForwardArrived(B(0)), PhaseEnded(0, 1))
        assert format_runs(actions) == "0F 0B s0 e0"
        assert Finished(B(0)) in actions
        assert not any(
            isinstance(action, SendPhaseBegin | SendForward | SendBackward) for action in actions
        )

    def test_a_node_alone_validates(self) -> None:
        alone = machine(0, 1, begun=False)
        actions = run(alone, PhaseBegun(0, False), ForwardArrived(B(0)), PhaseEnded(0, 1))
        assert actions == [
            Admit(4 + READ_AHEAD),
            RunForward(B(0), 0, trains=False, update=0),
            Finished(B(0)),
            Admit(5 + READ_AHEAD),
            RunPhaseEnd(0, trains=False),
        ]


class TestUpdates:
    def test_an_update_takes_the_micro_batches_up_to_its_mark(self) -> None:
        leaf = machine(2)
        actions = run(leaf, *arrivals(*range(6), update_size=3))
        assert format_runs(actions) == "0F 0B 1F 1B 2F 2B s0 3F 3B 4F 4B 5F 5B s1"
        assert [a.batches for a in actions if isinstance(a, RunStep)] == [1, 1]

    def test_the_count_of_an_update_is_that_of_whole_batches(self) -> None:
        """Two batches, of three and of one micro-batch, are one update."""
        leaf = machine(2)
        actions = run(
            leaf,
            ForwardArrived(B(0), ends_batch=False, ends_update=False),
            ForwardArrived(B(1), ends_batch=False, ends_update=False),
            ForwardArrived(B(2), ends_batch=True, ends_update=False),
            ForwardArrived(B(3), ends_batch=True, ends_update=True),
        )
        assert format_runs(actions) == "0F 0B 1F 1B 2F 2B 3F 3B s0"
        assert RunStep(0, batches=2) in actions

    def test_the_rest_of_a_phase_is_an_update_with_its_own_count(self) -> None:
        leaf = machine(2)
        marks = (False, False, True, False)
        run(leaf, *(ForwardArrived(B(i), ends_update=ends) for i, ends in enumerate(marks)))
        assert run(leaf, PhaseEnded(0, 4)) == [
            RunStep(update=1, batches=1),
            FreeVersion(1),
            RunPhaseEnd(0, trains=True),
        ]

    def test_the_end_of_a_phase_may_come_before_the_last_gradients(self) -> None:
        stem = machine(1)
        run(stem, ForwardArrived(B(0), ends_update=False), PhaseEnded(0, 1))
        assert format_runs(run(stem, BackwardArrived(B(0)))) == "0B s0 e0"

    def test_the_end_after_a_complete_update_adds_none(self) -> None:
        leaf = machine(2)
        run(leaf, *arrivals(0, 1, update_size=2))
        assert format_runs(run(leaf, PhaseEnded(0, 2))) == "e0"

    def test_updates_do_not_reach_over_the_end_of_a_phase(self) -> None:
        leaf = machine(2)
        run(leaf, *arrivals(0, update_size=2), PhaseEnded(0, 1), PhaseBegun(1, True))
        assert format_runs(run(leaf, *arrivals(0, 1, update_size=2, phase=1))) == "0F 0B 1F 1B s1"


class TestDelay:
    @pytest.mark.parametrize("position", [0, 1])
    def test_sync_starts_an_update_after_the_one_before(self, position: int) -> None:
        node = machine(position, schedule="sync", window=8)
        assert format_runs(run(node, *arrivals(*range(5), update_size=2))) == "0F 1F"
        assert format_runs(run(node, *backwards(0))) == "0B"
        assert format_runs(run(node, *backwards(1))) == "1B s0 2F 3F"

    def test_sync_needs_no_end_of_the_update_for_its_own_forwards(self) -> None:
        root = machine(0, schedule="sync")
        assert format_runs(run(root, *arrivals(0, 1, update_size=9))) == "0F 1F"

    @pytest.mark.parametrize("position", [0, 1])
    def test_async_is_one_update_ahead_at_most(self, position: int) -> None:
        node = machine(position, window=9)
        actions = run(node, *arrivals(*range(6), update_size=2))
        assert format_runs(actions) == "0F 1F 2F 3F"
        assert [a.update for a in actions if isinstance(a, RunForward)] == [0, 0, 1, 1]
        assert {a.version for a in actions if isinstance(a, RunForward)} == {0}
        assert format_runs(run(node, *backwards(0, 1))) == "0B 1B s0 4F 5F"

    def test_the_leaf_is_never_ahead(self) -> None:
        leaf = machine(2, clip=True)
        assert format_runs(run(leaf, *arrivals(0, 1, update_size=1))) == "0F 0B", "no clip norm yet"
        assert format_runs(run(leaf, ClipNormArrived(0))) == "s0 1F 1B"

    def test_backwards_of_the_next_update_wait_for_the_step(self) -> None:
        stem = machine(1, clip=True)
        run(stem, *arrivals(0, 1, update_size=1))
        assert format_runs(run(stem, *backwards(0, 1))) == "0B"
        actions = run(stem, NormsArrived(0), ClipNormArrived(0))
        assert format_runs(actions) == "s0 1B"
        assert _backward(actions).version == 0, "the version that its forward used"

    def test_a_backward_uses_the_version_of_its_forward(self) -> None:
        stem = machine(1)
        run(stem, ForwardArrived(B(0)), ForwardArrived(B(1)))
        first = run(stem, BackwardArrived(B(0)))
        assert FreeVersion(0) not in first, "micro-batch 1 still uses it"
        run(stem, ForwardArrived(B(2)))
        second = run(stem, BackwardArrived(B(1)))
        assert _backward(second).version == 0
        assert second.index(SendBackward(B(1))) < second.index(FreeVersion(0))
        assert _backward(run(stem, BackwardArrived(B(2)))).version == 1

    def test_a_version_that_nothing_uses_goes_with_the_update(self) -> None:
        leaf = machine(2)
        actions = run(leaf, ForwardArrived(B(0)), ForwardArrived(B(1)))
        assert [a for a in actions if isinstance(a, FreeVersion)] == [FreeVersion(0), FreeVersion(1)]


class TestDeferredWeightGradients:
    def test_they_run_after_the_gradients_of_inputs_are_sent(self) -> None:
        stem = machine(1, defers=True)
        run(stem, *arrivals(0, update_size=1))
        assert feed(stem, *backwards(0)) == [RunBackward(B(0), 0)]
        assert feed(stem, Done()) == [SendBackward(B(0)), RunWeights(B(0), 0)]
        assert feed(stem, Done()) == [RunStep(0, 1)]

    def test_they_run_when_the_stage_would_wait(self) -> None:
        stem = machine(1, defers=True)
        run(stem, *arrivals(0, 1, 2, update_size=4))
        feed(stem, *backwards(0), *arrivals(3, update_size=4), *backwards(1))
        order = [feed(stem, Done()) for _ in range(5)]
        assert format_runs(a for actions in order for a in actions) == "3F 1B 0W 1W"

    def test_they_let_others_pass_if_something_arrives(self) -> None:
        stem = machine(1, defers=True)
        run(stem, *arrivals(0, 1, update_size=3))
        feed(stem, *backwards(0))
        assert feed(stem, Done())[-1] == RunWeights(B(0), 0)
        assert feed(stem, *backwards(1)) == []
        assert feed(stem, WeightsInterrupted()) == [RunBackward(B(1), 0)]
        assert feed(stem, Done())[-1] == RunWeights(B(0), 0), "the older ones go on"
        assert feed(stem, WeightsInterrupted()) == [RunWeights(B(0), 0)], "nothing else is to be done"
        assert feed(stem, Done()) == [RunWeights(B(1), 0)]

    def test_nothing_else_can_be_interrupted(self) -> None:
        leaf = machine(2)
        assert feed(leaf, ForwardArrived(B(0)))[-1] == RunForward(B(0), 0, True, update=0)
        assert "interrupted" in failure(leaf, WeightsInterrupted())

    def test_a_step_waits_for_them(self) -> None:
        leaf = machine(2, defers=True)
        feed(leaf, *arrivals(0, 1, update_size=2))
        actions = [action for _ in range(6) for action in feed(leaf, Done())]
        assert format_runs(actions) == "0B 1F 1B 0W 1W s0"

    def test_so_does_the_exchange_of_norms_and_shared_gradients(self) -> None:
        leaf = machine(2, defers=True, clip=True, sends_shared=True)
        feed(leaf, ForwardArrived(B(0)))
        assert feed(leaf, Done(), Done()) == [SendBackward(B(0)), RunWeights(B(0), 0)]
        assert feed(leaf, Done()) == [SendShared(0), SendNorms(0)]

    def test_a_limit_on_activations_brings_them_forward(self) -> None:
        def order(limit: int | None) -> str:
            leaf = machine(2, defers=True, activation_limit=limit)
            feed(leaf, *arrivals(*range(3), update_size=3))
            return format_runs([action for _ in range(9) for action in feed(leaf, Done())])

        assert order(None) == "0B 1F 1B 2F 2B 0W 1W 2W s0"
        assert order(2) == "0B 1F 1B 0W 2F 2B 1W 2W s0"
        assert order(1) == "0B 0W 1F 1B 1W 2F 2B 2W s0"

    def test_a_version_is_kept_until_they_are_done(self) -> None:
        """The weights of version 0 are overtaken; micro-batch 1 needs them until its last gradient."""
        stem = machine(1, defers=True)
        run(stem, *arrivals(0, 1, update_size=1))
        actions = run(stem, *backwards(0, 1))
        assert format_runs(actions) == "0B 0W s0 1B 1W s1"
        assert actions.index(RunWeights(B(1), 0)) < actions.index(FreeVersion(0))

    def test_the_root_frees_the_place_of_a_micro_batch_before_them(self) -> None:
        root = machine(0, defers=True, window=1)
        run(root, *arrivals(0, 1, update_size=2))
        assert format_runs(run(root, *backwards(0))) == "0B 1F 0W"


class TestSharedGradients:
    def test_the_owner_adds_them_before_its_step(self) -> None:
        root = machine(0, expects_shared=True)
        run(root, *arrivals(0, update_size=1))
        assert format_runs(run(root, *backwards(0))) == "0B"
        assert feed(root, SharedArrived(0)) == [CompleteGradients(0), RunStep(0, 1)]

    def test_they_may_come_before_the_gradients_of_this_stage(self) -> None:
        root = machine(0, expects_shared=True)
        run(root, *arrivals(0, update_size=1))
        assert run(root, SharedArrived(0)) == []
        actions = run(root, *backwards(0))
        assert actions.index(CompleteGradients(0)) < actions.index(RunStep(0, 1))

    def test_they_may_belong_to_a_later_update(self) -> None:
        root = machine(0, expects_shared=True)
        run(root, *arrivals(0, 1, update_size=1))
        assert run(root, SharedArrived(0), SharedArrived(1)) == []
        actions = run(root, *backwards(0))
        assert [a for a in actions if isinstance(a, CompleteGradients)] == [CompleteGradients(0)]
        assert format_runs(actions) == "0B s0"
        assert CompleteGradients(1) in run(root, *backwards(1))

    def test_a_stage_between_adds_and_sends_them_on(self) -> None:
        stem = machine(1, expects_shared=True, sends_shared=True, clip=True)
        run(stem, *arrivals(0, update_size=1), *backwards(0))
        assert run(stem, NormsArrived(0)) == []
        assert run(stem, SharedArrived(0)) == [CompleteGradients(0), SendShared(0), SendNorms(0)]


class TestClip:
    def test_norms_travel_from_the_leaf_and_the_clip_norm_from_the_root(self) -> None:
        leaf, stem, root = (machine(position, clip=True) for position in (2, 1, 0))
        for node in (root, stem):
            run(node, *arrivals(0, update_size=1), *backwards(0))
        assert run(leaf, *arrivals(0, update_size=1))[-1] == SendNorms(0)
        assert run(stem, NormsArrived(0)) == [SendNorms(0)]
        assert run(root, NormsArrived(0)) == [CombineNorms(0, batches=1)]
        assert feed(root, ClipNormArrived(0)) == [SendClipNorm(0), RunStep(0, 1)]
        assert feed(stem, ClipNormArrived(0)) == [SendClipNorm(0), RunStep(0, 1)]
        assert feed(leaf, ClipNormArrived(0)) == [RunStep(0, 1)]

    def test_the_norms_of_later_stages_may_come_first(self) -> None:
        stem = machine(1, clip=True)
        run(stem, *arrivals(0, update_size=1))
        assert run(stem, NormsArrived(0)) == []
        assert run(stem, *backwards(0))[-1] == SendNorms(0)

    def test_they_may_belong_to_a_later_update(self) -> None:
        stem = machine(1, clip=True)
        run(stem, *arrivals(0, 1, update_size=1), *backwards(0))
        assert run(stem, NormsArrived(0), NormsArrived(1)) == [SendNorms(0)]
        actions = run(stem, ClipNormArrived(0), *backwards(1))
        assert actions[-1] == SendNorms(1)

    def test_the_rest_of_a_phase_is_combined_too_and_once(self) -> None:
        root = machine(0, 2, schedule="sync", clip=True)
        run(root, ForwardArrived(B(0), ends_update=False), *backwards(0))
        assert run(root, PhaseEnded(0, 1), NormsArrived(0)) == [SendPhaseEnd(0, 1), CombineNorms(0, 1)]
        assert run(root, WindowSet(2)) == []
        assert format_runs(run(root, ClipNormArrived(0))) == "s0 e0"

    @pytest.mark.parametrize(("schedule", "first"), [("sync", ""), ("async", "1F")])
    def test_sync_forwards_wait_for_the_clip_norm(self, schedule: Schedule, first: str) -> None:
        stem = machine(1, schedule=schedule, clip=True)
        run(stem, *arrivals(0, update_size=1), *backwards(0), NormsArrived(0))
        assert format_runs(run(stem, *arrivals(1, update_size=1))) == first
        assert format_runs(run(stem, ClipNormArrived(0))).startswith("s0")

    def test_a_node_alone_needs_no_messages(self) -> None:
        alone = machine(0, 1, clip=True)
        assert run(alone, ForwardArrived(B(0)))[-1] == CombineNorms(0, 1)
        assert run(alone, ClipNormArrived(0)) == [RunStep(0, 1), FreeVersion(0)]


class TestPhases:
    def test_begin_and_end_travel_in_order_with_the_forwards(self) -> None:
        stem = machine(1, begun=False)
        assert feed(stem, PhaseBegun(0, True)) == [SendPhaseBegin(0, True)]
        feed(stem, ForwardArrived(B(0)))
        assert feed(stem, PhaseEnded(0, 1)) == []
        assert feed(stem, PhaseBegun(1, False)) == []
        assert feed(stem, Done()) == [SendForward(B(0)), SendPhaseEnd(0, 1), SendPhaseBegin(1, False)]

    @pytest.mark.parametrize(("schedule", "early"), [("sync", ""), ("async", "0F")])
    def test_forwards_of_the_next_epoch_follow_the_same_rule(
        self, schedule: Schedule, early: str
    ) -> None:
        stem = machine(1, schedule=schedule)
        run(stem, ForwardArrived(B(0)), PhaseEnded(0, 1), PhaseBegun(1, True))
        assert format_runs(run(stem, ForwardArrived(B(0, 1)))) == early
        assert format_runs(run(stem, BackwardArrived(B(0)))) in ("0B s0 e0", "0.0B s0 e0 1.0F")

    def test_validation_waits_until_training_is_over_here(self) -> None:
        stem = machine(1, defers=True)
        run(stem, *arrivals(0, update_size=2), PhaseEnded(0, 1), PhaseBegun(1, False))
        assert run(stem, ForwardArrived(B(0, 1))) == []
        actions = run(stem, BackwardArrived(B(0)), PhaseEnded(1, 1))
        assert format_runs(actions) == "0.0B 0.0W s0 e0 1.0V e1"
        assert RunForward(B(0, 1), version=1, trains=False, update=1) in actions

    def test_training_goes_on_after_the_forwards_of_a_validation(self) -> None:
        stem = machine(1, begun=False)
        run(stem, PhaseBegun(0, False), ForwardArrived(B(0)), PhaseEnded(0, 1), PhaseBegun(1, True))
        assert format_runs(run(stem, ForwardArrived(B(0, 1)))) == "0F"
        assert run(stem, ResultArrived(B(0))) == [SendResult(B(0))]

    def test_validation_between_epochs_counts_no_update(self) -> None:
        leaf = machine(2)
        run(leaf, *arrivals(0, update_size=1), PhaseEnded(0, 1), PhaseBegun(1, False))
        assert format_runs(run(leaf, ForwardArrived(B(0, 1)), PhaseEnded(1, 1))) == "0V e1"
        actions = run(leaf, PhaseBegun(2, True), *arrivals(0, update_size=1, phase=2))
        assert format_runs(actions) == "0F 0B s1"

    def test_the_leaf_ends_a_validation_after_its_last_result(self) -> None:
        leaf = machine(2, begun=False)
        feed(leaf, PhaseBegun(0, False))
        feed(leaf, ForwardArrived(B(0)))
        assert feed(leaf, PhaseEnded(0, 1)) == []
        assert feed(leaf, Done()) == [SendResult(B(0)), RunPhaseEnd(0, trains=False)]

    def test_the_root_ends_a_validation_when_the_last_result_is_back(self) -> None:
        root = machine(0, begun=False)
        assert "e0" not in format_runs(
            run(root, PhaseBegun(0, False), ForwardArrived(B(0)), PhaseEnded(0, 1))
        )
        assert run(root, ResultArrived(B(0)))[-1] == RunPhaseEnd(0, trains=False)

    @pytest.mark.parametrize("position", [0, 1, 2])
    @pytest.mark.parametrize("trains", [True, False])
    def test_a_phase_may_be_empty(self, position: int, trains: bool) -> None:
        node = machine(position, begun=False)
        assert format_runs(run(node, PhaseBegun(0, trains), PhaseEnded(0, 0))) == "e0"


class TestRoot:
    def test_the_first_phase_admits_the_window_and_some_ahead(self) -> None:
        root = machine(0, begun=False, window=3)
        assert feed(root, PhaseBegun(0, True)) == [SendPhaseBegin(0, True), Admit(3 + READ_AHEAD)]

    def test_a_window_set_first_admits(self) -> None:
        assert feed(machine(0, begun=False, window=3), WindowSet(5)) == [Admit(5 + READ_AHEAD)]

    def test_a_batch_may_have_more_micro_batches_than_admitted(self) -> None:
        """The user submits whole batches; the window holds back what is too much."""
        root = machine(0, window=2)
        assert format_runs(run(root, *arrivals(*range(8), update_size=8))) == "0F 1F"

    def test_no_more_in_flight_than_the_window(self) -> None:
        root = machine(0, window=2)
        assert format_runs(run(root, *arrivals(*range(4), update_size=4))) == "0F 1F"
        assert run(root, BackwardArrived(B(0)))[1:3] == [Finished(B(0)), Admit(3 + READ_AHEAD)]
        assert root.in_flight == 2

    def test_the_window_grows_at_once(self) -> None:
        root = machine(0, window=1)
        run(root, *arrivals(0, 1, update_size=2))
        assert feed(root, WindowSet(2)) == [Admit(2 + READ_AHEAD), RunForward(B(1), 0, True, update=0)]

    def test_a_window_that_shrinks_takes_nothing_back(self) -> None:
        root = machine(0, window=3)
        run(root, *arrivals(*range(5), update_size=5))
        assert run(root, WindowSet(1)) == []
        first = run(root, BackwardArrived(B(0)), BackwardArrived(B(1)))
        assert format_runs(first) == "0B 1B"
        assert not any(isinstance(action, Admit) for action in first)
        assert format_runs(run(root, BackwardArrived(B(2)))) == "2B 3F"

    def test_sync_keeps_to_the_window_within_an_update(self) -> None:
        root = machine(0, schedule="sync", window=1)
        assert format_runs(run(root, *arrivals(0, 1, update_size=3))) == "0F"
        assert format_runs(run(root, *backwards(0))) == "0B 1F"

    def test_results_free_places_too(self) -> None:
        root = machine(0, begun=False, window=1)
        run(root, PhaseBegun(0, False), ForwardArrived(B(0)), ForwardArrived(B(1)))
        assert run(root, ResultArrived(B(0)))[:3] == [
            Finished(B(0)),
            Admit(2 + READ_AHEAD),
            RunForward(B(1), 0, trains=False, update=0),
        ]


class TestActivationLimit:
    def test_a_stage_keeps_activations_of_no_more_than_it_may(self) -> None:
        stem = machine(1, activation_limit=2)
        assert format_runs(run(stem, *arrivals(*range(4), update_size=4))) == "0F 1F"
        assert format_runs(run(stem, *backwards(0))) == "0B 2F"

    def test_without_gradients_there_is_nothing_to_keep(self) -> None:
        stem = machine(1, activation_limit=1, begun=False)
        run(stem, PhaseBegun(0, False))
        assert format_runs(run(stem, *arrivals(*range(3), update_size=1))) == "0V 1V 2V"


class TestFailures:
    @pytest.mark.parametrize(
        ("position", "before", "event", "words"),
        [
            (
                1,
                [],
                ForwardArrived(B(1)),
                "forward of micro-batch 1 of phase 0 arrived, expected micro-batch 0",
            ),
            (
                1,
                [ForwardArrived(B(0))],
                ForwardArrived(B(0)),
                "micro-batch 0 of phase 0 arrived, expected micro-batch 1",
            ),
            (1, [], ForwardArrived(B(0, 1)), "but phase 1 has not begun"),
            (1, [PhaseEnded(0, 0)], ForwardArrived(B(0)), "but phase 0 has already ended"),
            (1, [], BackwardArrived(B(3)), "backward of micro-batch 3 of phase 0 arrived, but no"),
            (
                1,
                [ForwardArrived(B(0)), ForwardArrived(B(1))],
                BackwardArrived(B(1)),
                "backward of micro-batch 1 of phase 0 arrived, expected micro-batch 0 of phase 0",
            ),
            (1, [ForwardArrived(B(0))], ResultArrived(B(0)), "but phase 0 is a training phase"),
            (2, [ForwardArrived(B(0))], BackwardArrived(B(0)), "no micro-batch was sent"),
            (1, [], Done(), "none was requested"),
            (1, [], PhaseBegun(1, True), "phase 1 began before phase 0 had ended"),
            (1, [PhaseEnded(0, 0)], PhaseBegun(0, True), "phase 0 began after phase 0"),
            (1, [], PhaseEnded(0, 2), "phase 0 ended with 2 micro-batches, but 0 have arrived"),
            (1, [], PhaseEnded(1, 0), "but phase 1 has not begun"),
            (1, [ForwardArrived(B(0))], ClipNormArrived(0), "none are expected"),
            (1, [ForwardArrived(B(0))], NormsArrived(0), "norms of update 0 arrived, but none are"),
            (1, [ForwardArrived(B(0))], SharedArrived(0), "shared gradients of update 0 arrived, but"),
            (0, [], WindowSet(0), "a window of 0"),
        ],
    )
    def test_a_violation_of_the_protocol_is_named(
        self, position: int, before: Sequence[Event], event: Event, words: str
    ) -> None:
        node = machine(position)
        run(node, *before)
        assert words in failure(node, event)

    @pytest.mark.parametrize("event", [SharedArrived(1), NormsArrived(1), ClipNormArrived(1)])
    def test_values_of_an_unknown_update_fail(self, event: Event) -> None:
        stem = machine(1, clip=True, expects_shared=True)
        run(stem, *arrivals(0, update_size=1))
        assert "of update 1 arrived, but update 0 is next" in failure(stem, event)

    @pytest.mark.parametrize("event", [SharedArrived(0), NormsArrived(0)])
    def test_values_of_an_update_that_is_done_or_of_the_same_twice_fail(self, event: Event) -> None:
        stem = machine(1, clip=True, expects_shared=True)
        run(stem, *arrivals(0, update_size=1), event)
        assert "a second time" in failure(stem, event)

        done = machine(1, expects_shared=True)
        run(done, *arrivals(0, update_size=1), *backwards(0), SharedArrived(0))
        assert "but update 1 is next" in failure(done, SharedArrived(0))

    def test_norms_at_the_leaf_fail(self) -> None:
        leaf = machine(2, clip=True)
        run(leaf, ForwardArrived(B(0)))
        assert "none are expected" in failure(leaf, NormsArrived(0))

    def test_a_clip_norm_before_the_gradients_or_twice_fails(self) -> None:
        stem = machine(1, clip=True)
        run(stem, *arrivals(0, update_size=1))
        assert "before all its gradients" in failure(stem, ClipNormArrived(0))

        twice = machine(1, clip=True)
        run(twice, *arrivals(0, update_size=1), *backwards(0))
        feed(twice, NormsArrived(0), ClipNormArrived(0))
        assert "the clip norm of update 0 arrived" in failure(twice, ClipNormArrived(0))

    def test_it_shows_the_node_and_its_last_computations(self) -> None:
        stem = machine(1)
        run(stem, ForwardArrived(B(0)), ForwardArrived(B(1)), BackwardArrived(B(0)))
        reason = failure(stem, Done())
        assert reason.startswith("Stem (stage 1): ")
        assert reason.endswith("(last run here: 0F 1F 0B s0)")

    def test_after_a_failure_nothing_is_done(self) -> None:
        stem = machine(1)
        stem.handle(Done(), 0.0)
        assert stem.handle(ForwardArrived(B(0)), 0.0) == []


def test_a_delay_that_the_plan_does_not_have_makes_room_for_two_batches() -> None:
    root = machine(0, schedule="sync", window=1, activation_limit=1, begun=False)
    root.allow_delay()
    begun = feed(root, PhaseBegun(0, True))
    assert begun[-1] == Admit(2 + READ_AHEAD)
    actions = run(root, *arrivals(0, 1, 2, update_size=1))
    assert [each.microbatch.index for each in actions if isinstance(each, RunForward)] == [0, 1]
    stem = machine(1, schedule="sync", window=1, activation_limit=1, begun=False)
    stem.allow_delay()
    feed(stem, PhaseBegun(0, True))
    actions = run(stem, *arrivals(0, 1, 2, update_size=1))
    assert [each.microbatch.index for each in actions if isinstance(each, RunForward)] == [0, 1]
    leaf = machine(2, schedule="sync", begun=False)
    leaf.allow_delay()
    assert leaf.max_delay == 0


def test_a_schedule_prints_with_phases_only_where_needed() -> None:
    one = [
        RunForward(B(0), 0, True, 0),
        Finished(B(0)),
        RunBackward(B(0), 0),
        RunWeights(B(0), 0),
        RunStep(0, 1),
    ]
    assert format_runs(one) == "0F 0B 0W s0"
    assert (
        format_runs([*one, RunForward(B(0, 1), 0, False, 1), RunPhaseEnd(1, False)])
        == "0.0F 0.0B 0.0W s0 1.0V e1"
    )


# What always holds


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    window = st.integers(1, 6)
    count = draw(st.integers(1, 4))
    users = draw(st.sets(st.integers(0, count - 1)))
    return Pipeline(
        count=count,
        phases=tuple(
            draw(st.lists(st.builds(Phase, st.booleans(), st.integers(0, 5)), min_size=1, max_size=4))
        ),
        schedule=draw(st.sampled_from(["async", "sync"])),
        window=draw(window),
        parts=draw(st.integers(1, 3)),
        update_frequency=draw(st.integers(1, 3)),
        clip=draw(st.booleans()),
        defers=draw(st.booleans()),
        users=tuple(sorted(users)) if len(users) > 1 else (),
        windows=tuple(draw(st.lists(window, max_size=3))),
        activation_limits=tuple(draw(st.lists(st.none() | st.integers(1, 3), max_size=4))),
        interruptions=draw(st.integers(0, 2)),
    )


@settings(max_examples=150, deadline=None)
@given(pipelines(), st.data())
def test_every_order_ends_and_loses_nothing(pipeline: Pipeline, data: st.DataObject) -> None:
    pipeline.run(lambda ready: data.draw(st.sampled_from(ready)))
    each = [pipeline.microbatches(number) for number in range(len(pipeline.phases))]
    every = [microbatch for phase in each for microbatch in phase]
    trained = [m for m in every if pipeline.phases[m.phase].trains]

    assert pipeline.finished() == every
    assert all(node.idle for node in pipeline.machines)
    assert pipeline.peak <= max(pipeline.window, *pipeline.windows, 1)
    for position, log in enumerate(pipeline.logs):
        traits = pipeline.traits(position)
        assert [a.microbatch for a in log if isinstance(a, RunForward)] == every
        assert [a.microbatch for a in log if isinstance(a, RunBackward)] == trained
        deferred = [a.microbatch for a in log if isinstance(a, RunWeights)]
        assert deferred == (trained if traits.defers else [])
        assert [a.phase for a in log if isinstance(a, RunPhaseEnd)] == list(range(len(pipeline.phases)))
        if traits.activation_limit is not None:
            assert pipeline.held[position] <= traits.activation_limit
        _check_versions(pipeline, position, log)
        _check_updates(pipeline, position, log)
        _check_phase_order(pipeline, log)


def _check_versions(pipeline: Pipeline, position: int, log: list[Action]) -> None:
    newest, held = 0, {0}
    used: dict[MicrobatchId, int] = {}
    delay = 0 if pipeline.schedule == "sync" or position == pipeline.count - 1 else 1
    for action in log:
        match action:
            case RunForward(microbatch, version, trains, update):
                assert version == newest, "a forward uses the newest weights"
                if trains:
                    used[microbatch] = version
                    assert 0 <= update - version <= delay
            case RunBackward(microbatch, version) | RunWeights(microbatch, version):
                assert version == used[microbatch]
                assert version in held
                assert newest - version <= delay
            case RunStep(update):
                assert update == newest
                newest += 1
                held.add(newest)
                assert len(held) <= 2 + delay
            case FreeVersion(version):
                assert version != newest
                held.remove(version)
        assert not isinstance(action, RunForward) or len(held) <= 1 + delay
    assert held == {newest}


def _check_updates(pipeline: Pipeline, position: int, log: list[Action]) -> None:
    """Check that each step has its batches, and comes after all that it depends on."""
    every, traits = pipeline.update_frequency, pipeline.traits(position)
    counts: list[int] = []
    members: list[set[MicrobatchId]] = []
    for number, phase in enumerate(pipeline.phases):
        if phase.trains:
            counts += [every] * (phase.batches // every)
            counts += [phase.batches % every] * (phase.batches % every > 0)
            size, microbatches = every * pipeline.parts, pipeline.microbatches(number)
            members += [set(microbatches[i : i + size]) for i in range(0, len(microbatches), size)]
    assert [a for a in log if isinstance(a, RunStep)] == [RunStep(u, c) for u, c in enumerate(counts)]
    complete: set[MicrobatchId] = set()
    before: list[Action] = []
    for action in log:
        if isinstance(action, RunWeights if traits.defers else RunBackward):
            complete.add(action.microbatch)
        if isinstance(action, CompleteGradients | SendShared | SendNorms | CombineNorms | RunStep):
            assert members[action.update] <= complete, "all gradients of this stage come first"
        if isinstance(action, RunStep):
            assert (CompleteGradients(action.update) in before) == traits.expects_shared
            assert (SendShared(action.update) in before) == traits.sends_shared
            assert (SendNorms(action.update) in before) == (traits.clip and position > 0)
            assert (CombineNorms(action.update, action.batches) in before) == (
                traits.clip and position == 0
            )
        before.append(action)
    exchanged = [a for a in log if isinstance(a, CompleteGradients | SendShared | SendNorms)]
    assert len(set(exchanged)) == len(exchanged), "each is done once per update"


def _check_phase_order(pipeline: Pipeline, log: list[Action]) -> None:
    over: set[int] = set()
    for action in log:
        match action:
            case RunPhaseEnd(phase):
                over.add(phase)
            case RunForward(microbatch, _, False):
                earlier = {p for p in range(microbatch.phase) if pipeline.phases[p].trains}
                assert earlier <= over, "validation uses the weights that the phases before it made"


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.integers(0, 2**32))
def test_async_with_a_window_of_one_and_updates_of_one_is_sync(pipeline: Pipeline, seed: int) -> None:
    def scheduled(schedule: Schedule) -> list[str]:
        made = Pipeline(pipeline.count, pipeline.phases, schedule, window=1)
        return [format_runs(log) for log in made.run(Random(seed).choice).logs]

    assert scheduled("async") == scheduled("sync")


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.integers(0, 2**32))
def test_sync_computes_the_same_in_any_order(pipeline: Pipeline, seed: int) -> None:
    """The update of a micro-batch and the version it ran on do not depend on timing."""

    def essence(made: Pipeline) -> list[Counter[Action]]:
        runs = RunForward | RunBackward | RunWeights | RunStep | RunPhaseEnd
        return [Counter(a for a in log if isinstance(a, runs)) for log in made.logs]

    def fresh() -> Pipeline:
        return Pipeline(
            pipeline.count,
            pipeline.phases,
            "sync",
            pipeline.window,
            pipeline.parts,
            pipeline.update_frequency,
            pipeline.clip,
            pipeline.defers,
            pipeline.users,
            interruptions=pipeline.interruptions,
        )

    assert essence(fresh().run(Random(seed).choice)) == essence(fresh().run())


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.integers(0, 2**32))
def test_gradients_are_added_in_the_order_of_the_micro_batches(pipeline: Pipeline, seed: int) -> None:
    """Sums of floating-point numbers depend on the order; that of a stage is always the same."""
    pipeline.run(Random(seed).choice)
    for log in pipeline.logs:
        for kind in (RunBackward, RunWeights):
            order = [action.microbatch for action in log if isinstance(action, kind)]
            assert order == sorted(order, key=lambda m: (m.phase, m.index))
