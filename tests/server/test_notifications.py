"""Waiting requests wake up on notifications, and only then; liveness of providers."""

import asyncio
import threading

from ravnest.server.liveness import Liveness
from ravnest.server.notifications import Notifications

FAR = 60.0


def test_a_notification_wakes_the_subscribers_of_its_topic() -> None:
    async def scene() -> tuple[bool, bool]:
        notifications = Notifications()
        with (
            notifications.subscribe(("job", "a")) as first,
            notifications.subscribe(("job", "b")) as second,
        ):
            threading.Thread(target=notifications.notify, args=(("job", "a"),)).start()
            return await first.wait(FAR), await second.wait(0)

    assert asyncio.run(scene()) == (True, False)


def test_a_notification_before_the_wait_is_not_missed() -> None:
    async def scene() -> bool:
        notifications = Notifications()
        with notifications.subscribe(("job", "a")) as subscription:
            notifications.notify(("job", "a"))
            return await subscription.wait(FAR)

    assert asyncio.run(scene())


def test_all_waits_end_when_the_server_stops() -> None:
    async def scene() -> tuple[bool, bool]:
        notifications = Notifications()
        with notifications.subscribe(("job", "a")) as subscription:
            threading.Thread(target=notifications.close).start()
            before = await subscription.wait(FAR)
        with notifications.subscribe(("job", "a")) as subscription:
            return before, await subscription.wait(FAR)

    assert asyncio.run(scene()) == (False, False)


def test_a_wait_without_a_notification_ends() -> None:
    async def scene() -> bool:
        with Notifications().subscribe(("job", "a")) as subscription:
            return await subscription.wait(0.001)

    assert not asyncio.run(scene())


def test_a_silent_provider_is_overdue() -> None:
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
