"""Spans of one node, with its place in the run."""

from __future__ import annotations

from dataclasses import dataclass

from ravnest.tracing.spans import TraceSpan


@dataclass(frozen=True)
class TracedNode:
    """Place of a node in a run."""

    node: int
    cluster: int
    stage: int
    role: str
    provider: str = ""
    """Name of its machine; empty: not known."""

    @property
    def title(self) -> str:
        """Name of the node's row."""
        where = f"cluster {self.cluster}, stage {self.stage}: node_{self.node} ({self.role})"
        return f"{where} on {self.provider}" if self.provider else where


@dataclass(frozen=True)
class NodeTrace:
    """Spans of one process of a node; all have the same clock."""

    node: TracedNode
    spans: tuple[TraceSpan, ...]

    @property
    def interval(self) -> tuple[int, int]:
        """Times of the first start and the last end; both 0 if there are no spans."""
        if not self.spans:
            return 0, 0
        return min(span.start for span in self.spans), max(span.end for span in self.spans)

    def since(self, start: int) -> NodeTrace:
        """Return the trace without the spans that end before a time."""
        return NodeTrace(self.node, tuple(span for span in self.spans if span.end >= start))
