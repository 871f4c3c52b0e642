"""Signs of life of providers in virtual time: polls, restarts, clock jumps, neighbours and results."""

import asyncio
import dataclasses
import errno
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_cases import Caller, Case, Time, losses, offer, opened
from sqlalchemy.exc import OperationalError

from ravnest import deadlines
from ravnest.deadlines import (
    LINK_OUTAGE,
    LOST_AFTER,
    POLL_GAP,
    POLL_WAIT,
    RESTART_GRACE,
    RESULT_WAIT,
    TRAINING_SILENCE,
    WITNESSED_LIMIT,
)
from ravnest.server.heartbeat_queue import HeartbeatQueue
from ravnest.server.liveness import Liveness
from ravnest.server.settings import Clock, ServerSettings
from ravnest.telemetry import QueueRecord

HOUR = 3600.0


@dataclass
class TwoClocks(Time):
    """A wall clock that can jump, beside the steady one."""

    jump: float = 0.0

    def clock(self) -> Clock:
        return Clock(wall=lambda: self.now + self.jump, steady=lambda: self.now)


def providers(case: Case, *names: str) -> list[Caller]:
    return [
        case.provider(name, compute=100.0 - i, address=f"127.0.0.1:{9000 + i}")
        for i, name in enumerate(names)
    ]


def states(case: Case) -> list[str]:
    return [each["state"] for each in case.admin().get("/api/providers")]


def finish(provider: Caller, **fields: Any) -> None:
    content = f"trained by {provider.id}".encode()
    files = [
        {"name": "node_0.json", "artifact": {"sha256": provider.upload(content), "size": len(content)}}
    ]
    provider.report("finished", result=files, **fields)


def queue() -> dict[str, Any]:
    return asdict(QueueRecord(in_flight=1, window=1, inbox=0))


# Polls


def test_a_provider_that_polls_as_designed_is_never_overdue() -> None:
    """Each poll takes as long as a provider waits for it, and every second answer gets lost."""
    liveness, now = Liveness(LOST_AFTER), 0.0
    held = POLL_WAIT
    lost = POLL_WAIT + deadlines.POLL_ANSWER + deadlines.longest_pause(deadlines.FIRST_PAUSE)
    for _ in range(100):
        for silence in (held + POLL_GAP, lost + deadlines.HTTP_CONNECT):
            liveness.see("p", steady=now, wall=0.0)
            now += silence
            assert liveness.overdue(now) == []


def test_a_provider_inside_a_poll_is_alive() -> None:
    liveness, now = Liveness(LOST_AFTER), 0.0
    liveness.see("p", steady=now, wall=0.0)
    with liveness.polling("p", lambda: now):
        now = 10 * LOST_AFTER
        assert liveness.overdue(now) == []
        assert liveness.next_deadline() is None
    assert liveness.overdue(now) == []
    assert liveness.next_deadline() == now + LOST_AFTER
    now += LOST_AFTER
    assert liveness.overdue(now) == ["p"]


def test_a_provider_that_leaves_during_its_poll_is_forgotten() -> None:
    liveness = Liveness(LOST_AFTER)
    liveness.see("p", steady=0.0, wall=0.0)
    with liveness.polling("p", lambda: 1.0):
        liveness.forget("p")
    assert liveness.next_deadline() is None


def test_a_poll_that_the_server_holds_keeps_the_provider(case: Case) -> None:
    (alice,) = providers(case, "alice")
    service = case.server.provider_service
    original = service.reply

    def slow(provider: str) -> Any:
        case.pass_time(2 * LOST_AFTER)  # the server is busy while the poll is open
        return original(provider)

    service.reply = slow  # type: ignore[method-assign]
    alice.heartbeat()
    service.reply = original  # type: ignore[method-assign]
    case.server.run_due()
    assert states(case) == ["offered"]
    case.pass_time(LOST_AFTER)
    assert states(case) == ["lost"]


