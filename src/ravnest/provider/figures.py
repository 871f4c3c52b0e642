"""Figures of a provider for Prometheus: sums over all its assignments since it started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ravnest.logs.prometheus import Figure, Sample
from ravnest.provider.assignment_progress import AssignmentProgress
from ravnest.provider.work_meter import WorkFigures
from ravnest.schemas.providers import ProviderOffer
from ravnest.version import __version__

_STATES = ("offered", "fetching", "fetched", "training", "uploading", "finished", "failed")
_NOTHING = WorkFigures(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class FigureSnapshot:
    """Figures at one time."""

    state: str = "offered"
    """Phase of the current assignment; ``offered`` without one."""
    is_connected: bool = True
    used_memory: int = 0
    """Bytes that the current job takes."""
    work: WorkFigures = _NOTHING
    """Figures of the current assignment."""
    samples: int = 0
    """This and the following are sums over all assignments."""
    received_bytes: int = 0
    sent_bytes: int = 0
    assignments: int = 0


class ProviderFigures:
    """Collects figures in the agent's thread; ``snapshot`` may be read in any thread."""

    def __init__(self) -> None:
        self.snapshot = FigureSnapshot()
        self._before = FigureSnapshot()
        """Sums over the assignments before the current one."""
        self._current: AssignmentProgress | None = None

    def note(self, work: AssignmentProgress | None, used_memory: int, *, is_connected: bool) -> None:
        """Take the state of the provider: its assignment, if it has one."""
        before = self._before
        if work is not self._current:
            self._current = work
            begun = self.snapshot.assignments + (work is not None)
            before = self._before = replace(self.snapshot, assignments=begun)
        done = (None if work is None else work.meter.latest) or _NOTHING
        self.snapshot = FigureSnapshot(
            "offered" if work is None else work.phase,
            is_connected,
            used_memory if work is not None and work.phase == "training" else 0,
            done,
            before.samples + done.samples,
            before.received_bytes + done.received_bytes,
            before.sent_bytes + done.sent_bytes,
            before.assignments,
        )


def provider_figures(offer: ProviderOffer, room: int, found: FigureSnapshot) -> Iterator[Figure]:
    """Yield the figures; ``room``: bytes that a job may take."""
    about = {"name": offer.name, "version": __version__}
    yield _figure("info", "gauge", "Name and version of the provider.", Sample(about, 1))
    states = [Sample({"state": each}, each == found.state) for each in _STATES]
    yield _figure("state", "gauge", "1 for what the provider does now.", *states)
    yield _single("server_connected", "gauge", "1 while the server answers.", found.is_connected)
    yield _single("offered_memory_bytes", "gauge", "Memory that a job may take.", room)
    yield _single("used_memory_bytes", "gauge", "Memory that the job takes.", found.used_memory)
    yield _single("offered_cores", "gauge", "Cores that a job may use.", offer.cores)
    yield _single("assignments_total", "counter", "Assignments since the start.", found.assignments)
    yield _single("samples_total", "counter", "Samples trained here.", found.samples)
    yield _single("received_bytes_total", "counter", "Bytes from other providers.", found.received_bytes)
    yield _single("sent_bytes_total", "counter", "Bytes to other providers.", found.sent_bytes)
    work = found.work
    yield _single("updates", "gauge", "Updates of the training so far.", work.updates)
    rates = (work.samples_per_second, work.idle) if found.state == "training" else (None, None)
    yield _single("samples_per_second", "gauge", "Rate of the last seconds.", rates[0])
    yield _single("idle_ratio", "gauge", "Share of the last seconds without computing.", rates[1])


def _single(name: str, kind: str, text: str, value: float | None) -> Figure:
    return _figure(name, kind, text, *([] if value is None else [Sample({}, value)]))


def _figure(name: str, kind: str, text: str, *samples: Sample) -> Figure:
    return Figure(f"ravnest_provider_{name}", kind, text, samples)
