"""Spans of a link's messages: from the first frame that is encoded or decoded to the last one."""

from __future__ import annotations

from collections.abc import Iterator

from ravnest.tracing.recorder import SpanRecorder, link_number, now
from ravnest.tracing.spans import SpanKind
from ravnest.wire.envelope import Buffer


class LinkTrace:
    """Messages of one link, as its threads process them: one that writes and one that reads.

    While a connection replaces another one there may be two of each; a span is wrong then, and no more.
    """

    def __init__(self, recorder: SpanRecorder, peer: int, session: str) -> None:
        self._recorder = recorder
        self._place = peer, link_number(session)
        self._encoded: list[tuple[int, object, int, int]] = []
        """Messages that are encoded, and of which the last bytes are not written."""
        self._arrived = 0
        self._arrived_bytes = 0

    def encoding(
        self, frames: Iterator[list[Buffer]], head: object, number: int
    ) -> Iterator[list[Buffer]]:
        """Yield the frames of a message to the peer; it ends once the bytes of the last are written."""
        began, size = now(), 0
        for parts in frames:
            size += sum(map(len, parts))
            yield parts
        self._encoded.append((began, head, number, size))

    def written(self) -> None:
        """Record the messages that are encoded: all bytes are written."""
        while self._encoded:
            began, head, number, size = self._encoded.pop(0)
            self._recorder.message(SpanKind.SEND, began, head, self._place, number, size)

    def arrived(self, size: int, *, opens: bool) -> None:
        """Count a frame of the peer; ``opens``: it is the first of a message."""
        if opens:
            self._arrived, self._arrived_bytes = now(), 0
        self._arrived_bytes += size

    def received(self, head: object, number: int) -> None:
        """Record a message of the peer that is complete."""
        size = self._arrived_bytes
        self._recorder.message(SpanKind.RECEIVE, self._arrived, head, self._place, number, size)
