"""The page's stream: the whole state once, then small changes; and curves of a bounded length."""

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_cases import Case, losses, opened
from test_page import browser, token

from ravnest.errors import ServerRefusedError
from ravnest.schemas.auth import ApiRole
from ravnest.server.db.records import MemberRecord
from ravnest.server.db.telemetry import LossBucket
from ravnest.server.settings import ConnectionLimits, ServerSettings
from ravnest.server.web.curves import bucket_size, computing_share, loss_buckets, merged, thinned
from ravnest.server.web.deltas import item_changes
from ravnest.server.web.details import time_shares
from ravnest.server.web.feed import PAUSE, PageFeed, ProviderRow
from ravnest.server.web.layers import layer_words
from ravnest.server.web.sparkline import MOST_POINTS, extended
from ravnest.server.web.stream import StreamPlaces, page_events
from ravnest.telemetry import TimingRecord

VIEWER = MemberRecord("viewer", ApiRole.VIEWER, "viewer")


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30.0))


def parsed(event: bytes) -> tuple[str, dict[str, Any]]:
    name, data = event.decode().strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def row(**changes: Any) -> ProviderRow:
    fields: dict[str, Any] = dict.fromkeys(ProviderRow.__slots__, 0) | changes
    return ProviderRow(**fields)


def test_only_changed_fields_are_sent() -> None:
    before = {"a": row(id="a", ram=1.0), "b": row(id="b"), "c": row(id="c")}
    after = {"a": replace(before["a"], ram=2.0, cores=9), "b": before["b"], "d": row(id="d")}
    found = item_changes(before, after, only_new=("cores",))
    assert found.changed["a"] == {"ram": 2.0}
    assert set(found.changed) == {"a", "d"}
    assert found.changed["d"]["id"] == "d"
    assert found.removed == ("c",)
    assert not item_changes(after, dict(after))


def test_a_sparkline_grows_and_is_thinned_out() -> None:
    curve: tuple[tuple[int, float], ...] = ()
    for update in range(10 * MOST_POINTS):
        curve = extended(curve, update, 1.0 / (update + 1))
    assert len(curve) <= MOST_POINTS
    assert curve[-1][0] == 10 * MOST_POINTS - 1
    assert [update for update, _ in curve] == sorted({update for update, _ in curve})
    repeated = extended(((1, 1.0), (2, 1.0), (3, 1.0)), 2, 5.0)
    assert repeated == ((1, 1.0), (2, 5.0))
    assert extended(curve, 10**6, None) == curve


@pytest.mark.parametrize(
    ("first", "last"), [(0, 0), (0, 9), (0, 10), (7, 23), (0, 99_999), (33, 100_032)]
)
def test_buckets_are_as_many_as_asked_for_at_most(first: int, last: int) -> None:
    for points in (1, 10, 600):
        step = bucket_size(first, last, points)
        assert last // step - first // step + 1 <= points
        assert step == 1 or (last - first + 1) / step > points / 2 - 2


def test_parts_of_a_bucket_become_one() -> None:
    one = LossBucket(0, 4, 5, 2.0, 1.0, 3.0, 0.0, 0)
    other = LossBucket(5, 9, 5, 4.0, 0.5, 6.0, 2.0, 1)
    none = LossBucket(10, 10, 1, None, None, None, 0.0, 1)
    assert merged([other, one, none], 10) == [LossBucket(0, 9, 10, 3.0, 0.5, 6.0, 1.0, 1), none]
    assert thinned(range(10), 3) == (1, 5, 9)


def test_layers_are_named_in_short() -> None:
    names = ["embed.weight", "blocks.2.a.weight", "blocks.10.b.bias", "head", "0.weight"]
    assert layer_words(names) == "embed, head, 0, blocks.2–10"


def test_shares_of_time_follow_from_the_rate() -> None:
    timing = TimingRecord(0, 8, forward=0.01, backward=0.02, step=0.0, to_next=0.005, to_previous=0.005)
    shares = time_shares(timing, samples_per_second=160.0, samples_per_microbatch=8.0)
    assert (shares.computing, shares.sending, shares.waiting) == pytest.approx((0.6, 0.2, 0.4))


def test_the_utilisation_of_a_stage_follows_the_rate_at_that_time() -> None:
    paces = [(10.0, 40.0), (20.0, 80.0)]
    shares = [computing_share(time, 0.05, paces, 8.0) for time in (0.0, 12.0, 19.0, 90.0)]
    assert shares == pytest.approx([0.25, 0.25, 0.5, 0.5])
    assert computing_share(10.0, 9.0, paces, 8.0) == 1.0
    assert computing_share(10.0, 0.05, [], 8.0) is None
    assert computing_share(10.0, 0.05, paces, None) is None


