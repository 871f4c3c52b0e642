"""Long polls: who waits for news gets it when it comes."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from server_cases import Caller, Case, losses

LONG = 60


def run(
    case: Case, ask: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]], act: Callable[[], object]
) -> Any:
    """Ask; once the server listens for news on behalf of who asked, act; the answer."""
    listening = threading.Event()
    listen = case.server.notifications.subscribe

    def noticed(topic: Any) -> Any:
        listening.set()
        return listen(topic)

    async def scene() -> Any:
        transport = httpx.ASGITransport(case.client.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            asking = asyncio.ensure_future(ask(client))
            assert await asyncio.to_thread(listening.wait, LONG)
            await asyncio.to_thread(act)
            return (await asking).json()

    case.server.notifications.subscribe = noticed  # type: ignore[method-assign]
    try:
        return asyncio.run(scene())
    finally:
        case.server.notifications.subscribe = listen  # type: ignore[method-assign]


def poll(
    provider: Caller, known: str | None
) -> Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]:
    return lambda client: client.post(
        f"/api/providers/{provider.id}/heartbeat",
        json={"known": known, "wait": LONG},
        headers={"Authorization": f"Bearer {provider.credential}"},
    )


def test_orders_reach_a_provider_that_waits(case: Case) -> None:
    rita, alice = case.requester(), case.provider()
    job = case.submit(rita)
    assert run(case, poll(alice, None), case.match)["assignment"] == f"{job}-0"


def test_a_provider_that_waits_hears_that_its_job_is_cancelled(case: Case) -> None:
    rita, alice = case.requester(), case.provider()
    job = case.submit(rita)
    case.match()
    cancel = lambda: rita.post(f"/api/jobs/{job}/cancel")  # noqa: E731
    assert run(case, poll(alice, f"{job}-0"), cancel)["assignment"] is None


def test_who_has_something_else_than_it_should_is_told_at_once(case: Case) -> None:
    alice = case.provider()
    answer = run(case, poll(alice, "of an earlier life"), lambda: None)
    assert answer["assignment"] is None


def test_who_waits_for_a_job_hears_of_each_change(case: Case) -> None:
    rita, alice = case.requester(), case.provider()
    job = case.submit(rita)
    case.match()

    def wait(changed: float) -> Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]:
        return lambda client: client.get(
            f"/api/jobs/{job}/wait",
            params={"changed": changed, "timeout": LONG},
            headers={"Authorization": f"Bearer {rita.credential}"},
        )

    view = rita.get(f"/api/jobs/{job}/wait?changed=0")
    for act, state, updates in [
        (lambda: alice.report("training"), "training", 0),
        (lambda: alice.report("training", records=losses(1.0)), "training", 1),
        (lambda: rita.post(f"/api/jobs/{job}/cancel"), "cancelled", 1),
    ]:
        before = view["changed"]
        view = run(case, wait(before), act)
        assert view["changed"] > before
        assert (view["state"], view["progress"]["updates"]) == (state, updates)


def test_a_wait_for_nothing_ends_with_things_as_they_are(case: Case) -> None:
    rita = case.requester()
    job = case.submit(rita)
    view = rita.get(f"/api/jobs/{job}")
    assert rita.get(f"/api/jobs/{job}/wait?changed={view['changed']}&timeout=0") == view
