"""Metrics of a job as data: names with parameters, and the requester's own functions as graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ravnest.errors import DataError, JobError, SettingsError
from ravnest.jobs.graph_loss import PackedLoss, load_loss, pack_metric
from ravnest.jobs.registry import named_component
from ravnest.runtime.model_selection import (
    early_stopping_rule,
    keep_best_rule,
    needed_metrics,
)
from ravnest.runtime.stage.validation_metrics import LOSS, ChosenMetric, choose_metrics, with_needed
from ravnest.schemas.jobs import BestRule, GraphLoss, MetricSpec, StoppingRule


@dataclass(frozen=True)
class JobMetrics:
    """Metrics of a job, and what is decided by them."""

    metrics: tuple[ChosenMetric, ...]
    stopping: StoppingRule | None
    best: BestRule | None


def select_metrics(
    metrics: object, early_stopping: object, keep_best: object, plateau: str = ""
) -> JobMetrics:
    """Return the metrics of a job, with those that its rules need; ``JobError`` for wrong ones."""
    try:
        needed = needed_metrics(early_stopping, keep_best, plateau)
        chosen = with_needed(choose_metrics(metrics), needed)
        if plateau and plateau not in {metric.label for metric in chosen}:
            raise SettingsError(f"the schedule 'plateau' names the metric {plateau!r}, which is none")
        stopping = early_stopping_rule(early_stopping, chosen)
        best = keep_best_rule(keep_best, chosen)
    except SettingsError as error:
        raise JobError(str(error)) from error
    return JobMetrics(
        chosen,
        None
        if stopping is None
        else StoppingRule(
            metric=stopping.rule.metric,
            mode=stopping.rule.mode,
            patience=stopping.patience,
            min_delta=stopping.rule.min_delta,
        ),
        None if best is None else BestRule(metric=best.metric, mode=best.mode),
    )


def pack_metrics(
    chosen: Sequence[ChosenMetric],
    output: Any,
    labels: torch.Tensor,
    folder: Path,
    add: Callable[[PackedLoss], GraphLoss],
) -> tuple[MetricSpec, ...]:
    """Return the wire form of metrics after a check with the output and labels of a batch.

    Functions are captured below ``folder``; ``add`` registers their files. Raises ``JobError``.
    """
    packed = []
    for number, metric in enumerate(chosen):
        if metric.function is not None:
            graph = pack_metric(
                metric.function, metric.label, output, labels, folder / f"metric_{number}"
            )
            packed.append(MetricSpec(label=metric.label, metric=add(graph)))
            continue
        if metric.name != LOSS:
            try:
                metric.make().add(output, labels)
            except DataError as error:
                raise JobError(f"the metric {metric.label!r} cannot be computed: {error}") from error
        named = named_component(metric.name, f"the metric {metric.label!r}", metric.params)
        packed.append(MetricSpec(label=metric.label, metric=named))
    return tuple(packed)


def load_metrics(
    specs: Sequence[MetricSpec], files_of: Callable[[int], tuple[Path, Path]]
) -> Mapping[str, Any]:
    """Return metrics for ``Node``; ``files_of`` returns graph and weights of one by its number."""
    found: dict[str, Any] = {}
    for number, spec in enumerate(specs):
        if isinstance(spec.metric, GraphLoss):
            found[spec.label] = load_loss(*files_of(number))
        else:
            found[spec.label] = {"name": spec.metric.name, **spec.metric.params}
    return found
