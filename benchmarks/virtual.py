"""Learning against virtual time: the schedule's machines under a simulator, with the real computations.

The stages of a task are split and planned as by `clusterize`, for equal nodes. Their computing speed is
chosen such that a quarter of a batch per stage (1/12 of a batch with 3 stages, 1/32 with 8) takes 30 ms
at the slowest stage; links have a delay of 20 ms and 100 Mbit/s, for the bytes of the real activations.
Each micro-batch costs the fixed time that the plan assumes in addition. Batches have 64 samples, so
that 8 stages can have four micro-batches each. The simulator decides what each stage computes when, and
each computation is carried out with the weights that the schedule gives it, in one process. LSTM layers
stand for larger ones that take these times: they defer weight gradients whatever their size, and each
micro-batch that does costs what `lstm_cost.py` has measured in addition. Compared are

- `auto`: the schedule and window of the plan, and the micro-batches that the Root chooses by the times
  of stages and links during the first batches of a run (`runtime/control/microbatch_tuner.py`); these
  first batches are not part of the measurement;
- an ideal pipeline: the learning of one process at the rate of the slowest stage.

The time to a given loss is the time until the validation loss is below that of one process after 80% of
the updates. Dropout draws other random numbers in stages than in one process. "Same random numbers" is
the same comparison with an ideal pipeline that learns as these stages do without any delay. "Bound" is
the least time of an update that any schedule with the same delay of gradients needs for the same
micro-batches. Run as a script to print the report; arguments choose tasks by the first words of names.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from delay import Curve, time_to, train_delayed
from learning_tasks import TASKS, Task, text_data, token_loss
from line_chart import line_chart
from schedule_bound import least_cycle
from torch import nn
from workloads import GPT, NODE_DATA, free_addresses

from ravnest import clusterize
from ravnest.plan.microbatches import OVERHEAD_SECONDS, UNIT_SECONDS
from ravnest.plan.plan import Plan, StagePlan
from ravnest.runtime.batch_parts import BatchSplit, part_sizes
from ravnest.runtime.control.microbatch_tuner import LEAST_BATCHES, MicrobatchTuner
from ravnest.runtime.inputs import bind
from ravnest.runtime.schedule.events import (
    Action,
    Finished,
    FreeVersion,
    RunBackward,
    RunForward,
    RunStep,
    RunWeights,
)
from ravnest.runtime.schedule.machine import MAX_DELAY
from ravnest.runtime.schedule.simulator import (
    LinkCost,
    Observe,
    Scenario,
    StageCost,
    each_cost,
    simulate,
)
from ravnest.runtime.stage.execution import LossPart, StageExecution
from ravnest.runtime.stage.observer import MicrobatchReport
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.split import lstm_deferral
from ravnest.split.rows import cut_rows
from ravnest.store.bundle import load_module
from ravnest.store.node_spec import read_node
from ravnest.types import MicrobatchId, Schedule
from ravnest.wire.messages import StageTiming

SEEDS = int(os.environ.get("RAVNEST_BENCH_SEEDS", "3"))
STAGES = (3, 8)
DELAY_SECONDS = 0.020
MEGABITS = 100.0
PART_SECONDS = 0.030
PARTS_PER_STAGE = 4
POINTS = 40
"""Validations in a run."""
CHARTED = ("BERT-like classifier", 3, 0)
"""Task, stages and seed of the chart."""
CHART = Path(__file__).resolve().parent.parent / "docs" / "images" / "virtual-time.svg"
TARGET = 0.8
"""Share of the updates after which one process has reached the target loss."""
LSTM_COST = 1.12
"""Time of LSTM layers that defer, as a multiple of others: the largest of `lstm_cost.py`, 2026-11-18."""
FLOAT_ERROR = 1e-4
"""Relative difference at which two losses count as equal: sums are formed in another order."""

BATCH = 64
EPOCHS = {"sine": 8, "BERT-like": 6, "ViT,": 6, "LSTM": 6, "CNN": 6}
"""Epochs by first words of names: 120 to 132 updates."""
VIRTUAL_TASKS = (
    Task(  # with separate weights at both ends: the simulator exchanges no gradients of tied weights
        "GPT, byte-level", lambda: GPT(256, 32, 3, 32, heads=2), text_data, token_loss, BATCH, 4, 3e-3
    ),
    *(
        replace(task, batch=BATCH, epochs=EPOCHS[first])
        for task in TASKS
        if (first := task.name.split()[0]) in EPOCHS
    ),
)


@dataclass(frozen=True)
class VirtualRun:
    """Learning of a pipeline under virtual time."""

    schedule: Schedule
    microbatches: int
    curve: Curve
    seconds: float
    """Time per update."""
    bound: float
    """Least time per update of any schedule with the same delay of gradients."""


class VirtualPipeline:
    """Stages of a task's model, with predicted costs, that train under virtual time."""

    def __init__(self, task: Task, seed: int, stages: int, folder: Path) -> None:
        """Split and plan the model before training."""
        self._task, self._seed = replace(task, whole_batches=True), seed
        slowest = PART_SECONDS * PARTS_PER_STAGE * stages
        trial = max(stage.compute_seconds for stage in self._plan(stages, 1.0, folder / "trial").stages)
        self.plan = self._plan(stages, trial / slowest, folder)
        (self.cluster,) = self.plan.clusters
        self.slowest = max(stage.compute_seconds for stage in self.plan.stages)
        self._node_data = folder / NODE_DATA
        self.batches = list(self._task.batches(seed))
        every = max(1, len(self.batches) // POINTS)
        self.points = range(every, len(self.batches) + 1, every)
        """Numbers of updates after which the model is validated."""

    def train(self, schedule: Schedule | None = None, parts: int | None = None) -> VirtualRun:
        """Train with the schedule of the plan and the Root's micro-batches, or with the given ones."""
        chosen = schedule or self.plan.schedule
        executions = self._executions(chosen)
        count = parts or self._tuned_parts(chosen, executions)
        scenario = self._scenario(chosen, count, executions, len(self.batches))
        training = _Training(self, executions, count)
        simulation = simulate(scenario, observe=training.perform)
        return VirtualRun(
            chosen,
            count,
            training.curve(self._task, self._seed),
            count / simulation.rate,
            least_cycle(
                [_without_extra(cost) for costs in scenario.costs for cost in each_cost(costs)],
                scenario.links,
                count,
                MAX_DELAY[chosen],
            ),
        )

    def _tuned_parts(self, schedule: Schedule, executions: Sequence[StageExecution]) -> int:
        """Return the micro-batches that the Root chooses by the times of the first batches."""
        rows, tuner = self.cluster.microbatch_rows, MicrobatchTuner()
        if rows is None:
            return self.cluster.microbatches
        count, before = tuner.parts(BATCH, BatchSplit(rows, smallest=self.plan.smallest_rows)), 0
        while count != before:
            scenario = self._scenario(schedule, count, executions, LEAST_BATCHES + 1)
            tuner.pause()
            simulate(scenario, observe=_report_to(tuner, scenario))
            before, count = count, tuner.current
        return count

    def _scenario(
        self, schedule: Schedule, count: int, executions: Sequence[StageExecution], batches: int
    ) -> Scenario:
        stages = self.cluster.stages
        window = max(self.cluster.in_flight, count * (1 + MAX_DELAY[schedule]))
        return Scenario(
            tuple(_stage_cost(s, count, e) for s, e in zip(stages, executions, strict=True)),
            tuple(_link_cost(stage, count) for stage in stages[:-1]),
            window=window,
            update_size=count,
            schedule=schedule,
            microbatches=count * batches,
            activation_limits=(window,) * len(stages),
        )

    def alone(self, delays: Sequence[int] = (0,)) -> Curve:
        """Return the learning of one process, at the rate of the slowest stage."""
        task, curve = self._task, Curve()

        def observe(update: int, model: nn.Module) -> None:
            if update in self.points:
                curve.append((update * self.slowest, task.validation_loss(model, self._seed)))
                model.train()

        train_delayed(task, self._seed, delays, observe=observe)
        return curve

    def undelayed(self) -> Curve:
        """Return the learning of the stages without any delay, at the rate of the slowest stage."""
        losses = [loss for _, loss in self.train("sync", 1).curve]
        return [(update * self.slowest, loss) for update, loss in zip(self.points, losses, strict=True)]

    def values(self, batch: Any, parts: int) -> list[tuple[dict[str, Any], Any, float]]:
        """Return inputs, batch and weight of each micro-batch of a batch."""
        sizes = part_sizes(self._task.batch, parts)
        cut = cut_rows(list(batch), sizes)
        assert cut is not None
        return [
            (bind(self._signature, list(part[:-1]), {}), part, size / self._task.batch)
            for part, size in zip(cut, sizes, strict=True)
        ]

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return the loss of a micro-batch."""
        return self._task.loss(output, batch)

    def _plan(self, stages: int, gigaflops: float, folder: Path) -> Plan:
        node_data = folder / NODE_DATA
        node_data.mkdir(parents=True)
        benchmarks = {"ram": 4, "bandwidth": MEGABITS, "compute": gigaflops}
        nodes = {
            str(number): {"IP": address, "benchmarks": benchmarks}
            for number, address in enumerate(free_addresses(stages))
        }
        (node_data / "node_configs.json").write_text(json.dumps(nodes), encoding="utf-8")
        example = next(iter(self._task.loaders(self._seed)[0]))[:-1]
        with contextlib.redirect_stdout(io.StringIO()):
            model = self._task.first(self._seed)
            return clusterize(model, tuple(example), clusters=1, folder=node_data)

    def _executions(self, schedule: Schedule) -> list[StageExecution]:
        task = self._task
        rule = UpdateRule(
            torch.optim.AdamW,
            {"lr": task.rate},
            torch.optim.lr_scheduler.OneCycleLR,
            task.one_cycle(self._seed),
            scheduler_each_epoch=False,
            look_ahead=True,
        )
        specs = [read_node(self._node_data, f"node_{s.node.id}") for s in self.cluster.stages]
        modules = [load_module(self._node_data / spec.bundle, spec.sha256) for spec in specs]
        self._signature = modules[0].spec.signature
        last = len(modules) - 1
        return [
            StageExecution(
                module,
                rule,
                seed=self._seed,
                stash=schedule == "async" and position < last,
                defer=position > 0,
            )
            for position, module in enumerate(modules)
        ]


class _Training:
    """Computations of all stages, carried out as a simulation requests them."""

    def __init__(self, owner: VirtualPipeline, executions: list[StageExecution], parts: int) -> None:
        self._owner, self._executions, self._parts = owner, executions, parts
        self._messages: dict[tuple[int, MicrobatchId], Mapping[str, Any]] = {}
        """Inputs of a forward, or gradients for a backward, by the stage that receives them."""
        self._losses: dict[MicrobatchId, LossPart] = {}
        self._weights: dict[int, dict[str, torch.Tensor]] = {}
        """Weights of the whole model after an update."""
        self._times: dict[int, float] = {}

    def perform(self, now: float, position: int, action: Action) -> None:
        """Carry out an action of a stage."""
        execution = self._executions[position]
        match action:
            case RunForward():
                self._forward(execution, action)
            case RunBackward(microbatch):
                gradients = self._messages.pop((position, microbatch), {})
                self._messages[position - 1, microbatch] = execution.backward(microbatch, gradients)
                if position == 0:
                    del self._messages[-1, microbatch]
            case RunWeights(microbatch):
                execution.weight_gradients(microbatch)
            case RunStep(update):
                execution.step(1)
                self._keep(update + 1, execution, now)
            case FreeVersion(version):
                execution.free(version)
            case _:
                pass

    def curve(self, task: Task, seed: int) -> Curve:
        """Return the validation losses with the times of the last stage's update."""
        model, points = task.first(seed), Curve()
        for update, weights in self._weights.items():
            model.load_state_dict(weights)
            points.append((self._times[update], task.validation_loss(model, seed)))
        return points

    def _forward(self, execution: StageExecution, run: RunForward) -> None:
        position, microbatch = execution.index, run.microbatch
        if position == 0:
            self._load(microbatch)
        values = self._messages.pop((position, microbatch))
        last = position == len(self._executions) - 1
        part = self._losses.pop(microbatch) if last else None
        late = run.update > run.version
        outputs, _ = execution.forward(
            microbatch, run.version, values, part, late=late, costly=run.defers_costly
        )
        if not last:
            self._messages[position + 1, microbatch] = outputs

    def _load(self, microbatch: MicrobatchId) -> None:
        number, part = divmod(microbatch.index, self._parts)
        if part:
            return
        leaf, owner = self._executions[-1], self._owner
        for index, (values, batch, weight) in enumerate(
            owner.values(owner.batches[number], self._parts), microbatch.index
        ):
            each = MicrobatchId(microbatch.phase, index)
            self._messages[0, each] = values
            self._losses[each] = LossPart(
                lambda outputs, batch=batch: owner.loss(leaf.output(outputs), batch), weight
            )

    def _keep(self, update: int, execution: StageExecution, now: float) -> None:
        if update not in self._owner.points:
            return
        module = execution.module
        tensors = module.state_tensors()
        self._weights.setdefault(update, {}).update(
            (name, tensors[entry.key].detach().clone())
            for entry in module.spec.state
            for name in entry.names
        )
        self._times[update] = max(now, self._times.get(update, 0.0))


def _report_to(tuner: MicrobatchTuner, scenario: Scenario) -> Observe:
    """Return an observer that reports micro-batches to the tuner as the Root's worker does."""
    none, count = LinkCost(0.0, 0.0), scenario.update_size
    timings = tuple(
        StageTiming(
            cost.forward,
            cost.backward,
            cost.weights,
            cost.step,
            following.forward,
            following.forward_busy,
            previous.backward,
            previous.backward_busy,
        )
        for (cost,), following, previous in zip(
            map(each_cost, scenario.costs),
            (*scenario.links, none),
            (none, *scenario.links),
            strict=True,
        )
    )

    def observe(now: float, _: int, action: Action) -> None:
        match action:
            case Finished(microbatch):
                part = microbatch.index % count
                tuner.add(MicrobatchReport(part, count, BATCH, timings), now)
            case _:
                pass

    return observe


def _stage_cost(stage: StagePlan, count: int, execution: StageExecution) -> StageCost:
    seconds = stage.compute_seconds / count + OVERHEAD_SECONDS
    third = (seconds + UNIT_SECONDS * (stage.stop - stage.start)) / 3
    slower = third * (1 + 3 * (LSTM_COST - 1) / 2)
    deferring = StageCost(slower, slower, weights=third) if execution.may_defer_costly else None
    if execution.defers:
        return StageCost(third, third, weights=third, deferring=deferring)
    return StageCost(third, 2 * third, deferring=deferring)


def _without_extra(cost: StageCost) -> StageCost:
    """Return the cost of a stage whose deferral takes no additional time."""
    if cost.deferring is None:
        return cost
    third = cost.microbatch / 3
    return StageCost(third, third, weights=third)


def _link_cost(stage: StagePlan, count: int) -> LinkCost:
    busy = stage.link_seconds / count
    return LinkCost(DELAY_SECONDS + busy, DELAY_SECONDS + busy, busy, busy)


@dataclass(frozen=True)
class Row:
    """Times of one task, by seed."""

    task: str
    stages: int
    slowest: float
    """Time of a batch at the slowest stage."""
    runs: list[VirtualRun]
    ratios: list[float]
    """Times to the target loss, relative to the ideal pipeline."""
    same_numbers: list[float]
    """The same, if the ideal pipeline draws the random numbers of the stages."""

    def __str__(self) -> str:
        run = self.runs[0]
        median, low, high, same = (
            "not reached" if math.isinf(ratio) else f"{ratio:.2f} x"
            for ratio in (
                statistics.median(self.ratios),
                min(self.ratios),
                max(self.ratios),
                statistics.median(self.same_numbers),
            )
        )
        return (
            f"| {self.task} | {self.stages} | {run.schedule} | {run.microbatches} "
            f"| {run.bound / self.slowest:.2f} x | {run.seconds / self.slowest:.2f} x "
            f"| **{median}** | {low} to {high} | {same} |"
        )


def _row(task: Task, stages: int) -> Row:
    """Measure a task; the chart of one is written for the docs."""
    row: Row | None = None
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory() as scratch:
            pipeline = VirtualPipeline(task, seed, stages, Path(scratch))
            ideal = pipeline.alone()
            run = pipeline.train()
            exact = pipeline.undelayed() if run.schedule == "async" else ideal
        row = row or Row(task.name, stages, pipeline.slowest, [], [], [])
        row.runs.append(run)
        row.ratios.append(_time_ratio(run.curve, ideal))
        row.same_numbers.append(_time_ratio(run.curve, exact))
        if (task.name, stages, seed) == CHARTED:
            series = {"auto": run.curve, "ideal": ideal}
            CHART.write_text(line_chart(series, "virtual time, s", "validation loss"), encoding="utf-8")
    assert row is not None
    return row


def _time_ratio(curve: Curve, ideal: Curve) -> float:
    """Return the time to the target loss, relative to that of an ideal pipeline."""
    target = ideal[int(len(ideal) * TARGET) - 1][1] * (1 + FLOAT_ERROR)
    return time_to(curve, target) / time_to(ideal, target)


def measure(tasks: Sequence[str] = ()) -> str:
    """Return the report as Markdown; ``tasks`` are first words of names, by default all."""
    torch.set_num_threads(1)
    lstm_deferral.LEAST_WIDTH = lstm_deferral.LEAST_PRODUCT = 1
    lines = [
        "All times are multiples of those of the ideal pipeline; the time to the target loss is the "
        f"median of {SEEDS} seeds, with its range.",
        "",
        "| task | stages | `auto` chooses | micro-batches | bound | time of an update "
        "| time to the loss | range | same random numbers |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for task in VIRTUAL_TASKS:
        if tasks and task.name.split()[0].strip(",") not in tasks:
            continue
        for stages in STAGES:
            lines.append(str(_row(task, stages)))
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    print(measure(sys.argv[1:]))
