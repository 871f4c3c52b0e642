"""Compare the step time of chained stages with that of the unsplit module.

A step is forward, loss, backward and an SGD update on both sides. Both run alternately in one process
on one thread, so that other load on the machine affects both equally; results are medians. CPU time is
reported too, because it does not count the time in which another process had the core. Each model has
its own process, whose allocator keeps freed memory: otherwise the side that holds the top of the heap
pays for the page faults of both. Run as a script it prints its report.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from subjects import Subject, bert, digits_cnn, gpt2, loss_of, lstm, mlp, resnet, vit

from ravnest.split import Chain, split

STAGES = 3
LIMIT = 1.05
BLOCK_SECONDS = 0.15
"""Approximate length of a timed block of steps; one step of a small model is too short."""
PAIRS = 31
LONGEST = 40.0
"""Time limit in seconds per model; large ones get fewer pairs, but at least ``FEWEST``."""
FEWEST = 7
KEEP_FREED = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}

FIXED = Subject("MLP 5 x 4, batch 2: the fixed cost alone", partial(mlp, 2, 4))
SUBJECTS = (
    Subject("digits CNN, batch 64", partial(digits_cnn, 64)),
    Subject("MLP 5 x 512, batch 128", partial(mlp, 128, 512)),
    Subject("ResNet-18, batch 8 at 64 px", partial(resnet, 18, 8, 64)),
    Subject("ResNet-50, batch 8 at 64 px", partial(resnet, 50, 8, 64)),
    Subject("GPT-2, 4 layers of 256, batch 4 x 64", partial(gpt2, 4, 64)),
    Subject("BERT, 4 layers of 256, batch 4 x 64", partial(bert, 4, 64)),
    Subject("ViT, 6 layers of 192, batch 4 at 64 px", partial(vit, 4)),
    Subject("LSTM, 2 layers of 128, batch 16 x 32", partial(lstm, 16, 32)),
)


@dataclass(frozen=True)
class Timing:
    """Medians of one model, in seconds per step."""

    unsplit: float
    chained: float
    ratio: float
    """Chained / unsplit in wall-clock time; above 1 is slower."""
    processor_ratio: float
    """Chained / unsplit in CPU time."""
    pairs: int


def time_subject(subject: Subject) -> Timing:
    """Measure both sides alternately."""
    model, args, kwargs = subject.build()
    chain = Chain.of(split(model, args, kwargs, stages=STAGES, check=False))
    unsplit = _unsplit_step(copy.deepcopy(model).train(), args, kwargs)
    chained = _chained_step(chain.train(), args, kwargs)
    for step in (unsplit, chained, unsplit, chained):
        step()
    once = _seconds(unsplit, 1)[0]
    steps = max(1, round(BLOCK_SECONDS / once))
    pairs = max(FEWEST, min(PAIRS, round(LONGEST / (2 * steps * once))))
    found: dict[Callable[[], None], list[tuple[float, float]]] = {unsplit: [], chained: []}
    for pair in range(pairs):
        gc.collect()
        for step in (unsplit, chained) if pair % 2 else (chained, unsplit):
            found[step].append(_seconds(step, steps))
    clocks = [[clock for clock, _ in found[step]] for step in (unsplit, chained)]
    processor = [[used for _, used in found[step]] for step in (unsplit, chained)]
    before, after = map(statistics.median, clocks)
    return Timing(before, after, _ratio(*clocks), _ratio(*processor), pairs)


def _ratio(unsplit: list[float], chained: list[float]) -> float:
    """Return the median ratio of neighbouring blocks, which ran under the same load."""
    return statistics.median(b / a for a, b in zip(unsplit, chained, strict=True))


def _unsplit_step(model: torch.nn.Module, args: tuple, kwargs: dict) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(*args, **kwargs)).backward()
        optimizer.step()

    return step


def _chained_step(chain: Chain, args: tuple, kwargs: dict) -> Callable[[], None]:
    optimizer = torch.optim.SGD(chain.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        chain.backward(loss_of(chain(*args, **kwargs)))
        optimizer.step()

    return step


def _seconds(step: Callable[[], None], count: int) -> tuple[float, float]:
    """Return wall-clock and CPU seconds per step."""
    gc.disable()
    clock, used = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    result = (time.perf_counter() - clock) / count, (time.process_time() - used) / count
    gc.enable()
    return result


def time_in_process(subject: Subject) -> Timing:
    """Measure a model in its own process."""
    done = subprocess.run(
        [sys.executable, __file__, subject.name],
        env={**os.environ, **KEEP_FREED},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Timing(**json.loads(done.stdout.splitlines()[-1]))


def _worker(name: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    subject = next(subject for subject in (*SUBJECTS, FIXED) if subject.name == name)
    print(json.dumps(asdict(time_subject(subject))))


def measure() -> str:
    """Return the report in Markdown."""
    lines = [
        "| model | unsplit, ms | chained, ms | chained / unsplit | CPU time ratio | pairs |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    worst = 0.0
    for subject in SUBJECTS:
        found = time_in_process(subject)
        worst = max(worst, found.ratio)
        lines.append(
            f"| {subject.name} | {1000 * found.unsplit:.2f} | {1000 * found.chained:.2f} | "
            f"{found.ratio:.3f} | {found.processor_ratio:.3f} | {found.pairs} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    fixed = time_in_process(FIXED)
    return (
        f"Step time (forward, loss, backward, SGD update) of {STAGES} chained stages, and of the "
        f"unsplit module in eager mode: one thread, medians of interleaved blocks. A ratio above 1 "
        f"means that the stages are slower. The largest ratio is {worst:.3f}; the goal is at most "
        f"{LIMIT}.\n\n"
        + "\n".join(lines)
        + f"\n\nThe fixed cost is {1e6 * (fixed.chained - fixed.unsplit) / STAGES:.0f} µs per stage and "
        "step, mostly for its own backward call; it matters for models whose step takes less than a few "
        "milliseconds.\n"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _worker(sys.argv[1])
    else:
        print(measure())