def test_a_server_that_was_halted_does_not_blame_its_providers(case: Case) -> None:
    providers(case, "alice")
    case.time.now += HOUR
    case.server.provider_service.excuse_silence()
    case.server.run_due()
    assert states(case) == ["offered"]
    case.pass_time(LOST_AFTER)
    assert states(case) == ["lost"]


# Clocks


@pytest.mark.parametrize("jump", [-5 * HOUR, 5 * HOUR, 20 * HOUR])
def test_a_jump_of_the_wall_clock_changes_nothing(tmp_path: Path, jump: float) -> None:
    time = TwoClocks()
    with opened(tmp_path, time=time) as case:
        rita, (alice, bob) = case.requester(), providers(case, "alice", "bob")
        job = case.submit(rita)
        case.match()
        alice.report("fetched")
        bob.report("fetching")
        time.jump = jump
        for _ in range(5):
            case.pass_time(10)
            alice.heartbeat()
            bob.heartbeat()
        assert rita.get(f"/api/jobs/{job}")["state"] == "shipping", "the fetch is not late"
        assert states(case) == ["reserved", "reserved"]
        bob.report("fetched")
        changed = rita.get(f"/api/jobs/{job}")["changed"]
        for each in (alice, bob):
            each.report("training")
        assert rita.get(f"/api/jobs/{job}/wait?changed={changed}")["state"] == "training"
        time.jump = 0.0
        case.pass_time(LOST_AFTER - 1)
        assert states(case) == ["training", "training"]
        second = case.submit(rita)
        case.match()
    time.jump = -jump
    with opened(tmp_path, time=time) as case:
        alice, bob, rita = (dataclasses.replace(each, client=case.client) for each in (alice, bob, rita))
        case.pass_time(RESTART_GRACE - 1)
        assert states(case) == ["training", "training"]
        third = case.submit(rita)
        finish(alice)
        bob.report("finished")
        case.match()
        assert [rita.get(f"/api/jobs/{each}")["state"] for each in (job, second, third)] == [
            "done",
            "shipping",
            "submitted",
        ], "jobs start in the order of their submission"


def test_a_restarted_server_waits_longer(tmp_path: Path) -> None:
    time = Time()
    with opened(tmp_path, time=time) as case:
        providers(case, "alice")
    time.now += HOUR
    with opened(tmp_path, time=time) as case:
        case.pass_time(RESTART_GRACE - 1)
        assert states(case) == ["offered"]
        case.pass_time(1)
        assert states(case) == ["lost"]


# Fetches


def test_workers_may_train_once_all_providers_of_the_job_have_fetched(case: Case) -> None:
    rita = case.requester()
    alice, bob, carol, dave = providers(case, "alice", "bob", "carol", "dave")
    job = case.submit(rita)
    case.match()
    for each in (alice, bob, carol):
        assert not each.report("fetched")["may_train"]
    dave.report("fetching")
    for _ in range(6):  # a minute
        case.pass_time(10)
        assert not any(each.heartbeat()["may_train"] for each in (alice, bob, carol, dave))
    assert "3 of 4 nodes have fetched" in rita.get(f"/api/jobs/{job}")["reason"]
    assert dave.report("fetched")["may_train"]
    assert all(each.heartbeat()["may_train"] for each in (alice, bob, carol))


def test_a_cluster_whose_node_cannot_fetch_does_not_hold_up_the_others(case: Case) -> None:
    rita = case.requester()
    alice, bob, carol, dave = providers(case, "alice", "bob", "carol", "dave")
    case.submit(rita)
    case.match()
    for each in (alice, bob, carol):
        each.report("fetched")
    dave.report("failed", reason="no room on its disk")
    assert alice.heartbeat()["may_train"]
    assert bob.heartbeat()["may_train"]
    assert not carol.heartbeat()["may_train"], "its cluster cannot train"


