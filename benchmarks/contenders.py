"""Processes of the pipelines that are compared: they train for as long as they are told to.

    python contenders.py ravnest|torch|single '<settings as JSON>'

A measuring process reads one number per line, the seconds to train for, and answers each with a
``Rate`` as JSON. Between two lines it is idle, so that contenders can take turns.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from workloads import NODE_DATA, WORKLOADS, Endless, Workload, loss_of

from ravnest import Node, Trainer
from ravnest.store.bundle import load_module
from ravnest.store.node_spec import read_node

WARM_SHARE = 0.25
"""Share of the time that is not measured, while the pipeline fills."""
LONGEST_WARM = 5.0
"""Most seconds of it."""


@dataclass(frozen=True)
class Rate:
    """Measurements of a process, without ramp-up and drain."""

    samples: float
    """Samples per second."""
    window: int = 1
    staleness: float = 0.0
    """Median staleness at the Root."""
    trained: int = 0
    """All samples, those of ramp-up and drain included."""
    cpu: float = 0.0
    """CPU milliseconds per sample, of all processes together."""
    gap: float = 0.0
    """Longest time between two updates, in seconds; a pipeline that stands still has a long one."""


@dataclass(frozen=True)
class Seat:
    """Settings of a process."""

    workload: str
    folder: str
    name: str = ""
    """Name of the node; for torch, the stage to load."""
    store: str = ""
    """torch: ``host:port`` of rank 0."""
    device: str = "lo"
    """torch: the network device to use."""
    schedule: str = "auto"
    compression: bool | str = False
    reduce_factor: int | None = None
    checkpoint_minutes: float | None = 1.0
    """Minutes between two checkpoints; None: no checkpoints."""
    team: str = ""
    """Name of the processes that train together, for their files."""

    def work(self) -> Workload:
        """Return the workload."""
        return WORKLOADS[self.workload]


def _orders() -> Iterator[float]:
    for line in sys.stdin:
        yield float(line)


def _answer(rate: Rate) -> None:
    print(json.dumps(asdict(rate)), flush=True)


class Clock:
    """Counter of finished samples over time."""

    def __init__(self, seconds: float, warm: float | None = None) -> None:
        """``warm``: seconds that do not count; by default a share of all."""
        now = time.perf_counter()
        self._warm = now + (WARM_SHARE * seconds if warm is None else warm)
        self._end = now + seconds
        self._first: tuple[float, int] | None = None
        self._last = (now, 0)
        self.gap = 0.0
        """Longest time between two marks after the warm-up."""

    @property
    def over(self) -> bool:
        """Return True if it is time to stop."""
        return time.perf_counter() >= self._end

    def mark(self, done: int) -> None:
        """Record the number of finished samples."""
        now = time.perf_counter()
        if now >= self._warm and done > self._last[1]:
            if self._first is not None:
                self.gap = max(self.gap, now - self._last[0])
            self._last = (now, done)
            self._first = self._first or self._last

    def rate(self) -> float:
        """Return the rate between the first mark after the warm-up and the last."""
        if self._first is None or self._first == self._last:
            return 0.0
        (t0, n0), (t1, n1) = self._first, self._last
        return (n1 - n0) / (t1 - t0)


class Racing(Trainer):
    """Trainer whose Root trains on request; the other nodes follow."""

    def __init__(self, node: Node, loader: Endless, samples: int) -> None:
        super().__init__(node, train_loader=loader)
        self._samples = samples

    def prelim_checks(self) -> None:
        """Work until the Root is done; an endless loader has no length."""
        if not self.node.is_root:
            self._finish_call()

    def train(self) -> None:
        """Train once, over all requests."""
        self.prelim_checks()
        if self.node.is_root:
            for seconds in _orders():
                _answer(self._run(seconds))

    def batches(self) -> Iterator[Any]:
        """Train one endless epoch."""
        yield from self.train_loader

    def _run(self, seconds: float) -> Rate:
        state = self.node._ensure_started().progress.state
        clock = Clock(seconds, min(WARM_SHARE * seconds, LONGEST_WARM))
        begin, staleness, count = state.done, [0], type(state).add

        def add(batches: int, now: float, samples: int) -> None:
            """Count finished batches when they finish: the user's thread would see them late."""
            count(state, batches, now, samples)
            clock.mark((state.done - begin) * self._samples)
            staleness.append(state.staleness)

        state.add = add  # type: ignore[method-assign]
        for batch in self.batches():
            self.node.forward_compute(batch[0])
            if clock.over:
                break
        del state.add  # that of the class again
        self.node.wait_for_backwards()
        trained = (state.done - begin) * self._samples
        staleness_seen = statistics.median(staleness)
        return Rate(clock.rate(), state.window, staleness_seen, trained, gap=clock.gap)


