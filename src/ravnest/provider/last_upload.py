"""The upload with which a provider leaves whose checkpoints no other node has. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ravnest.deadlines import LAST_UPLOAD


@dataclass
class LastUpload:
    """Upload of the last checkpoints after the end of the worker; over when the server knows of it."""

    deadline: float
    """Time at which the provider leaves in any case."""
    is_over: bool = False
    """The server has acknowledged the checkpoints."""
    _told: int | None = None
    """Number of the last report that named them."""

    @classmethod
    def begin(cls, now: float) -> LastUpload:
        """Return an upload that begins now."""
        return cls(now + LAST_UPLOAD)

    def sent(self, number: int) -> None:
        """Note that a report names the checkpoints."""
        self._told = number

    def answered(self, number: int) -> None:
        """Note the answer to a heartbeat; that to a poll can come before the report has arrived."""
        self.is_over |= number == self._told
