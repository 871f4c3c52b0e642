"""Heartbeats that are processed together: none is lost, and one does not affect another."""

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import httpx
from server_cases import Caller, Case, losses
from sqlalchemy import event

from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import Heartbeat, HeartbeatReply, ProviderState
from ravnest.server.db.new_records import NEWEST_KEPT
from ravnest.server.heartbeat_queue import HeartbeatQueue
from ravnest.server.versioned_cache import VersionedCache
from ravnest.telemetry import QueueRecord, WarningRecord

LONG = 60.0
COUNT = 12


def training(case: Case, count: int) -> list[Caller]:
    providers = [case.provider(f"p{number}") for number in range(count)]
    case.submit(case.requester(), min_providers=count, max_providers=count)
    case.match()
    for phase in ("fetching", "fetched", "training"):
        for each in providers:
            each.report(phase)
    return providers


def beat(case: Case, provider: Caller, **fields: Any) -> tuple[str, Heartbeat]:
    assignment = provider.heartbeat()["assignment"]
    report = {"assignment": assignment, "phase": "training", **fields}
    return provider.id, Heartbeat.model_validate({"report": report, "known": assignment, "wait": 0})


def test_heartbeats_that_wait_are_processed_together() -> None:
    batches: list[list[str]] = []
    is_first, go_on = threading.Event(), threading.Event()

    def together(found: Sequence[tuple[str, Heartbeat]]) -> list[HeartbeatReply | None]:
        batches.append([provider for provider, _ in found])
        is_first.set()
        assert go_on.wait(LONG)
        return [HeartbeatReply(assignment=provider) for provider, _ in found]

    async def scene() -> list[HeartbeatReply]:
        queue = HeartbeatQueue(together, lambda *_: HeartbeatReply(assignment="alone"))
        first = asyncio.ensure_future(queue.answer("0", Heartbeat()))
        await asyncio.to_thread(is_first.wait, LONG)
        others = [asyncio.ensure_future(queue.answer(str(n), Heartbeat())) for n in range(1, 5)]
        await asyncio.sleep(0)
        go_on.set()
        return await asyncio.gather(first, *others)

    replies = asyncio.run(scene())
    assert [each.assignment for each in replies] == ["0", "1", "2", "3", "4"]
    assert batches == [["0"], ["1", "2", "3", "4"]]


def test_heartbeats_soon_after_a_transaction_share_the_next_one() -> None:
    """A transaction for each heartbeat took twice the CPU time with 1000 providers."""
    batches: list[list[str]] = []

    def together(found: Sequence[tuple[str, Heartbeat]]) -> list[HeartbeatReply | None]:
        batches.append([provider for provider, _ in found])
        return [HeartbeatReply(assignment=provider) for provider, _ in found]

    async def scene() -> None:
        queue = HeartbeatQueue(together, lambda *_: HeartbeatReply(assignment="alone"), gather=2.0)
        await queue.answer("0", Heartbeat())
        await asyncio.gather(*(queue.answer(str(n), Heartbeat()) for n in range(1, 5)))

    asyncio.run(scene())
    assert batches == [["0"], ["1", "2", "3", "4"]]


def test_heartbeats_are_processed_alone_if_they_cannot_be_together() -> None:
    def together(found: Sequence[tuple[str, Heartbeat]]) -> list[HeartbeatReply | None]:
        if len(found) == 1 and found[0][0] == "routine":
            return [HeartbeatReply(assignment="together")]
        if found[0][0] == "broken":
            raise RuntimeError
        return [None]

    queue = HeartbeatQueue(together, lambda name, _: HeartbeatReply(assignment=f"{name}, alone"))

    async def answer(name: str) -> str | None:
        return (await queue.answer(name, Heartbeat())).assignment

    found = [asyncio.run(answer(name)) for name in ("routine", "another", "broken", "routine")]
    assert found == ["together", "another, alone", "broken, alone", "together"]


