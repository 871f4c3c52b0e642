"""Learning rate schedules of a job as data: names of Transformers, or a list of pieces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ravnest.errors import JobError
from ravnest.runtime.stage.learning_rate import SHAPES
from ravnest.runtime.stage.validation_metrics import LOSS, METRIC_NAMES, ChosenMetric, direction_of
from ravnest.schemas.jobs import NamedComponent, TrainingSpec

logger = logging.getLogger(__name__)

PIECEWISE = "PiecewiseLR"
ONE_CYCLE = "one_cycle"
PLATEAU = "plateau"
"""Name of the schedule that follows a metric of validations."""
_ONE_CYCLE = "OneCycleLR"
"""Scheduler of torch that has to know its number of steps."""
_MUCH_LONGER = 1.5
"""Steps of that scheduler, relative to those of the job, from which on its number is a mistake."""


_PLATEAU = {"factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lr", "eps"}
"""Further parameters of that schedule."""


@dataclass(frozen=True)
class Piece:
    """A part of training in which the factor of the learning rate follows a shape."""

    shape: str
    steps: int
    first: float
    last: float


def named_schedule(schedule: object, params: Mapping[str, Any], updates: int) -> NamedComponent:
    """Return the wire form of a schedule that is a name or a list of pieces.

    ``updates`` is the number of all updates; lengths below 1 are shares of it.
    """
    if isinstance(schedule, str):
        pieces, power = _by_name(schedule, dict(params), updates)
    elif isinstance(schedule, Sequence):
        if params:
            raise JobError("lr_scheduler is a list of pieces, which takes no lr_scheduler_params")
        pieces, power = _from_list(schedule, updates), 1.0
    else:
        raise JobError(
            "lr_scheduler must be a class of torch.optim.lr_scheduler, a name such as 'cosine', or a "
            f"list of pieces, not a {type(schedule).__name__}"
        )
    columns: dict[str, Any] = {
        "shapes": [piece.shape for piece in pieces],
        "steps": [piece.steps for piece in pieces],
        "first": [float(piece.first) for piece in pieces],
        "last": [float(piece.last) for piece in pieces],
        "power": float(power),
    }
    return NamedComponent(name=PIECEWISE, params=columns)


def plateau_metric(params: Mapping[str, Any]) -> str:
    """Return the metric that the schedule ``plateau`` follows; the loss if none is given."""
    metric = params.get("metric", LOSS)
    if not isinstance(metric, str):
        raise JobError(f"the metric of the schedule 'plateau' is a name, not {metric!r}")
    return metric


def named_plateau(params: Mapping[str, Any]) -> NamedComponent:
    """Return the wire form of the schedule ``plateau``: ``ReduceLROnPlateau`` with the metric's mode."""
    metric = plateau_metric(params)
    known = metric in METRIC_NAMES
    mode = params.get("mode", direction_of(ChosenMetric(metric, metric)) if known else None)
    if mode not in ("min", "max"):
        raise JobError(
            f"the schedule 'plateau' needs mode='min' or mode='max' for the metric {metric!r}, not "
            f"{mode!r}"
        )
    own = {key: value for key, value in params.items() if key not in ("metric", "mode")}
    if unknown := sorted(set(own) - _PLATEAU):
        raise JobError(f"the schedule 'plateau' has no parameter {unknown[0]!r}")
    return NamedComponent(name="ReduceLROnPlateau", params={**own, "mode": mode})


def _one_cycle(params: dict[str, Any], updates: int) -> tuple[list[Piece], float]:
    """Return the schedule of torch's ``OneCycleLR`` whose largest rate is that of the optimizer."""
    share = _number(params, "pct_start", 0.3)
    low = 1 / max(_number(params, "div_factor", 25.0), 1e-12)
    lowest = low / max(_number(params, "final_div_factor", 1e4), 1e-12)
    if params:
        raise JobError(f"the schedule 'one_cycle' has no parameter {next(iter(params))!r}")
    up = max(_updates(share, updates) - 1, 0)
    down = max(updates - 1 - up, 0)
    return [Piece("cosine", up, low, 1.0), Piece("cosine", down, 1.0, lowest)], 1.0


def _by_name(name: str, params: dict[str, Any], updates: int) -> tuple[list[Piece], float]:
    if name == ONE_CYCLE:
        return _one_cycle(params, updates)
    if name not in _NAMES:
        known = ", ".join(sorted((*_NAMES, ONE_CYCLE, PLATEAU)))
        raise JobError(
            f"no schedule is called {name!r}, only {known}; give one of PyTorch's as a class, such as "
            "lr_scheduler=torch.optim.lr_scheduler.OneCycleLR"
        )
    warm_up = _warm_up(params, updates)
    power = _number(params, "power", 1.0)
    rest = max(updates - warm_up, 0)
    pieces = [Piece("linear", warm_up, 0.0, 1.0)] if warm_up else []
    pieces += _NAMES[name](params, rest)
    if params:
        raise JobError(f"the schedule {name!r} has no parameter {next(iter(params))!r}")
    return pieces, power