def test_a_waiting_provider_is_told_that_all_have_fetched(case: Case) -> None:
    rita, (alice, bob) = case.requester(), providers(case, "alice", "bob")
    job = case.submit(rita)
    case.match()
    alice.report("fetched")

    async def poll() -> Any:
        transport = httpx.ASGITransport(case.client.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            asking = asyncio.ensure_future(
                client.post(
                    f"/api/providers/{alice.id}/heartbeat",
                    json={"known": f"{job}-0", "wait": 60},
                    headers={"Authorization": f"Bearer {alice.credential}"},
                )
            )
            await asyncio.to_thread(bob.report, "fetched")
            return (await asking).json()

    assert asyncio.run(poll())["may_train"]


# Neighbours


def training_pair(case: Case) -> tuple[Caller, str, Caller, Caller]:
    rita, (alice, bob) = case.requester(), providers(case, "alice", "bob")
    job = case.submit(rita)
    case.match()
    for each in (alice, bob):
        each.report("training")
    return rita, job, alice, bob


@pytest.mark.parametrize("silent", ["alice", "bob"])
def test_a_silent_provider_is_kept_while_its_neighbour_reports_progress(case: Case, silent: str) -> None:
    rita, job, *both = training_pair(case)
    other = both[silent == "alice"]
    for update in range(20):
        case.pass_time(10)
        record = losses(1.0, first=update) if silent == "bob" else [queue()]
        other.report("training", first_record=update, records=record)
    assert states(case) == ["training", "training"]
    events = [e["reason"] for e in rita.get(f"/api/jobs/{job}/events") if e["kind"] == "warning"]
    assert len(events) == 1
    assert f"no heartbeat for 30 seconds from {silent}, but its neighbours report progress" in events[0]
    for _ in range(int(TRAINING_SILENCE // 10)):
        assert states(case) == ["training", "training"]
        case.pass_time(10)
        other.heartbeat()
    assert "lost" in states(case), "without progress it is lost soon"
    assert "no heartbeat for 290 seconds" in rita.get(f"/api/jobs/{job}")["reason"]


def test_an_outage_that_links_outlast_loses_no_provider(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    for _ in range(int(LINK_OUTAGE // 10)):
        case.pass_time(10)
        alice.heartbeat()
    bob.heartbeat()
    assert states(case) == ["training", "training"]
    (event,) = (e["reason"] for e in rita.get(f"/api/jobs/{job}/events") if e["kind"] == "warning")
    assert "no heartbeat for 30 seconds from bob: the server waits up to 90 seconds" in event
    for _ in range(int(TRAINING_SILENCE // 10)):
        case.pass_time(10)
        alice.heartbeat()
    reason = rita.get(f"/api/jobs/{job}")["reason"]
    assert "bob had the place: the provider was lost: no heartbeat for 90 seconds" in reason


def test_a_silent_provider_is_lost_after_a_bound_even_with_progress(case: Case) -> None:
    rita, job, alice, _ = training_pair(case)
    for update in range(int(WITNESSED_LIMIT // 10)):
        assert states(case) == ["training", "training"]
        case.pass_time(10)
        alice.report("training", first_record=update, records=losses(1.0, first=update))
    reason = rita.get(f"/api/jobs/{job}")["reason"]
    assert "no heartbeat for 600 seconds, but its neighbours report progress with it" in reason


def test_progress_of_another_cluster_is_no_sign_of_life(case: Case) -> None:
    rita = case.requester()
    alice, bob, carol, dave = providers(case, "alice", "bob", "carol", "dave")
    case.submit(rita)
    case.match()
    for each in (alice, bob, carol, dave):
        each.report("training")
    for update in range(int(TRAINING_SILENCE // 10)):
        case.pass_time(10)
        alice.heartbeat()
        dave.heartbeat()
        carol.report("training", first_record=update, records=losses(1.0, first=update))
    assert sorted(states(case)) == ["lost", "training", "training", "training"]


# Results


@pytest.mark.parametrize("leaves", [True, False])
def test_a_lost_provider_returns_with_its_result(case: Case, leaves: bool) -> None:
    rita, job, alice, bob = training_pair(case)
    alice.report("uploading")
    bob.report("finished")
    if leaves:
        alice.call("DELETE", f"/api/providers/{alice.id}")
    case.pass_time(RESULT_WAIT - 60)
    view = rita.get(f"/api/jobs/{job}")
    assert view["state"] == "training"
    assert "the job waits 60 minutes for its return" in view["reason"]
    alice.post("/api/providers", case.admin().get("/api/providers")[0]["offer"])
    assert alice.heartbeat()["assignment"] == f"{job}-0"
    assert "waits" not in rita.get(f"/api/jobs/{job}")["reason"]
    bob.heartbeat()
    other = case.submit(rita)
    case.match()
    assert f"{other}-0" == bob.heartbeat()["assignment"], "alice still works on the first job"
    finish(alice)
    assert rita.get(f"/api/jobs/{job}")["state"] == "done"


def test_a_result_is_given_up_after_a_while(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    alice.report("uploading")
    bob.report("finished")
    case.pass_time(LOST_AFTER)
    case.pass_time(RESULT_WAIT)
    view = rita.get(f"/api/jobs/{job}")
    assert view["state"] == "training", "the end is repeated when there are providers"
    assert "waits for a provider for node_0" in view["reason"]
    assert "lost with the result, and was away for 60 minutes" in view["reason"]
    alice.post("/api/providers", offer("alice", address="127.0.0.1:9000"))
    assert alice.heartbeat()["assignment"] == f"{job}-0", "it is not too late yet"
    finish(alice)
    assert rita.get(f"/api/jobs/{job}")["state"] == "done"


def test_a_result_is_awaited_across_a_restart_of_the_server(tmp_path: Path) -> None:
    time = Time()
    with opened(tmp_path, time=time) as case:
        rita, job, alice, bob = training_pair(case)
        alice.report("uploading")
        bob.report("finished")
        case.pass_time(LOST_AFTER)
    time.now += 2 * RESULT_WAIT
    with opened(tmp_path, time=time) as case:
        alice, rita = (dataclasses.replace(each, client=case.client) for each in (alice, rita))
        case.pass_time(RESULT_WAIT - 1)
        assert alice.heartbeat()["assignment"] == f"{job}-0"
        finish(alice)
        assert rita.get(f"/api/jobs/{job}")["state"] == "done"


def test_a_node_that_is_lost_after_the_training_does_not_stop_the_upload(case: Case) -> None:
    rita, job, alice, _ = training_pair(case)
    alice.report("uploading")
    for _ in range(10):
        case.pass_time(10)
        alice.heartbeat()
    assert rita.get(f"/api/jobs/{job}")["state"] == "training"
    finish(alice)
    view = rita.get(f"/api/jobs/{job}")
    assert view["state"] == "done"
    assert "(bob): the provider was lost" in view["reason"]


def test_a_result_that_is_late_is_explained_to_the_requester(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    alice.report("uploading")
    bob.report("finished")
    full = "the server's disk has 0.0 GB left, not enough for 0.1 GB"
    for _ in range(3):
        alice.report("uploading", reason=full)
    assert f"node_0 of cluster 0 (alice): {full}" in rita.get(f"/api/jobs/{job}")["reason"]
    events = [e["reason"] for e in rita.get(f"/api/jobs/{job}/events") if e["kind"] == "warning"]
    assert events == [f"node_0: its trained stages are not here yet: {full}"]
    finish(alice)
    assert rita.get(f"/api/jobs/{job}")["state"] == "done"


@pytest.mark.parametrize(
    "error",
    [
        lambda: OSError(errno.ENOSPC, "No space left on device"),
        lambda: OperationalError("INSERT", {}, Exception("database or disk is full")),
    ],
)
def test_a_full_disk_is_said_as_such(case: Case, error: Callable[[], Exception]) -> None:
    _, _, alice, _ = training_pair(case)

    def fail(*_: object) -> None:
        raise error()

    case.server.provider_service.heartbeat = fail  # type: ignore[method-assign]
    case.server.heartbeats = HeartbeatQueue(fail, case.server.provider_service.answer)  # type: ignore[arg-type]
    assert "disk is full" in alice.heartbeat(507)["detail"]


def test_settings_hold_the_deadlines() -> None:
    assert ServerSettings().restart_grace == RESTART_GRACE
