"""Changes of the books, and what follows from them once they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ravnest.schemas.jobs import JobResult, JobState
from ravnest.schemas.providers import ProviderState
from ravnest.server.auth.tokens import AuthService
from ravnest.server.db.database import Database, Transaction
from ravnest.server.db.records import AssignmentRecord, JobRecord, ProviderRecord
from ravnest.server.job_status import judge
from ravnest.server.notifications import Notifications, Topic
from ravnest.server.settings import Clock


@dataclass
class UnitOfWork:
    """One transaction, and the news in it."""

    books: Transaction
    topics: set[Topic] = field(default_factory=set)
    ended: list[str] = field(default_factory=list)
    """Jobs."""
    matching: bool = False
    """Something changed that may let a job start."""

    def release(self, record: ProviderRecord, reason: str) -> None:
        """A provider has no work any more."""
        self.books.providers.move(record, ProviderState.OFFERED, reason)
        self.topics.add(("provider", record.id))
        self.matching = True

    def end_part(self, part: AssignmentRecord, phase: str, reason: str) -> None:
        """A part is over; its provider loses what it was given for it."""
        self.books.parts.move(part, phase, reason)
        self.books.holdings.take(part.id)
        self.topics.add(("provider", part.provider))

    def end_job(
        self, record: JobRecord, state: JobState, reason: str, root: AssignmentRecord | None = None
    ) -> None:
        """Nothing more happens to a job; its providers are free."""
        for part in self.books.parts.of_job(record.id):
            if not part.has_ended:
                self.end_part(part, "stopped", reason)
        for provider in self.books.providers.of_job(record.id):
            self.release(provider, f"{record.name} is {state}")
        result = None if root is None else self._result(record, root)
        self.books.jobs.move(record, state, reason, result=result)
        self.topics.add(("job", record.id))
        self.ended.append(record.id)
        self.matching = True

    def requeue(self, record: JobRecord, reason: str) -> None:
        """A job whose plan came to nothing waits again; its providers are free."""
        for provider in self.books.providers.of_job(record.id):
            self.release(provider, f"{record.name} waits again")
        self.books.jobs.move(record, JobState.SUBMITTED, reason, plan="")
        self.topics.add(("job", record.id))
        self.matching = True

    def judge(self, job: str) -> None:
        """Draw the conclusions from what is known of a job's parts."""
        record = self.books.jobs.get(job)
        if record is None or record.state not in (JobState.SHIPPING, JobState.TRAINING):
            return
        parts = self.books.parts.of_job(job)
        verdict = judge(parts, self.books.providers.names(part.provider for part in parts))
        self.topics.add(("job", job))
        if verdict.state.is_final:
            self.end_job(record, verdict.state, verdict.reason, verdict.root)
        elif verdict.state is JobState.TRAINING and record.state is JobState.SHIPPING:
            self.books.jobs.move(record, JobState.TRAINING, verdict.reason)
        else:
            self.books.jobs.explain(record, verdict.reason)

    def _result(self, record: JobRecord, root: AssignmentRecord) -> str:
        files = self.books.parts.result(root)
        self.books.holdings.give(record.owner, [file.artifact for file in files])
        return JobResult(job=record.id, cluster=root.cluster, files=files).model_dump_json()


class UnitOfWorkFactory:
    """Where changes are made: each is written whole, and then told to those who wait for it."""

    def __init__(
        self,
        store: Database,
        trust: AuthService,
        wakes: Notifications,
        clock: Clock,
        match: Callable[[], None],
    ) -> None:
        """``match`` is called after each change that may let a job start; it must not wait."""
        self.store = store
        self.wakes = wakes
        self.clock = clock
        self._trust = trust
        self._match = match

    @contextmanager
    def change(self) -> Iterator[UnitOfWork]:
        """A transaction; what follows from it happens when it is written."""
        with self.store.change(self.clock.wall()) as books:
            change = UnitOfWork(books)
            yield change
        for job in change.ended:
            self._trust.forget_job(job)
        for topic in change.topics:
            self.wakes.wake(topic)
        if change.matching:
            self._match()
