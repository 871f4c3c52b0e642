"""Long polling: a waiting request is answered as soon as there is news."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from server_cases import Caller, Case, losses

LONG = 60


def run(
    case: Case, ask: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]], act: Callable[[], object]
) -> Any:
    """Send a request; act once the server has subscribed for it; return the answer."""
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


def test_a_waiting_provider_receives_its_assignment(case: Case) -> None:
    rita, alice = case.requester(), case.provider()
    job = case.submit(rita)
    assert run(case, poll(alice, None), case.match)["assignment"] == f"{job}-0"


def test_a_waiting_provider_is_told_that_its_job_is_cancelled(case: Case) -> None:
    rita, alice = case.requester(), case.provider()
    job = case.submit(rita)
    case.match()
    cancel = lambda: rita.post(f"/api/jobs/{job}/cancel")  # noqa: E731
    assert run(case, poll(alice, f"{job}-0"), cancel)["assignment"] is None


def test_a_provider_with_the_wrong_assignment_is_told_at_once(case: Case) -> None:
    alice = case.provider()
    answer = run(case, poll(alice, "of an earlier life"), lambda: None)
    assert answer["assignment"] is None


def test_each_change_of_a_job_answers_a_waiting_request(case: Case) -> None:
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


def test_a_wait_without_a_change_returns_the_current_state(case: Case) -> None:
    rita = case.requester()
    job = case.submit(rita)
    view = rita.get(f"/api/jobs/{job}")
    assert rita.get(f"/api/jobs/{job}/wait?changed={view['changed']}&timeout=0") == view


def test_a_poll_ends_when_its_sender_closes_the_connection(case: Case) -> None:
    """Its silence counts from then on: the connection of a process that was killed is closed at once."""
    alice = case.provider()
    body = json.dumps({"wait": LONG}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/api/providers/{alice.id}/heartbeat",
        "query_string": b"",
        "headers": [
            (b"authorization", f"Bearer {alice.credential}".encode()),
            (b"content-type", b"application/json"),
        ],
        "client": ("127.0.0.1", 1),
        "server": ("server", 80),
        "scheme": "http",
    }
    messages = iter(({"type": "http.request", "body": body}, {"type": "http.disconnect"}))

    async def receive() -> Any:
        return next(messages)

    async def send(_message: Any) -> None:
        """Drop the answer, which nobody reads."""

    async def scene() -> None:
        async with asyncio.timeout(case.server.settings.heartbeat_wait - 1):
            await case.client.app(scope, receive, send)  # type: ignore[arg-type]

    asyncio.run(scene())
    assert case.server.provider_service.liveness.next_deadline() is not None, "no poll is open"
