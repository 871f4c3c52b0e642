"""Work of the last stage only: losses and validation results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ravnest.errors import DataError, StageInputError
from ravnest.runtime.batch_parts import part_sizes
from ravnest.runtime.data import Criterion, Targets, count_correct, size_of
from ravnest.runtime.random_state import RandomState, capture_random_state, restore_random_state
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.loss_chunks import ChunkedLoss
from ravnest.runtime.stage.validation_metrics import LOSS, ChosenMetric, Metric
from ravnest.split.loss_head import cut_positions, few_positions, find_chunking, made_up_logits
from ravnest.split.loss_weighting import (
    LossWeighting,
    NotDecomposable,
    find_weighting,
    is_large,
    peek_item,
)
from ravnest.split.rows import cut_rows, repeat_rows
from ravnest.split.structure import tensors_in
from ravnest.wire.messages import LossSplit, PhaseKind

FEW_ROWS = 3
"""Samples with which the loss of large outputs is checked."""
_UNCHECKED = (
    "the labels are neither a DataLoader with a map-style dataset nor a list of batches, so that the "
    "loss cannot be checked before the run"
)
_CHECKED_ROWS = 3
"""Samples with which the loss of chunks is checked."""


@dataclass
class _Tally:
    """Running counts of a validation: correct answers, or the loss if accuracy is not defined."""

    correct: int = 0
    answers: int = 0
    loss: float = 0.0
    """Sum of the losses, weighted by samples."""
    samples: int = 0
    metrics: dict[str, Metric] = field(default_factory=dict)
    """Chosen metrics by label, except for the loss."""

    def mean_loss(self) -> float:
        """Return the loss, as a mean over samples."""
        return self.loss / max(self.samples, 1)


@dataclass(frozen=True)
class ValidationScore:
    """Result of a validation."""

    name: str
    """Label of the first of the chosen metrics; without any, ``accuracy`` or ``loss``."""
    value: float
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values of all chosen metrics by label."""


@dataclass(frozen=True)
class LabelPart:
    """Labels of a micro-batch."""

    item: Any
    weight: float = 1.0
    """Share of the micro-batch's loss in the loss of the batch."""


@dataclass(frozen=True)
class LabelChunk:
    """Labels of some positions of a micro-batch."""

    item: Any
    size: int
    """Number of positions."""
    weight: float
    """Share of the chunk's loss in the loss of the micro-batch."""


@dataclass(frozen=True)
class HeadOutput:
    """Result of the last linear layer, as an example shows it."""

    shape: tuple[int, ...]
    """Samples, positions, ..., classes."""
    dtype: torch.dtype
    tail: Callable[[torch.Tensor], Any]
    """Function from the result to the model's output."""


@dataclass(frozen=True)
class _Chunking:
    """Rule by which the positions of a micro-batch are divided."""

    sizes: tuple[int, ...]
    weighting: LossWeighting
    logits: HeadOutput


ExampleOutput = Callable[[int, int | None], Any]
"""Function from a number of samples, and their length if it varies, to an output of the model."""


def _weighting_of_lengths(
    criterion: Criterion, example_output: ExampleOutput, item: Any, rows: int
) -> LossWeighting | NotDecomposable:
    """Return the weights of the parts of a batch, with outputs as long as the labels if lengths vary."""
    lengths = dict.fromkeys(size for tensor in tensors_in(item) for size in tensor.shape[1:])
    tried: list[list[torch.Size]] = []
    first: NotDecomposable | None = None
    for length in (None, *lengths):
        output = example_output(rows, length)
        shapes = [tensor.shape for tensor in tensors_in(output)]
        if shapes in tried:
            continue
        tried.append(shapes)
        found = find_weighting(criterion, output, item, rows)
        if isinstance(found, LossWeighting):
            return found
        first = first or found
    assert first is not None
    return first


