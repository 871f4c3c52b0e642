"""Metrics of a validation by name: sums over all batches, from which the value follows at the end.

The definitions are those of torchmetrics. Predictions have a class dimension, the second one or the last
one, and targets are class indices, unless a metric says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from ravnest.errors import DataError, SettingsError
from ravnest.runtime.data import prediction_of, size_of, targets_of

IGNORED = -100
"""Target that does not count, unless ``ignore_index`` is another one; the default of torch's losses."""
LOSS = "loss"
"""Name of the metric that is the criterion."""
Mode = Literal["min", "max"]
_AVERAGES = ("micro", "macro", "weighted")
_TASKS = ("multiclass", "binary", "multilabel")


class Metric(Protocol):
    """Sums of a metric over the batches of a validation."""

    def add(self, output: Any, item: Any) -> None:
        """Add a batch: the model's output, and an item of the labels loader."""

    def value(self) -> float:
        """Return the metric over all batches so far."""


@dataclass
class MeanMetric:
    """Mean of what a function returns: of its values, or of one number for each batch, by samples."""

    function: Callable[[Any, Any], torch.Tensor]
    total: float = 0.0
    count: int = 0

    def add(self, output: Any, item: Any) -> None:
        """Add the values of a batch."""
        with torch.no_grad():
            values = torch.as_tensor(self.function(output, item)).detach()
        weight = size_of(item) if values.numel() == 1 else 1
        self.total += float(values.double().sum()) * weight
        self.count += values.numel() * weight

    def value(self) -> float:
        """Return the mean."""
        return self.total / max(self.count, 1)


@dataclass
class ErrorMetric:
    """Mean of a power of the differences between prediction and targets, or its root."""

    power: int
    root: bool = False
    total: float = 0.0
    count: int = 0

    def add(self, output: Any, item: Any) -> None:
        """Add the differences of a batch."""
        prediction, targets = _tensors(output, item)
        if prediction.shape != targets.shape and prediction.numel() == targets.numel():
            prediction = prediction.reshape(targets.shape)
        if prediction.shape != targets.shape:
            raise _misfit(prediction, targets, "the same shape")
        differences = (prediction.double() - targets.double()).abs()
        self.total += float(differences.pow(self.power).sum())
        self.count += differences.numel()

    def value(self) -> float:
        """Return the mean, or its root."""
        mean = self.total / max(self.count, 1)
        return math.sqrt(mean) if self.root else mean


@dataclass
class PerplexityMetric:
    """Exponential of the mean negative log-likelihood of the targets."""

    ignore_index: int = IGNORED
    class_dim: int | None = None
    total: float = 0.0
    count: int = 0

    def add(self, output: Any, item: Any) -> None:
        """Add the targets of a batch."""
        scores, targets = _by_class(output, item, self.ignore_index, self.class_dim)
        chances = torch.log_softmax(scores.float(), 1).gather(1, targets[:, None])
        self.total -= float(chances.double().sum())
        self.count += targets.numel()

    def value(self) -> float:
        """Return the perplexity; infinite if it is too large for a number."""
        mean = self.total / max(self.count, 1)
        return math.exp(mean) if mean < 700 else math.inf


@dataclass
class TopKMetric:
    """Share of targets that are among the ``top_k`` classes with the highest scores."""

    top_k: int = 1
    ignore_index: int = IGNORED
    class_dim: int | None = None
    correct: int = 0
    count: int = 0

    def add(self, output: Any, item: Any) -> None:
        """Add the targets of a batch."""
        scores, targets = _by_class(output, item, self.ignore_index, self.class_dim)
        if self.top_k == 1:
            hits = scores.argmax(1) == targets
        else:
            found = scores.topk(min(self.top_k, scores.shape[1]), dim=1).indices
            hits = (found == targets[:, None]).any(1)
        self.correct += int(hits.sum())
        self.count += targets.numel()

    def value(self) -> float:
        """Return the share."""
        return self.correct / max(self.count, 1)


