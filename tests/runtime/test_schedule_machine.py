"""Schedule machine: scripted event orders for each rule, random orders for invariants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_cases import Phase, Pipeline

from ravnest.runtime.schedule.events import (
    Action,
    Admit,
    BackwardArrived,
    ClipNormArrived,
    Done,
    Event,
    Fail,
    Finished,
    ForwardArrived,
    FreeVersion,
    GatherNorms,
    PhaseBegun,
    PhaseEnded,
    ResultArrived,
    RunBackward,
    RunForward,
    RunPhaseEnd,
    RunStep,
    SendBackward,
    SendClipNorm,
    SendForward,
    SendPhaseBegin,
    SendPhaseEnd,
    SendResult,
    WindowSet,
)
from ravnest.runtime.schedule.machine import READ_AHEAD, Schedule, ScheduleMachine, format_runs
from ravnest.types import MicrobatchId


def B(index: int, phase: int = 0) -> MicrobatchId:  # noqa: N802 - short, as it prints
    return MicrobatchId(phase, index)


def machine(
    position: int,
    count: int = 3,
    *,
    schedule: Schedule = "async",
    window: int = 4,
    every: int = 1,
    clip: bool = False,
    begun: bool = True,
) -> ScheduleMachine:
    made = ScheduleMachine(
        position, count, schedule=schedule, window=window, update_frequency=every, clip=clip
    )
    if begun:
        made.handle(PhaseBegun(0, True), 0.0)
    return made


def feed(to: ScheduleMachine, *events: Event) -> list[Action]:
    """Handle the events and return the actions of the last one."""
    actions: list[Action] = []
    for event in events:
        actions = to.handle(event, 0.0)
        assert not any(isinstance(action, Fail) for action in actions), actions
    return actions


def run(to: ScheduleMachine, *events: Event) -> list[Action]:
    """Handle the events, finish every computation at once, and return all actions."""
    actions: list[Action] = []
    for event in events:
        more = to.handle(event, 0.0)
        actions += more
        while more and isinstance(more[-1], RunForward | RunBackward | RunStep | RunPhaseEnd):
            more = to.handle(Done(), 0.0)
            actions += more
    return actions


def _backward(actions: list[Action]) -> RunBackward:
    (backward,) = (action for action in actions if isinstance(action, RunBackward))
    return backward


class TestPasses:
    def test_a_stem_runs_a_forward_and_sends_it_on(self) -> None:
        stem = machine(1)
        assert feed(stem, ForwardArrived(B(0))) == [RunForward(B(0), version=0, trains=True)]
        assert feed(stem, Done()) == [SendForward(B(0))]

    def test_one_computation_at_a_time(self) -> None:
        stem = machine(1)
        feed(stem, ForwardArrived(B(0)))
        assert feed(stem, ForwardArrived(B(1))) == []
        assert feed(stem, Done()) == [SendForward(B(0)), RunForward(B(1), 0, True)]

    def test_gradients_are_sent_before_the_update(self) -> None:
        stem = machine(1)
        run(stem, ForwardArrived(B(0)))
        assert feed(stem, BackwardArrived(B(0))) == [RunBackward(B(0), 0, last_of_update=True)]
        assert feed(stem, Done()) == [SendBackward(B(0)), RunStep(update=0, count=1)]
        assert feed(stem, Done()) == [FreeVersion(0)]

    def test_an_update_runs_before_waiting_passes(self) -> None:
        stem = machine(1)
        run(stem, ForwardArrived(B(0)))
        feed(stem, BackwardArrived(B(0)), ForwardArrived(B(1)))
        assert feed(stem, Done())[-1] == RunStep(0, 1)
        assert feed(stem, Done()) == [FreeVersion(0), RunForward(B(1), 1, True)]

    def test_backwards_and_forwards_alternate(self) -> None:
        stem = machine(1, every=9)
        run(stem, *(ForwardArrived(B(index)) for index in range(3)))
        feed(stem, ForwardArrived(B(3)))
        for event in (ForwardArrived(B(4)), BackwardArrived(B(0)), BackwardArrived(B(1))):
            feed(stem, event)
        order = [feed(stem, Done()) for _ in range(4)]
        assert format_runs(action for actions in order for action in actions) == "0B 4F 1B"

    def test_the_leaf_runs_the_backward_after_the_forward(self) -> None:
        leaf = machine(2)
        feed(leaf, ForwardArrived(B(0)))
        feed(leaf, ForwardArrived(B(1)))
        assert feed(leaf, Done()) == [RunBackward(B(0), 0, last_of_update=True)]
        assert feed(leaf, Done()) == [SendBackward(B(0)), RunStep(0, 1)]
        assert feed(leaf, Done()) == [FreeVersion(0), RunForward(B(1), 1, True)]

    def test_a_single_node_is_root_and_leaf(self) -> None:
        alone = machine(0, 1)
        actions = run(alone, ForwardArrived(B(0)), PhaseEnded(0, 1))
        assert format_runs(actions) == "0F 0B s0 e0"
        assert Finished(B(0)) in actions
        assert not any(
            isinstance(action, SendPhaseBegin | SendForward | SendBackward) for action in actions
        )

    def test_a_single_node_validates(self) -> None:
        alone = machine(0, 1, begun=False)
        actions = run(alone, PhaseBegun(0, False), ForwardArrived(B(0)), PhaseEnded(0, 1))
        assert actions == [
            Admit(4 + READ_AHEAD),
            RunForward(B(0), 0, trains=False),
            Finished(B(0)),
            Admit(5 + READ_AHEAD),
            RunPhaseEnd(0, trains=False),
        ]


class TestVersions:
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

    def test_an_unused_version_is_freed_with_the_update(self) -> None:
        leaf = machine(2)
        actions = run(leaf, ForwardArrived(B(0)), ForwardArrived(B(1)))
        assert [a for a in actions if isinstance(a, FreeVersion)] == [FreeVersion(0), FreeVersion(1)]


class TestUpdates:
    def test_an_update_has_update_frequency_backwards(self) -> None:
        leaf = machine(2, every=3)
        actions = run(leaf, *(ForwardArrived(B(index)) for index in range(6)))
        assert format_runs(actions) == "0F 0B 1F 1B 2F 2B s0 3F 3B 4F 4B 5F 5B s1"
        assert [a.count for a in actions if isinstance(a, RunStep)] == [3, 3]

    def test_remaining_gradients_are_applied_at_the_end_of_the_phase(self) -> None:
        leaf = machine(2, every=3)
        run(leaf, *(ForwardArrived(B(index)) for index in range(4)))
        assert run(leaf, PhaseEnded(0, 4)) == [
            RunStep(update=1, count=1),
            FreeVersion(1),
            RunPhaseEnd(0, trains=True),
        ]

    def test_an_update_does_not_span_two_phases(self) -> None:
        leaf = machine(2, every=2)
        run(leaf, ForwardArrived(B(0)), PhaseEnded(0, 1), PhaseBegun(1, True))
        actions = run(leaf, *(ForwardArrived(B(index, 1)) for index in range(2)))
        assert format_runs(actions) == "0F 0B 1F 1B s1"

    def test_the_backward_that_fills_an_update_is_marked(self) -> None:
        stem = machine(1, every=2)
        run(stem, *(ForwardArrived(B(index)) for index in range(4)))
        lasts = [
            action.last_of_update
            for index in range(4)
            for action in run(stem, BackwardArrived(B(index)))
            if isinstance(action, RunBackward)
        ]
        assert lasts == [False, True, False, True]

    def test_a_backward_that_may_be_the_last_is_marked(self) -> None:
        leaf = machine(2, every=4)
        # The next micro-batch has not arrived: this one may be the last.
        assert run(leaf, ForwardArrived(B(0)))[1] == RunBackward(B(0), 0, last_of_update=True)
        # The next one has arrived: this one is not the last.
        feed(leaf, ForwardArrived(B(1)))
        feed(leaf, ForwardArrived(B(2)))
        assert feed(leaf, Done()) == [RunBackward(B(1), 0, last_of_update=False)]


class TestClip:
    def test_the_root_gathers_norms_when_the_update_is_complete(self) -> None:
        root = machine(0, 2, schedule="sync", every=2, clip=True)
        run(root, ForwardArrived(B(0)), ForwardArrived(B(1)), BackwardArrived(B(0)))
        actions = run(root, BackwardArrived(B(1)))
        assert actions[-1] == GatherNorms(update=0, count=2)
        assert feed(root, ClipNormArrived(0)) == [SendClipNorm(0), RunStep(0, 2)]

    def test_norms_of_the_last_update_of_a_phase_are_gathered_once(self) -> None:
        root = machine(0, 2, schedule="sync", every=2, clip=True)
        assert GatherNorms(0, 1) not in run(root, ForwardArrived(B(0)), BackwardArrived(B(0)))
        assert run(root, PhaseEnded(0, 1)) == [SendPhaseEnd(0, 1), GatherNorms(0, 1)]
        assert run(root, WindowSet(2)) == []
        assert format_runs(run(root, ClipNormArrived(0))) == "s0 e0"

    def test_a_stem_passes_the_clip_norm_on_and_forwards_wait_for_it(self) -> None:
        stem = machine(1, schedule="sync", clip=True)
        run(stem, ForwardArrived(B(0)), BackwardArrived(B(0)))
        assert run(stem, ForwardArrived(B(1))) == []
        assert feed(stem, ClipNormArrived(0)) == [SendClipNorm(0), RunStep(0, 1)]
        assert feed(stem, Done()) == [FreeVersion(0), RunForward(B(1), 1, True)]

    def test_async_does_not_wait_for_a_clip_norm(self) -> None:
        assert RunStep(0, 1) in run(machine(2, clip=True), ForwardArrived(B(0)))


class TestPhases:
    def test_begin_and_end_are_sent_in_order_with_the_forwards(self) -> None:
        stem = machine(1, begun=False)
        assert feed(stem, PhaseBegun(0, True)) == [SendPhaseBegin(0, True)]
        feed(stem, ForwardArrived(B(0)))
        assert feed(stem, PhaseEnded(0, 1)) == []
        assert feed(stem, PhaseBegun(1, False)) == []
        assert feed(stem, Done()) == [SendForward(B(0)), SendPhaseEnd(0, 1), SendPhaseBegin(1, False)]

    def test_forwards_of_the_next_epoch_run_while_gradients_are_in_flight(self) -> None:
        stem = machine(1)
        run(stem, ForwardArrived(B(0)), PhaseEnded(0, 1), PhaseBegun(1, True))
        assert format_runs(run(stem, ForwardArrived(B(0, 1)))) == "0F"
        assert format_runs(run(stem, BackwardArrived(B(0)))) == "0B s0 e0"

    def test_validation_waits_for_the_end_of_training(self) -> None:
        stem = machine(1, every=2)
        run(stem, ForwardArrived(B(0)), PhaseEnded(0, 1), PhaseBegun(1, False))
        assert run(stem, ForwardArrived(B(0, 1))) == []
        actions = run(stem, BackwardArrived(B(0)), PhaseEnded(1, 1))
        assert format_runs(actions) == "0.0B s0 e0 1.0V e1"
        assert RunForward(B(0, 1), version=1, trains=False) in actions

    def test_training_continues_after_the_forwards_of_a_validation(self) -> None:
        stem = machine(1, begun=False)
        run(stem, PhaseBegun(0, False), ForwardArrived(B(0)), PhaseEnded(0, 1), PhaseBegun(1, True))
        assert format_runs(run(stem, ForwardArrived(B(0, 1)))) == "0F"
        assert run(stem, ResultArrived(B(0))) == [SendResult(B(0))]

    def test_the_leaf_ends_a_validation_after_its_last_result(self) -> None:
        leaf = machine(2, begun=False)
        feed(leaf, PhaseBegun(0, False))
        feed(leaf, ForwardArrived(B(0)))
        assert feed(leaf, PhaseEnded(0, 1)) == []
        assert feed(leaf, Done()) == [SendResult(B(0)), RunPhaseEnd(0, trains=False)]

    def test_the_root_ends_a_validation_when_the_last_result_arrives(self) -> None:
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
    def test_the_first_phase_admits_the_window_and_the_read_ahead(self) -> None:
        root = machine(0, begun=False, window=3)
        assert feed(root, PhaseBegun(0, True)) == [SendPhaseBegin(0, True), Admit(3 + READ_AHEAD)]

    def test_setting_the_window_before_a_phase_admits(self) -> None:
        assert feed(machine(0, begun=False, window=3), WindowSet(5)) == [Admit(5 + READ_AHEAD)]

    def test_no_more_in_flight_than_the_window(self) -> None:
        root = machine(0, window=2)
        assert format_runs(run(root, *(ForwardArrived(B(index)) for index in range(4)))) == "0F 1F"
        assert run(root, BackwardArrived(B(0)))[1:3] == [Finished(B(0)), Admit(3 + READ_AHEAD)]
        assert root.in_flight == 2

    def test_the_window_grows_at_once(self) -> None:
        root = machine(0, window=1)
        run(root, ForwardArrived(B(0)), ForwardArrived(B(1)))
        assert feed(root, WindowSet(2)) == [Admit(2 + READ_AHEAD), RunForward(B(1), 0, True)]

    def test_a_smaller_window_does_not_revoke_admissions(self) -> None:
        root = machine(0, window=3)
        run(root, *(ForwardArrived(B(index)) for index in range(5)))
        assert run(root, WindowSet(1)) == []
        first = run(root, BackwardArrived(B(0)), BackwardArrived(B(1)))
        assert format_runs(first) == "0B s0 1B s1"
        assert not any(isinstance(action, Admit) for action in first)
        assert format_runs(run(root, BackwardArrived(B(2)))) == "2B s2 3F"

    def test_sync_waits_for_the_update(self) -> None:
        root = machine(0, schedule="sync", every=2, window=4)
        assert format_runs(run(root, *(ForwardArrived(B(index)) for index in range(4)))) == "0F 1F"
        assert format_runs(run(root, BackwardArrived(B(0)))) == "0B"
        assert format_runs(run(root, BackwardArrived(B(1)))) == "1B s0 2F 3F"

    def test_sync_keeps_to_the_window_within_an_update(self) -> None:
        root = machine(0, schedule="sync", every=3, window=1)
        assert format_runs(run(root, ForwardArrived(B(0)), ForwardArrived(B(1)))) == "0F"
        assert format_runs(run(root, BackwardArrived(B(0)))) == "0B 1F"

    def test_sync_admits_no_more_than_an_update_can_use(self) -> None:
        root = machine(0, begun=False, schedule="sync", every=2, window=8)
        assert Admit(2 + READ_AHEAD) in feed(root, PhaseBegun(0, True))

    def test_results_free_places(self) -> None:
        root = machine(0, begun=False, window=1)
        run(root, PhaseBegun(0, False), ForwardArrived(B(0)), ForwardArrived(B(1)))
        assert run(root, ResultArrived(B(0)))[:3] == [
            Finished(B(0)),
            Admit(2 + READ_AHEAD),
            RunForward(B(1), 0, trains=False),
        ]


class TestActivationLimit:
    def test_a_stage_respects_its_limit(self) -> None:
        stem = ScheduleMachine(1, 3, schedule="async", window=4, update_frequency=1, activation_limit=2)
        run(stem, PhaseBegun(0, True))
        assert format_runs(run(stem, *(ForwardArrived(B(index)) for index in range(4)))) == "0F 1F"
        assert format_runs(run(stem, BackwardArrived(B(0)))) == "0B s0 2F"

    def test_the_limit_does_not_apply_without_gradients(self) -> None:
        stem = ScheduleMachine(1, 3, schedule="async", window=4, update_frequency=1, activation_limit=1)
        run(stem, PhaseBegun(0, False))
        assert format_runs(run(stem, *(ForwardArrived(B(index)) for index in range(3)))) == "0V 1V 2V"


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
            (
                1,
                [PhaseEnded(0, 0)],
                ForwardArrived(B(0)),
                "but phase 0 has already ended",
            ),
            (1, [], BackwardArrived(B(3)), "backward of micro-batch 3 of phase 0 arrived, but no"),
            (
                1,
                [ForwardArrived(B(0)), ForwardArrived(B(1))],
                BackwardArrived(B(1)),
                "backward of micro-batch 1 of phase 0 arrived, expected micro-batch 0 of phase 0",
            ),
            (1, [ForwardArrived(B(0))], ResultArrived(B(0)), "but phase 0 trains"),
            (2, [ForwardArrived(B(0))], BackwardArrived(B(0)), "no micro-batch was sent"),
            (1, [], Done(), "none was requested"),
            (1, [], PhaseBegun(1, True), "phase 1 began before phase 0 had ended"),
            (1, [PhaseEnded(0, 0)], PhaseBegun(2, True), "expected phase 1 to begin, but phase 2 began"),
            (1, [], PhaseEnded(0, 2), "phase 0 ended with 2 micro-batches, but 0 have arrived"),
            (1, [], PhaseEnded(1, 0), "but phase 1 has not begun"),
            (1, [], ClipNormArrived(0), "none is expected"),
            (0, [], WindowSet(0), "a window of 0"),
            (
                0,
                [ForwardArrived(B(index)) for index in range(4 + READ_AHEAD)],
                ForwardArrived(B(6)),
                "admitted",
            ),
        ],
    )
    def test_protocol_violations_are_named(
        self, position: int, before: Sequence[Event], event: Event, words: str
    ) -> None:
        node = machine(position)
        run(node, *before)
        (failure,) = node.handle(event, 0.0)
        assert isinstance(failure, Fail)
        assert words in failure.reason

    def test_a_clip_norm_for_another_update_fails(self) -> None:
        for update, words in ((1, "update 0 is next"), (0, "before all its gradients")):
            (failure,) = machine(1, schedule="sync", clip=True).handle(ClipNormArrived(update), 0.0)
            assert isinstance(failure, Fail)
            assert words in failure.reason

    def test_a_failure_shows_the_node_and_its_last_computations(self) -> None:
        stem = machine(1)
        run(stem, ForwardArrived(B(0)), ForwardArrived(B(1)), BackwardArrived(B(0)))
        (failure,) = stem.handle(Done(), 0.0)
        assert isinstance(failure, Fail)
        assert failure.reason.startswith("Stem (stage 1): ")
        assert failure.reason.endswith("(last run here: 0F 1F 0B s0)")

    def test_events_after_a_failure_are_ignored(self) -> None:
        stem = machine(1)
        stem.handle(Done(), 0.0)
        assert stem.handle(ForwardArrived(B(0)), 0.0) == []


def test_phases_are_printed_only_if_there_are_several() -> None:
    one = [RunForward(B(0), 0, True), Finished(B(0)), RunBackward(B(0), 0, True), RunStep(0, 1)]
    assert format_runs(one) == "0F 0B s0"
    assert (
        format_runs([*one, RunForward(B(0, 1), 0, False), RunPhaseEnd(1, False)])
        == "0.0F 0.0B s0 1.0V e1"
    )


# Invariants


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    window = st.integers(1, 6)
    return Pipeline(
        count=draw(st.integers(1, 4)),
        phases=tuple(
            draw(st.lists(st.builds(Phase, st.booleans(), st.integers(0, 7)), min_size=1, max_size=4))
        ),
        schedule=draw(st.sampled_from(["async", "sync"])),
        window=draw(window),
        update_frequency=draw(st.integers(1, 4)),
        clip=draw(st.booleans()),
        windows=tuple(draw(st.lists(window, max_size=3))),
        activation_limits=tuple(draw(st.lists(st.none() | st.integers(1, 3), max_size=4))),
    )


@settings(max_examples=120, deadline=None)
@given(pipelines(), st.data())
def test_every_order_finishes_all_micro_batches(pipeline: Pipeline, data: st.DataObject) -> None:
    pipeline.run(lambda ready: data.draw(st.sampled_from(ready)))
    trained = [
        B(i, p) for p, phase in enumerate(pipeline.phases) if phase.trains for i in range(phase.count)
    ]
    every = [B(i, p) for p, phase in enumerate(pipeline.phases) for i in range(phase.count)]

    assert pipeline.finished() == every
    assert all(node.idle for node in pipeline.machines)
    assert pipeline.peak <= max(pipeline.window, *pipeline.windows, 1)
    for log in pipeline.logs:
        assert [a.microbatch for a in log if isinstance(a, RunForward)] == every
        assert [a.microbatch for a in log if isinstance(a, RunBackward)] == trained
        assert [a.phase for a in log if isinstance(a, RunPhaseEnd)] == list(range(len(pipeline.phases)))
        _check_versions(log)
        _check_updates(pipeline, log)
        _check_phase_order(pipeline, log)


def _check_versions(log: list[Action]) -> None:
    newest, held = 0, {0}
    used: dict[MicrobatchId, int] = {}
    for action in log:
        match action:
            case RunForward(microbatch, version, trains):
                assert version == newest, "a forward uses the newest weights"
                if trains:
                    used[microbatch] = version
            case RunBackward(microbatch, version):
                assert version == used[microbatch]
                assert version in held
            case RunStep(update):
                assert update == newest
                newest += 1
                held.add(newest)
            case FreeVersion(version):
                assert version != newest
                held.remove(version)
    assert held == {newest}


def _check_updates(pipeline: Pipeline, log: list[Action]) -> None:
    every = pipeline.update_frequency
    counts: list[int] = []
    for phase in pipeline.phases:
        if phase.trains:
            counts += [every] * (phase.count // every)
            counts += [phase.count % every] * (phase.count % every > 0)
    steps = [action for action in log if isinstance(action, RunStep)]
    assert [step.count for step in steps] == counts
    assert [step.update for step in steps] == list(range(len(counts)))
    backward: RunBackward | None = None
    for action in log:
        if isinstance(action, RunBackward):
            backward = action
        elif isinstance(action, RunStep):
            assert backward is not None
            assert backward.last_of_update, "the last of an update is always marked"
            if pipeline.schedule == "sync":
                assert backward.version == action.update, "sync has no stale gradients"


def _check_phase_order(pipeline: Pipeline, log: list[Action]) -> None:
    over: set[int] = set()
    for action in log:
        match action:
            case RunPhaseEnd(phase):
                over.add(phase)
            case RunForward(microbatch, _, False):
                earlier = {p for p in range(microbatch.phase) if pipeline.phases[p].trains}
                assert earlier <= over, "validation uses the weights of all earlier phases"


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.integers(0, 2**32))
def test_async_with_a_window_of_one_is_sync_with_updates_of_one(pipeline: Pipeline, seed: int) -> None:
    def scheduled(schedule: Schedule) -> list[str]:
        made = Pipeline(pipeline.count, pipeline.phases, schedule, window=1, update_frequency=1)
        return [format_runs(log) for log in made.run(Random(seed).choice).logs]

    assert scheduled("async") == scheduled("sync")


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.integers(0, 2**32))
def test_sync_computes_the_same_in_any_event_order(pipeline: Pipeline, seed: int) -> None:
    """The update of a micro-batch and the version that it ran on do not depend on timing."""

    def essence(made: Pipeline) -> list[Counter[Action]]:
        runs = RunForward | RunStep | RunPhaseEnd
        return [Counter(a for a in log if isinstance(a, runs)) for log in made.logs]

    def fresh() -> Pipeline:
        return Pipeline(
            pipeline.count, pipeline.phases, "sync", pipeline.window, pipeline.update_frequency
        )

    assert essence(fresh().run(Random(seed).choice)) == essence(fresh().run())
