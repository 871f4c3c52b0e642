"""Checks of all values of a dataset while it is packed, and of its labels against the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ravnest.errors import JobError
from ravnest.jobs.graph_loss import evaluate_loss
from ravnest.runtime.data import prediction_of

_CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_CLASS_FUNCTIONS = (functional.cross_entropy, functional.nll_loss, functional.multi_margin_loss)
_IGNORED = -100
"""Label that torch leaves out by default."""
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class LabelExtreme:
    """The smallest or the largest integer label of a dataset."""

    value: int
    sample: int
    """Index of the sample in the user's dataset."""
    labels: torch.Tensor
    """All labels of this sample."""


class ValueScan:
    """Streaming check of a dataset: refuses NaN and infinity, and finds the extreme labels."""

    def __init__(self, label: str, criterion: Callable[..., Any], *, refuses: bool = True) -> None:
        """``label`` names the dataset in errors. ``refuses``: raise for values that are not finite.

        A loss of the user may be made for labels that are missing, as NaN; one of torch is not.
        """
        self.label = label
        self.lowest: LabelExtreme | None = None
        self.highest: LabelExtreme | None = None
        self._ignored = _setting(criterion, "ignore_index", _IGNORED)
        self._refuses = refuses
        module = getattr(_function(criterion), "__module__", None) or ""
        self._refuses_labels = refuses and module.startswith("torch.nn")

    def add(
        self, fields: Mapping[str, torch.Tensor], labels: torch.Tensor, indices: torch.Tensor
    ) -> None:
        """Check some samples with these indices; raise ``JobError`` with the index of a bad one."""
        if self._refuses:
            for name, values in fields.items():
                self._check_finite(values, f"the input {name!r}", indices)
        if self._refuses_labels:
            self._check_finite(labels, "the target", indices)
        if labels.dtype in _INTEGERS:
            self._find_extremes(labels, indices)

    def _check_finite(self, values: torch.Tensor, what: str, indices: torch.Tensor) -> None:
        if not (values.is_floating_point() or values.is_complex()) or bool(values.sum().isfinite()):
            return  # a finite sum proves that all values are, and is fast
        bad = (~values.isfinite()).reshape(len(values), -1).any(1).nonzero()
        if len(bad):
            row = int(bad[0])
            kind = "NaN" if bool(values[row].isnan().any()) else "infinite"
            raise JobError(
                f"{what} of sample {int(indices[row])} of {self.label} has values that are {kind}: "
                "leave out or repair such samples, or set check_values=False if the model expects them"
            )

    def _find_extremes(self, labels: torch.Tensor, indices: torch.Tensor) -> None:
        rows = labels.reshape(len(labels), -1).long()
        if rows.shape[1] == 0:
            return
        used = rows != self._ignored
        low = rows.where(used, torch.iinfo(torch.int64).max).amin(1)
        high = rows.where(used, torch.iinfo(torch.int64).min).amax(1)
        for row in (int(low.argmin()), int(high.argmax())):
            if not bool(used[row].any()):
                continue
            sample, own = int(indices[row]), labels[row].clone()
            if self.lowest is None or int(low[row]) < self.lowest.value:
                self.lowest = LabelExtreme(int(low[row]), sample, own)
            if self.highest is None or int(high[row]) > self.highest.value:
                self.highest = LabelExtreme(int(high[row]), sample, own)


def check_classes(scan: ValueScan, criterion: Callable[..., Any], output: Any) -> None:
    """Raise ``JobError`` if a label is not a class of the model, for losses of torch that take classes.

    ``output`` is the output of the model for a batch.
    """
    scores = prediction_of(output)
    if scan.lowest is None or scan.highest is None or not _takes_classes(criterion):
        return
    classes = scores.shape[1] if scores.dim() > 1 else scores.shape[0]
    wrong = next((e for e in (scan.lowest, scan.highest) if not 0 <= e.value < classes), None)
    if wrong is None:
        return
    advice = "give the model an output for each class, or change the labels"
    if (scan.lowest.value, scan.highest.value) == (1, classes):
        advice = "subtract 1 from all labels"
    raise JobError(
        f"sample {wrong.sample} of {scan.label} has the label {wrong.value}, but the model's output has "
        f"{classes} classes, whose labels are 0 to {classes - 1}: {advice}"
    )


def check_extremes(
    scan: ValueScan, criterion: Callable[..., Any], output: Any, labels: torch.Tensor
) -> None:
    """Raise ``JobError`` if the loss, of any kind, fails for the smallest or the largest label.

    ``output`` and ``labels`` are those of a batch for which it does not fail.
    """
    for extreme in (scan.lowest, scan.highest):
        if extreme is None or extreme.labels.shape != labels.shape[1:]:
            continue  # the labels of another dataset may be padded to another length
        batch = labels.clone()
        batch[0] = extreme.labels
        try:
            evaluate_loss(criterion, output, batch)
        except JobError as error:
            raise JobError(
                f"sample {extreme.sample} of {scan.label} has the label {extreme.value}, and with it "
                f"{error}"
            ) from error


def _takes_classes(criterion: Callable[..., Any]) -> bool:
    return isinstance(criterion, _CLASS_LOSSES) or _function(criterion) in _CLASS_FUNCTIONS


def _function(criterion: Callable[..., Any]) -> Any:
    """Return the function or the class of a loss."""
    if isinstance(criterion, functools.partial):
        return criterion.func
    return type(criterion) if isinstance(criterion, nn.Module) else criterion


def _setting(criterion: Callable[..., Any], name: str, default: int) -> int:
    """Return a parameter of a loss of torch: of a module, or of a ``functools.partial``."""
    if isinstance(criterion, functools.partial):
        return int(criterion.keywords.get(name, default))
    return int(getattr(criterion, name, default))