Score = Literal["accuracy", "f1", "precision", "recall", "iou"]


@dataclass
class ClassCountMetric:
    """Score from the numbers of hits, of predictions and of targets of each class.

    ``macro`` is the mean over the classes that occur, in predictions or targets; ``weighted`` weights
    them by their targets; ``micro`` adds the numbers of all classes first. A task ``binary`` has one
    class; ``multilabel`` has one for each position of the second dimension.
    """

    score: Score
    task: str = "multiclass"
    average: str = "macro"
    threshold: float = 0.5
    logits: bool = True
    """Predictions of the tasks ``binary`` and ``multilabel`` are logits; else probabilities."""
    ignore_index: int = IGNORED
    class_dim: int | None = None
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(5, 0, dtype=torch.int64))
    """Hits, predictions, targets, correct answers (also that a class is not there) and all answers, by
    class."""

    def add(self, output: Any, item: Any) -> None:
        """Add the counts of a batch."""
        found = self._multiclass(output, item) if self.task == "multiclass" else self._yes(output, item)
        if not self.counts.numel():
            self.counts = torch.zeros_like(found)
        if self.counts.shape != found.shape:
            raise DataError(
                f"the model's output has {found.shape[1]} classes in one batch and "
                f"{self.counts.shape[1]} in another"
            )
        self.counts += found

    def _multiclass(self, output: Any, item: Any) -> torch.Tensor:
        scores, targets = _by_class(output, item, self.ignore_index, self.class_dim)
        classes = scores.shape[1]
        chosen = scores.argmax(1)
        hits = targets[chosen == targets]
        counted = (hits, chosen, targets, hits, targets)
        return torch.stack([torch.bincount(each, minlength=classes) for each in counted]).cpu()

    def _yes(self, output: Any, item: Any) -> torch.Tensor:
        prediction, targets = _tensors(output, item)
        if prediction.shape != targets.shape and prediction.numel() == targets.numel():
            prediction = prediction.reshape(targets.shape)
        if prediction.shape != targets.shape:
            raise _misfit(prediction, targets, f"the same shape, for the task {self.task!r}")
        chances = prediction.sigmoid() if self.logits else prediction
        if self.task == "binary" or prediction.dim() < 2:
            chances, targets = chances.reshape(-1, 1), targets.reshape(-1, 1)
        else:
            chances, targets = (
                each.movedim(1, -1).reshape(-1, each.shape[1]) for each in (chances, targets)
            )
        counts = targets != self.ignore_index
        chosen, wanted = (chances > self.threshold) & counts, (targets > 0) & counts
        parts = (chosen & wanted, chosen, wanted, (chosen == wanted) & counts, counts)
        return torch.stack([part.sum(0) for part in parts]).cpu()

    def value(self) -> float:
        """Return the score."""
        counts = self.counts.double()
        if self.average == "micro":
            counts = counts.sum(1, keepdim=True)
        hits, predicted, targets, correct, answers = counts
        above, below = {
            "accuracy": (correct, answers),
            "recall": (hits, targets),
            "precision": (hits, predicted),
            "f1": (2 * hits, predicted + targets),
            "iou": (hits, predicted + targets - hits),
        }[self.score]
        scores = torch.where(below > 0, above / below.clamp(min=1), 0.0)
        weights = targets if self.average == "weighted" else torch.ones_like(targets)
        if self.average == "macro" and (self.task == "multiclass" or self.score == "iou"):
            weights = (predicted + targets > 0).double()
        return float((scores * weights).sum() / weights.sum().clamp(min=1))


@dataclass(frozen=True)
class ChosenMetric:
    """A metric that the user has chosen."""

    label: str
    """Name in all reports."""
    name: str
    """Name in the list of metrics; empty for a function."""
    params: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[[Any, Any], torch.Tensor] | None = None

    @property
    def given(self) -> Any:
        """The metric as a value of ``metrics``."""
        return self.function or {"name": self.name, **self.params}

    def make(self) -> Metric:
        """Return the metric without any batch; the criterion is not made here."""
        if self.function is not None:
            return MeanMetric(self.function)
        return _METRICS[self.name](**self.params)


