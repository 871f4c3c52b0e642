"""Spans: what a node did from one time to another, as fixed numbers of integers.

Names are codes, so that a node that lies can show wrong times, but no text of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum, unique
from itertools import chain
from typing import NamedTuple


@unique
class SpanKind(IntEnum):
    """Kind of a span. The numbers are part of files and messages: add at the end, change none."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHTS = 2
    STEP = 3
    EVALUATE = 4
    PHASE_END = 5
    CHECKPOINT = 6
    SAVE = 7
    WAIT = 8
    SEND = 9
    RECEIVE = 10
    ROUND = 11
    COPY = 12
    EXCHANGE = 13
    PHASE = 14


LABELS = {
    SpanKind.FORWARD: "forward",
    SpanKind.BACKWARD: "backward",
    SpanKind.WEIGHTS: "weight gradients",
    SpanKind.STEP: "optimizer step",
    SpanKind.EVALUATE: "evaluate",
    SpanKind.PHASE_END: "end of phase",
    SpanKind.CHECKPOINT: "checkpoint",
    SpanKind.SAVE: "save",
    SpanKind.WAIT: "wait",
    SpanKind.SEND: "send",
    SpanKind.RECEIVE: "receive",
    SpanKind.ROUND: "averaging round",
    SpanKind.COPY: "copy weights",
    SpanKind.EXCHANGE: "exchange",
    SpanKind.PHASE: "phase",
}
MESSAGES = (
    "message",
    "Forward",
    "Backward",
    "ForwardResult",
    "SharedGradients",
    "SharedWeights",
    "GradientNorms",
    "ClipNorm",
    "RingChunk",
    "StateBlock",
    "StageSaved",
    "PhaseBegin",
    "PhaseEnd",
)
"""Names of messages; the first one stands for all others, which are small and rare."""
PHASES = ("end", "connect", "train", "validate", "predict", "average", "save", "rejoin")
"""Names of phases, as in ``telemetry.PhaseName``."""
_WHATS = {
    SpanKind.WAIT: len(SpanKind),
    SpanKind.SEND: len(MESSAGES),
    SpanKind.RECEIVE: len(MESSAGES),
    SpanKind.PHASE: len(PHASES),
}
"""Bounds of ``what``; 1 for other kinds."""
LARGEST = 2**53
"""Bound of all numbers of a span."""


class TraceSpan(NamedTuple):
    """One thing that a node did."""

    kind: int
    start: int
    """Microseconds since 1970, by the node's own clock."""
    duration: int
    """Microseconds."""
    what: int = 0
    """Kind of the computation that a wait ended with; index of a message in ``MESSAGES``, or of a phase
    in ``PHASES``."""
    first: int = 0
    """Phase of the run that a micro-batch belongs to, or the number of an update, round or epoch."""
    second: int = 0
    """Index of the micro-batch in its phase."""
    peer: int = 0
    """Node at the other end of a message's link."""
    link: int = 0
    """Number that both ends of a link share."""
    number: int = 0
    """Number of the message on its link, in its direction."""
    bytes: int = 0
    """Bytes of a message."""

    @property
    def end(self) -> int:
        """Time after the span."""
        return self.start + self.duration


FIELDS = len(TraceSpan._fields)


def flattened(spans: Iterable[TraceSpan]) -> tuple[int, ...]:
    """Return the numbers of some spans one after the other."""
    return tuple(chain.from_iterable(spans))


def unflattened(numbers: Sequence[int]) -> Iterator[TraceSpan]:
    """Yield the spans of ``flattened`` numbers; ``ValueError`` if they are no spans."""
    if len(numbers) % FIELDS:
        raise ValueError(f"{len(numbers)} numbers are no spans of {FIELDS} numbers each")
    for start in range(0, len(numbers), FIELDS):
        yield checked(TraceSpan(*numbers[start : start + FIELDS]))


def checked(span: TraceSpan) -> TraceSpan:
    """Return a span; ``ValueError`` if one of its numbers is out of range."""
    if not all(type(number) is not bool and isinstance(number, int) for number in span) or not (
        min(span) >= 0 and max(span) < LARGEST
    ):
        raise ValueError("a number of a span is out of range")
    if span.kind >= len(SpanKind) or span.what >= _WHATS.get(SpanKind(span.kind), 1):
        raise ValueError("a span has an unknown kind")
    return span
