"""Cost of metrics, logs and traces: training with all of them, relative to training with none.

Two stages in one process train over loopback, with one thread each, so that everything that observes
them competes with them for Python's lock. "All" is: traces of both nodes written to files, callbacks, a
`RunLog` (TensorBoard, CSV, JSON), records through a pipe that are checked on its other side, as between
a worker and its agent, and a page for Prometheus that is read once per second. Runs with and without
take turns for some minutes; the numbers are medians of the ratios of neighbouring runs, and in brackets
their range. The main figure is the processor time of the whole process, which depends less on what else
runs on the machine than the time does. *Noise* is the same ratio of neighbouring runs without anything:
a cost that is smaller cannot be seen. The digits model is the worst case: its micro-batches take a few
milliseconds. Run as a script to print the report, in about five minutes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from workloads import DIGITS, MEDIUM_GPT, NODE_DATA, Workload, free_addresses, loss_of

from ravnest import Callbacks, Node, RunLog, Trainer
from ravnest.logs.background import TimedRecord
from ravnest.provider.figures import ProviderFigures, provider_figures
from ravnest.provider.metrics_page import metrics_page
from ravnest.provider.record_pipe import read_records, record_writer
from ravnest.schemas.providers import ProviderOffer
from ravnest.telemetry import LossRecord, RecordSink, WorkerRecord
from ravnest.tracing.files import SpanFiles
from ravnest.tracing.node_trace import TracedNode
from ravnest.tracing.recorder import SpanRecorder, now
from ravnest.tracing.spans import SpanKind
from ravnest.types import Address

SECONDS = float(os.environ.get("RAVNEST_BENCH_SECONDS", "270"))
"""Time in which pairs of runs begin, of all models."""
SHARES = {DIGITS: 2 / 3, MEDIUM_GPT: 1 / 3}
"""Models and their shares of this time."""
LEAST_PAIRS = 2
UPDATES = {DIGITS.name: 300, MEDIUM_GPT.name: 3}
"""Updates of a run."""
WARM_UP = 1
"""Updates before the clock starts; the share of the micro-batches is settled then."""
GOAL = 0.01
_CALLS = 2000
_SCRAPE = 1.0


@dataclass(frozen=True)
class Cost:
    """Seconds of a run."""

    time: float
    cpu: float


class _Several:
    """Passes records to several receivers."""

    def __init__(self, *sinks: RecordSink) -> None:
        self._sinks = sinks

    def emit(self, record: WorkerRecord) -> None:
        for sink in self._sinks:
            sink.emit(record)


class _Batches(list[Any]):
    """Batches of one run; notes when the warm-up is over."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        some = work.loader()
        self.extend(some[index % len(some)] for index in range(WARM_UP + UPDATES[work.name]))
        self.began = Cost(0.0, 0.0)

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            if index == WARM_UP:
                self.began = Cost(time.perf_counter(), time.process_time())
            yield self[index]