def _accuracy(top_k: int = 1, average: str = "micro", **settings: Any) -> Metric:
    if average == "micro" and settings.get("task", "multiclass") == "multiclass":
        settings.pop("task", None)
        return TopKMetric(top_k, **settings)
    if top_k != 1:
        raise TypeError("top_k needs average='micro' and the task 'multiclass'")
    return ClassCountMetric("accuracy", average=average, **settings)


def _score(name: Score) -> Callable[..., Metric]:
    return lambda **settings: ClassCountMetric(name, **settings)


_METRICS: dict[str, Callable[..., Metric]] = {
    "accuracy": _accuracy,
    "top_k_accuracy": lambda top_k=5, **settings: TopKMetric(top_k, **settings),
    "f1": _score("f1"),
    "precision": _score("precision"),
    "recall": _score("recall"),
    "iou": _score("iou"),
    "mae": lambda: ErrorMetric(1),
    "mse": lambda: ErrorMetric(2),
    "rmse": lambda: ErrorMetric(2, root=True),
    "perplexity": PerplexityMetric,
}
METRIC_NAMES = (*_METRICS, LOSS)
_SMALLER_IS_BETTER = {"mae", "mse", "rmse", "perplexity", LOSS}


def direction_of(metric: ChosenMetric) -> Mode | None:
    """Return whether small or large values of a metric are better; None for a function."""
    if metric.function is not None or not metric.name:
        return None
    return "min" if metric.name in _SMALLER_IS_BETTER else "max"


def choose_metrics(given: object) -> tuple[ChosenMetric, ...]:
    """Return the metrics of a list of names, mappings and functions, or of a mapping with labels.

    ``SettingsError`` says what is wrong with one of them.
    """
    if isinstance(given, Mapping):
        found = [_chosen(entry, str(label)) for label, entry in given.items()]
    elif isinstance(given, Iterable) and not isinstance(given, str):
        found = [_chosen(entry, None) for entry in given]
    else:
        raise SettingsError(
            "metrics must be a list, such as ['accuracy', {'name': 'f1', 'average': 'macro'}], or a "
            f"mapping of labels to metrics, not {given!r}"
        )
    labels = [metric.label for metric in found]
    if double := next((label for label in labels if labels.count(label) > 1), None):
        raise SettingsError(
            f"two metrics are called {double!r}: give metrics as a mapping with a label for each"
        )
    return tuple(found)


def with_needed(metrics: Sequence[ChosenMetric], names: Sequence[str]) -> tuple[ChosenMetric, ...]:
    """Return the metrics and those that are needed by name and missing among them."""
    labels = {metric.label for metric in metrics}
    missing = [name for name in dict.fromkeys(names) if name not in labels and name in METRIC_NAMES]
    return (*metrics, *choose_metrics(missing))


def _chosen(entry: object, label: str | None) -> ChosenMetric:
    if isinstance(entry, str):
        entry = {"name": entry}
    if isinstance(entry, Mapping):
        params = dict(entry)
        name = params.pop("name", None)
        if name not in METRIC_NAMES:
            raise SettingsError(
                f"no metric is called {name!r}, only {', '.join(METRIC_NAMES)}; another one can be a "
                "function of the model's output and the labels"
            )
        metric = ChosenMetric(label or _label(str(name), params), str(name), params)
        _check_params(metric)
    elif callable(entry):
        own = str(getattr(entry, "__name__", type(entry).__name__))
        metric = ChosenMetric(label or own, "", function=entry)
    else:
        raise SettingsError(
            f"a metric is a name, a mapping with a name and parameters, or a function, not {entry!r}"
        )
    if not metric.label or len(metric.label) > 100:
        raise SettingsError("the label of a metric must have 1 to 100 characters")
    return metric


