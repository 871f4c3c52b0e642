"""What only the last stage does: losses, and figures of validations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ravnest.errors import DataError
from ravnest.runtime.data import Criterion, Targets, hits, size_of
from ravnest.wire.messages import PhaseKind


@dataclass
class _Tally:
    """A validation so far: hits where accuracy makes sense, else losses weighted by samples."""

    hits: int = 0
    answers: int = 0
    loss: float = 0.0
    samples: int = 0


@dataclass(frozen=True)
class ValidationScore:
    """The result of a validation."""

    name: str
    """``accuracy`` or ``loss``."""
    value: float
    samples: int


class Leaf:
    """The Leaf's labels and criterion, in step with the Root."""

    def __init__(self, criterion: Criterion | None, labels: Any, test_labels: Any) -> None:
        self._criterion = criterion
        self._targets = {
            "train": Targets(labels, "labels"),
            "validate": Targets(test_labels, "test_labels"),
        }
        self._tally = _Tally()

    def begin(self, kind: PhaseKind, *, loads: bool) -> None:
        """A phase of the Root's starts here, with its first micro-batch or its end.

        ``loads``: the labels are iterated here; a cluster of one node has the Root's own batches.
        """
        self._tally = _Tally()
        if loads and kind != "predict":
            self._targets[kind].begin()

    def end(self, kind: PhaseKind, count: int, *, exhausted: bool) -> None:
        """The phase is over here, after ``count`` micro-batches."""
        if kind != "predict":
            self._targets[kind].end(count, exhausted=exhausted)

    def item(self, kind: PhaseKind, index: int, size: int, digests: Mapping[str, str]) -> Any:
        """What the labels give for a micro-batch; ``DataError`` if it is another than the Root's."""
        return self._targets[kind].take(index, size, digests)

    def loss(self, output: Any, item: Any) -> torch.Tensor:
        """The loss of a micro-batch."""
        if self._criterion is None:
            raise DataError(
                "the Leaf needs a loss to train: Node(criterion=torch.nn.functional.cross_entropy)"
            )
        return self._criterion(output, item)

    def judge(self, output: Any, item: Any) -> float | None:
        """The accuracy of one micro-batch, or its loss; counted for the phase too."""
        samples = size_of(item)
        self._tally.samples += samples
        counted = hits(output, item)
        if counted is not None:
            right, answers = counted
            self._tally.hits += right
            self._tally.answers += answers
            return right / max(answers, 1)
        if self._criterion is None:
            return None
        with torch.no_grad():
            loss = float(self._criterion(output, item))
        self._tally.loss += loss * samples
        return loss

    def score(self) -> ValidationScore:
        """The figure of the phase."""
        tally = self._tally
        if tally.answers:
            return ValidationScore("accuracy", tally.hits / tally.answers, tally.samples)
        return ValidationScore("loss", tally.loss / max(tally.samples, 1), tally.samples)
