"""Cost of metrics, logs and traces: training with all of them, relative to training with none.

Three pipelines of two stages in one process train the same model over loopback, with one thread each, so
that everything that observes them competes with them for Python's lock. One of them has everything:
traces of both nodes written to files, callbacks, a `RunLog` (TensorBoard, CSV, JSON), records through a
pipe that are checked on its other side, as between a worker and its agent, and a page for Prometheus
that is read once per second. The others have nothing. They take turns of a second or two; a turn ends
when the process is idle again, so that what is written in the background is counted, too. One
figure is the processor time of the whole process in a turn with everything, relative to the mean of the
turns without just before and after it, as the median of the turns. Pipelines that do the same differ by
some percent all their life, as their memory lies differently: there are several sets of three, in
another order each, and the table has the mean of the sets and its standard error.
*Noise* is the same ratio between the two pipelines without anything. The other tables depend far less
on other programs: they have the processor time of each thread that observes, and of the recording in a
loop; in the threads that compute it takes several times as long, since it is in no cache there. The
digits model is the worst case: its micro-batches take a few milliseconds. Run as a script to print the
report, in about a quarter of an hour.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from workloads import DIGITS, MEDIUM_GPT, NODE_DATA, Workload, free_addresses, loss_of

from ravnest import Callbacks, Node, RunLog, Trainer
from ravnest.logs.background import TimedRecord
from ravnest.logs.metrics_page import metrics_page
from ravnest.provider.figures import ProviderFigures, provider_figures
from ravnest.provider.record_pipe import read_records, record_writer
from ravnest.schemas.providers import ProviderOffer
from ravnest.telemetry import LossRecord, RecordSink, WorkerRecord
from ravnest.tracing.files import SpanFiles
from ravnest.tracing.node_trace import TracedNode
from ravnest.tracing.recorder import SpanRecorder, now
from ravnest.tracing.spans import SpanKind
from ravnest.types import Address

TURNS = {DIGITS: 14, MEDIUM_GPT: 4}
"""Models and the turns of each of their pipelines."""
SETS = int(os.environ.get("RAVNEST_BENCH_SETS", "9"))
"""Sets of three pipelines of each model; at least 2."""
UPDATES = {DIGITS.name: 60, MEDIUM_GPT.name: 2}
"""Updates of a turn."""
WARM_UP = 2
"""Turns before the measurement; the share of the micro-batches is settled then."""
GOAL = 0.01
THREADS = {
    "ravnest-log": "`RunLog`, callbacks",
    "ravnest-trace": "trace files of both nodes",
    "telemetry records": "records to the agent",
    "agent": "the agent, another process in reality: check of the records",
    "metrics page": "the agent: page for Prometheus",
}
"""Threads that observe, by name, and what they do."""
IN_WORKER = ("ravnest-log", "ravnest-trace", "telemetry records")
_CALLS = 2000
_BATCH = 50
"""Losses that a `RunLog` writes at once."""
_SCRAPE = 1.0
_SETTLE = 1.1
"""Least seconds between two turns; by then, what is written in the background is written."""
_LOOK = 0.1
_IDLE = 0.1
"""Share of a core below which the process is idle."""
_PATIENCE = 300.0


@dataclass(frozen=True)
class Cost:
    """Seconds of a turn."""

    time: float
    """From the start until the last batch was asked for."""
    cpu: float
    """Processor time of the process until it was idle again."""
    threads: dict[str, float]
    """Processor time by the name of the thread."""


Round = tuple[Cost, Cost, Cost]
"""Costs of a turn without anything, with everything, and without anything again."""


Formed = tuple[Path, list[str]]
"""Folder and node names of a pipeline whose model is split."""


class _Several:
    """Passes records to several receivers."""

    def __init__(self, *sinks: RecordSink) -> None:
        self._sinks = sinks

    def emit(self, record: WorkerRecord) -> None:
        for sink in self._sinks:
            sink.emit(record)


class _Turns:
    """Turns of one pipeline, each with the same number of updates."""

    def __init__(self, updates: int) -> None:
        self._updates = updates
        self._begun = 0
        self._may_begin, self._is_over = threading.Semaphore(0), threading.Semaphore(0)

    def enter(self) -> None:
        """Wait for the turn of the next update; the Root calls it before each."""
        if self._begun % self._updates == 0:
            if self._begun:
                self._is_over.release()
            assert self._may_begin.acquire(timeout=_PATIENCE)
        self._begun += 1

    def end(self) -> None:
        """End the last turn."""
        self._is_over.release()

    def take(self) -> Cost:
        """Let the pipeline train for one turn; return its cost."""
        began, cpu, threads = time.perf_counter(), time.process_time(), _thread_times()
        self._may_begin.release()
        assert self._is_over.acquire(timeout=_PATIENCE)
        seconds = time.perf_counter() - began
        _await_idleness()
        spent = time.process_time() - cpu
        after = _thread_times()
        return Cost(seconds, spent, {name: after[name] - threads[name] for name in after})


class _NodeInTurns(Node):
    """Node that waits for its turn before each update."""

    turns: _Turns

    def forward_compute(self, tensors: Any = None, **named: Any) -> Any:
        """Compute as ``Node`` does."""
        self.turns.enter()
        return super().forward_compute(tensors, **named)


def _thread_times() -> dict[str, float]:
    """Return the processor time of all threads by name; threads of one name are summed."""
    found: dict[str, float] = defaultdict(float)
    for thread in threading.enumerate():
        if thread.ident is not None:
            found[thread.name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return found


def _await_idleness() -> None:
    end = time.monotonic() + _SETTLE
    while True:
        before = time.process_time()
        time.sleep(_LOOK)
        if time.process_time() - before < _IDLE * _LOOK and time.monotonic() > end:
            return


def measure() -> str:
    """Return the report in Markdown."""
    torch.set_num_threads(1)
    rows = [
        f"The goal is a cost of at most {GOAL:.0%}. Load of the machine before: "
        f"{os.getloadavg()[0]:.1f}.",
        "",
        "| model | sets, turns | processor time of an update without | with all, relative to it (above "
        "1 is slower) | noise | time with all, relative to that without |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    measured = [_measured(*each) for each in TURNS.items()]
    found = [*rows, *(row for row, _ in measured), "", parts(), ""]
    return "\n".join([*found, *(table for _, table in measured)])


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
            "pass a record to a `RunLog`, in the thread that computes": _least(
                lambda: log.emit(loss.record)
            ),
            "write the loss of an update to a `RunLog`": _least(lambda: log.handle([loss] * _BATCH))
            / _BATCH,
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


def _measured(work: Workload, turns: int) -> tuple[str, str]:
    """Return a model's row of ratios, and its table of threads."""
    sets = [_set_of_rounds(work, turns, first=number % 3) for number in range(SETS)]
    updates = UPDATES[work.name]
    rounds = [each for found in sets for each in found]
    without = statistics.median(each.cpu for found in rounds for each in found[::2]) / updates
    processor = [2 * seen.cpu / (one.cpu + two.cpu) for one, seen, two in map(_medians, sets)]
    noise = [two.cpu / one.cpu for one, _, two in map(_medians, sets)]
    times = [2 * seen.time / (one.time + two.time) for one, seen, two in map(_medians, sets)]
    figures = " | ".join(map(_shown, (processor, noise, times)))
    spent = {
        name: statistics.median(seen.threads.get(name, 0.0) for _, seen, _ in rounds) / updates
        for name in THREADS
    }
    row = f"| {work.name} | {SETS} x {turns} | {1000 * without:.1f} ms | {figures} |"
    return row, _thread_table(work.name, without, spent)