def measure() -> str:
    """Return the report in Markdown."""
    torch.set_num_threads(1)
    rows = [
        f"The goal is a cost of at most {GOAL:.0%}. Load of the machine before: "
        f"{os.getloadavg()[0]:.1f}.",
        "",
        "| model | pairs | processor time of an update without | with all, relative to it (above 1 is "
        "slower) | noise | time with all, relative to that without |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    return "\n".join([*rows, *(_row(*each) for each in SHARES.items()), "", parts()])


def parts() -> str:
    """Return the processor time of single parts in Markdown; it depends little on other programs."""
    recorder = SpanRecorder(2 * _CALLS)
    loss = TimedRecord(1.0, LossRecord(1, 0, 1.0, 8, 0))
    with tempfile.TemporaryDirectory(prefix="ravnest-") as name, RunLog(Path(name) / "run") as log:
        files = SpanFiles(Path(name) / "traces", TracedNode(0, 0, 0, "Root"))
        found = {
            "record a span, in the thread that computes": _least(
                lambda: recorder.add(SpanKind.FORWARD, now(), 1, 2)
            ),
            "write it to a file, in another thread": _least(
                lambda: files.write(recorder.take()), setup=lambda: _record(recorder)
            )
            / _CALLS,
            "write the loss of an update to a `RunLog`": _least(lambda: log.handle(loss)),
        }
        files.close()
    rows = [f"| {what} | {1e6 * seconds:.1f} |" for what, seconds in found.items()]
    return "\n".join(["| processor time | microseconds |", "|---|--:|", *rows])


def _record(recorder: SpanRecorder) -> None:
    recorder.take()
    for _ in range(_CALLS):
        recorder.add(SpanKind.FORWARD, now(), 1, 2)


def _least(call: Callable[[], object], setup: Callable[[], None] | None = None) -> float:
    """Return the least processor time of a call; that of ``setup`` before each is not counted."""
    found = []
    for _ in range(20):
        if setup is not None:
            setup()
        calls = 1 if setup is not None else _CALLS
        began = time.thread_time()
        for _ in range(calls):
            call()
        found.append((time.thread_time() - began) / calls)
    return min(found)


def _row(work: Workload, share: float) -> str:
    end = time.monotonic() + share * SECONDS
    _run(work, observed=True)  # imports, caches
    pairs: list[tuple[Cost, Cost]] = []
    while len(pairs) < LEAST_PAIRS or time.monotonic() < end:
        order = (False, True) if len(pairs) % 2 else (True, False)
        found = {observed: _run(work, observed=observed) for observed in order}
        pairs.append((found[False], found[True]))
    without = statistics.median(off.cpu for off, _ in pairs) / UPDATES[work.name]
    times = [on.time / off.time for off, on in pairs]
    processor = [on.cpu / off.cpu for off, on in pairs]
    noise = [after.cpu / before.cpu for (before, _), (after, _) in pairwise(pairs)]
    figures = " | ".join(map(_shown, (processor, noise, times)))
    return f"| {work.name} | {len(pairs)} | {1000 * without:.1f} ms | {figures} |"


def _shown(ratios: list[float]) -> str:
    return f"**{statistics.median(ratios):.3f}** ({min(ratios):.3f} to {max(ratios):.3f})"


def _run(work: Workload, *, observed: bool) -> Cost:
    """Return what a run costs after the warm-up."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ravnest-")))
        names = work.form(folder, free_addresses(2))
        given: dict[str, Any] = {}
        if observed:
            given = {"trace": folder / "traces", "record_sink": stack.enter_context(_observers(folder))}
        batches = _Batches(work)

        def provide(name: str) -> None:
            own = batches if name == names[0] else list(batches)
            with Node(
                name,
                optimizer=torch.optim.AdamW,
                criterion=loss_of,
                labels=own,
                schedule="sync",
                micro_batches=work.micro_batches,
                checkpoints=False,
                folder=folder / NODE_DATA,
                trained_folder=folder / "trained",
                loss_filename=folder / "losses.txt",
                progress=False,
                **given,
            ) as node:
                Trainer(node, train_loader=own, batch_size=work.samples).train()

        threads = [threading.Thread(target=provide, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return Cost(time.perf_counter() - batches.began.time, time.process_time() - batches.began.cpu)


@contextmanager
def _observers(folder: Path) -> Iterator[RecordSink]:
    """Yield a receiver of records that does all there is, while a page of figures is read."""
    reading, writing = os.pipe()
    figures, over = ProviderFigures(), threading.Event()
    reader = threading.Thread(target=read_records, args=(reading, lambda _records: None), daemon=True)
    with ExitStack() as stack:
        page = stack.enter_context(
            metrics_page(
                Address("127.0.0.1", 0), lambda: provider_figures(_offer(), 1, figures.snapshot)
            )
        )

        def scrape() -> None:
            while not over.wait(_SCRAPE):
                with urllib.request.urlopen(f"http://{page}/metrics", timeout=60) as answer:
                    answer.read()

        scraper = threading.Thread(target=scrape, daemon=True)
        scraper.start()
        reader.start()
        log = stack.enter_context(RunLog(folder / "run"))
        callbacks = stack.enter_context(Callbacks())
        writer = stack.enter_context(record_writer(writing))
        assert writer is not None
        yield _Several(log, callbacks, writer)
        over.set()
        scraper.join()
    reader.join()


def _offer() -> ProviderOffer:
    return ProviderOffer(
        name="alice",
        address="127.0.0.1:9000",
        ram=1,
        cores=1,
        compute=1,
        bandwidth=1,
        round_trip=0,
        version="1",
        torch="2",
    )


if __name__ == "__main__":
    print(measure())
