"""Spans of averaging rounds at one node: the round, and within it the copy and the exchange."""

from __future__ import annotations

from ravnest.tracing.recorder import SpanRecorder, now
from ravnest.tracing.spans import SpanKind


class RoundTrace:
    """Records rounds; used by the averaging thread. Without a recorder, it records nothing."""

    def __init__(self, recorder: SpanRecorder | None) -> None:
        self._recorder = recorder
        self._round = 0
        self._copying = 0
        """Time at which the weights of the round began to be copied; 0: no round is open."""
        self._exchanging = 0

    def copying(self, number: int) -> None:
        """Begin a round: its weights are copied."""
        self._round, self._copying, self._exchanging = number, now(), 0

    def copied(self) -> None:
        """End the copy of the weights."""
        self._add(SpanKind.COPY, self._copying)

    def exchanging(self) -> None:
        """Begin to exchange weights with other clusters."""
        self._exchanging = now()

    def exchanged(self) -> None:
        """End the exchange."""
        self._add(SpanKind.EXCHANGE, self._exchanging)
        self._exchanging = 0

    def settled(self) -> None:
        """End the round."""
        self._add(SpanKind.ROUND, self._copying)
        self._copying = 0

    def _add(self, kind: SpanKind, began: int) -> None:
        if self._recorder is not None and began:
            self._recorder.add(kind, began, self._round)
