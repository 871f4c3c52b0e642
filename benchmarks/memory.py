"""Compare the planned memory of stages with the memory that training them takes.

Each stage is loaded from disk in its own process, as on a provider, and trained for a few updates like
in the runtime: with the number of micro-batches in flight of its position in the pipeline, a version of
the weights for each if there are several, AdamW, inputs and gradients that arrive as new tensors, and
outputs that are released once they are sent.

There are two measures. **Tensors** is the peak memory of torch's allocator, summed from all allocations
and releases that the profiler records. It includes temporaries inside operators and is the same in
every run. **Process** is the growth of the resident set after imports and a first update. The allocator
has one arena and returns large blocks at once, so this is close to the memory in use. It also includes
allocations of libraries (oneDNN, BLAS) and code pages that are loaded late, about 10 to 30 MB, and is
therefore shown from 64 MB on. Run as a script it prints its report.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import ProfilerActivity, profile

from ravnest.plan.cost import ModelCosts
from ravnest.plan.memory import StageMemory
from ravnest.plan.profiler import optimizer_state_factor, profile_model
from ravnest.split import Chain, StageModule, prepare
from ravnest.split.splitter import balanced_cuts
from ravnest.store.bundle import load_module, save_stage

LIMITS = (0.8, 1.2)
PIPELINES = (2, 3)
UPDATES = 3
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
    from subjects import Subject, bert, digits_cnn, gpt2, lstm, mlp, resnet, vit  # noqa: PLC0415

    return (
        Subject("digits CNN, batch 64", partial(digits_cnn, 64)),
        Subject("digits CNN, batch 512", partial(digits_cnn, 512)),
        Subject("ResNet-18, batch 16 at 64 px", partial(resnet, 18, 16, 64)),
        Subject("ResNet-50, batch 16 at 96 px", partial(resnet, 50, 16, 96)),
        Subject("GPT-2, 4 layers of 256, batch 8 x 128", partial(gpt2, 8, 128)),
        Subject("BERT, 4 layers of 256, batch 8 x 128", partial(bert, 8, 128)),
        Subject("ViT, 6 layers of 192, batch 16 at 64 px", partial(vit, 16)),
        Subject("LSTM, 2 layers of 256, batch 32 x 64", partial(lstm, 32, 64, 256)),
        Subject("MLP 5 x 2048, batch 64", partial(mlp, 64, 2048)),
    )


@dataclass(frozen=True)
class Measured:
    """Peak memory of a stage in bytes."""

    tensors: int
    process: int


@dataclass(frozen=True)
class Comparison:
    """Planned and measured memory of one stage."""

    stage: int
    stages: int
    planned: StageMemory[float]
    measured: Measured


# Requester: plan, split and write the stages with their inputs.


def compare(subject: Any, stages: int) -> list[Comparison]:
    """Plan and run every stage of a model; return the comparisons."""
    model, args, kwargs = subject.build()
    prepared = prepare(model, args, kwargs)
    cuts = balanced_cuts(prepared, [1.0] * stages)
    profile_ = profile_model(prepared, optimizer_factor=optimizer_state_factor(torch.optim.AdamW))
    costs = ModelCosts.of(profile_)
    bounds = [0, *(prepared.cuts.index(cut) + 1 for cut in cuts), costs.units]
    split = prepared.cut(cuts)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        chain = _RecordingChain(Chain.of(split).modules)
        chain(*args, **kwargs)
        for index, stage in enumerate(split.stages):
            place = Path(folder, str(index))
            save_stage(place, stage)
            torch.save(chain.inputs[index], place / "inputs.pt")
            in_flight = stages - index
            planned = costs.memory(bounds[index], bounds[index + 1], in_flight)
            measured = Measured(
                tensors=_worker(place, in_flight, "tensors"),
                process=_worker(place, in_flight, "process"),
            )
            found.append(Comparison(index, stages, planned, measured))
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


def _worker(place: Path, in_flight: int, what: str) -> int:
    done = subprocess.run(
        [sys.executable, __file__, str(place), str(in_flight), what],
        env={**os.environ, **RETURN_FREED},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(json.loads(done.stdout.splitlines()[-1]))


# Provider: load and train one stage.


def train(module: StageModule, inputs: Sequence[Any], in_flight: int, updates: int) -> None:
    """Train a stage with ``in_flight`` micro-batches in flight and one update per micro-batch."""
    trainer = _Trainer(module, in_flight)
    while trainer.updates < updates:
        if len(trainer.in_flight) < in_flight:
            trainer.forward(inputs)
        else:
            trainer.backward()


class _Trainer:
    """Trains one stage like the runtime does."""

    def __init__(self, module: StageModule, in_flight: int) -> None:
        self.module = module.train()
        self.updates = 0
        self.in_flight: deque[_InFlight] = deque()
        self._leaving: list[Any] = []
        self._returning: list[torch.Tensor | None] = []
        """Outputs and gradients of the last micro-batch, which are being sent to the neighbours."""
        parameters = module.parameters_by_key()
        self._trained = {key: p for key, p in parameters.items() if p.requires_grad}
        self._versions = in_flight > 1
        self._optimizer = torch.optim.AdamW(self._trained.values()) if self._trained else None

    def forward(self, inputs: Sequence[Any]) -> None:
        specs = self.module.graph.inputs
        received = [_received(v, s.gradient) for v, s in zip(inputs, specs, strict=True)]
        version = self._trained
        if self._versions:
            version = {k: p.detach().clone().requires_grad_() for k, p in self._trained.items()}
        outputs = self.module(*received, parameters=version)
        leaves = [v for v in received if isinstance(v, torch.Tensor) and v.requires_grad]
        ends = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
        ends = [o for o in ends if o.dim() == 0] or ends  # only the loss, if the stage computes one
        edges = [(get_gradient_edge(o), torch.empty_like(o, device="meta")) for o in ends]
        self._leaving = [_detached(output) for output in outputs]
        self.in_flight.append(_InFlight(leaves, version, edges))

    def backward(self) -> None:
        self._returning, gradients = self.in_flight.popleft().backward()
        for parameter, gradient in zip(self._trained.values(), gradients, strict=True):
            parameter.grad = gradient
        del gradients
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()
        self.updates += 1


@dataclass
class _InFlight:
    """A micro-batch between its forward and its backward pass."""

    leaves: list[torch.Tensor]
    version: dict[str, torch.Tensor]
    ends: list[tuple[GradientEdge, torch.Tensor]]

    def backward(self) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Return the gradients of the inputs and of the version's tensors."""
        found = torch.autograd.grad(
            [edge for edge, _ in self.ends],
            [*self.leaves, *self.version.values()],
            [torch.ones_like(shape, device="cpu") for _, shape in self.ends],
            allow_unused=True,
        )
        return list(found[: len(self.leaves)]), list(found[len(self.leaves) :])


