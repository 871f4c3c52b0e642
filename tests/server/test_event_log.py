"""The log of ``ravnest serve``: one line per event, no control characters, and nothing waits for it."""

import threading
from pathlib import Path

import pytest
from server_cases import opened

from ravnest.schemas.jobs import EventView
from ravnest.server.event_log import EventLog, log_line


def event(kind: str, before: str, after: str, reason: str = "why") -> EventView:
    fields = {"sequence": 0, "time": 0.0, "subject": "job-1", "reason": reason}
    return EventView(kind=kind, before=before, after=after, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (event("job", "", "submitted"), "job-1 submitted: why"),
        (event("job", "submitted", "submitted"), "job-1 is submitted: why"),
        (event("job", "training", "done"), "job-1 done: why"),
        (event("provider", "", "offered", "alice joined: 4 GB"), "provider: alice joined: 4 GB"),
        (event("provider", "training", "lost"), "provider alice is gone: why"),
        (event("provider", "lost", "offered", "alice is back"), "provider: alice is back"),
        (event("recovery", "", "", "node 1 is\ntaken over"), "alice: node 1 is taken over"),
        (event("server", "", "", "bob joined"), "server: bob joined"),
        (event("provider", "offered", "reserved"), None),
        (event("refusal", "", ""), None),
        (event("warning", "", ""), None),
    ],
)
def test_an_event_is_one_line(found: EventView, shown: str | None) -> None:
    line = log_line(found, "alice")
    assert line is None if shown is None else line is not None and line.partition("  ")[2] == shown


def test_control_characters_and_long_reasons_do_not_reach_the_terminal() -> None:
    line = log_line(event("provider", "", "lost", "x" * 4000), "ali\x1b[31mce\u202e")
    assert line is not None
    assert line.isprintable()
    assert len(line) <= 500


def test_what_happens_to_a_job_is_logged(tmp_path: Path) -> None:
    lines: list[str] = []
    with opened(tmp_path) as case, EventLog(case.server.db, lines.append).running():
        rita = case.requester()
        alice = case.provider("alice")
        job = case.submit(rita)
        case.match()
        alice.report("training")
        alice.report("failed", reason="out of memory", cause="job")
    shown = [line.partition("  ")[2] for line in lines]
    assert shown[0] == "server: rita joined as requester from testclient"
    assert any(line.startswith("provider: alice joined: 4 GB, 2 cores, ") for line in shown)
    words = [line.partition(":")[0] for line in shown if line.startswith("job-")]
    assert words == [
        f"{job} {state}" for state in ("submitted", "planned", "shipping", "training", "failed")
    ]
    assert not any("rvn" in line for line in lines), "no token is in the log"


def test_a_terminal_that_is_halted_halts_nothing(tmp_path: Path) -> None:
    halted = threading.Event()
    with opened(tmp_path) as case:
        log = EventLog(case.server.db, lambda _line: [halted.wait(30)].clear())
        with log.running():
            for _ in range(3):
                log.add([event("server", "", "")] * 1000)
            halted.set()


def test_a_closed_stream_ends_the_log_only(tmp_path: Path) -> None:
    def write(_line: str) -> None:
        raise BrokenPipeError

    with opened(tmp_path) as case:
        with EventLog(case.server.db, write).running():
            case.provider("alice")
        assert len(case.admin().get("/api/providers")) == 1
