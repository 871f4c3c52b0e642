"""Processes of clusters that average: they train as ordered, and say what averaging took.

    python averaged_nodes.py '<settings as JSON>'

A Root reads the seconds to train for and answers with a ``Taken``, as `contenders.py` does.
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

EPOCH = 11
"""Updates of an epoch in each of the demo's two clusters."""


@dataclass(frozen=True)
class Taken(Rate):
    """What a Root measured."""

    seconds: float = 0.0
    """Of training, from the order to its end."""
    cpu: float = 0.0
    """Seconds of its process, for a sample: computing, sending and averaging."""
    stopped: float = 0.0
    """Share of its time that the thread that computes spent on averages: to copy and change weights."""
    rounds: int = 0
    """Averaged; counted at the Root that coordinates."""
    peak: int = 0
    """The most bytes that its process has had in memory so far."""


class _Stopped:
    """Seconds that the thread that computes spent on averages; of the processor, which is shared."""

    seconds = 0.0

    @classmethod
    def during(cls, call: Callable[[], None]) -> None:
        begin = time.thread_time()
        call()
        cls.seconds += time.thread_time() - begin


class _TimedWorker:
    """A worker that times what is posted to it for averages."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def post(self, call: Callable[[], None]) -> None:
        """In the thread of the worker."""
        self._worker.post(lambda: _Stopped.during(call))


class TimedState(AveragingAdapter):
    """Times everything that averaging does in the thread that computes."""

    def __init__(self, worker: Any, rings: Any, **options: Any) -> None:
        super().__init__(worker, rings, **options)
        self._worker = _TimedWorker(worker)  # type: ignore[assignment]
        execution = worker.execution
        later = execution.after_step  # what is not done when it is posted
        execution.after_step = lambda change: later(lambda: _Stopped.during(change))


class _Watching(Racing):
    def batches(self) -> Iterator[Any]:
        """Epochs are those of the demo's clusters."""
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
        """Seconds that the thread that computes has had of the processor."""
        answers: SimpleQueue[float] = SimpleQueue()
        self.node._ensure_started()._worker.post(lambda: answers.put(time.thread_time()))
        return answers.get(timeout=60)


def main() -> None:
    """Be one node."""
    torch.set_num_threads(1)
    node_runtime.AveragedState = TimedState  # type: ignore[misc]
    ravnest(Seat(**json.loads(sys.argv[1])), _Watching)


if __name__ == "__main__":
    main()