def ravnest(seat: Seat, racing: type[Racing] = Racing, **settings: Any) -> None:
    """Run one node; ``settings`` are further settings of it."""
    work = seat.work()
    loader = work.loader()
    with Node(
        seat.name,
        optimizer=torch.optim.AdamW,
        optimizer_params=settings.pop("optimizer_params", {"lr": 1e-4}),
        criterion=loss_of,
        labels=loader,
        schedule=seat.schedule,
        micro_batches=work.micro_batches,
        compression=seat.compression,
        reduce_factor=seat.reduce_factor,
        folder=Path(seat.folder) / NODE_DATA,
        loss_filename=Path(seat.folder) / "losses.txt",
        checkpoints=seat.checkpoint_minutes is not None,
        checkpoint_minutes=seat.checkpoint_minutes or 1.0,
        checkpoint_folder=Path(seat.folder) / f"checkpoints{seat.team}",
        progress=False,
        **settings,
    ) as node:
        racing(node, loader, work.samples).train()


class _Plain(nn.Module):
    """Stage that returns a tensor if it has a single output, as torch's pipelines require."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the outputs in the form that torch's pipelines require."""
        outputs = self.stage(*inputs)
        return outputs if len(outputs) > 1 else outputs[0]


def pipelining(seat: Seat) -> None:
    """Run one rank of torch's Schedule1F1B on gloo, with the stage of Ravnest's node."""
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # noqa: PLC0415

    place = read_node(Path(seat.folder) / NODE_DATA, seat.name)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = seat.store.rsplit(":", 1)
    os.environ["GLOO_SOCKET_IFNAME"] = seat.device
    hour = timedelta(hours=1)
    dist.init_process_group("gloo", rank=place.stage, world_size=place.stages, timeout=hour)
    module = load_module(Path(seat.folder) / NODE_DATA / place.bundle, place.sha256).train()
    work = seat.work()
    stage = PipelineStage(_Plain(module), place.stage, place.stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, work.micro_batches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    batches = iter(work.loader())

    def step() -> None:
        inputs, targets = next(batches)
        first, last = place.stage == 0, place.stage == place.stages - 1
        losses: list[torch.Tensor] = []
        arguments: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
        schedule.step(*([inputs] if first else []), **arguments, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    samples, seconds_a_step = work.samples, 0.0
    orders = _orders() if place.stage == 0 else itertools.repeat(0.0)
    for seconds in orders:
        # All ranks must agree on the number of steps, and a message per step would slow it down.
        wanted = max(4, round(seconds / seconds_a_step)) if seconds_a_step else 4
        count = torch.tensor([wanted])
        dist.broadcast(count, 0)
        if not int(count):
            break
        clock, began = Clock(seconds), time.perf_counter()
        for number in range(int(count)):
            step()
            clock.mark((number + 1) * samples)
        seconds_a_step = (time.perf_counter() - began) / int(count)
        if place.stage == 0:
            _answer(Rate(clock.rate(), place.stages, trained=int(count) * samples))
    if place.stage == 0:
        dist.broadcast(torch.tensor([0]), 0)
    dist.destroy_process_group()


def single(seat: Seat) -> None:
    """Train the unsplit model in one process."""
    work = seat.work()
    model, loader = work.model().train(), work.loader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for seconds in _orders():
        clock = Clock(seconds)
        for number, (inputs, targets) in enumerate(loader, 1):
            loss_of(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            clock.mark(number * work.samples)
            if clock.over:
                break
        _answer(Rate(clock.rate(), trained=number * work.samples))


CONTENDERS = {"ravnest": ravnest, "torch": pipelining, "single": single}


def main() -> None:
    """Run the process that the arguments name."""
    torch.set_num_threads(1)
    CONTENDERS[sys.argv[1]](Seat(**json.loads(sys.argv[2])))


if __name__ == "__main__":
    main()
