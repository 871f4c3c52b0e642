"""The page's stream: the whole state once, then small changes; and curves of a bounded length."""

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from server_cases import Case, FakePlanner, losses, offer, opened, spec
from test_page import browser, token

from ravnest.deadlines import PAGE_PAUSE
from ravnest.errors import ServerRefusedError
from ravnest.schemas.auth import ApiRole
from ravnest.server.db.records import MemberRecord
from ravnest.server.db.telemetry import LossBucket
from ravnest.server.settings import ConnectionLimits, ServerSettings
from ravnest.server.web.curves import (
    MicrobatchSizes,
    bucket_size,
    computing_share,
    job_curves,
    loss_buckets,
    merged,
    microbatch_sizes,
    summed,
    thinned,
)
from ravnest.server.web.deltas import item_changes
from ravnest.server.web.details import time_shares
from ravnest.server.web.feed import PageFeed, ProviderRow
from ravnest.server.web.layers import layer_words
from ravnest.server.web.sparkline import MOST_POINTS, extended
from ravnest.server.web.stream import StreamPlaces, page_events
from ravnest.telemetry import PaceRecord, ScheduleRecord, TimingRecord

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
    """A link's delay is no share of time, and an update's optimizer step is shared by its parts."""
    timing = TimingRecord(0, 8, 0.01, 0.02, 0.08, to_next=0.02, to_previous=0.03)
    parts = MicrobatchSizes(samples=8.0, per_update=16)
    old = time_shares(timing, 160.0, parts)
    assert (old.computing, old.sending) == (pytest.approx(0.7), None)
    new = time_shares(replace(timing, to_next_busy=0.005, to_previous_busy=0.002), 160.0, parts)
    assert (new.computing, new.sending) == pytest.approx((0.7, 0.1))


def test_the_sizes_of_micro_batches_follow_from_schedule_and_job() -> None:
    training = spec().training.model_copy(update={"batch_size": 64, "update_frequency": 3})
    assert microbatch_sizes(training, ScheduleRecord("sync", 4, "")) == MicrobatchSizes(16.0, 12)


def test_rates_of_clusters_are_summed_while_they_report() -> None:
    one, other = [(0.0, 10.0), (5.0, 20.0), (90.0, 30.0)], [(2.0, 1.0), (5.0, 2.0)]
    assert summed([one, other]) == [(0.0, 10.0), (2.0, 11.0), (5.0, 22.0), (90.0, 30.0)]
    assert summed([]) == []


def test_old_rates_of_which_few_are_kept_count_until_the_next() -> None:
    one = [(30.0 * number, 10.0) for number in range(4)] + [(91.0, 10.0), (92.0, 10.0)]
    other = [(30.0 * number + 15, 1.0) for number in range(3)]
    assert [rate for _, rate in summed([one, other])] == [10.0] + [11.0] * 8


def test_each_cluster_has_its_own_rate_and_the_job_that_of_all(tmp_path: Path) -> None:
    with opened(tmp_path, planner=FakePlanner(needs=2, size=1)) as case:
        rita, roots = case.requester(), [case.provider(name) for name in ("alice", "bob")]
        training = spec().training.model_copy(update={"batch_size": 8})
        job = case.submit(rita, training=training)
        case.match()
        for root, mean, recent in zip(roots, (100.0, 60.0), (80.0, 40.0), strict=True):
            records = [
                ScheduleRecord("sync", 1, ""),
                PaceRecord(0, 9, mean, 1.0, recent),
                TimingRecord(0, 9, 0.02, 0.03, 0.0, 0.0, 0.0),
            ]
            root.report("training", records=[asdict(each) for each in records])
        page = browser(case, token(case))
        detail = page.get(f"/page/jobs/{job}").json()
        assert detail["view"]["progress"]["samples_per_second"] == 160.0
        shares = {node["name"]: node["computing"] for node in detail["nodes"]}
        assert shares == pytest.approx({"alice": 0.5, "bob": 0.25})
        assert PageFeed(case.server).current().jobs[job].rate == 160.0
        paces = page.get(f"/page/jobs/{job}/curves").json()["paces"]
        assert paces[-1][1] == 120.0
        roots[1].report("failed", reason="too little memory", cause="machine")
        assert page.get(f"/page/jobs/{job}").json()["view"]["progress"]["samples_per_second"] == 100.0


def test_the_utilisation_of_a_stage_follows_the_rate_at_that_time() -> None:
    paces = [(10.0, 40.0), (20.0, 80.0)]
    shares = [computing_share(time, 0.05, paces, 8.0) for time in (0.0, 12.0, 19.0, 90.0)]
    assert shares == pytest.approx([0.25, 0.25, 0.5, 0.5])
    assert computing_share(10.0, 9.0, paces, 8.0) == 1.0
    assert computing_share(10.0, 0.05, [], 8.0) is None
    assert computing_share(10.0, 0.05, paces, None) is None


