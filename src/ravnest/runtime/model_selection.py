"""Early stopping and the best model, by a metric of validations. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ravnest.errors import SettingsError
from ravnest.runtime.settings import is_count
from ravnest.runtime.stage.validation_metrics import (
    METRIC_NAMES,
    ChosenMetric,
    Mode,
    direction_of,
)

_KEYS = ("metric", "patience", "min_delta", "mode")
DEFAULT_PATIENCE = 3


@dataclass(frozen=True)
class SelectionRule:
    """Order of the values of a metric."""

    metric: str
    mode: Mode
    min_delta: float = 0.0
    """Difference to the best value below which another one is no better."""

    def improves(self, value: float, best: float | None) -> bool:
        """Return whether a value is better than the best one so far; NaN never is."""
        if not math.isfinite(value):
            return False
        if best is None:
            return True
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best of some values; None if there is none."""
        best: float | None = None
        for value in values:
            best = value if self.improves(value, best) else best
        return best


@dataclass(frozen=True)
class EarlyStopping:
    """Rule by which training stops: so many validations in a row without a better value."""

    rule: SelectionRule
    patience: int = DEFAULT_PATIENCE

    def reason(self, values: Sequence[float]) -> str:
        """Return why training stops after validations with these values; empty if it goes on."""
        best: float | None = None
        at = -1
        for number, value in enumerate(values):
            if self.rule.improves(value, best):
                best, at = value, number
        waited = len(values) - 1 - at
        if waited < self.patience:
            return ""
        if best is None:
            return f"{self.rule.metric} was not finite in {waited} validations in a row"
        return (
            f"{self.rule.metric} was not better than {best:.6g} (validation {at + 1}) in {waited} "
            "validations in a row"
        )


def early_stopping_rule(given: object, metrics: Sequence[ChosenMetric]) -> EarlyStopping | None:
    """Return the rule of the argument ``early_stopping``; ``SettingsError`` for a wrong one."""
    if given is None:
        return None
    example = "early_stopping must be a mapping such as {'metric': 'loss', 'patience': 3}"
    if not isinstance(given, Mapping):
        raise SettingsError(f"{example}, not {given!r}")
    if unknown := sorted(set(given) - set(_KEYS)):
        raise SettingsError(f"early_stopping has no {unknown[0]!r}, only {', '.join(_KEYS)}")
    patience, delta = given.get("patience", DEFAULT_PATIENCE), given.get("min_delta", 0.0)
    if not is_count(patience):
        raise SettingsError(
            f"patience of early_stopping must be a whole number from 1, not {patience!r}"
        )
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 <= delta < math.inf:
        raise SettingsError(f"min_delta of early_stopping must be a number from 0, not {delta!r}")
    mode = _mode("early_stopping", given.get("metric"), given.get("mode"), metrics)
    return EarlyStopping(SelectionRule(given["metric"], mode, float(delta)), patience)


def keep_best_rule(given: object, metrics: Sequence[ChosenMetric]) -> SelectionRule | None:
    """Return the rule of the argument ``keep_best``, a metric or a mapping with its mode."""
    if given is None:
        return None
    found: Mapping[str, Any] = {"metric": given} if isinstance(given, str) else {}
    if isinstance(given, Mapping):
        found = given
    if unknown := sorted(set(found) - {"metric", "mode"}):
        raise SettingsError(f"keep_best has no {unknown[0]!r}, only metric and mode")
    if not found:
        raise SettingsError(f"keep_best must be the name of a metric, such as 'accuracy', not {given!r}")
    mode = _mode("keep_best", found.get("metric"), found.get("mode"), metrics)
    return SelectionRule(found["metric"], mode)


def needed_metrics(*given: object) -> list[str]:
    """Return the names of metrics in arguments ``early_stopping`` and ``keep_best``."""
    names = [each.get("metric") if isinstance(each, Mapping) else each for each in given]
    return [name for name in names if isinstance(name, str)]


def _mode(where: str, metric: object, mode: object, metrics: Sequence[ChosenMetric]) -> Mode:
    """Return whether small or large values are better: as given, or as the metric says."""
    if not isinstance(metric, str):
        raise SettingsError(f"{where} needs the name of a metric, such as 'accuracy', not {metric!r}")
    found = next((each for each in metrics if each.label == metric), None)
    if found is None:
        known = ", ".join(dict.fromkeys((*(each.label for each in metrics), *METRIC_NAMES)))
        raise SettingsError(f"{where} names the metric {metric!r}, which is not one of {known}")
    if mode not in (None, "min", "max"):
        raise SettingsError(f"mode of {where} must be 'min' or 'max', not {mode!r}")
    chosen = direction_of(found) if mode is None else mode
    if chosen is None:
        raise SettingsError(
            f"{where} uses the function {metric!r}: say with a mode whether small or large values are "
            f"better, such as {where}={{'metric': {metric!r}, 'mode': 'max'}}"
        )
    return "min" if chosen == "min" else "max"
