"""When processes are ended, by events and times that a test writes down."""

from signal import SIGINT, SIGKILL, SIGTERM

from ravnest.provider.supervision import (
    DeadlinePassed,
    Ended,
    Interrupted,
    OutputClosed,
    Send,
    Supervision,
)


def three() -> Supervision:
    return Supervision(["node_0", "node_1", "node_2"], grace=10, patience=5)


def test_all_end_well() -> None:
    supervision = three()
    for number in (2, 0, 1):
        assert supervision.handle(Ended(f"node_{number}", 0), now=number) == []
    assert supervision.running == []
    assert supervision.deadline is None
    assert supervision.exit_code == 0
    assert supervision.summary() == []


def test_one_that_ends_well_leaves_the_others_alone() -> None:
    supervision = three()
    supervision.handle(Ended("node_0", 0), now=0)
    assert supervision.deadline is None


def test_when_one_fails_the_others_get_grace_then_sigterm_then_sigkill() -> None:
    supervision = three()
    assert supervision.handle(Ended("node_1", 3), now=100) == []
    assert supervision.deadline == 110
    assert supervision.handle(Ended("node_0", 1), now=104) == []
    assert supervision.deadline == 110, "a second failure does not begin the grace again"
    assert supervision.handle(DeadlinePassed(), now=110) == [Send("node_2", SIGTERM)]
    assert supervision.deadline == 115
    assert supervision.handle(DeadlinePassed(), now=115) == [Send("node_2", SIGKILL)]
    assert supervision.deadline is None
    supervision.handle(Ended("node_2", -SIGKILL), now=116)
    assert supervision.exit_code == 3
    assert supervision.summary() == [
        "node_1 failed: exit code 3",
        "node_0 failed: exit code 1",
        "node_2 did not end by itself: SIGKILL",
    ]


def test_an_interrupt_is_passed_on_once_and_the_second_kills() -> None:
    supervision = three()
    supervision.handle(Ended("node_0", 0), now=0)
    assert supervision.handle(Interrupted(), now=1) == [Send("node_1", SIGINT), Send("node_2", SIGINT)]
    assert supervision.deadline == 11
    supervision.handle(Ended("node_1", -SIGINT), now=2)
    assert supervision.handle(Interrupted(), now=3) == [Send("node_2", SIGKILL)]
    assert supervision.deadline is None
    supervision.handle(Ended("node_2", -SIGKILL), now=4)
    assert supervision.exit_code == 128 + SIGINT
    assert supervision.summary() == ["node_1 was interrupted", "node_2 did not end by itself: SIGKILL"]


def test_an_interrupted_process_that_stays_is_terminated_too() -> None:
    supervision = three()
    supervision.handle(Interrupted(), now=0)
    assert [send.signal for send in supervision.handle(DeadlinePassed(), now=10)] == [SIGTERM] * 3


def test_an_interrupt_while_the_others_end_is_passed_on_within_their_grace() -> None:
    supervision = three()
    supervision.handle(Ended("node_0", 1), now=0)
    assert supervision.handle(Interrupted(), now=4) == [Send("node_1", SIGINT), Send("node_2", SIGINT)]
    assert supervision.deadline == 10


def test_output_that_is_closed_is_one_interrupt_however_many_notice() -> None:
    supervision = Supervision(["node_0"], grace=10)
    assert supervision.handle(OutputClosed(), now=0) == [Send("node_0", SIGINT)]
    assert supervision.handle(OutputClosed(), now=1) == []
    assert supervision.deadline == 10
    assert supervision.handle(Interrupted(), now=2) == [Send("node_0", SIGKILL)]


def test_a_signal_that_somebody_else_sent_is_a_failure() -> None:
    supervision = three()
    supervision.handle(Ended("node_0", -SIGKILL), now=0)
    assert supervision.summary() == ["node_0 failed: ended by SIGKILL"]


def test_an_unknown_signal_is_named_by_its_number() -> None:
    supervision = Supervision(["node_0"])
    supervision.handle(Ended("node_0", -120), now=0)
    assert supervision.summary() == ["node_0 failed: ended by signal 120"]