def test_only_routine_heartbeats_are_processed_together(case: Case) -> None:
    alice, bob, carol, dora = training(case, 4)
    answer = case.server.heartbeats._answer_routine
    same = beat(case, alice, records=losses(1.0, 2.0))
    later = beat(case, bob, phase="uploading", records=losses(1.0))
    foreign = beat(case, carol)[0], same[1]
    gap = beat(case, dora, records=losses(1.0), first_record=7)
    stranger = "provider-unknown", Heartbeat()
    idle = alice.id, Heartbeat()
    replies = answer([same, later, foreign, gap, stranger, idle])
    assert [reply is not None for reply in replies] == [True, False, False, False, False, True]
    assert replies[0] is not None
    assert replies[0].records_known == 2
    assert replies[0].may_train
    known = [each.heartbeat()["records_known"] for each in (alice, bob, carol, dora)]
    assert known == [2, 0, 0, 0], "what is not routine has no effect here"
    again = answer([same])
    assert again[0] is not None
    assert again[0].records_known == 2, "a report that is sent again is stored once"


def test_the_number_of_statements_does_not_grow_with_that_of_heartbeats(case: Case) -> None:
    """At each statement the thread may wait for Python's lock, so that a busy server fell behind."""
    providers = training(case, COUNT)
    news = [*losses(1.0, 2.0), *(asdict(QueueRecord(1, 2, 3)) for _ in range(NEWEST_KEPT["queue"] + 5))]
    beats = [beat(case, each, records=news) for each in providers]
    answer, statements = case.server.heartbeats._answer_routine, []
    answer(beats[:1])  # the job is read once
    event.listen(
        case.server.db._engine, "before_cursor_execute", lambda *args: statements.append(args[2])
    )
    counts = []
    for some in (beats[1:3], beats[3:]):
        statements.clear()
        replies = answer(some)
        assert [reply.records_known for reply in replies if reply] == [len(news)] * len(some)
        counts.append(len(statements))
    assert counts[0] == counts[1], statements
    with case.server.db.read() as db:
        for each, _ in beats:
            own = db.assignments.current(each)
            assert own is not None
            assert (own.records, own.losses) == (len(news), 2)
            assert len(db.telemetry.newest(own.id, QueueRecord, 1000)) == NEWEST_KEPT["queue"]


def test_statements_of_heartbeats_read_only_what_they_need(case: Case) -> None:
    providers = training(case, COUNT)
    beats = [beat(case, each, records=losses(1.0, 2.0)) for each in providers]
    answer, found = case.server.heartbeats._answer_routine, []
    answer(beats[:1])
    event.listen(
        case.server.db._engine, "before_cursor_execute", lambda *args: found.append((args[2], args[3]))
    )
    answer(beats[1:])
    steps: list[str] = []
    with case.server.db._engine.connect() as connection:
        for statement, values in [each for each in found if each[0].startswith("SELECT")]:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values)
            steps += [row[3] for row in plan]
    scans = [step for step in steps if step.startswith("SCAN")]
    assert not [step for step in scans if "VIRTUAL TABLE" not in step], steps
    by_index = [step for step in steps if step.startswith("SEARCH assignments")]
    assert by_index == ["SEARCH assignments USING INDEX ix_assignments_provider (provider=?)"] * 2


def test_providers_that_begin_are_processed_together(case: Case) -> None:
    """When large jobs started, heartbeats waited for a second: each beginning was a transaction."""
    providers = [case.provider(f"p{number}") for number in range(4)]
    case.submit(case.requester(), min_providers=4, max_providers=4)
    case.match()
    answer, commits = case.server.heartbeats._answer_routine, []
    event.listen(case.server.db._engine, "commit", commits.append)
    for phase in ("fetching", "fetched", "training"):
        beats = [beat(case, each, phase=phase, records=losses(1.0)) for each in providers]
        commits.clear()
        replies = answer([*beats, beats[0]])
        assert len(commits) == 2, "one that writes, and one that reads for the replies"
        assert [reply is not None for reply in replies] == [True] * 4 + [False]
        assert [reply.may_train for reply in replies if reply] == [phase != "fetching"] * 4
        assert [reply.records_known for reply in replies if reply] == [1] * 4
    with case.server.db.read() as db:
        (job,) = db.jobs.listed()
        assert job.state is JobState.TRAINING
        assert {each.state for each in db.providers.present()} == {ProviderState.TRAINING}
        assert all(len(db.telemetry.losses(each.id)) == 1 for each in db.assignments.of_job(job.id))


def test_the_end_of_a_phase_that_needs_more_is_processed_alone(case: Case) -> None:
    (alice,) = training(case, 1)
    answer = case.server.heartbeats._answer_routine
    for fields in (
        {"phase": "uploading"},
        {"phase": "finished"},
        {"phase": "failed", "cause": "machine", "reason": "no memory"},
        {"phase": "fetched", "records": losses(1.0), "first_record": 7},
        {"phase": "fetched", "tls_rejections": {"foreign": 1}},
    ):
        assert answer([beat(case, alice, **fields)]) == [None], fields
    with case.server.db.read() as db:
        own = db.assignments.current(alice.id)
        assert own is not None
        assert own.phase == "training"