def _warm_up(params: dict[str, Any], updates: int) -> int:
    given = [key for key in ("warmup_steps", "num_warmup_steps", "warmup_ratio") if key in params]
    if len(given) > 1:
        raise JobError(f"lr_scheduler_params has both {given[0]} and {given[1]}: give one of them")
    if not given:
        return 0
    value = _number(params, given[0], 0.0)
    if given[0] == "warmup_ratio" and value > 1:
        raise JobError(f"warmup_ratio is a share of all updates from 0 to 1, not {value:g}")
    return round(value * updates) if given[0] == "warmup_ratio" else _updates(value, updates)


def _plain(shape: str, last: float) -> Callable[[dict[str, Any], int], list[Piece]]:
    return lambda _params, rest: [Piece(shape, rest, 1.0, last)]


def _cosine(params: dict[str, Any], rest: int) -> list[Piece]:
    return [Piece("cosine", rest, 1.0, _number(params, "min_lr_rate", 0.0))]


def _restarts(params: dict[str, Any], rest: int) -> list[Piece]:
    count = int(_number(params, "num_cycles", 1))
    if count < 1:
        raise JobError("num_cycles must be an integer of at least 1")
    ends = [round(rest * number / count) for number in range(count + 1)]
    lengths = (end - start for start, end in pairwise(ends))
    return [Piece("cosine", length, 1.0, 0.0) for length in lengths]


def _polynomial(params: dict[str, Any], rest: int) -> list[Piece]:
    return [Piece("polynomial", rest, 1.0, _number(params, "end", 0.0))]


_NAMES: dict[str, Callable[[dict[str, Any], int], list[Piece]]] = {
    "constant": _plain("constant", 1.0),
    "constant_with_warmup": _plain("constant", 1.0),
    "linear": _plain("linear", 0.0),
    "cosine": _cosine,
    "cosine_with_restarts": _restarts,
    "polynomial": _polynomial,
    "inverse_sqrt": _plain("inverse_sqrt", 0.0),
}


def _number(params: dict[str, Any], key: str, default: float) -> float:
    value = params.pop(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise JobError(f"lr_scheduler_params[{key!r}] must be a number from 0, not {value!r}")
    return value


def _from_list(given: Sequence[Any], updates: int) -> list[Piece]:
    if not given:
        raise JobError("lr_scheduler is an empty list: give at least one piece")
    pieces: list[Piece] = []
    for number, entry in enumerate(given):
        pieces.append(_piece(entry, number, pieces, updates, is_last=number == len(given) - 1))
    return pieces


def _piece(entry: object, number: int, before: Sequence[Piece], updates: int, *, is_last: bool) -> Piece:
    where = f"piece {number} of lr_scheduler"
    if not isinstance(entry, Mapping) or entry.get("shape") not in SHAPES:
        raise JobError(
            f"{where} must be a mapping with a shape ({', '.join(SHAPES)}), such as "
            "{'shape': 'linear', 'first': 0, 'last': 1, 'length': 0.1}"
        )
    if unknown := sorted(set(entry) - {"shape", "length", "first", "last"}):
        raise JobError(f"{where} has an unknown key {unknown[0]!r}: shape, length, first and last")
    length = entry.get("length")
    left = max(updates - sum(piece.steps for piece in before), 0)
    if length is None and not is_last:
        raise JobError(f"{where} needs a length, in updates or as a share of training below 1")
    first = entry.get("first", before[-1].last if before else 1.0)
    last = entry.get("last", first if entry["shape"] == "constant" else 0.0)
    for key, value in (("length", 0 if length is None else length), ("first", first), ("last", last)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise JobError(f"{key} of {where} must be a number from 0, not {value!r}")
    steps = left if length is None else _updates(length, updates)
    return Piece(entry["shape"], steps, float(first), float(last))


def _updates(length: float, updates: int) -> int:
    """Return a length in updates; below 1 it is a share of all updates."""
    return round(length * updates) if length < 1 else int(length)


def check_one_cycle(training: TrainingSpec, samples: int) -> None:
    """Raise ``JobError`` if torch's ``OneCycleLR`` ends before the training; warn if it hardly begins.

    It would raise an error at the step after its last one.
    """
    scheduler = training.scheduler
    if scheduler is None or scheduler.name != _ONE_CYCLE or not training.epochs:
        return
    params = scheduler.params
    total, epochs, per_epoch = (params.get(n) for n in ("total_steps", "epochs", "steps_per_epoch"))
    given = total if isinstance(total, int) else 0
    if not given and isinstance(epochs, int) and isinstance(per_epoch, int):
        given = epochs * per_epoch
    updates = training.epochs * training.updates_per_epoch(samples)
    each_epoch = training.lr_step_on_epoch_change
    steps = training.epochs if each_epoch else updates
    when = "once per epoch (lr_step_on_epoch_change=True)" if each_epoch else "after each update"
    remedy = (
        f"use lr_scheduler='one_cycle', or lr_step_on_epoch_change=False and total_steps={updates}: all "
        "clusters together make so many updates"
    )
    text = f"OneCycleLR is given {given} steps, and the job makes {steps}, {when}"
    if given < steps:
        raise JobError(f"{text}; torch refuses further ones: {remedy}")
    if given > _MUCH_LONGER * steps:
        logger.warning("%s, so that the learning rate does not get far: %s", text, remedy)
