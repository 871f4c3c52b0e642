"""The database: transactions, persistence, upgrades, and bounds of what it stores."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from node_files import node_file
from server_cases import Case, artifact, offer, spec
from sqlalchemy.exc import IntegrityError

from ravnest.errors import ServerError
from ravnest.schemas.auth import ApiRole, hashed
from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import Assignment, DataShare, ProviderState, TlsRejections
from ravnest.schemas.reachability import AddressCheck
from ravnest.server.db.database import Database, Transaction
from ravnest.server.db.events import fair_share
from ravnest.server.db.members import FoundMember
from ravnest.server.db.new_records import NEWEST_KEPT
from ravnest.server.db.records import AssignmentRecord, MemberRecord
from ravnest.server.lifecycle import TransitionError
from ravnest.telemetry import (
    CheckpointRecord,
    LossRecord,
    PaceRecord,
    QueueRecord,
    TimingRecord,
    ValidationRecord,
    WarningRecord,
)

VALIDATION = ValidationRecord(0, epoch=0, name="accuracy", value=0.5, samples=8)


def losses(*values: float, first: int = 0) -> list[LossRecord]:
    """Loss records of consecutive updates."""
    return [LossRecord(update, 0, value, 1, 0) for update, value in enumerate(values, first)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.sqlite"


@pytest.fixture
def db(path: Path) -> Database:
    db = Database(path)
    db.open()
    return db


def assignment(job: str = "j") -> Assignment:
    return Assignment(
        id=f"{job}-0",
        job=job,
        node=0,
        node_spec=node_file(0),
        stage=artifact("units"),
        weights=artifact("weights"),
        train=DataShare(samples=8, total=8),
        training=spec().training,
        tls=False,
    )


def fill(tx: Transaction) -> None:
    tx.members.add(MemberRecord("r", ApiRole.REQUESTER, "rita"), "secret-r")
    tx.members.add(MemberRecord("p", ApiRole.PROVIDER, "alice"), "secret-p")
    tx.members.add_token("secret-t", ApiRole.VIEWER, uses=3, expires=None)
    tx.jobs.add("j", "r", spec(), "submitted")
    tx.providers.add("p", offer(), "joined")
    tx.assignments.add(assignment(), "p")
    tx.artifact_grants.grant("r", [artifact("units"), artifact("units"), artifact("weights")])


def test_a_second_process_reads_what_the_first_wrote(db: Database, path: Path) -> None:
    with db.write(5.0) as tx:
        fill(tx)
        tx.telemetry.add(current(tx), 0, [*losses(3.0, 2.0), VALIDATION])
        provider = tx.providers.get("p")
        assert provider is not None
        tx.providers.move(provider, ProviderState.RESERVED, "for j", job="j")
    with db.read() as tx:
        before = state_of(tx)
    second = Database(path)  # the first is not closed, as after a kill
    second.open()
    with second.read() as tx:
        assert state_of(tx) == before
        assert tx.members.by_hash(hashed("secret-p"), 0.0) == FoundMember(
            MemberRecord("p", ApiRole.PROVIDER, "alice"), None
        )
        assert tx.telemetry.losses("j-0") == losses(3.0, 2.0)
        assert tx.telemetry.validations("j-0") == (VALIDATION,)
        assert tx.jobs.spec("j") == spec()
        assert tx.assignments.body("j-0") == assignment()


def state_of(tx: Transaction) -> object:
    return (
        tx.providers.present(),
        tx.jobs.listed(),
        tx.assignments.of_job("j"),
        tx.events.after(0),
        tx.artifact_grants.totals("r"),
        tx.members.token("secret-t"),
    )


def test_a_state_and_its_event_are_written_together_or_not_at_all(db: Database) -> None:
    with db.write(1.0) as tx:
        fill(tx)

    def fail_halfway() -> None:
        with db.write(2.0) as tx:
            provider = tx.providers.get("p")
            assert provider is not None
            tx.providers.move(provider, ProviderState.LOST, "gone")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    with db.read() as tx:
        provider = tx.providers.get("p")
        assert provider is not None
        assert provider.state is ProviderState.OFFERED
        assert [event.after for event in tx.events.after(0)] == ["submitted", "offered"]


def test_other_transitions_than_those_of_the_lifecycle_are_refused(db: Database) -> None:
    with db.write(1.0) as tx:
        fill(tx)
    with db.write(2.0) as tx:
        job = tx.jobs.get("j")
        assert job is not None
        with pytest.raises(TransitionError):
            tx.jobs.move(job, JobState.DONE, "no")


def test_each_transition_is_an_event_with_its_reason(db: Database) -> None:
    with db.write(1.0) as tx:
        fill(tx)
    with db.write(2.0) as tx:
        provider = tx.providers.get("p")
        assert provider is not None
        tx.providers.move(provider, ProviderState.RESERVED, "reserved for digits", job="j")
    with db.read() as tx:
        (event,) = tx.events.after(2)
        assert (event.kind, event.subject, event.before, event.after, event.reason, event.time) == (
            "provider",
            "p",
            "offered",
            "reserved",
            "reserved for digits",
            2.0,
        )
        assert event in tx.events.after(0, job="j")


def test_changes_of_a_job_have_different_times(db: Database) -> None:
    with db.write(1.0) as tx:
        fill(tx)
    times = []
    for _ in range(3):
        with db.write(1.0) as tx:
            tx.jobs.touch("j")
            job = tx.jobs.get("j")
            assert job is not None
            times.append(job.changed)
    assert times == sorted(set(times))


def current(tx: Transaction) -> AssignmentRecord:
    record = tx.assignments.get("j-0")
    assert record is not None
    return record


def test_records_that_are_sent_again_are_stored_once(db: Database) -> None:
    with db.write(1.0) as tx:
        fill(tx)
        for first, records, new, known in [
            (0, losses(5.0, 4.0), 2, 2),
            (0, [*losses(5.0, 4.0), WarningRecord("w")], 1, 3),
            (1, [*losses(4.0, first=1), WarningRecord("w")], 0, 3),
            (3, losses(3.0, first=2), 1, 4),
        ]:
            assert len(tx.telemetry.add(current(tx), first, records)) == new
            assert current(tx).records == known
        assert tx.telemetry.losses("j-0", 1) == losses(4.0, 3.0, first=1)
        assert tx.telemetry.losses("j-0", 9) == []
        assert tx.telemetry.newest("j-0", WarningRecord, 9) == [WarningRecord("w")]


def test_old_losses_are_thinned_out(db: Database) -> None:
    with db.write(1.0) as tx:
        fill(tx)
        for first in range(0, 1000, 50):
            values = [float(i) for i in range(first, first + 50)]
            tx.telemetry.add(current(tx), first, losses(*values, first=first), most_losses=100)
            found = tx.telemetry.losses("j-0")
            assert len(found) == current(tx).losses <= 100
            assert found[-1].update == first + 49, "the last loss is kept"
        updates = [record.update for record in found]
        assert updates[0] == 0
        assert max(after - before for before, after in pairwise(updates)) <= 32
        assert current(tx).records == 1000
        assert tx.telemetry.last_loss("j-0") == losses(999.0, first=999)[0]


def test_of_other_records_the_newest_are_kept(db: Database) -> None:
    queues = [QueueRecord(in_flight=number, window=4, inbox=0) for number in range(500)]
    with db.write(1.0) as tx:
        fill(tx)
        tx.telemetry.add(current(tx), 0, [VALIDATION, *queues])
        kept = tx.telemetry.newest("j-0", QueueRecord, 1000)
        assert kept == list(reversed(queues))[: NEWEST_KEPT["queue"]]
        assert tx.telemetry.validations("j-0") == (VALIDATION,)


def test_of_rates_and_timings_some_of_the_whole_time_remain(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NEWEST_KEPT, "pace", 40)
    monkeypatch.setitem(NEWEST_KEPT, "timing", 80)
    with db.write(0.0) as tx:
        fill(tx)
    for second in range(300):
        with db.write(float(second)) as tx:
            timings = [TimingRecord(stage, 9, 1.0, 0, 0, 0, 0) for stage in range(2)]
            tx.telemetry.add(current(tx), 3 * second, [PaceRecord(0, None, second, None), *timings])
    with db.read() as tx:
        times = [time for time, _ in tx.telemetry.rates("j-0")]
        costs = tx.telemetry.timings_between("j-0", 0.0, 1e9)
    assert len(times) <= 40
    assert times[0] == 0
    assert times[-20:] == [float(second) for second in range(280, 300)], "the newest are all there"
    assert max(after - before for before, after in pairwise(times)) <= 64
    assert len(costs) <= 80
    for stage in range(2):
        own = [time for time, timing in costs if timing.stage == stage]
        assert own[0] == 0
        assert own[-20:] == times[-20:]


def test_the_newest_timing_of_each_stage_and_recent_warnings(db: Database) -> None:
    with db.write(1.0) as tx:
        fill(tx)
        old, new = ([TimingRecord(stage, 9, cost, 0, 0, 0, 0) for stage in range(3)] for cost in (2, 1))
        tx.telemetry.add(current(tx), 0, [*old, WarningRecord("first"), *new[:2]])
    with db.write(2.0) as tx:
        tx.telemetry.add(current(tx), 6, [WarningRecord("second")])
        assert tx.telemetry.timings("j-0") == (*new[:2], old[2])
        warnings = tx.telemetry.warnings(["j-0"], 9)
        assert [(each.time, each.message) for each in warnings] == [(2.0, "second"), (1.0, "first")]
        assert len(tx.telemetry.warnings(["j-0"], 1)) == 1


def test_losses_in_buckets_are_all_there_and_end_with_the_last(db: Database) -> None:
    with db.write(1.0) as tx:
        fill(tx)
        tx.telemetry.add(current(tx), 0, losses(*(float(i) for i in range(1003))))
        assert tx.telemetry.loss_range(current(tx).id) == (0, 1002)
        buckets = tx.telemetry.loss_buckets(current(tx).id, 3, 1002, 10)
    assert [(each.first, each.last) for each in buckets[:2]] == [(3, 9), (10, 19)]
    assert (len(buckets), sum(each.count for each in buckets)) == (101, 1000)
    assert (buckets[1].mean, buckets[1].low, buckets[1].high) == (14.5, 10.0, 19.0)


def test_an_assignment_without_a_job_cannot_be_written(db: Database) -> None:
    with pytest.raises(IntegrityError), db.write(1.0) as tx:
        tx.assignments.add(assignment("no such job"), "nobody")


def test_concurrent_writes_are_serialised(db: Database, path: Path) -> None:
    with db.write(1.0) as tx:
        tx.members.add_token("t", ApiRole.VIEWER, uses=1000, expires=None)
    others = [db, Database(path)]

    def use(chosen: Database) -> None:
        for _ in range(20):
            with chosen.write(1.0) as tx:
                token = tx.members.token("t")
                assert token is not None
                tx.members.use_token(token)

    threads = [threading.Thread(target=use, args=(others[i % 2],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with db.read() as tx:
        token = tx.members.token("t")
    assert token is not None
    assert token.uses_left == 920


def test_the_log_is_copied_beside_transactions_and_not_by_commits(db: Database, path: Path) -> None:
    """A commit copied it for each 4 MB, and everybody who wrote waited for the disk."""
    with db.write(1.0) as tx:
        fill(tx)
    db.copy_log()
    for number in range(8):
        with db.write(2.0) as tx:
            tx.members.add(
                MemberRecord(f"m{number}", ApiRole.VIEWER, "m" * (1 << 20)), f"secret-{number}"
            )
    log = path.with_name(path.name + "-wal")
    assert log.stat().st_size > 8 << 20
    assert path.stat().st_size < 1 << 20, "no commit has copied it"
    with db.read() as reading, db.write(3.0) as tx:  # neither keeps the copy from what is committed
        tx.members.add(MemberRecord("last", ApiRole.VIEWER, "vera"), "secret-last")
        assert reading.members.get("m7") is not None
        db.copy_log()
    alone = path.with_name("alone.sqlite")
    alone.write_bytes(path.read_bytes())
    with Database(alone).read() as tx:
        assert tx.members.get("m7") is not None
        assert tx.members.get("last") is None


def test_a_database_of_a_later_version_is_refused(db: Database, path: Path) -> None:
    with db._engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA user_version=99")
    with pytest.raises(ServerError, match="later version"):
        Database(path).open()


OLD_ASSIGNMENTS = """CREATE TABLE assignments (id VARCHAR PRIMARY KEY, job VARCHAR, provider VARCHAR,
    node INTEGER, cluster INTEGER, role VARCHAR, body TEXT, phase VARCHAR, reason TEXT, figures TEXT,
    losses INTEGER, result TEXT)"""
OLD_LOSSES = """CREATE TABLE losses (assignment VARCHAR, position INTEGER, value FLOAT,
    PRIMARY KEY (assignment, position)) WITHOUT ROWID"""


def make_old(db: Database, version: int) -> None:
    """Turn a filled database into one of an earlier layout."""
    with db._engine.begin() as connection:
        body = json.loads(assignment().model_dump_json())
        node = {"format": "ravnest-node", "version": 1, **body.pop("node_spec")}
        old_spec = json.loads(spec().model_dump_json())
        old_spec["if_short"] = old_spec.pop("on_insufficient")
        for column in ("learning_rate", "time"):
            connection.exec_driver_sql(f"ALTER TABLE losses DROP COLUMN {column}")
        for column in ("attempt", "replans", "resumed"):
            connection.exec_driver_sql(f"ALTER TABLE jobs DROP COLUMN {column}")
        later = ("attempt", "generation", "cause", "phase_before", "refills", "checkpoint")
        for column in (*later, "used_memory", "peak_memory"):
            connection.exec_driver_sql(f"ALTER TABLE assignments DROP COLUMN {column}")
        if version == 4:
            connection.exec_driver_sql("PRAGMA user_version=4")
            return
        connection.exec_driver_sql("ALTER TABLE providers DROP COLUMN checks")
        if version == 3:
            connection.exec_driver_sql("PRAGMA user_version=3")
            return
        for table in ("records", "losses", "assignments"):
            connection.exec_driver_sql(f"DROP TABLE {table}")
        connection.exec_driver_sql(OLD_ASSIGNMENTS)
        connection.exec_driver_sql(OLD_LOSSES)
        connection.exec_driver_sql(
            "INSERT INTO assignments VALUES "
            "('j-0', 'j', 'p', 0, 0, 'Root', ?, 'training', '', '[0.25, null]', 2, NULL)",
            (json.dumps({**body, "node_file": node}),),
        )
        connection.exec_driver_sql("INSERT INTO losses VALUES ('j-0', 0, 3.0), ('j-0', 1, NULL)")
        connection.exec_driver_sql("UPDATE jobs SET spec = ?", (json.dumps(old_spec),))
        if version == 2:
            connection.exec_driver_sql(
                "ALTER TABLE assignments ADD COLUMN strangers TEXT NOT NULL DEFAULT '{\"bare\": 4}'"
            )
        connection.exec_driver_sql(f"PRAGMA user_version={version}")


@pytest.mark.parametrize("version", [1, 2])
def test_a_database_of_an_earlier_version_is_upgraded(db: Database, path: Path, version: int) -> None:
    with db.write(1.0) as tx:
        fill(tx)
    make_old(db, version)
    upgraded = Database(path)
    upgraded.open()
    with upgraded.write(2.0) as tx:
        assert [event.after for event in tx.events.after(0)] == ["submitted", "offered"]
        assert tx.jobs.spec("j") == spec()
        assert tx.assignments.body("j-0") == assignment()
        record = current(tx)
        assert record.tls_rejections == TlsRejections(bare=4 if version == 2 else 0)
        assert (record.losses, record.records) == (2, 0)
        assert [each.loss for each in tx.telemetry.losses("j-0")] == [3.0, None]
        assert [each.value for each in tx.telemetry.validations("j-0")] == [0.25, None]
        assert tx.telemetry.add(record, 0, losses(1.0, first=2))
        assert current(tx).losses == 3
    again = Database(path)
    again.open()
    with again.read() as tx:
        assert len(tx.telemetry.losses("j-0")) == 3


def test_assignments_of_an_earlier_version_have_no_earlier_holder(db: Database, path: Path) -> None:
    with db.write(1.0) as tx:
        fill(tx)
        before = current(tx)
    make_old(db, 4)
    upgraded = Database(path)
    upgraded.open()
    with upgraded.write(2.0) as tx:
        assert current(tx) == before
        tx.assignments.lose(before, "gone", "passing")
        lost = tx.assignments.get("j-0")
        assert lost is not None
        assert (lost.phase, lost.phase_before, lost.cause) == ("lost", "waiting", "passing")
        tx.assignments.reopen(lost)
        assert current(tx) == before
        tx.assignments.set_resume(before)
        assert tx.assignments.body("j-0") == assignment().model_copy(update={"resume": True})


def test_the_learning_rate_of_an_update_is_stored(db: Database) -> None:
    records = [LossRecord(0, 0, 3.0, 1, 0, 0.1), LossRecord(1, 0, 2.0, 1, 0, 0.3)]
    with db.write(1.0) as tx:
        fill(tx)
        later = {"losses": ["learning_rate", "time"], "assignments": ["used_memory", "peak_memory"]}
        for table, column in ((table, each) for table, columns in later.items() for each in columns):
            drop = f"ALTER TABLE {table} DROP COLUMN {column}"
            tx.telemetry._connection.exec_driver_sql(drop)
        tx.telemetry._connection.exec_driver_sql("PRAGMA user_version=6")
    db.open()
    with db.write(2.0) as tx:
        tx.telemetry.add(current(tx), 0, records)
        assert tx.telemetry.losses("j-0") == records
        (bucket,) = tx.telemetry.loss_buckets("j-0", 0, 1, 2)
    assert bucket.learning_rate == pytest.approx(0.2)


def test_the_loss_of_an_update_that_is_repeated_is_the_newer_one(db: Database) -> None:
    with db.write(1.0) as tx:
        fill(tx)
        tx.telemetry.add(current(tx), 0, losses(4.0, 3.0, 2.0))
        tx.telemetry.add(current(tx), 3, losses(2.5, 1.5, 1.0, first=1))
        assert tx.telemetry.losses("j-0") == losses(4.0, 2.5, 1.5, 1.0)
        assert current(tx).losses == 4


def test_the_newest_checkpoint_is_the_one_that_all_nodes_have(db: Database) -> None:
    with db.write(1.0) as tx:
        fill(tx)
        own = tx.assignments.of_job("j")
        assert tx.telemetry.common_checkpoint(own, 0) == 0
        records = [CheckpointRecord(update, 0, 10, 0.1) for update in (10, 20)]
        tx.telemetry.add(current(tx), 0, records)
        assert tx.telemetry.common_checkpoint(own, 0) == 20
        assert tx.telemetry.common_checkpoint(own, 1) == 0
        assert tx.telemetry.count(["j-0"], CheckpointRecord) == 2


def test_the_checks_of_addresses_are_stored_and_added_by_an_upgrade(db: Database, path: Path) -> None:
    checks = (AddressCheck(address="10.0.0.1:9", reachable=False, reason="no answer"),)
    with db.write(1.0) as tx:
        fill(tx)
        tx.providers.set_checks("p", checks)
        assert [each.checks for each in tx.providers.present()] == [checks]
    make_old(db, 3)
    upgraded = Database(path)
    upgraded.open()
    with upgraded.write(2.0) as tx:
        assert [each.checks for each in tx.providers.present()] == [()]
        tx.providers.set_checks("p", checks)
        assert [each.checks for each in tx.providers.present()] == [checks]


def test_the_newest_refusals_and_warnings_are_kept(db: Database) -> None:
    with db.write(1.0) as tx:
        tx.events.add("server", "server", "started")
        for number in range(10):
            tx.events.add("refusal", "token", f"r{number}")
            tx.events.add("warning", "p", f"w{number}")
        tx.events.forget(keep=2)
        removed = "16 events up to here were removed: the server keeps the newest ones"
        found = [event.reason for event in tx.events.after(0)]
        assert found == ["started", removed, "r8", "w8", "r9", "w9"]


def test_one_provider_cannot_push_out_the_events_of_others(db: Database) -> None:
    with db.write(1.0) as tx:
        for number in range(3):
            tx.events.add("warning", "alice", f"a{number}")
            tx.events.add("warning", "bob", f"b{number}")
        for number in range(100):
            tx.events.add("warning", "mallory", f"m{number}")
            tx.events.forget(keep=10)
        found = [event.reason for event in tx.events.after(0) if event.kind == "warning"]
        assert found == ["a0", "b0", "a1", "b1", "a2", "b2", "m96", "m97", "m98", "m99"]


@pytest.mark.parametrize(
    ("counts", "total", "share"),
    [([100], 10, 10), ([3, 3, 100], 10, 4), ([5, 5, 5], 10, 3), ([1, 2], 10, 10), ([9] * 20, 10, 0)],
)
def test_the_surplus_is_that_of_those_with_the_most(counts: list[int], total: int, share: int) -> None:
    assert fair_share(counts, total) == share


def test_a_long_reason_is_clipped(db: Database) -> None:
    with db.write(1.0) as tx:
        tx.events.add("server", "server", "x" * 9000)
        assert len(tx.events.after(0)[0].reason) <= 4000


def test_many_threads_write_in_turn(case: Case) -> None:
    """SQLite alone let some of many threads starve until "database is locked"."""

    def write(number: int) -> None:
        with case.server.db.write(0.0) as db:
            db.events.add("server", "test", str(number))

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(write, range(320)))
    assert sum(each["subject"] == "test" for each in case.events()) == 320
