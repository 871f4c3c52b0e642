"""When processes are started again or ended: scripted events and times in, actions out."""

import random
from signal import SIGINT, SIGKILL, SIGTERM

from ravnest.provider.supervision import (
    Interrupted,
    OutputClosed,
    PauseOver,
    ProcessEnded,
    RestartPolicy,
    SendSignal,
    StartAgain,
    Supervision,
)


def three() -> Supervision:
    return Supervision(["node_0", "node_1", "node_2"], grace=10, patience=5)


def test_all_succeed() -> None:
    supervision = three()
    for number in (2, 0, 1):
        assert supervision.handle(ProcessEnded(f"node_{number}", 0), now=number) == []
    assert supervision.running == []
    assert supervision.deadline is None
    assert supervision.exit_code == 0
    assert supervision.summary() == []


def test_a_success_leaves_the_others_running() -> None:
    supervision = three()
    supervision.handle(ProcessEnded("node_0", 0), now=0)
    assert supervision.deadline is None


def test_when_one_fails_the_others_get_grace_then_sigterm_then_sigkill() -> None:
    supervision = three()
    assert supervision.handle(ProcessEnded("node_1", 3), now=100) == []
    assert supervision.deadline == 110
    assert supervision.handle(ProcessEnded("node_0", 1), now=104) == []
    assert supervision.deadline == 110, "a second failure does not restart the grace period"
    assert supervision.handle(PauseOver(), now=110) == [SendSignal("node_2", SIGTERM)]
    assert supervision.deadline == 115
    assert supervision.handle(PauseOver(), now=115) == [SendSignal("node_2", SIGKILL)]
    assert supervision.deadline is None
    supervision.handle(ProcessEnded("node_2", -SIGKILL), now=116)
    assert supervision.exit_code == 3
    assert supervision.summary() == [
        "node_1 failed: exit code 3",
        "node_0 failed: exit code 1",
        "node_2 did not end by itself: SIGKILL",
    ]


def test_an_interrupt_is_passed_on_once_and_the_second_kills() -> None:
    supervision = three()
    supervision.handle(ProcessEnded("node_0", 0), now=0)
    assert supervision.handle(Interrupted(), now=1) == [
        SendSignal("node_1", SIGINT),
        SendSignal("node_2", SIGINT),
    ]
    assert supervision.deadline == 11
    supervision.handle(ProcessEnded("node_1", -SIGINT), now=2)
    assert supervision.handle(Interrupted(), now=3) == [SendSignal("node_2", SIGKILL)]
    assert supervision.deadline is None
    supervision.handle(ProcessEnded("node_2", -SIGKILL), now=4)
    assert supervision.exit_code == 128 + SIGINT
    assert supervision.summary() == ["node_1 was interrupted", "node_2 did not end by itself: SIGKILL"]


def test_an_interrupted_process_that_does_not_end_is_terminated() -> None:
    supervision = three()
    supervision.handle(Interrupted(), now=0)
    assert [send.signal for send in supervision.handle(PauseOver(), now=10)] == [SIGTERM] * 3


def test_an_interrupt_during_the_grace_period_does_not_extend_it() -> None:
    supervision = three()
    supervision.handle(ProcessEnded("node_0", 1), now=0)
    assert supervision.handle(Interrupted(), now=4) == [
        SendSignal("node_1", SIGINT),
        SendSignal("node_2", SIGINT),
    ]
    assert supervision.deadline == 10


def test_closed_output_counts_as_one_interrupt() -> None:
    supervision = Supervision(["node_0"], grace=10)
    assert supervision.handle(OutputClosed(), now=0) == [SendSignal("node_0", SIGINT)]
    assert supervision.handle(OutputClosed(), now=1) == []
    assert supervision.deadline == 10
    assert supervision.handle(Interrupted(), now=2) == [SendSignal("node_0", SIGKILL)]


