"""Compare LSTM layers that defer their weight gradients with the same layers that do not.

Without deferral, forward and backward are one kernel of oneDNN each. With it, both are loops over the
steps, and the weight gradients follow. Both are measured as a stage computes them, with the sums of an
update, on one thread and alternately, as medians of CPU time: other load on the machine affects both.
Each size has its own process, whose allocator keeps freed memory. Run as a script it prints its report.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
from stage_cost import KEEP_FREED
from torch import nn

from ravnest.split import lstm_deferral, split
from ravnest.split.chain import StagePass
from ravnest.split.deferred import DeferredGradients
from ravnest.split.module import StageModule

SIZES = (
    (16, 64, 16),
    (16, 128, 64),
    (64, 128, 32),
    (3, 256, 64),
    (8, 256, 32),
    (16, 256, 32),
    (32, 256, 32),
    (64, 256, 32),
    (4, 384, 64),
    (4, 512, 64),
    (8, 512, 64),
    (16, 512, 32),
    (4, 1024, 32),
)
"""Samples, width of input and hidden state, and steps of a micro-batch."""
BLOCK_SECONDS = 0.15
PAIRS = 15
TIMEOUT = 300.0

Step = Callable[[bool], None]


def _step(samples: int, width: int, steps: int) -> Step:
    """Return a function that computes a micro-batch, with or without deferral."""
    torch.manual_seed(0)
    x = torch.randn(samples, steps, width)
    (stage,) = split(nn.LSTM(width, width, batch_first=True), x, stages=1, check=False).stages
    module = StageModule(stage.spec, stage.tensors).train()
    x.requires_grad_()
    of_output = torch.randn(samples, steps, width)
    parameters = module.parameters_by_key()
    sums = {key: torch.zeros_like(parameter) for key, parameter in parameters.items()}

    def step(defers: bool) -> None:
        deferred = DeferredGradients(costly=True) if defers else None
        outputs = module(x, deferred=deferred)
        x.grad = None
        StagePass(module, (x,), outputs, parameters).accumulate(
            [(outputs[0], of_output)], sums, deferred
        )
        if deferred is not None:
            deferred.compute(sums.__setitem__, sums)

    return step


def _seconds(step: Step, defers: bool, count: int) -> float:
    begin = time.process_time()
    for _ in range(count):
        step(defers)
    return (time.process_time() - begin) / count


def _worker(samples: int, width: int, steps: int) -> None:
    """Print the milliseconds without deferral, and the ratios of neighbouring blocks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lstm_deferral.LEAST_WIDTH = lstm_deferral.LEAST_PRODUCT = 1
    step = _step(samples, width, steps)
    once = [_seconds(step, defers, 2) for defers in (True, False)]
    count = max(1, round(BLOCK_SECONDS / once[1]))
    blocks: list[tuple[float, float]] = []
    for pair in range(PAIRS):
        order = (True, False) if pair % 2 else (False, True)
        found = {defers: _seconds(step, defers, count) for defers in order}
        blocks.append((found[False], found[True]))
    whole = statistics.median(seconds for seconds, _ in blocks)
    print(json.dumps([1000 * whole, sorted(deferred / seconds for seconds, deferred in blocks)]))


def measure() -> str:
    """Return the report in Markdown."""
    lines = [
        "| samples x width x steps | without deferral, ms | with / without | middle half | deferred |",
        "|---|--:|--:|--:|---|",
    ]
    worst = 0.0
    for samples, width, steps in SIZES:
        done = subprocess.run(
            [sys.executable, __file__, str(samples), str(width), str(steps)],
            env={**os.environ, **KEEP_FREED},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=TIMEOUT,
        )
        whole, ratios = json.loads(done.stdout.splitlines()[-1])
        ratio = statistics.median(ratios)
        large = samples * 4 * width * width >= lstm_deferral.LEAST_PRODUCT
        deferred = width >= lstm_deferral.LEAST_WIDTH and large
        worst = max(worst, ratio) if deferred else worst
        lines.append(
            f"| {samples} x {width} x {steps} | {whole:.1f} | {ratio:.2f} "
            f"| {ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f} "
            f"| {'yes' if deferred else 'no'} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return (
        "CPU time of an LSTM layer that defers its weight gradients, relative to one that does not; "
        "above 1 is slower. `deferred`: sizes that stages defer. The largest ratio of these is "
        f"{worst:.2f}.\n\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _worker(*map(int, sys.argv[1:]))
    else:
        print(measure())
