"""Logs as JSON, one object per line: ``time``, ``level``, ``event``, and further fields by name."""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]


def json_line(event: str, *, at: float | None = None, level: str = "info", **fields: object) -> str:
    """Return a line; ``event`` says what kind of thing happened, ``at`` when (seconds since 1970)."""
    moment = datetime.fromtimestamp(time.time() if at is None else at, UTC)
    shown = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"time": shown, "level": level, "event": event, **fields}, default=str)


class JsonFormatter(logging.Formatter):
    """Log records of Python as JSON lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record; an exception is in the field ``error``."""
        fields: dict[str, object] = {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json_line("log", at=record.created, level=record.levelname.lower(), **fields)


def log_as_json() -> None:
    """Have the handlers of the root logger write JSON lines from now on."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())
