"""The wish of a provider to leave while it trains; another one may take over its training first."""

from __future__ import annotations

from dataclasses import dataclass

from ravnest.deadlines import HANDOVER, LEAVE_ANSWER


@dataclass
class LeaveWish:
    """A wish to leave, and the time at which the provider leaves in any case."""

    reason: str
    deadline: float
    _told: int | None = None
    """Number of the first heartbeat that told the server."""
    _waits: bool = False
    """The server has answered that another provider is about to take over."""

    @classmethod
    def begin(cls, reason: str, now: float) -> LeaveWish:
        """Return a wish of which the server is told next."""
        return cls(reason, now + LEAVE_ANSWER)

    def sent(self, number: int) -> None:
        """Note that a heartbeat tells the server of the wish."""
        if self._told is None:
            self._told = number

    def answered(self, number: int, *, may_leave: bool, now: float) -> None:
        """Note the answer to a heartbeat; answers to earlier ones say nothing about the wish."""
        if self._told is None or number < self._told:
            return
        if may_leave:
            self.deadline = now
        elif not self._waits:
            self._waits, self.deadline = True, self.deadline + HANDOVER - LEAVE_ANSWER
