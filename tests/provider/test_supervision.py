"""When processes are ended: scripted events and times in, signals out."""

from signal import SIGINT, SIGKILL, SIGTERM

from ravnest.provider.supervision import (
    GracePassed,
    Interrupted,
    OutputClosed,
    ProcessEnded,
    SendSignal,
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
    assert supervision.handle(GracePassed(), now=110) == [SendSignal("node_2", SIGTERM)]
    assert supervision.deadline == 115
    assert supervision.handle(GracePassed(), now=115) == [SendSignal("node_2", SIGKILL)]
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
    assert [send.signal for send in supervision.handle(GracePassed(), now=10)] == [SIGTERM] * 3


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
