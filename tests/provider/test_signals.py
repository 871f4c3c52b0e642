"""Signals reach the function that is called for them, whatever the main thread does."""

import os
import signal
import threading

import pytest

from ravnest.provider.signals import interrupts, raised_interrupts

SECONDS = 30.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_arrives_before_a_wait_is_not_noticed_after_it(number: signal.Signals) -> None:
    """The handler in the main thread ran after its wait: the second Ctrl-C did nothing for a minute."""
    noted = threading.Semaphore(0)
    released = threading.Event()

    def arrive() -> None:
        """Have the signal handled by this thread, as if it came just before the main thread waited."""
        for _ in range(2):
            signal.pthread_kill(threading.get_ident(), number)
            assert noted.acquire(timeout=SECONDS), "the main thread waits meanwhile"
        released.set()

    with interrupts(noted.release):
        sender = threading.Thread(target=arrive)
        sender.start()
        assert released.wait(SECONDS)
        sender.join()


def test_handlers_are_those_of_before() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for each in (interrupts(lambda: None), raised_interrupts()):
        with each:
            assert signal.getsignal(signal.SIGINT) != before[0]
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_signals_are_raised_where_that_is_wanted() -> None:
    with pytest.raises(KeyboardInterrupt), raised_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)


def test_another_thread_receives_no_signals() -> None:
    found = []

    def run() -> None:
        with interrupts(lambda: None), raised_interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