def test_a_provider_may_have_several_heartbeats_among_those_that_wait(case: Case) -> None:
    alice, bob = training(case, 2)
    first = beat(case, alice, records=losses(1.0, 2.0))
    longer = beat(case, alice, records=losses(1.0, 2.0, 3.0))
    other = beat(case, bob, records=losses(4.0))
    again = beat(case, alice, records=losses(2.5, first=1), first_record=3)
    replies = case.server.heartbeats._answer_routine([first, longer, other, again])
    assert [reply.records_known for reply in replies if reply] == [2, 3, 1, 4]
    with case.server.db.read() as db:
        own = db.assignments.current(alice.id)
        assert own is not None
        assert own.losses == 3
        assert [each.loss for each in db.telemetry.losses(own.id)] == [1.0, 2.5, 3.0]


def test_no_event_is_lost_when_many_heartbeats_arrive_at_once(case: Case) -> None:
    providers = training(case, COUNT)
    assignments = [each.heartbeat()["assignment"] for each in providers]

    async def send(client: httpx.AsyncClient, number: int, position: int) -> int:
        provider, assignment = providers[number], assignments[number]
        report = {
            "assignment": assignment,
            "phase": "training",
            "first_record": position,
            "records": [asdict(WarningRecord(f"warning {position}"))],
        }
        body = {"report": report, "known": assignment, "may_train": True, "wait": 0}
        answer = await client.post(
            f"/api/providers/{provider.id}/heartbeat",
            json=body,
            headers={"Authorization": f"Bearer {provider.credential}"},
        )
        known: int = answer.json()["records_known"]
        return known

    async def scene() -> None:
        transport = httpx.ASGITransport(case.client.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            for position in range(4):
                known = await asyncio.gather(*(send(client, n, position) for n in range(COUNT)))
                assert known == [position + 1] * COUNT

    asyncio.run(scene())
    warnings = [event["reason"] for event in case.events() if event["kind"] == "warning"]
    assert sorted(warnings) == sorted(
        f"node_{node}: warning {position}" for node in range(COUNT) for position in range(4)
    )


def test_a_change_of_a_job_is_in_the_next_reply(case: Case) -> None:
    """Replies are composed from what was read before, as long as nothing changes."""
    alice, bob = case.provider("alice"), case.provider("bob")
    case.submit(case.requester(), min_providers=2)
    case.match()
    alice.report("fetched")
    assert not alice.heartbeat()["may_train"], "bob has not fetched yet"
    bob.report("fetched")
    assert alice.heartbeat()["may_train"]


def test_a_heartbeat_that_is_not_valid_is_refused_as_on_other_routes(case: Case) -> None:
    alice = case.provider()
    path, headers = f"/api/providers/{alice.id}/heartbeat", {"Content-Type": "application/json"}
    long = b" " * (100 << 10)
    for content in (
        b"",
        b"[",
        b"[" * 60_000,
        b'"\\ud800"',
        b'{"wait": NaN}',
        b'{"wait": "soon"}',
        b"[]" + long,
    ):
        detail = alice.call("POST", path, 422, content=content, headers=headers)["detail"]
        assert detail.startswith("the request is not valid: body")
    alice.call("POST", path, 200, content=json.dumps({"wait": 0}).encode() + long, headers=headers)
    alice.call("POST", path, 413, content=b" " * (5 << 20), headers=headers)
    alice.call("PUT", path, 405, content=b"{}", headers=headers)


def test_a_cache_keeps_nothing_that_was_read_before_a_change() -> None:
    cache: VersionedCache[str] = VersionedCache(2)
    before = cache.changes
    cache.forget(["a"])
    cache.put("a", "old", before)
    assert cache.get("a") is None
    for key in ("a", "b"):
        cache.put(key, key, cache.changes)
    assert cache.get("a") == "a"
    cache.put("c", "c", cache.changes)
    assert [cache.get(key) for key in ("a", "b", "c")] == ["a", None, "c"], "b was not used for longest"
    cache.forget(["a"])
    assert [cache.get(key) for key in ("a", "c")] == [None, "c"]
