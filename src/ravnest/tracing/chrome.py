"""Traces of nodes as one document in the Trace Event Format, which Perfetto and Chrome open. Pure.

A node is a process row; its compute thread, its links in both directions, its averaging and its phases
are thread rows. Arrows follow each micro-batch through the computations of its cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ravnest.tracing.clocks import ClockOffset, clock_offsets
from ravnest.tracing.node_trace import NodeTrace
from ravnest.tracing.spans import LABELS, MESSAGES, PHASES, SpanKind, TraceSpan

Event = dict[str, Any]
_PHASES, _COMPUTE, _AVERAGING, _LINKS = 0, 1, 2, 3
"""Numbers of thread rows; links have two per peer from ``_LINKS`` on."""
_AWAITED = {
    SpanKind.FORWARD: "inputs",
    SpanKind.EVALUATE: "inputs",
    SpanKind.BACKWARD: "gradients",
    SpanKind.WEIGHTS: "work",
    SpanKind.STEP: "other stages",
}
"""Causes of waits, by the computation that it ended with."""
_UPDATES = frozenset({SpanKind.STEP, SpanKind.CHECKPOINT})
_PASSES = frozenset({SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.WEIGHTS, SpanKind.EVALUATE})
_ROUNDS = frozenset({SpanKind.ROUND, SpanKind.COPY, SpanKind.EXCHANGE})


def chrome_trace(traces: Sequence[NodeTrace], seconds: float | None = None) -> dict[str, Any]:
    """Return the document; times are those of the first node's clock.

    ``seconds``: only what ends in the last seconds of the run, by that clock.
    """
    ordered = sorted(traces, key=lambda each: (each.node.cluster, each.node.stage, each.interval))
    offsets = clock_offsets(ordered)
    aligned = [
        NodeTrace(trace.node, tuple(s._replace(start=s.start - offset.ahead) for s in trace.spans))
        for trace, offset in zip(ordered, offsets, strict=True)
    ]
    if seconds is not None:
        end = max((trace.interval[1] for trace in aligned), default=0)
        aligned = [trace.since(end - int(1e6 * seconds)) for trace in aligned]
    zero = min((trace.interval[0] for trace in aligned if trace.spans), default=0)
    events: list[Event] = []
    for row, (trace, offset) in enumerate(zip(aligned, offsets, strict=True)):
        events += _row(row + 1, trace, offset, zero)
    events += _flows(aligned, zero)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "start": zero,
            "clocks": {t.node.title: _clock(o) for t, o in zip(aligned, offsets, strict=True)},
        },
    }


def _clock(offset: ClockOffset) -> str:
    if offset.error is None:
        return "clock of the machine: no messages tell its difference from the others"
    if not offset.ahead and not offset.error:
        return "reference"
    return (
        f"clock corrected by {-offset.ahead / 1000:.3f} ms, error at most {offset.error / 1000:.3f} ms"
    )


def _row(pid: int, trace: NodeTrace, offset: ClockOffset, zero: int) -> Iterator[Event]:
    """Yield the events of one node."""
    yield _about(pid, 0, "process_name", name=trace.node.title)
    yield _about(pid, 0, "process_sort_index", sort_index=pid)
    yield _about(pid, 0, "process_labels", labels=_clock(offset))
    lanes: dict[int, list[TraceSpan]] = {}
    for span in trace.spans:
        lanes.setdefault(_lane(span), []).append(span)
    for lane, spans in sorted(lanes.items()):
        yield _about(pid, lane, "thread_name", name=_lane_name(lane))
        yield _about(pid, lane, "thread_sort_index", sort_index=lane)
        for span in nested(spans):
            yield {
                "ph": "X",
                "pid": pid,
                "tid": lane,
                "ts": span.start - zero,
                "dur": span.duration,
                "name": _name(span),
                "cat": LABELS[SpanKind(span.kind)],
                "args": _details(span),
            }


def _about(pid: int, tid: int, kind: str, **arguments: object) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": arguments}


def nested(spans: Iterable[TraceSpan]) -> list[TraceSpan]:
    """Return the spans of one row in order, each of them within, or after, the ones before it.

    Links write the end of one message and the beginning of the next at once; such a span begins when the
    one before ends. What remains of no span is left out.
    """
    found: list[TraceSpan] = []
    open_ends: list[int] = []
    for span in sorted(spans, key=lambda each: (each.start, -each.duration)):
        start, end = span.start, span.end
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        while open_ends and open_ends[-1] < end:
            start = max(start, open_ends.pop())
        if end >= start:
            open_ends.append(end)
            found.append(span._replace(start=start, duration=end - start))
    return sorted(found, key=lambda each: (each.start, -each.duration))


def _lane(span: TraceSpan) -> int:
    if span.kind in (SpanKind.SEND, SpanKind.RECEIVE):
        return _LINKS + 2 * span.peer + (span.kind == SpanKind.RECEIVE)
    if span.kind == SpanKind.PHASE:
        return _PHASES
    return _AVERAGING if span.kind in _ROUNDS else _COMPUTE


def _lane_name(lane: int) -> str:
    if lane >= _LINKS:
        peer, receives = divmod(lane - _LINKS, 2)
        return f"from node_{peer}" if receives else f"to node_{peer}"
    return {_PHASES: "phases", _COMPUTE: "compute", _AVERAGING: "averaging"}[lane]


def _name(span: TraceSpan) -> str:
    match span.kind:
        case SpanKind.WAIT:
            return f"wait for {_AWAITED.get(SpanKind(span.what), 'messages')}"
        case SpanKind.SEND | SpanKind.RECEIVE:
            return MESSAGES[span.what]
        case SpanKind.PHASE:
            return PHASES[span.what]
    return LABELS[SpanKind(span.kind)]


def _details(span: TraceSpan) -> dict[str, int]:
    kind = span.kind
    if kind in _PASSES:
        return {"phase": span.first, "micro-batch": span.second}
    if kind in (SpanKind.SEND, SpanKind.RECEIVE):
        about = {"bytes": span.bytes, "message": span.number}
        named = MESSAGES[span.what] in ("Forward", "Backward", "ForwardResult", "SharedWeights")
        return {"phase": span.first, "micro-batch": span.second, **about} if named else about
    if kind in _UPDATES:
        return {"update": span.first}
    if kind in _ROUNDS:
        return {"round": span.first}
    return {"epoch": span.first} if kind == SpanKind.PHASE else {}


def _flows(traces: Sequence[NodeTrace], zero: int) -> Iterator[Event]:
    """Yield arrows from each computation of a micro-batch to the next one in its cluster."""
    steps: dict[tuple[int, int, int], list[tuple[tuple[bool, int], int, int]]] = {}
    for row, trace in enumerate(traces):
        for span in trace.spans:
            if span.kind in (SpanKind.FORWARD, SpanKind.EVALUATE, SpanKind.BACKWARD):
                returns = span.kind == SpanKind.BACKWARD
                order = returns, -trace.node.stage if returns else trace.node.stage
                key = trace.node.cluster, span.first, span.second
                steps.setdefault(key, []).append((order, row + 1, span.start - zero))
    for number, (_, found) in enumerate(sorted(steps.items())):
        for position, (_, pid, time) in enumerate(sorted(found)):
            if len(found) > 1:
                last = position == len(found) - 1
                yield {
                    "ph": "s" if position == 0 else "f" if last else "t",
                    "id": number,
                    "pid": pid,
                    "tid": _COMPUTE,
                    "ts": time,
                    "name": "micro-batch",
                    "cat": "flow",
                    "bp": "e",
                }