def _received(value: Any, gradient: bool) -> Any:
    return value.clone().requires_grad_(gradient) if isinstance(value, torch.Tensor) else value


def tensor_peak(place: Path, in_flight: int) -> int:
    """Return the peak bytes of tensors while the stage is loaded and trained."""
    inputs = torch.load(place / "inputs.pt", weights_only=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        train(_load(place), inputs, in_flight, UPDATES)
    kineto = recorded.profiler.kineto_results
    changes = [(e.start_ns(), e.nbytes()) for e in kineto.events() if e.name() == "[memory]"]
    peak = now = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        now += change
        peak = max(peak, now)
    return peak


def process_peak(place: Path, in_flight: int) -> int:
    """Return the growth of the resident set from before the stage is loaded to its peak."""
    inputs = torch.load(place / "inputs.pt", weights_only=True)
    train(_load(place), inputs, in_flight, 1)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = psutil.Process().memory_info().rss
    train(_load(place), inputs, in_flight, UPDATES)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak) * 1024 - before


def _load(place: Path) -> StageModule:
    """Load the stage with weights in allocated memory, not in mapped pages of the file."""
    module = load_module(place)
    module.load_state_dict({k: t.clone() for k, t in module.state_dict().items()}, assign=True)
    return module


def measure() -> str:
    """Return the report in Markdown."""
    lines = [
        "| model | stage | in flight | planned, MB | tensors, MB | planned / tensors | process, MB |"
        " planned / process |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    ratios = []
    for subject in subjects():
        for stages in PIPELINES:
            for found in compare(subject, stages):
                planned, measured = found.planned.total, found.measured
                ratios.append(planned / measured.tensors)
                process = "-", "-"
                if measured.process >= SHOWN:
                    process = f"{measured.process / 1e6:.0f}", f"{planned / measured.process:.2f}"
                lines.append(
                    f"| {subject.name} | {found.stage + 1} of {found.stages} | "
                    f"{found.stages - found.stage} | {planned / 1e6:.1f} | "
                    f"{measured.tensors / 1e6:.1f} | {ratios[-1]:.2f} | {' | '.join(process)} |"
                )
                print(lines[-1], file=sys.stderr, flush=True)
    return (
        f"Planned training memory of each stage, and the memory of a run with AdamW. Planned / "
        f"tensors is between {min(ratios):.2f} and {max(ratios):.2f} (above 1: more planned than used); "
        f"the goal is {LIMITS[0]} to {LIMITS[1]}.\n\n" + "\n".join(lines) + "\n"
    )


def _work(place: str, in_flight: str, what: str) -> None:
    torch.set_num_threads(1)
    peak = tensor_peak if what == "tensors" else process_peak
    print(json.dumps(peak(Path(place), int(in_flight))))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if len(sys.argv) > 1:
        _work(*sys.argv[1:])
    else:
        print(measure())
