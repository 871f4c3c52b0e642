"""The books: everything is there after the process is gone."""

import threading
from pathlib import Path

import pytest
from server_cases import artifact, offer, spec
from sqlalchemy.exc import IntegrityError

from ravnest.errors import ServerError
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobState
from ravnest.schemas.providers import Assignment, DataShare, ProviderState
from ravnest.server.db.database import Database, Transaction
from ravnest.server.db.records import MemberRecord
from ravnest.server.lifecycle import TransitionError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.sqlite"


@pytest.fixture
def store(path: Path) -> Database:
    store = Database(path)
    store.open()
    return store


def assignment(job: str = "j") -> Assignment:
    return Assignment(
        id=f"{job}-0",
        job=job,
        node=0,
        node_file={"cluster": 0, "role": "Root"},
        stage=artifact("units"),
        weights=artifact("weights"),
        train=DataShare(samples=8),
        training=spec().training,
        tls=False,
    )


def fill(books: Transaction) -> None:
    books.members.add(MemberRecord("r", ApiRole.REQUESTER, "rita"), "secret-r")
    books.members.add(MemberRecord("p", ApiRole.PROVIDER, "alice"), "secret-p")
    books.members.add_token("secret-t", ApiRole.VIEWER, uses=3, expires=None)
    books.jobs.add("j", "r", spec(), "submitted")
    books.providers.add("p", offer(), "joined")
    books.parts.add(assignment(), "p")
    books.holdings.give("r", [artifact("units"), artifact("units"), artifact("weights")])


def test_a_second_store_finds_what_the_first_wrote(store: Database, path: Path) -> None:
    with store.change(5.0) as books:
        fill(books)
        part = books.parts.get("j-0")
        assert part is not None
        books.parts.keep_losses(part, 0, [3.0, 2.0])
        books.parts.keep_figures(part, [0.5])
        provider = books.providers.get("p")
        assert provider is not None
        books.providers.move(provider, ProviderState.RESERVED, "for j", job="j")
    with store.look() as books:
        before = state_of(books)
    second = Database(path)  # the first is not closed: its process was killed
    second.open()
    with second.look() as books:
        assert state_of(books) == before
        assert books.members.known_by("secret-p", 0.0) == MemberRecord("p", ApiRole.PROVIDER, "alice")
        assert books.parts.losses("j-0") == (3.0, 2.0)
        assert books.jobs.spec("j") == spec()
        assert books.parts.body("j-0") == assignment()


def state_of(books: Transaction) -> object:
    return (
        books.providers.present(),
        books.jobs.listed(),
        books.parts.of_job("j"),
        books.events.after(0),
        books.holdings.sizes("r"),
        books.members.token("secret-t"),
    )


def test_a_state_and_its_event_are_written_together_or_not_at_all(store: Database) -> None:
    with store.change(1.0) as books:
        fill(books)

    def fail_halfway() -> None:
        with store.change(2.0) as books:
            provider = books.providers.get("p")
            assert provider is not None
            books.providers.move(provider, ProviderState.LOST, "gone")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    with store.look() as books:
        provider = books.providers.get("p")
        assert provider is not None
        assert provider.state is ProviderState.OFFERED
        assert [event.after for event in books.events.after(0)] == ["submitted", "offered"]


def test_only_transitions_of_the_lifecycle_are_written(store: Database) -> None:
    with store.change(1.0) as books:
        fill(books)
    with store.change(2.0) as books:
        job = books.jobs.get("j")
        assert job is not None
        with pytest.raises(TransitionError):
            books.jobs.move(job, JobState.DONE, "no")


