"""Log of what happens at a server, as lines for its operator."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from ravnest.logs.json_lines import json_line
from ravnest.schemas.base import plain
from ravnest.schemas.jobs import EventView
from ravnest.schemas.providers import ProviderState
from ravnest.server.db.database import Database
from ravnest.server.lifecycle import NEW

_LONGEST_LINE = 500
_MOST_WAITING = 1000
"""Events that wait to be written; further ones are dropped, so that a halted terminal halts nothing."""
_STOP_SECONDS = 2.0


def log_line(event: EventView, name: str) -> str | None:
    """Return an event as one line; ``None`` for those that others can cause in any number.

    ``name``: that of the provider, or of the job, that the event is about. What providers do for a job
    is left out: the line of the job says it.
    """
    match event.kind:
        case "job":
            same = event.before == event.after
            what = f"{event.subject} is {event.after}" if same else f"{event.subject} {event.after}"
        case "provider" if event.after == ProviderState.LOST:
            what = f"provider {name} is gone"
        case "provider" if event.before in (NEW, ProviderState.LOST):
            what = "provider"  # the reason has its name
        case "recovery":
            what = name
        case "server" if event.subject != "token":  # who joins with it is logged
            what = "server"
        case _:
            return None
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
    reason = " ".join(event.reason.split())
    line = plain(f"{when}  {what}: {reason}")
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 2]} …"


def log_json(event: EventView, name: str) -> str | None:
    """Return an event as a JSON line; ``None`` for those that ``log_line`` leaves out."""
    if log_line(event, name) is None:
        return None
    return json_line(
        event.kind,
        at=event.time,
        subject=event.subject,
        name=name,
        before=event.before,
        after=event.after,
        reason=event.reason,
    )


class EventLog:
    """Writes the lines of a database's events in a thread of its own; the server never waits for it."""

    def __init__(
        self,
        db: Database,
        write: Callable[[str], None],
        shown: Callable[[EventView, str], str | None] = log_line,
    ) -> None:
        """``shown`` returns the line of an event."""
        self._shown = shown
        self._db = db
        self._write = write
        self._waiting: queue.Queue[EventView | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="event log", daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Write while the block runs; events that wait at its end are written within a bounded time."""
        self._db.on_events = self.add
        self._thread.start()
        try:
            yield
        finally:
            with suppress(queue.Full):
                self._waiting.put(None, timeout=_STOP_SECONDS)
            self._thread.join(_STOP_SECONDS)

    def add(self, events: Sequence[EventView]) -> None:
        """Queue events; those for which there is no room are left out."""
        with suppress(queue.Full):
            for event in events:
                self._waiting.put_nowait(event)

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            try:
                if line := self._shown(event, self._name(event)):
                    self._write(line)
            except (OSError, ValueError):  # nobody reads any more
                return

    def _name(self, event: EventView) -> str:
        """Return the name of the provider that an event is about; the subject if it is none."""
        if event.kind not in ("provider", "recovery"):
            return event.subject
        with self._db.read() as db:
            found = db.providers.get(event.subject)
        return event.subject if found is None else found.offer.name
