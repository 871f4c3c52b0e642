"""Retention of rows: ended jobs and events are removed by age and by number, and readers are told."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import training_pair, upload
from server_cases import Case, losses, offer, opened
from sqlalchemy import func, select

from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobState
from ravnest.server import row_retention
from ravnest.server.auth.tokens import ADMIN
from ravnest.server.db import tables
from ravnest.server.db.records import JobRecord, MemberRecord
from ravnest.server.row_retention import expired_jobs
from ravnest.server.settings import ServerSettings
from ravnest.telemetry import WarningRecord

DAY = 86400.0
FEW = ServerSettings(lost_after=1e9, restart_grace=1e9, most_ended_jobs=2, most_events=50, kept_events=5)


@pytest.fixture
def few(tmp_path: Path) -> Iterator[Case]:
    """Server that keeps few rows, and removes three of them at a time."""
    with pytest.MonkeyPatch.context() as patch, opened(tmp_path, settings=FEW) as case:
        patch.setattr(row_retention, "_AT_ONCE", 3)
        yield case


def rows(case: Case, table: Any) -> int:
    with case.server.db._engine.connect() as connection:
        return int(connection.execute(select(func.count()).select_from(table)).scalar_one())


def ended_pair(case: Case) -> str:
    """Train a job with some losses, warnings and a look at its stages, and cancel it."""
    rita, job, alice, _ = training_pair(case)
    alice.report("training", records=[*losses(*range(10)), *warnings(4)])
    case.server.straggler_service.measure(job)
    rita.post(f"/api/jobs/{job}/cancel")
    return job


def warnings(count: int) -> list[dict[str, Any]]:
    return [asdict(WarningRecord(f"warning {number}")) for number in range(count)]


def reasons(case: Case, path: str = "/api/events") -> list[str]:
    return [each["reason"] for each in case.admin().get(path)]


def test_ended_jobs_expire_by_age_and_by_number_of_each_requester() -> None:
    first = JobRecord("a", "job", "rita", 1, 1, None, JobState.DONE, "", 0.0, 10.0, "", 0)
    jobs = [
        first,
        replace(first, id="b", owner="sam", changed=20.0),
        replace(first, id="c", changed=30.0),
        replace(first, id="d", changed=40.0),
    ]

    def ids(kept: float = 1e9, most: int = 100) -> str:
        return "".join(each.id for each in expired_jobs(jobs, 100.0, kept=kept, most=most))

    assert ids() == ""
    assert ids(kept=75.0) == "ab"
    assert ids(most=1) == "ac", "the only job of sam stays"
    assert ids(kept=75.0, most=1) == "abc"
    assert ids(most=0) == "abcd"


def test_an_old_job_is_removed_with_all_its_rows(case: Case) -> None:
    job = ended_pair(case)
    removed = (tables.jobs, tables.assignments, tables.losses, tables.records, tables.stage_times)
    assert all(rows(case, table) for table in removed)
    case.time.now += 89 * DAY
    case.server.clean_up()
    case.admin().get(f"/api/jobs/{job}")
    case.time.now += 2 * DAY
    case.server.clean_up()
    assert not any(rows(case, table) for table in removed)
    assert job not in str(case.events())
    assert "1 ended jobs" in reasons(case)[-1]
    assert "90 days after their end" in case.admin().get(f"/api/jobs/{job}", 404)["detail"]
    removed_jobs = case.server.removed_jobs(ADMIN)
    assert removed_jobs is not None
    assert (removed_jobs.count, case.time.now - removed_jobs.time) == (1, pytest.approx(91 * DAY))


def test_only_the_newest_ended_jobs_of_a_requester_stay(few: Case) -> None:
    rita, job, alice, _ = training_pair(few)
    alice.report("training", records=[*losses(*range(10)), *warnings(4)])
    rita.post(f"/api/jobs/{job}/cancel")
    of_another = few.submit(few.requester("sam"))
    few.admin().post(f"/api/jobs/{of_another}/cancel")
    later = [few.submit(rita) for _ in range(3)]
    for each in later:
        rita.post(f"/api/jobs/{each}/cancel")
    few.server.clean_up()
    known = {each["id"] for each in few.admin().get("/api/jobs")}
    assert known == {of_another, *later[1:]}
    assert rows(few, tables.losses) == rows(few, tables.records) == 0


def test_jobs_that_have_not_ended_or_can_be_resumed_stay(case: Case) -> None:
    rita, job, alice, bob = training_pair(case)
    for stage, caller in enumerate((alice, bob)):
        upload(caller, stage, 4)
    case.time.now += 100 * DAY
    case.server.row_retention.run_once()
    before = reasons(case, f"/api/jobs/{job}/events")
    assert before, "the server reads events of running jobs again"
    case.server.job_service.cancel(job, MemberRecord(rita.id, ApiRole.REQUESTER, "rita"))
    case.time.now += 100 * DAY
    case.server.row_retention.run_once()
    assert case.admin().get(f"/api/jobs/{job}")["state"] == "cancelled"


def test_events_are_removed_by_age_and_readers_are_told(case: Case) -> None:
    alice = case.provider()
    alice.call("DELETE", f"/api/providers/{alice.id}")
    job = ended_pair(case)
    before = case.events()
    case.time.now += 80 * DAY
    case.server.auth.create_token(ApiRole.VIEWER, "")
    case.admin().get("/api/jobs/none", 404)
    case.time.now += 20 * DAY
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_retention, "_AT_ONCE", 3)
        patch.setattr(row_retention, "expired_jobs", lambda *_, **__: [])
        case.server.row_retention.run_once()
    found = case.events()
    assert found[0]["reason"].startswith(f"{len(before)} events up to here were removed")
    assert found[0]["sequence"] == before[-1]["sequence"]
    of_job = case.admin().get(f"/api/jobs/{job}/events")
    assert [each["kind"] for each in of_job] == ["server"], "the job says so, too"
    assert case.admin().get(f"/api/jobs/{job}/events?after={of_job[0]['sequence']}") == []


def test_events_are_removed_by_number(few: Case) -> None:
    alice = few.provider()
    for _ in range(40):
        alice.call("DELETE", f"/api/providers/{alice.id}")
        alice.post("/api/providers", offer())
    few.server.clean_up()
    found = few.events()
    assert len(found) <= FEW.most_events + 2
    assert "events up to here were removed" in found[0]["reason"]
    assert "50 events" in found[-1]["reason"]


def test_a_running_job_says_where_its_warnings_were_removed(few: Case) -> None:
    _, job, alice, _ = training_pair(few)
    alice.report("training", records=warnings(12))
    few.server.run_due()
    found = few.admin().get(f"/api/jobs/{job}/events")
    kinds = [each["kind"] for each in found]
    assert kinds.count("warning") == FEW.kept_events
    assert "7 events up to here were removed" in found[kinds.index("warning") - 1]["reason"]
    assert [each["sequence"] for each in found] == sorted(each["sequence"] for each in found)


def test_a_database_without_the_new_index_and_table_gets_them(tmp_path: Path) -> None:
    with opened(tmp_path) as case, case.server.db._engine.begin() as connection:
        connection.exec_driver_sql("DROP INDEX events_of_kind")
        connection.exec_driver_sql("DROP TABLE removals")
    with opened(tmp_path) as case, case.server.db._engine.begin() as connection:
        names = connection.exec_driver_sql("SELECT name FROM sqlite_master").scalars().all()
        assert {"events_of_kind", "removals"} <= set(names)
