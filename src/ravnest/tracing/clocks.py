"""Differences between the clocks of nodes, from the messages between them. Pure.

A message cannot arrive before it was sent. If the fastest messages from A to B seem to take ``there``
and those from B to A ``back``, by two clocks that differ, then B's clock is ahead by at most ``there``
and at least ``-back``. The middle is exact if both directions are equally fast; half of the sum of both
bounds the error in any case.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ravnest.tracing.node_trace import NodeTrace
from ravnest.tracing.spans import SpanKind


@dataclass(frozen=True)
class ClockOffset:
    """Difference between a node's clock and that of the first node."""

    ahead: int
    """Microseconds by which the clock is ahead."""
    error: int | None
    """Bound of the error in microseconds; ``None``: no messages tell it, the clock is taken as is."""


def clock_offsets(traces: Sequence[NodeTrace]) -> list[ClockOffset]:
    """Return the offset of each trace's clock relative to the first one, along the surest path."""
    neighbours: dict[int, list[tuple[int, int, int]]] = {}
    for (one, other), (there, back) in _fastest(traces).items():
        ahead, error = (there - back) // 2, max(there + back, 0) // 2
        neighbours.setdefault(one, []).append((other, ahead, error))
        neighbours.setdefault(other, []).append((one, -ahead, error))
    found: dict[int, ClockOffset] = {}
    waiting = [(0, 0, 0)] if traces else []
    while waiting:
        error, trace, ahead = heapq.heappop(waiting)
        if trace in found:
            continue
        found[trace] = ClockOffset(ahead, error)
        for other, more, further in neighbours.get(trace, ()):
            if other not in found:
                heapq.heappush(waiting, (error + further, other, ahead + more))
    return [found.get(index, ClockOffset(0, None)) for index in range(len(traces))]


def _fastest(traces: Sequence[NodeTrace]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the least apparent delays there and back, for pairs of traces with messages both ways."""
    least: dict[tuple[int, int], int] = {}
    for sender, receiver, delay in _delays(traces):
        pair = sender, receiver
        least[pair] = min(delay, least.get(pair, delay))
    return {
        (one, other): (there, least[other, one])
        for (one, other), there in least.items()
        if one < other and (other, one) in least
    }


def _delays(traces: Sequence[NodeTrace]) -> Iterator[tuple[int, int, int]]:
    """Yield sender, receiver and apparent delay of each message that both have recorded."""
    sent: dict[tuple[int, int, int, int], tuple[int, int]] = {}
    for index, trace in enumerate(traces):
        for span in trace.spans:
            if span.kind == SpanKind.SEND:
                sent[trace.node.node, span.peer, span.link, span.number] = index, span.start
    for index, trace in enumerate(traces):
        for span in trace.spans:
            if span.kind == SpanKind.RECEIVE:
                match = sent.get((span.peer, trace.node.node, span.link, span.number))
                if match is not None:
                    yield match[0], index, span.end - match[1]
