"""Processes of clusters that average: they train on request and measure what averaging takes.

    python averaged_nodes.py '<settings as JSON>'

A Root reads the seconds to train for and answers with a ``Taken``, as in `contenders.py`.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any

import torch
from contenders import Racing, Rate, Seat, ravnest

from ravnest.runtime.control import node_runtime
from ravnest.runtime.stage.averaging_adapter import AveragingAdapter
from ravnest.runtime.stage.inbox import WorkerInbox

EPOCH = 11
"""Updates per epoch in each of the demo's two clusters."""


@dataclass(frozen=True)
class Taken(Rate):
    """Measurements of a Root."""

    seconds: float = 0.0
    """Seconds of training, from the request to its end."""
    cpu: float = 0.0
    """CPU seconds of its process per sample: computing, sending and averaging."""
    stopped: float = 0.0
    """Share of its time that the worker thread spent on averaging: copying and changing weights."""
    rounds: int = 0
    """Rounds, counted at the coordinating Root."""
    peak: int = 0
    """Peak memory of its process so far, in bytes."""


class _Stopped:
    """CPU seconds that the worker thread spent on averaging."""

    seconds = 0.0

    @classmethod
    def during(cls, call: Callable[[], None]) -> None:
        begin = time.thread_time()
        call()
        cls.seconds += time.thread_time() - begin


class _TimedInbox(WorkerInbox):
    """An inbox that times the calls posted for averages."""

    def __init__(self, inbox: WorkerInbox) -> None:
        super().__init__()
        self.calls, self.when_idle = inbox.calls, inbox.when_idle

    def post(self, call: Callable[[], None]) -> None:
        """Queue a call whose time in the worker's thread is counted."""
        super().post(lambda: _Stopped.during(call))

    def post_when_idle(self, call: Callable[[], None]) -> None:
        """Queue a call for the idle worker whose time is counted."""
        super().post_when_idle(lambda: _Stopped.during(call))


class TimedState(AveragingAdapter):
    """Measure everything that averaging does in the worker thread."""

    def __init__(self, execution: Any, inbox: WorkerInbox, rings: Any, **options: Any) -> None:
        super().__init__(execution, _TimedInbox(inbox), rings, **options)
        later = execution.after_step  # what is not done when it is posted
        execution.after_step = lambda change: later(lambda: _Stopped.during(change))


class _Watching(Racing):
    def batches(self) -> Iterator[Any]:
        """Loader with the epoch length of the demo's clusters."""
        while True:
            yield from itertools.islice(self.train_loader, EPOCH)
            self.node._end_epoch()

    def _run(self, seconds: float) -> Taken:
        rounds = self.node._ensure_started().rounds
        stopped, computed = _Stopped.seconds, self._computed()
        averaged, cpu, begin = rounds["averaged"], time.process_time(), time.perf_counter()
        done = self.node._ensure_started().progress.state.done
        rate = super()._run(seconds)
        samples = (self.node._ensure_started().progress.state.done - done) * self._samples
        return Taken(
            **asdict(rate),
            seconds=time.perf_counter() - begin,
            cpu=(time.process_time() - cpu) / samples,
            stopped=(_Stopped.seconds - stopped) / (self._computed() - computed),
            rounds=rounds["averaged"] - averaged,
            peak=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        )

    def _computed(self) -> float:
        """Return the CPU seconds of the worker thread."""
        answers: SimpleQueue[float] = SimpleQueue()
        self.node._ensure_started()._worker.post(lambda: answers.put(time.thread_time()))
        return answers.get(timeout=60)


def main() -> None:
    """Run one node."""
    torch.set_num_threads(1)
    node_runtime.AveragingAdapter = TimedState  # type: ignore[misc]
    ravnest(Seat(**json.loads(sys.argv[1])), _Watching)


if __name__ == "__main__":
    main()