class Leaf:
    """Labels and criterion of the Leaf, in step with the Root."""

    def __init__(
        self,
        criterion: Criterion | None,
        labels: Any,
        test_labels: Any,
        metrics: Sequence[ChosenMetric] = (),
    ) -> None:
        self._criterion = criterion
        self._metrics = metrics
        self._targets = {
            "train": Targets(labels, "labels"),
            "validate": Targets(test_labels, "test_labels"),
        }
        self._labels = labels
        self._weighting: LossWeighting | None = None
        self._chunking: _Chunking | None = None
        self._tally = self._new_tally()
        self._loaders = (labels, test_labels)
        self._random: RandomState | None = None
        """State of the generators when the labels' iteration in progress began."""
        self._resumed: RandomState | None = None
        """State of the generators for the next iteration of labels, after a checkpoint was loaded."""

    def find_weighting(self, example_output: ExampleOutput, rows: int) -> LossSplit:
        """Find out how the loss of a batch follows from the losses of its parts.

        ``example_output`` returns an output of the model for a number of samples and a length of them;
        only its shape matters. Fewer than ``rows`` are used if outputs are large, and only a few
        positions of them.
        """
        if self._criterion is None:
            return LossSplit(False, "the Leaf has no criterion")
        found = self._find_weighting(self._criterion, example_output, rows)
        if found is None:
            return LossSplit(False, _UNCHECKED)
        if isinstance(found, NotDecomposable):
            return LossSplit(False, found.reason)
        self._weighting = found
        return LossSplit(True, found.kind, found.smallest)

    def _find_weighting(
        self, criterion: Criterion, example_output: ExampleOutput, rows: int
    ) -> LossWeighting | NotDecomposable | None:
        """Return the result of the check; None if there are no labels to check it with."""
        if self._chunking is not None:
            logits = self._chunking.logits
            output = logits.tail(made_up_logits(logits.shape, rows, logits.dtype))
            item = few_positions(self._example(rows), logits.shape[1])
            return find_weighting(criterion.of_any_length(), output, item, rows)
        output = example_output(FEW_ROWS, None)
        if not is_large(output, FEW_ROWS):
            item = self._example(rows)
            return None if item is None else _weighting_of_lengths(criterion, example_output, item, rows)
        item = self._example(FEW_ROWS)
        if item is None:
            return None
        if isinstance(output, torch.Tensor) and output.dim() > 2:
            noise = made_up_logits(output.shape, FEW_ROWS, output.dtype)
            few = few_positions(item, output.shape[1])
            found = find_weighting(criterion.of_any_length(), noise, few, FEW_ROWS)
            if isinstance(found, LossWeighting):
                return found
        return _weighting_of_lengths(criterion, example_output, item, FEW_ROWS)

    def find_chunking(self, logits: HeadOutput, count: int) -> str:
        """Divide the positions of the logits into ``count`` chunks; return why not, or nothing."""
        if self._criterion is None:
            return "the Leaf has no criterion"
        rows, positions = logits.shape[:2]
        item = self._example(rows)
        if item is None:
            return _UNCHECKED
        criterion = self._criterion.of_any_length()
        found = find_chunking(criterion, logits.tail, logits.shape, item, logits.dtype)
        if isinstance(found, NotDecomposable):
            return found.reason
        chunks = max(1, min(count, positions // found.smallest))
        self._chunking = _Chunking(part_sizes(positions, chunks), found, logits)
        return ""

    def chunk(self, item: Any) -> list[LabelChunk]:
        """Return the labels of each chunk of positions; empty if the loss is computed as a whole."""
        chunking = self._chunking
        if chunking is None:
            return []
        sizes = chunking.sizes
        items = cut_positions(item, sum(sizes), sizes)
        if items is None:
            raise DataError(f"the labels of this batch do not have {sum(sizes)} positions")
        weights = chunking.weighting.weights(items, sizes)
        return [LabelChunk(*chunk) for chunk in zip(items, sizes, weights, strict=True)]

    def validation_chunks(self, item: Any) -> list[LabelChunk]:
        """Return the labels of chunks for a validation; one chunk if it is computed as a whole.

        With fewer classes than positions, accuracy could take positions for classes. Metrics that are
        functions need the whole output.
        """
        whole = [LabelChunk(item, 0, 1.0)]
        if self._chunking is None or any(metric.function is not None for metric in self._metrics):
            return whole
        _, positions, *_, classes = self._chunking.logits.shape
        cut = cut_positions(item, positions, (positions,))
        return whole if cut is None or classes <= positions else self.chunk(item)

    def _example(self, rows: int) -> Any | None:
        """Return labels of this number of samples, repeated if there are fewer; None if unknown."""
        item = peek_item(self._labels, rows)
        return None if item is None else repeat_rows(item, size_of(item), rows)

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

    def begin(self, kind: PhaseKind, epoch: int, *, loads: bool) -> None:
        """Begin a phase, with its first micro-batch or, if it is empty, with its end.

        ``loads``: the labels are iterated here; in a cluster of one node the Root's batches have them.
        """
        self._tally = self._new_tally()
        if loads and kind != "predict":
            if self._resumed is not None:
                restore_random_state(self._resumed, self._loaders)
                self._resumed = None
            self._random = capture_random_state(self._loaders)
            self._targets[kind].begin(epoch)

    def _new_tally(self) -> _Tally:
        made = {metric.label: metric.make() for metric in self._metrics if metric.name != LOSS}
        return _Tally(metrics=made)

    def skip(self, kind: PhaseKind, batches: int, samples: int) -> None:
        """Leave out the labels of batches that are part of a checkpoint."""
        if kind != "predict":
            self._targets[kind].skip(batches, samples)

    def random_state(self, *, between_phases: bool) -> RandomState | None:
        """Return the state of the generators with which the labels' iteration can be repeated."""
        return capture_random_state(self._loaders) if between_phases else self._random

    def resume(self, state: RandomState | None) -> None:
        """Set the generators before the next iteration of labels."""
        self._resumed = state

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

    def chunk_loss(self, output: Any, item: Any) -> torch.Tensor:
        """Return the loss of a chunk of positions."""
        assert self._criterion is not None
        return self._criterion.of_any_length()(output, item)

    def measure(self, outputs: Iterable[Any], parts: Sequence[LabelChunk]) -> float | None:
        """Return the accuracy (or loss) of one micro-batch, and add it to the phase's result.

        It comes as outputs of chunks of its positions, and their labels; as a whole, it is one chunk.
        """
        correct, answers, loss = 0, 0, 0.0
        accurate = False
        needs_loss = any(metric.name == LOSS for metric in self._metrics)
        for output, part in zip(outputs, parts, strict=True):
            counts = count_correct(output, part.item)
            if counts is not None:
                accurate = True
                correct, answers = correct + counts[0], answers + counts[1]
            if (counts is None or needs_loss) and self._criterion is not None and part.weight:
                criterion = self._criterion.of_any_length() if len(parts) > 1 else self._criterion
                with torch.no_grad():
                    loss += part.weight * float(criterion(output, part.item))
            for metric in self._tally.metrics.values():
                metric.add(output, part.item)
        samples = size_of(parts[0].item)
        self._tally.samples += samples
        self._tally.loss += loss * samples
        if accurate:
            self._tally.correct += correct
            self._tally.answers += answers
            return correct / max(answers, 1)
        return None if self._criterion is None else loss

    def score(self) -> ValidationScore:
        """Return the result of the phase."""
        tally = self._tally
        if self._metrics:
            values = {
                metric.label: tally.mean_loss()
                if metric.name == LOSS
                else tally.metrics[metric.label].value()
                for metric in self._metrics
            }
            first = self._metrics[0].label
            return ValidationScore(first, values[first], tally.samples, values)
        if tally.answers:
            return ValidationScore("accuracy", tally.correct / tally.answers, tally.samples)
        return ValidationScore(LOSS, tally.mean_loss(), tally.samples)


def start_chunks(execution: StageExecution, leaf: Leaf, count: int) -> str:
    """Let the last stage compute logits and loss in ``count`` chunks from the next micro-batch on.

    Return why that is not possible, or an empty string.
    """
    chunked = ChunkedLoss.of(execution.module)
    if isinstance(chunked, str):
        return chunked
    try:
        shape, dtype = execution.passes.example_logits_shape(chunked, _CHECKED_ROWS)
    except (StageInputError, RuntimeError, IndexError, ValueError) as error:
        return f"the loss cannot be checked: {error}"
    if len(shape) < 3:
        return f"the logits have {len(shape)} dimensions, and none of them counts positions"
    reason = leaf.find_chunking(HeadOutput(shape, dtype, chunked.tail), count)
    if not reason:
        execution.passes.chunked_loss = chunked
    return reason
