"""Compare the planned memory of stages with the memory that training them takes.

Each stage is loaded from disk in its own process, as on a provider, and trained for a few updates with
the runtime's own ``StageExecution`` and AdamW. A batch that can be split is split into micro-batches; as
many as the plan allows are in flight, and their weight gradients are deferred as long as the schedule
could defer them; with **1 kept**, the activations of the others are recomputed. A batch that cannot be
split is trained with a delay of one update, except at the Leaf. Inputs and gradients arrive as new
tensors, and outputs are released once they are sent: there are no links, and what the plan counts for
messages that links keep until they are acknowledged is left out.

There are two measures. **Tensors** is the peak memory of torch's allocator, summed from all allocations
and releases that the profiler records. It includes temporaries inside operators and is the same in
every run. **Process** is the growth of the resident set after imports and a first update. The allocator
has one arena and returns large blocks at once, so this is close to the memory in use. It also includes
allocations of libraries (oneDNN, BLAS) and code pages that are loaded late, about 10 to 30 MB, and is
therefore shown from 64 MB on, for the first line of a stage. Run as a script it prints its report;
arguments select models by the beginning of their names.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from ravnest.plan.cost import ModelCosts
from ravnest.plan.memory import StageMemory
from ravnest.plan.profiler import optimizer_state_factor, profile_model
from ravnest.runtime.stage.execution import LossPart, StageExecution
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.split import Chain, StageModule, prepare
from ravnest.split.splitter import balanced_cuts
from ravnest.store.bundle import load_module, save_stage
from ravnest.types import MicrobatchId

LIMITS = (1.0, 1.3)
STAGES = 3
UPDATES = 3
SPLITS = ((1.0, 1 / 4, False), (1 / 2, 1 / 8, False), (1.0, 1 / 8, True))
"""Shares and parts of a batch (``MemorySettings``), and whether one part is kept, if it is split."""
WHOLE = ((1.0, 1.0, False), (1.0, 1.0, True))
"""The same for batches that cannot be split."""
SHOWN = 64e6
"""Growth of the process in bytes from which it is shown."""
RETURN_FREED = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "OMP_NUM_THREADS": "1",
}


def subjects() -> tuple[Any, ...]:
    """Return the models; imported on demand because workers do not need them."""
    from subjects import Subject, bert, digits_cnn, gpt2, gru, lstm, mlp, resnet, vit  # noqa: PLC0415

    return (
        Subject("digits CNN, batch 64", partial(digits_cnn, 64)),
        Subject("ResNet-18, batch 16 at 64 px", partial(resnet, 18, 16, 64)),
        Subject("GPT-2, 4 layers of 256, batch 8 x 128", partial(gpt2, 8, 128)),
        Subject("BERT, 4 layers of 256, batch 8 x 128", partial(bert, 8, 128)),
        Subject("ViT, 6 layers of 192, batch 16 at 64 px", partial(vit, 16)),
        Subject("LSTM, 2 layers of 256, batch 32 x 64", partial(lstm, 32, 64, 256)),
        Subject("GRU, 2 layers of 256, batch 32 x 64", partial(gru, 32, 64, 256)),
        Subject("MLP 5 x 2048, batch 64", partial(mlp, 64, 2048)),
    )


@dataclass(frozen=True)
class Measured:
    """Peak memory of a stage in bytes."""

    tensors: int
    process: int | None


@dataclass(frozen=True)
class Comparison:
    """Planned and measured memory of one stage."""

    stage: int
    stages: int
    load: Load
    planned: StageMemory[float]
    measured: Measured


@dataclass(frozen=True)
class Load:
    """Micro-batches of a batch that a stage trains, as its worker gets them on the command line."""

    count: int
    in_flight: int
    delay: int
    kept: int | None = None
    """Micro-batches whose activations are kept at once; None: all."""

    def __str__(self) -> str:
        text = f"{self.in_flight} of {self.count}" if self.count > 1 else "1 batch"
        text = "2 batches" if self.delay else text
        return text if self.kept is None else f"{text}, {self.kept} kept"


# Requester: plan, split and write the stages with their inputs.


def compare(subject: Any, stages: int) -> list[Comparison]:
    """Plan and run every stage of a model; return the comparisons."""
    model, args, kwargs = subject.build()
    prepared = prepare(model, args, kwargs)
    cuts = balanced_cuts(prepared, [1.0] * stages)
    profile_ = profile_model(prepared, optimizer_factor=optimizer_state_factor(torch.optim.AdamW))
    bounds = [0, *(prepared.cuts.index(cut) + 1 for cut in cuts), len(profile_.units)]
    split = prepared.cut(cuts)
    splits = SPLITS if profile_.smallest_rows is not None else WHOLE
    found = []
    with tempfile.TemporaryDirectory() as folder:
        chain = _RecordingChain(Chain.of(split).modules)
        chain(*args, **kwargs)
        for index, stage in enumerate(split.stages):
            place = Path(folder, str(index))
            save_stage(place, stage)
            names = [value.name for value in stage.spec.graphs["train"].inputs]
            inputs = dict(zip(names, chain.inputs[index], strict=True))
            behind = split.stages[index + 1].spec.graphs["train"].inputs if index + 1 < stages else ()
            returning = [value.name for value in behind if value.gradient]
            torch.save((inputs, returning, profile_.batch_size), place / "inputs.pt")
            for number, (share, part, one_kept) in enumerate(splits):
                costs = ModelCosts.of(profile_, share=share, part=part)
                count = round(1 / part)
                delay = costs.training.max_delay if index + 1 < stages else 0
                if one_kept and not delay and count == 1:
                    continue
                load = Load(count, round(share * count), delay, 1 if one_kept else None)
                kept = part if one_kept else None
                planned = costs.memory(bounds[index], bounds[index + 1], stages - index, kept)
                measured = Measured(
                    tensors=_worker(place, load, "tensors"),
                    process=None if number else _worker(place, load, "process"),
                )
                without_links = replace(planned, unacknowledged=0.0)
                found.append(Comparison(index, stages, load, without_links, measured))
    return found


class _RecordingChain(Chain):
    """A chain that records the inputs of each stage."""

    inputs: list[list[Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            result = super().__call__(*args, **kwargs)
        self.inputs = [[_detached(value) for value in step.inputs] for step in self._passes]
        return result


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _worker(place: Path, load: Load, what: str) -> int:
    numbers = (load.count, load.in_flight, load.delay, load.kept or 0)
    done = subprocess.run(
        [sys.executable, __file__, str(place), what, *map(str, numbers)],
        env={**os.environ, **RETURN_FREED},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(json.loads(done.stdout.splitlines()[-1]))


# Provider: load and train one stage.


Example = tuple[dict[str, Any], list[str], int]
"""Inputs of a batch, the names of the outputs whose gradients come back, and the number of samples."""


def _example(place: Path) -> Example:
    example: Example = torch.load(place / "inputs.pt", weights_only=True)
    return example


class Training:
    """Trains one stage as the runtime does, without a pipeline around it."""

    def __init__(self, module: StageModule, example: Example, load: Load) -> None:
        inputs, returning, rows = example
        spec = module.spec
        self._load = load
        self._returning = frozenset(returning)
        self._parts = _cut(module, inputs, rows // load.count, load.count)
        self._leaf = spec.index == spec.count - 1
        rule = UpdateRule(torch.optim.AdamW)
        self._execution = StageExecution(
            module, rule, seed=0, stash=load.delay > 0, kept=load.kept, defer=spec.index > 0
        )
        self._number = 0
        self._sent: list[Any] = []
        """Outputs and gradients of the last micro-batch, which are being sent to the neighbours."""

    def run(self, updates: int) -> None:
        """Train this number of updates."""
        if self._load.delay:
            ahead = [self._forward(0)]
            for update in range(updates):
                ahead.append(self._forward(0))
                self._finish([ahead.pop(0)])
                if update:
                    self._execution.free(update - 1)
                self._execution.step(1)
            return
        for _ in range(updates):
            for first in range(0, self._load.count, self._load.in_flight):
                parts = range(first, min(first + self._load.in_flight, self._load.count))
                self._finish([self._forward(part) for part in parts] if not self._leaf else [*parts])
            self._execution.step(1)

    def _finish(self, started: list[Any]) -> None:
        """Run backward for micro-batches, and then their weight gradients; the Leaf begins with each."""
        deferred = []
        arrived: list[dict[str, torch.Tensor]] = []
        """Gradients from the next stage: those of the micro-batch at work and of the next one."""
        for number, one in enumerate(started):
            microbatch, outputs = self._forward(one) if isinstance(one, int) else one
            deferred.append(microbatch)
            if not self._leaf:
                waiting = 2 if self._load.delay or number + 1 < len(started) else 1
                while len(arrived) < waiting:
                    arrived.append({name: torch.ones(shape, dtype=d) for name, shape, d in outputs})
            gradients = {} if self._leaf else arrived[0]
            self._sent = [self._execution.backward(microbatch, gradients)]
            del gradients, arrived[:1]
        if self._execution.defers:
            for microbatch in deferred:
                self._execution.weight_gradients(microbatch)

    def _forward(self, part: int) -> tuple[MicrobatchId, list[Any]]:
        microbatch = MicrobatchId(0, self._number)
        self._number += 1
        values = {
            k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self._parts[part].items()
        }
        loss = LossPart(_loss, 1 / self._load.count) if self._leaf else None
        outputs, _ = self._execution.forward(microbatch, self._execution.updates.done, values, loss)
        self._sent = [outputs]
        return microbatch, [(k, v.shape, v.dtype) for k, v in outputs.items() if k in self._returning]


def _loss(outputs: tuple[Any, ...]) -> torch.Tensor:
    """Return the loss that the model computes, or the cross entropy of its output."""
    tensors = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    scalars = [o for o in tensors if o.dim() == 0]
    if scalars:
        return scalars[0]
    logits = tensors[0].flatten(0, -2)
    return torch.nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


def _cut(module: StageModule, inputs: dict[str, Any], rows: int, count: int) -> list[dict[str, Any]]:
    """Cut the inputs of a batch into micro-batches, along the dimension that counts samples."""
    parts: list[dict[str, Any]] = [{} for _ in range(count)]
    for spec in module.graph.inputs:
        counted = [(k, d.factor * rows) for k, d in enumerate(spec.shape) if d.symbol]
        for number, part in enumerate(parts):
            value = inputs[spec.name]
            for dimension, size in counted[:1] if isinstance(value, torch.Tensor) else ():
                value = value.narrow(dimension, number * size, size)
            part[spec.name] = rows if spec.dtype is None else value
    return parts


def tensor_peak(place: Path, load: Load) -> int:
    """Return the peak bytes of tensors while the stage is loaded and trained."""
    example = _example(place)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        Training(_load(place), example, load).run(UPDATES)
    kineto = recorded.profiler.kineto_results
    changes = [(e.start_ns(), e.nbytes()) for e in kineto.events() if e.name() == "[memory]"]
    peak = now = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        now += change
        peak = max(peak, now)
    return peak


def process_peak(place: Path, load: Load) -> int:
    """Return the growth of the resident set from before the stage is loaded to its peak."""
    example = _example(place)
    Training(_load(place), example, load).run(1)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = psutil.Process().memory_info().rss
    Training(_load(place), example, load).run(UPDATES)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak) * 1024 - before


def _load(place: Path) -> StageModule:
    """Load the stage with weights in allocated memory, not in mapped pages of the file."""
    module = load_module(place)
    module.load_state_dict({k: t.clone() for k, t in module.state_dict().items()}, assign=True)
    return module


def measure(selected: tuple[str, ...] = ()) -> str:
    """Return the report in Markdown, of all models or of those whose names begin like this."""
    lines = [
        "| model | stage | in flight | planned, MB | tensors, MB | planned / tensors | process, MB |"
        " planned / process |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    ratios = []
    for subject in subjects():
        if selected and not subject.name.startswith(selected):
            continue
        for found in compare(subject, STAGES):
            planned, measured = found.planned.total, found.measured
            ratios.append(planned / measured.tensors)
            process = "-", "-"
            if measured.process is not None and measured.process >= SHOWN:
                process = f"{measured.process / 1e6:.0f}", f"{planned / measured.process:.2f}"
            lines.append(
                f"| {subject.name} | {found.stage + 1} of {found.stages} | "
                f"{found.load} | {planned / 1e6:.1f} | "
                f"{measured.tensors / 1e6:.1f} | {ratios[-1]:.2f} | {' | '.join(process)} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return (
        f"Planned training memory of each stage, and the memory of a run with AdamW. Planned / "
        f"tensors is between {min(ratios):.2f} and {max(ratios):.2f} (above 1: more planned than used); "
        f"the goal is {LIMITS[0]} to {LIMITS[1]}.\n\n" + "\n".join(lines) + "\n"
    )


def _work(place: str, what: str, numbers: list[str]) -> None:
    torch.set_num_threads(1)
    peak = tensor_peak if what == "tensors" else process_peak
    count, in_flight, delay, kept = map(int, numbers)
    print(json.dumps(peak(Path(place), Load(count, in_flight, delay, kept or None))))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[2:3] in (["tensors"], ["process"]):
        _work(*sys.argv[1:3], sys.argv[3:])
    else:
        print(measure(tuple(sys.argv[1:])))