def test_a_long_curve_is_downsampled_with_its_extremes(case: Case) -> None:
    rita, alice = case.requester(), case.provider("alice")
    job = case.submit(rita)
    case.match()
    values = [1.0] * 1000
    values[500] = 9.0
    alice.report("training", records=losses(*values))
    with case.server.db.read() as db:
        found = loss_buckets(db, job, 50)
        part = loss_buckets(db, job, 50, 490, 509)
    assert len(found.buckets) <= 50
    assert max(each.high or 0 for each in found.buckets) == 9.0
    assert sum(each.count for each in found.buckets) == 1000
    assert (part.step, len(part.buckets), part.first, part.last) == (1, 20, 0, 999)


def test_the_stream_sends_the_state_and_then_changes(case: Case) -> None:
    rita, alice = case.requester(), case.provider("alice")
    job = case.submit(rita, name="digits")
    case.match()
    alice.report("training", records=losses(3.0, 2.0))

    async def watch() -> None:
        events = page_events(
            case.server, PageFeed(case.server), case.server.auth.member(admin, ""), 0.01
        )
        assert b"retry" in await anext(events)
        name, state = parsed(await anext(events))
        assert (name, state["me"]["role"]) == ("state", "admin")
        assert state["jobs"]["changed"][job]["curve"] == [[0, 3.0], [1, 2.0]]
        assert [each["name"] for each in state["providers"]["changed"].values()] == ["alice"]
        case.time.now += PAUSE
        await asyncio.to_thread(alice.report, "training", records=losses(1.5, first=2), first_record=2)
        case.time.now += PAUSE
        name, change = parsed(await anext(events))
        assert name == "change"
        changed = change["jobs"]["changed"][job]
        assert (changed["loss"], changed["updates"]) == (1.5, 3)
        assert "curve" not in changed
        assert "name" not in changed
        assert "providers" not in change
        await events.aclose()

    admin = case.admin().credential
    run(watch())


def test_a_stream_ends_with_the_server_and_with_the_membership(case: Case) -> None:
    async def watch(member: str, credential: str) -> None:
        record = case.server.auth.member(credential, "")
        events = page_events(case.server, PageFeed(case.server), record, 0.01)
        await anext(events)
        await anext(events)
        await asyncio.to_thread(case.server.revoke, member)
        assert parsed(await anext(events))[0] == "end"
        assert [each async for each in events] == []
        others = page_events(case.server, PageFeed(case.server), case.server.auth.member(admin, ""), 5.0)
        await anext(others)
        await anext(others)
        case.server.notifications.close()
        assert [each async for each in others] == []

    viewer, admin = case.member(ApiRole.VIEWER), case.admin().credential
    run(watch(viewer.id, viewer.credential))


def test_a_requester_sees_own_jobs_and_no_work_for_others(case: Case) -> None:
    rita, alice = case.requester(), case.provider("alice")
    job = case.submit(rita)
    case.match()
    state = PageFeed(case.server).current()
    own = state.seen_by(MemberRecord(rita.id, ApiRole.REQUESTER, "rita"))
    other = state.seen_by(MemberRecord("x", ApiRole.REQUESTER, "x"))
    itself = state.seen_by(MemberRecord(alice.id, ApiRole.PROVIDER, "alice"))
    assert state.seen_by(VIEWER) is state
    assert (set(own.jobs), own.providers[alice.id].job) == ({job}, job)
    assert (set(other.jobs), other.providers[alice.id].job) == (set(), None)
    assert "another requester" in other.providers[alice.id].reason
    assert (set(itself.jobs), set(itself.providers)) == (set(), {alice.id})


def test_a_provider_row_counts_what_it_has_delivered(case: Case) -> None:
    rita, alice = case.requester(), case.provider("alice")
    feed = PageFeed(case.server)
    row = feed.current().providers[alice.id]
    assert (row.finished, row.failed) == (0, 0)
    case.submit(rita)
    case.match()
    alice.report("failed", reason="too little memory", cause="machine")
    case.time.now += PAUSE
    row = feed.current().providers[alice.id]
    assert (row.finished, row.failed) == (0, 1)


def test_unchanged_items_stay_the_same_objects(case: Case) -> None:
    rita = case.requester()
    case.provider("alice")
    case.submit(rita)
    feed = PageFeed(case.server)
    before = feed.current()
    case.time.now += PAUSE
    after = feed.current()
    assert before is not after
    assert all(after.jobs[key] is card for key, card in before.jobs.items())
    assert all(after.providers[key] is each for key, each in before.providers.items())


def test_the_number_of_streams_is_limited() -> None:
    places = StreamPlaces(most=3, per_address=2)
    with places.taken("a"), places.taken("a"):
        with pytest.raises(ServerRefusedError, match="address"), places.taken("a"):
            pass
        with (
            places.taken("b"),
            pytest.raises(ServerRefusedError, match="too many browsers"),
            places.taken("c"),
        ):
            pass
    with places.taken("a"):
        pass


def test_a_stream_without_a_place_is_refused(tmp_path: Path) -> None:
    limits = ConnectionLimits(pages=0)
    with opened(tmp_path, settings=ServerSettings(connections=limits)) as case:
        answer = browser(case, token(case)).get("/page/stream")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
