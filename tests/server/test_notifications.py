"""Requests that wait are woken by news, and by nothing else."""

import asyncio
import threading

from ravnest.server.liveness import Liveness
from ravnest.server.notifications import Notifications

FAR = 60.0


def test_news_wakes_those_who_wait_for_it() -> None:
    async def scene() -> tuple[bool, bool]:
        wakes = Notifications()
        with wakes.listen(("job", "a")) as first, wakes.listen(("job", "b")) as second:
            threading.Thread(target=wakes.wake, args=(("job", "a"),)).start()
            return await first.wait(FAR), await second.wait(0)

    assert asyncio.run(scene()) == (True, False)


def test_news_between_looking_and_waiting_is_not_missed() -> None:
    async def scene() -> bool:
        wakes = Notifications()
        with wakes.listen(("job", "a")) as listener:
            wakes.wake(("job", "a"))
            return await listener.wait(FAR)

    assert asyncio.run(scene())


def test_when_the_server_stops_nobody_waits() -> None:
    async def scene() -> tuple[bool, bool]:
        wakes = Notifications()
        with wakes.listen(("job", "a")) as listener:
            threading.Thread(target=wakes.close).start()
            before = await listener.wait(FAR)
        with wakes.listen(("job", "a")) as listener:
            return before, await listener.wait(FAR)

    assert asyncio.run(scene()) == (False, False)


def test_waiting_for_nothing_ends() -> None:
    async def scene() -> bool:
        with Notifications().listen(("job", "a")) as listener:
            return await listener.wait(0.001)

    assert not asyncio.run(scene())


def test_who_was_not_heard_of_is_overdue() -> None:
    liveness = Liveness(30.0)
    assert liveness.next_deadline() is None
    liveness.see("a", steady=0.0, wall=100.0)
    liveness.see("b", steady=10.0, wall=110.0)
    assert liveness.next_deadline() == 30.0
    assert liveness.overdue(29.9) == []
    assert liveness.overdue(30.0) == ["a"]
    assert liveness.overdue(40.0) == ["a", "b"]
    liveness.forget("a")
    assert liveness.seen("a") is None
    assert liveness.seen("b") == 110.0
    assert liveness.next_deadline() == 40.0