def test_each_transition_is_an_event_with_its_reason(store: Database) -> None:
    with store.change(1.0) as books:
        fill(books)
    with store.change(2.0) as books:
        provider = books.providers.get("p")
        assert provider is not None
        books.providers.move(provider, ProviderState.RESERVED, "reserved for digits", job="j")
    with store.look() as books:
        (event,) = books.events.after(2)
        assert (event.kind, event.subject, event.before, event.after, event.reason, event.time) == (
            "provider",
            "p",
            "offered",
            "reserved",
            "reserved for digits",
            2.0,
        )
        assert event in books.events.after(0, job="j")


def test_changes_of_a_job_never_have_the_same_time(store: Database) -> None:
    with store.change(1.0) as books:
        fill(books)
    times = []
    for _ in range(3):
        with store.change(1.0) as books:
            books.jobs.touch("j")
            job = books.jobs.get("j")
            assert job is not None
            times.append(job.changed)
    assert times == sorted(set(times))


def test_losses_that_come_again_are_kept_once_and_gaps_are_not_taken(store: Database) -> None:
    with store.change(1.0) as books:
        fill(books)
        for first, values, known in [
            (0, [5.0, 4.0], 2),
            (0, [5.0, 4.0, 3.0], 3),
            (1, [4.0], 3),
            (4, [1.0], 3),
            (3, [2.0], 4),
        ]:
            part = books.parts.get("j-0")
            assert part is not None
            assert books.parts.keep_losses(part, first, values) == known
        assert books.parts.losses("j-0", 1) == (4.0, 3.0, 2.0)
        assert books.parts.losses("j-0", 9) == ()


def test_sampled_losses_end_with_the_last(store: Database) -> None:
    with store.change(1.0) as books:
        fill(books)
        part = books.parts.get("j-0")
        assert part is not None
        books.parts.keep_losses(part, 0, [float(i) for i in range(1003)])
        part = books.parts.get("j-0")
        assert part is not None
        sampled = books.parts.sampled_losses(part, 100)
    assert 90 <= len(sampled) <= 110
    assert sampled[-1] == (1002, 1002.0)


def test_what_belongs_to_nobody_cannot_be_written(store: Database) -> None:
    with pytest.raises(IntegrityError), store.change(1.0) as books:
        books.parts.add(assignment("no such job"), "nobody")


def test_writers_take_turns_and_none_is_lost(store: Database, path: Path) -> None:
    with store.change(1.0) as books:
        books.members.add_token("t", ApiRole.VIEWER, uses=1000, expires=None)
    others = [store, Database(path)]

    def use(chosen: Database) -> None:
        for _ in range(20):
            with chosen.change(1.0) as books:
                token = books.members.token("t")
                assert token is not None
                books.members.use_token(token)

    threads = [threading.Thread(target=use, args=(others[i % 2],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with store.look() as books:
        token = books.members.token("t")
    assert token is not None
    assert token.uses_left == 920


def test_a_database_of_a_later_version_is_refused(store: Database, path: Path) -> None:
    with store._engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA user_version=99")
    with pytest.raises(ServerError, match="later version"):
        Database(path).open()


def test_a_database_of_the_first_version_is_brought_up_to_date(store: Database, path: Path) -> None:
    with store.change(1.0) as books:
        books.events.add("server", "server", "started")
    with store._engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE assignments DROP COLUMN strangers")
        connection.exec_driver_sql("PRAGMA user_version=1")
    later = Database(path)
    later.open()
    with later.look() as books:
        assert [event.reason for event in books.events.after(0)] == ["started"]
        assert books.parts.of_job("job") == []


def test_of_refusals_the_newest_are_kept(store: Database) -> None:
    with store.change(1.0) as books:
        books.events.add("server", "server", "started")
        for number in range(10):
            books.events.add("refusal", "token", f"{number}")
        books.events.forget_refusals(keep=3)
        assert [event.reason for event in books.events.after(0)] == ["started", "7", "8", "9"]


def test_a_long_reason_is_cut(store: Database) -> None:
    with store.change(1.0) as books:
        books.events.add("server", "server", "x" * 9000)
        assert len(books.events.after(0)[0].reason) <= 4000
