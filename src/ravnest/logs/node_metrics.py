"""Page with the figures of one node for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from ravnest.logs.background import BackgroundSink, TimedRecord
from ravnest.logs.metrics_page import metrics_page
from ravnest.logs.node_figures import NodeFigures
from ravnest.types import Address


class NodeMetrics(BackgroundSink):
    """Serves the newest figures of a node at ``http://127.0.0.1:<port>/metrics``.

    Pass one to a node: ``Node(..., record_sink=NodeMetrics(9101))``. The page needs no credential; it is
    for this machine only, unless ``host`` is another address. ``close``, or the end of the process, ends
    it.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", *, name: str = "") -> None:
        """``port``: 0 takes a free one. ``name``: label ``node`` of the figures; none if it is empty."""
        self._name = name
        self._figures = NodeFigures()
        self._page = ExitStack()
        self.address = self._page.enter_context(metrics_page(Address(host, port), self._figures.figures))
        """Address of the page, with the actual port."""
        super().__init__()

    def handle(self, items: Sequence[TimedRecord]) -> None:
        """Take some records."""
        self._figures.add(self._name, [item.record for item in items])

    def flush(self) -> None:
        """Do nothing: the page shows what was taken."""

    def end(self) -> None:
        """End the page."""
        self._page.close()
