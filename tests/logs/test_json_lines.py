"""JSON logs: one object per line, whatever the text is."""

from __future__ import annotations

import io
import json
import logging

from rich.console import Console

from ravnest.cli.provider_console import JsonConsole
from ravnest.logs.json_lines import JsonFormatter, json_line
from ravnest.schemas.jobs import EventView
from ravnest.server.event_log import log_json


def test_a_line_is_one_object() -> None:
    line = json_line("job", at=1.5, level="warning", reason='two\nlines and "quotes"')
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "warning",
        "event": "job",
        "reason": 'two\nlines and "quotes"',
    }


def test_log_records_have_their_level_and_error() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
        record = logging.LogRecord("ravnest.x", logging.ERROR, "x.py", 1, "part %d", (3,), info)
    found = json.loads(JsonFormatter().format(record))
    assert (found["level"], found["event"], found["message"]) == ("error", "log", "part 3")
    assert "ValueError: broken" in found["error"]


def test_events_of_the_server_have_fields() -> None:
    event = EventView(
        sequence=1, time=2.0, kind="job", subject="job-1", before="planned", after="done", reason="x\ny"
    )
    line = log_json(event, "job-1")
    assert line is not None
    found = json.loads(line)
    assert (found["event"], found["subject"], found["after"]) == ("job", "job-1", "done")
    assert log_json(event.model_copy(update={"kind": "refusal"}), "x") is None


def test_lines_of_a_provider_are_objects_and_progress_is_rare() -> None:
    text, times = io.StringIO(), iter((0.0, 1.0, 31.0, 31.0, 32.0))
    console = JsonConsole(Console(file=text, soft_wrap=True, markup=False), lambda: next(times))
    console.say("starts [bold]training[/]")
    for line in ("one", "two", "three"):
        console.progress(line)
    found = [json.loads(line) for line in text.getvalue().splitlines()]
    assert [(each["event"], each["message"]) for each in found] == [
        ("provider", "starts [bold]training[/]"),
        ("progress", "two"),
    ]