def _label(name: str, params: Mapping[str, Any]) -> str:
    if name in ("accuracy", "top_k_accuracy") and (top := params.get("top_k", 5)) != 1:
        return f"top_{top}_accuracy" if name != "accuracy" or "top_k" in params else name
    return name


def _check_params(metric: ChosenMetric) -> None:
    params, where = metric.params, f"the metric {metric.label!r}"
    if metric.name == LOSS:
        if params:
            raise SettingsError(f"{where} takes no parameters: it is the criterion")
        return
    allowed: Sequence[tuple[str, Callable[[Any], bool], str]] = (
        ("top_k", lambda v: _is_whole(v) and v >= 1, "a whole number from 1"),
        ("average", lambda v: v in _AVERAGES, f"one of {', '.join(_AVERAGES)}"),
        ("task", lambda v: v in _TASKS, f"one of {', '.join(_TASKS)}"),
        ("threshold", lambda v: isinstance(v, float | int) and 0 <= v <= 1, "a number from 0 to 1"),
        ("logits", lambda v: isinstance(v, bool), "True or False"),
        ("ignore_index", _is_whole, "a whole number"),
        ("class_dim", lambda v: v is None or _is_whole(v), "a whole number"),
    )
    for name, fits, words in allowed:
        if name in params and not fits(params[name]):
            raise SettingsError(f"{name} of {where} must be {words}, not {params[name]!r}")
    try:
        metric.make()
    except TypeError as error:
        raise SettingsError(f"{where} does not accept its parameters: {error}") from error


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tensors(output: Any, item: Any) -> tuple[torch.Tensor, torch.Tensor]:
    prediction, targets = prediction_of(output), targets_of(item)
    if not isinstance(prediction, torch.Tensor) or not isinstance(targets, torch.Tensor):
        raise DataError(
            "a metric needs a tensor as prediction and a tensor as targets, not a "
            f"{type(prediction).__name__} and a {type(targets).__name__}"
        )
    return prediction.detach(), targets.to(prediction.device)


def _by_class(
    output: Any, item: Any, ignored: int, class_dim: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores with the classes in the second of two dimensions, and class indices."""
    prediction, targets = _tensors(output, item)
    dim = _class_dim(prediction, targets, class_dim)
    if targets.shape == prediction.shape:
        targets = targets.argmax(dim)
    scores = prediction.movedim(dim, -1).reshape(-1, prediction.shape[dim])
    targets = targets.reshape(-1).long()
    counts = targets != ignored
    if not bool(counts.all()):
        scores, targets = scores[counts], targets[counts]
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < scores.shape[1]:
        raise DataError(
            f"targets are from {int(targets.min())} to {int(targets.max())}, but the model's output has "
            f"{scores.shape[1]} classes; ignore_index of the metric leaves out one value"
        )
    return scores, targets


def _class_dim(prediction: torch.Tensor, targets: torch.Tensor, given: int | None) -> int:
    if prediction.dim() < 2:
        raise _misfit(prediction, targets, "a class dimension; for one logit per sample, use the task "
                      "'binary'")  # fmt: skip
    dims = (1, prediction.dim() - 1) if given is None else (given % prediction.dim(),)
    if targets.shape == prediction.shape and not targets.is_floating_point():
        return dims[0]
    if targets.shape == prediction.shape and bool(((targets == 0) | (targets == 1)).all()):
        return dims[0]
    for dim in dims:
        rest = [size for index, size in enumerate(prediction.shape) if index != dim]
        if list(targets.shape) == rest and not targets.is_floating_point():
            return dim
    raise _misfit(prediction, targets, "class indices of the shape of the output without its classes")


def _misfit(prediction: torch.Tensor, targets: torch.Tensor, wanted: str) -> DataError:
    return DataError(
        f"the model's output of shape {list(prediction.shape)} and the targets of shape "
        f"{list(targets.shape)} and {targets.dtype} do not fit the metric, which needs {wanted}"
    )