def test_a_signal_from_elsewhere_is_a_failure() -> None:
    supervision = three()
    supervision.handle(ProcessEnded("node_0", -SIGKILL), now=0)
    assert supervision.summary() == ["node_0 failed: ended by SIGKILL"]


def test_an_unknown_signal_is_named_by_its_number() -> None:
    supervision = Supervision(["node_0"])
    supervision.handle(ProcessEnded("node_0", -120), now=0)
    assert supervision.summary() == ["node_0 failed: ended by signal 120"]


# Restarts

POLICY = RestartPolicy(limit=2, settled=60, first_pause=1, longest_pause=3)


class NoJitter(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return 1.0


def restarting(policy: RestartPolicy = POLICY, groups: dict[str, int] | None = None) -> Supervision:
    names = ["node_0", "node_1", "node_2"]
    return Supervision(names, grace=10, patience=5, restart=policy, groups=groups, chance=NoJitter())


def due(supervision: Supervision) -> float:
    assert supervision.deadline is not None
    return supervision.deadline


def test_a_killed_process_is_started_again_after_a_pause_and_the_others_stay() -> None:
    supervision = restarting()
    assert supervision.handle(ProcessEnded("node_1", -SIGKILL), now=100) == []
    assert (supervision.running, supervision.deadline) == (["node_0", "node_2"], 101)
    assert supervision.handle(PauseOver(), now=101) == [
        StartAgain("node_1", "node_1 was ended by SIGKILL; started again (1)")
    ]
    assert sorted(supervision.running) == ["node_0", "node_1", "node_2"]
    assert supervision.deadline is None
    for number in range(3):
        supervision.handle(ProcessEnded(f"node_{number}", 0), now=102)
    assert (supervision.exit_code, supervision.summary()) == (0, [])
    assert not supervision.active


def test_a_deadline_that_comes_early_starts_nothing() -> None:
    supervision = restarting()
    supervision.handle(ProcessEnded("node_1", 1), now=100)
    assert supervision.handle(PauseOver(), now=100.9) == []
    assert supervision.deadline == 101


def test_two_failures_have_two_pauses() -> None:
    supervision = restarting()
    supervision.handle(ProcessEnded("node_1", 1), now=0)
    supervision.handle(ProcessEnded("node_2", 4), now=0.5)
    assert [a.name for a in supervision.handle(PauseOver(), now=1)] == ["node_1"]
    assert supervision.deadline == 1.5
    assert supervision.handle(PauseOver(), now=1.5) == [
        StartAgain("node_2", "node_2 failed with exit code 4; started again (1)")
    ]


def test_supervision_waits_for_a_restart_while_nothing_runs() -> None:
    supervision = Supervision(["node_0"], restart=POLICY, chance=NoJitter())
    supervision.handle(ProcessEnded("node_0", 1), now=0)
    assert supervision.running == []
    assert supervision.active


def test_pauses_grow_up_to_a_limit_and_restarts_are_counted() -> None:
    supervision = restarting(RestartPolicy(limit=4, settled=60, first_pause=1, longest_pause=3))
    now, pauses, reasons = 0.0, [], []
    for _ in range(4):
        supervision.handle(ProcessEnded("node_1", 1), now)
        pauses.append(due(supervision) - now)
        now = due(supervision)
        (action,) = supervision.handle(PauseOver(), now)
        assert isinstance(action, StartAgain)
        reasons.append(action.reason)
    assert pauses == [1, 2, 3, 3]
    assert reasons[-1] == "node_1 failed with exit code 1; started again (4)"


def test_a_process_that_has_run_for_a_while_is_started_again_soon_but_counted() -> None:
    supervision = restarting()
    now = failing(supervision, "node_1", 0, times=1)
    supervision.handle(ProcessEnded("node_1", -SIGKILL), now + 3)
    assert due(supervision) == now + 4, "the first pause"
    now = due(supervision)
    supervision.handle(PauseOver(), now)
    supervision.handle(ProcessEnded("node_1", -SIGKILL), now + 59)
    assert "given up after 2 restarts" in supervision.summary()[0]


def test_jitter_spreads_the_pauses() -> None:
    policy = RestartPolicy(first_pause=2, longest_pause=8)
    pauses = [policy.pause(1, random.Random(seed)) for seed in range(200)]
    assert 2 <= min(pauses) < 2.5 < 5.5 < max(pauses) <= 6
    assert policy.pause(10_000, NoJitter()) == 8


def failing(supervision: Supervision, name: str, now: float, times: int) -> float:
    """Let a process fail as soon as it is started, and return the time of the last start."""
    for _ in range(times):
        supervision.handle(ProcessEnded(name, 3), now)
        now = due(supervision)
        assert [type(a) for a in supervision.handle(PauseOver(), now)] == [StartAgain]
    return now


def test_a_process_that_never_settles_is_given_up_and_all_end() -> None:
    supervision = restarting()
    now = failing(supervision, "node_1", 0, times=2)
    assert supervision.handle(ProcessEnded("node_1", 3), now + 59) == []
    assert supervision.deadline == now + 69
    assert supervision.handle(PauseOver(), now + 69) == [
        SendSignal("node_0", SIGTERM),
        SendSignal("node_2", SIGTERM),
    ]
    for number in (0, 2):
        supervision.handle(ProcessEnded(f"node_{number}", -SIGTERM), now + 70)
    assert supervision.exit_code == 3
    assert supervision.summary()[:2] == [
        "node_1 failed: exit code 3; given up after 2 restarts",
        "node_0 did not end by itself: SIGTERM",
    ]


def test_a_process_that_has_settled_may_fail_anew() -> None:
    supervision = restarting()
    now = failing(supervision, "node_1", 0, times=2)
    now = failing(supervision, "node_1", now + 60, times=2)
    assert supervision.running.count("node_1") == 1
    supervision.handle(ProcessEnded("node_1", 3), now)
    assert "given up after 2 restarts" in supervision.summary()[0]


def test_a_process_that_succeeds_is_not_started_again() -> None:
    supervision = restarting()
    supervision.handle(ProcessEnded("node_1", 0), now=0)
    assert supervision.deadline is None


def test_a_process_has_nothing_to_continue_once_its_group_has_succeeded() -> None:
    supervision = restarting(groups={"node_0": 0, "node_1": 0, "node_2": 1})
    supervision.handle(ProcessEnded("node_0", 0), now=0)
    supervision.handle(ProcessEnded("node_1", -SIGKILL), now=1)
    assert supervision.deadline is None, "neither a restart nor the end of the others"
    supervision.handle(ProcessEnded("node_2", -SIGKILL), now=2)
    assert [a.name for a in supervision.handle(PauseOver(), now=3)] == ["node_2"]
    supervision.handle(ProcessEnded("node_2", 0), now=4)
    assert supervision.exit_code == 128 + SIGKILL
    assert supervision.summary() == ["node_1 failed: ended by SIGKILL"]


def test_an_interrupt_cancels_restarts() -> None:
    supervision = restarting()
    supervision.handle(ProcessEnded("node_1", -SIGKILL), now=0)
    assert supervision.handle(Interrupted(), now=0.5) == [
        SendSignal("node_0", SIGINT),
        SendSignal("node_2", SIGINT),
    ]
    assert supervision.deadline == 10.5
    for number in (0, 2):
        supervision.handle(ProcessEnded(f"node_{number}", -SIGINT), now=1)
    assert not supervision.active
    assert supervision.exit_code == 128 + SIGKILL
    assert supervision.summary()[0] == "node_1 failed: ended by SIGKILL"


def test_a_process_that_fails_while_all_end_is_not_started_again() -> None:
    supervision = restarting()
    supervision.handle(Interrupted(), now=0)
    supervision.handle(ProcessEnded("node_1", 1), now=1)
    assert supervision.deadline == 10