def test_the_newest_number_of_micro_batches_counts(case: Case) -> None:
    rita, alice = case.requester(), case.provider("alice")
    job = case.submit(rita)
    case.match()
    timing = TimingRecord(0, 8, forward=0.01, backward=0.02, step=0.0, to_next=0.0, to_previous=0.0)
    pace = PaceRecord(0, 100, 40.0, 9.0, recent=40.0)
    first = ScheduleRecord("sync", 1, "the plan's choice")
    newest = ScheduleRecord("sync", 8, "8 are faster")
    alice.report("training", records=[asdict(each) for each in (first, timing, pace)])
    case.pass_time(10.0)
    again = [asdict(each) for each in (newest, timing, pace)]
    alice.report("training", records=again, first_record=3)
    with case.server.db.read() as db:
        (root,) = db.assignments.of_job(job)
        began = db.telemetry.first_schedule(root.id)
        (curve,) = job_curves(db, job, 50, 0, 100).stages
        size = db.jobs.spec(job).training.batch_size
    assert rita.get(f"/api/jobs/{job}")["progress"]["schedule"] == asdict(newest)
    assert began == curve.times[0], "training began with the first one"
    assert curve.shares == pytest.approx([0.03 * 40 / size, 0.03 * 40 / max(1, size / 8)])


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
        case.time.now += PAGE_PAUSE
        await asyncio.to_thread(alice.report, "training", records=losses(1.5, first=2), first_record=2)
        case.time.now += PAGE_PAUSE
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


def test_news_reach_a_browser_although_another_one_was_told_just_before(case: Case) -> None:
    """The state is shared: what was read for one browser before the news is not taken for another."""
    alice = case.provider("alice")
    feed, admin = PageFeed(case.server), case.server.auth.member(case.admin().credential, "")

    async def watch() -> None:
        events = page_events(case.server, feed, admin, 30.0)
        await anext(events)
        await anext(events)
        case.time.now += PAGE_PAUSE
        feed.current()  # another browser
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.to_thread(alice.post, "/api/providers", offer("alice", ram=9.0))
        await asyncio.sleep(PAGE_PAUSE / 4)
        assert not waiting.done()
        case.time.now += PAGE_PAUSE
        _, change = parsed(await waiting)
        assert change["providers"]["changed"][alice.id]["ram"] == 9.0
        await events.aclose()

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


def test_jobs_of_many_others_do_not_hide_own_and_active_ones(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ravnest.server.web.feed.MOST_JOBS", 2)
    rita, otto = case.requester("rita"), case.requester("otto")
    waiting, own = case.submit(rita), case.submit(rita)
    others = [case.submit(otto) for _ in range(3)]
    for job in (own, *others):
        case.server.job_service.cancel(job, MemberRecord("admin", ApiRole.ADMIN, "admin"))
    feed = PageFeed(case.server)
    assert list(feed.current().jobs) == [*others[:0:-1], waiting]
    member = MemberRecord(rita.id, ApiRole.REQUESTER, "rita")
    with feed.watched_by(member):
        assert list(feed.current().seen_by(member).jobs) == [own, waiting]
    case.time.now += PAGE_PAUSE
    assert list(feed.current().seen_by(member).jobs) == [waiting]


def test_the_memory_that_workers_take_is_summed(case: Case) -> None:
    rita, alice = case.requester(), case.provider("alice")
    job = case.submit(rita)
    case.match()
    alice.report("training", records=losses(3.0), memory={"now": 700, "peak": 900})
    feed = PageFeed(case.server)
    assert feed.current().used_memory == 700
    assert feed.current().seen_by(MemberRecord("x", ApiRole.REQUESTER, "x")).used_memory == 700
    case.server.job_service.cancel(job, MemberRecord("admin", ApiRole.ADMIN, "admin"))
    case.time.now += PAGE_PAUSE
    assert feed.current().used_memory == 0


def test_a_provider_row_counts_what_it_has_delivered(case: Case) -> None:
    rita, alice = case.requester(), case.provider("alice")
    feed = PageFeed(case.server)
    row = feed.current().providers[alice.id]
    assert (row.finished, row.failed) == (0, 0)
    case.submit(rita)
    case.match()
    alice.report("failed", reason="too little memory", cause="machine")
    case.time.now += PAGE_PAUSE
    row = feed.current().providers[alice.id]
    assert (row.finished, row.failed) == (0, 1)


def test_unchanged_items_stay_the_same_objects(case: Case) -> None:
    rita = case.requester()
    case.provider("alice")
    case.submit(rita)
    feed = PageFeed(case.server)
    before = feed.current()
    case.time.now += PAGE_PAUSE
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
    with places.taken("2001:db8::1"), places.taken("2001:db8::2"):  # one household
        assert "address" in places.refusal("2001:db8::3")


def test_a_stream_without_a_place_is_refused(tmp_path: Path) -> None:
    limits = ConnectionLimits(pages=0)
    with opened(tmp_path, settings=ServerSettings(connections=limits)) as case:
        page = browser(case, token(case))
        answer = page.get("/page/stream")
        assert "too many browsers" in page.get("/page/whoami").json()["refusal"]
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
