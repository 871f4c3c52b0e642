"""Work of the last stage only: losses and validation results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ravnest.errors import DataError
from ravnest.runtime.batch_parts import part_sizes
from ravnest.runtime.data import Criterion, Targets, count_correct, size_of
from ravnest.split.loss_weighting import LossWeighting, NotDecomposable, find_weighting, peek_item
from ravnest.split.rows import cut_rows, repeat_rows
from ravnest.wire.messages import LossSplit, PhaseKind


@dataclass
class _Tally:
    """Running counts of a validation: correct answers, or the loss if accuracy is not defined."""

    correct: int = 0
    answers: int = 0
    loss: float = 0.0
    """Sum of the losses, weighted by samples."""
    samples: int = 0


@dataclass(frozen=True)
class ValidationScore:
    """Result of a validation."""

    name: str
    """``accuracy`` or ``loss``."""
    value: float
    samples: int


@dataclass(frozen=True)
class LabelPart:
    """Labels of a micro-batch."""

    item: Any
    weight: float = 1.0
    """Share of the micro-batch's loss in the loss of the batch."""


class Leaf:
    """Labels and criterion of the Leaf, in step with the Root."""

    def __init__(self, criterion: Criterion | None, labels: Any, test_labels: Any) -> None:
        self._criterion = criterion
        self._targets = {
            "train": Targets(labels, "labels"),
            "validate": Targets(test_labels, "test_labels"),
        }
        self._labels = labels
        self._weighting: LossWeighting | None = None
        self._tally = _Tally()

    def find_weighting(self, output: Any, rows: int) -> LossSplit:
        """Find out how the loss of a batch follows from the losses of its parts.

        ``output`` is an output of the model for ``rows`` samples; only its shape matters.
        """
        if self._criterion is None:
            return LossSplit(False, "the Leaf has no criterion")
        item = peek_item(self._labels, rows)
        if item is None:
            return LossSplit(
                False,
                "the labels are neither a DataLoader with a map-style dataset nor a list of batches, so "
                "that the loss cannot be checked before the run",
            )
        item = repeat_rows(item, size_of(item), rows)
        found = find_weighting(self._criterion, output, item, rows)
        if isinstance(found, NotDecomposable):
            return LossSplit(False, found.reason)
        self._weighting = found
        return LossSplit(True, found.kind, found.smallest)

    def split(self, item: Any, batch_size: int, parts: int) -> list[LabelPart]:
        """Return the labels of each part of a batch."""
        if parts == 1:
            return [LabelPart(item)]
        sizes = part_sizes(batch_size, parts)
        items = cut_rows(item, sizes)
        if items is None or self._weighting is None:
            raise DataError("the labels of this batch cannot be split; set micro_batches=1")
        weights = self._weighting.weights(items, sizes)
        return [LabelPart(part, weight) for part, weight in zip(items, weights, strict=True)]

    def begin(self, kind: PhaseKind, *, loads: bool) -> None:
        """Begin a phase, with its first micro-batch or, if it is empty, with its end.

        ``loads``: the labels are iterated here; in a cluster of one node the Root's batches have them.
        """
        self._tally = _Tally()
        if loads and kind != "predict":
            self._targets[kind].begin()

    def end(self, kind: PhaseKind, count: int, *, exhausted: bool) -> None:
        """End a phase after ``count`` micro-batches."""
        if kind != "predict":
            self._targets[kind].end(count, exhausted=exhausted)

    def item(self, kind: PhaseKind, index: int, size: int, digests: Mapping[str, str]) -> Any:
        """Return the labels of a micro-batch; ``DataError`` if they do not match the Root's batch."""
        return self._targets[kind].take(index, size, digests)

    def loss(self, output: Any, item: Any) -> torch.Tensor:
        """Return the loss of a micro-batch."""
        if self._criterion is None:
            raise DataError(
                "the Leaf needs a loss to train: Node(criterion=torch.nn.functional.cross_entropy)"
            )
        return self._criterion(output, item)

    def measure(self, output: Any, item: Any) -> float | None:
        """Return the accuracy (or loss) of one micro-batch, and add it to the phase's result."""
        samples = size_of(item)
        self._tally.samples += samples
        counts = count_correct(output, item)
        if counts is not None:
            correct, answers = counts
            self._tally.correct += correct
            self._tally.answers += answers
            return correct / max(answers, 1)
        if self._criterion is None:
            return None
        with torch.no_grad():
            loss = float(self._criterion(output, item))
        self._tally.loss += loss * samples
        return loss

    def score(self) -> ValidationScore:
        """Return the result of the phase."""
        tally = self._tally
        if tally.answers:
            return ValidationScore("accuracy", tally.correct / tally.answers, tally.samples)
        return ValidationScore("loss", tally.loss / max(tally.samples, 1), tally.samples)