def _set_of_rounds(work: Workload, turns: int, *, first: int) -> list[Round]:
    """Return the rounds of three new pipelines; ``first``: which of them is made first."""
    made: dict[int, _Turns] = {}
    with ExitStack() as stack:
        found, formed = free_addresses(6), list[Formed]()
        for addresses in (
            found[:2],
            found[2:4],
            found[4:],
        ):  # nothing else runs while models are captured
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ravnest-")))
            formed.append((folder, work.form(folder, addresses)))
        for number in range(first, first + 3):
            training = _training(work, formed[number % 3], WARM_UP + turns, observed=number % 3 == 1)
            made[number % 3] = stack.enter_context(training)
        for each in [*made.values()] * WARM_UP:
            each.take()
        off, on, other = made[0], made[1], made[2]
        return [_round(off, on, other, is_reversed=bool(number % 2)) for number in range(turns)]


def _medians(rounds: list[Round]) -> Round:
    """Return the median costs of the pipelines of a set."""
    one, seen, two = (
        Cost(
            statistics.median(each[place].time for each in rounds),
            statistics.median(each[place].cpu for each in rounds),
            {},
        )
        for place in range(3)
    )
    return one, seen, two


def _thread_table(model: str, without: float, spent: dict[str, float]) -> str:
    worker = sum(spent[name] for name in IN_WORKER)
    named = [(THREADS[name], seconds) for name, seconds in spent.items()]
    rows = [
        f"| {what} | {1e6 * seconds:.0f} | {seconds / without:.2%} |"
        for what, seconds in [*named, ("**all threads of the worker**", worker)]
    ]
    head = [f"| {model}: threads | microseconds per update | of its processor time |", "|---|--:|--:|"]
    return "\n".join([*head, *rows, ""])


def _round(off: _Turns, on: _Turns, other: _Turns, *, is_reversed: bool) -> Round:
    """Let each pipeline take a turn, the observed one in the middle; return their costs."""
    if is_reversed:
        last, middle, first = other.take(), on.take(), off.take()
        return first, middle, last
    return off.take(), on.take(), other.take()


def _shown(ratios: list[float]) -> str:
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return f"**{statistics.mean(ratios):.3f}** ± {error:.3f}"


@contextmanager
def _training(work: Workload, formed: Formed, turns: int, *, observed: bool) -> Iterator[_Turns]:
    """Yield the turns of a pipeline; all of them must be taken."""
    folder, names = formed
    with ExitStack() as stack:
        given: dict[str, Any] = {}
        if observed:
            given = {"trace": folder / "traces", "record_sink": stack.enter_context(_observers(folder))}
        of_root, some = _Turns(UPDATES[work.name]), work.loader()
        batches = [some[index % len(some)] for index in range(turns * UPDATES[work.name])]

        def provide(name: str) -> None:
            with _NodeInTurns(
                name,
                optimizer=torch.optim.AdamW,
                criterion=loss_of,
                labels=batches,
                schedule="sync",
                micro_batches=work.micro_batches,
                checkpoints=False,
                folder=folder / NODE_DATA,
                trained_folder=folder / "trained",
                loss_filename=folder / "losses.txt",
                progress=False,
                **given,
            ) as node:
                node.turns = of_root
                Trainer(node, train_loader=batches, batch_size=work.samples).train()
            if name == names[0]:
                of_root.end()

        threads = [threading.Thread(target=provide, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        yield of_root
        for thread in threads:
            thread.join()


@contextmanager
def _observers(folder: Path) -> Iterator[RecordSink]:
    """Yield a receiver of records that does all there is, while a page of figures is read."""
    reading, writing = os.pipe()
    figures, over = ProviderFigures(), threading.Event()
    reader = threading.Thread(
        target=read_records, args=(reading, lambda _records: None), name="agent", daemon=True
    )
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
