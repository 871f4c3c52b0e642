"""Decide how the loss of a batch follows from the losses of its parts.

A batch is trained in parts, and the gradients of the parts are added. The sum is the gradient of the
batch if ``loss(batch) == sum_k w_k * loss(part_k)`` with weights that do not depend on the outputs:
the share of samples for a mean, the share of counted labels where some labels are ignored, 1 for a
sum. Which of these holds is found by evaluating the user's loss, on its example and on variations.
"""

from __future__ import annotations

import logging
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset

from ravnest.split.rows import cut_rows, repeat_rows, shuffle_rows, vary_floats
from ravnest.split.structure import map_tensors, tensors_in

logger = logging.getLogger(__name__)

Loss = Callable[[Any, Any], torch.Tensor]
"""A loss of a model's output and of an item of the labels loader."""

_ROWS = 6
_FEW_ROWS = 3
_MANY_ELEMENTS = 2**22
"""Outputs with more elements are checked with fewer rows and variations, and in their own type."""
_USUAL_IGNORED = (-100, -1, 0)
_MAX_VALUES = 12
"""Label values that are tried in each tensor of labels."""
_MAX_LEAVES = 6
_EXACT = 1e-6
"""Relative difference that is accepted in float64; a small constant in a denominator is no coupling."""
_CLOSE = 1e-4
_SEED = 20_240_302


@dataclass(frozen=True)
class LossWeighting:
    """The rule that gives the weight of each part of a batch."""

    kind: Literal["samples", "counted", "masked", "sum"]
    """``samples``: shares of the samples. ``counted``: shares of the labels that count. ``masked``:
    shares of the sum of a mask. ``sum``: 1."""
    leaf: int = 0
    """Position of the labels or of the mask among the tensors of an item, in the order of
    ``tensors_in``; for ``counted`` and ``masked``."""
    ignored: tuple[int, ...] = ()
    """Label values that do not count."""
    class_weights: tuple[float, ...] = ()
    """Count of each label value; empty: 1."""
    skipped: int = 0
    """First positions of dimension 1 that do not count, as in losses that shift labels by one."""
    smallest: int = 1
    """Samples that the smallest part must have."""

    def weights(self, items: Sequence[Any], sizes: Sequence[int]) -> tuple[float, ...]:
        """Return ``w_k`` such that the loss of the batch is ``sum_k w_k * loss(part_k)``.

        ``items`` are the parts of what the labels loader gave, from ``cut_rows``; ``sizes`` their
        numbers of samples. A part in which nothing counts has weight 0.0 and often a loss of NaN:
        leave that part's loss and gradient out of the sums, as 0 * NaN is NaN. Where nothing counts
        in the whole batch, the weights are shares of the samples, so that the result is what the
        loss gives for nothing (NaN in most cases), as in one process.
        """
        if self.kind == "sum":
            return (1.0,) * len(sizes)
        counts = [float(size) for size in sizes]
        if self.kind != "samples":
            found = [self._count(item) for item in items]
            counts = found if sum(found) > 0 else counts
        total = sum(counts)
        return tuple(count / total for count in counts)

    def _count(self, item: Any) -> float:
        tensor = tensors_in(item)[self.leaf].detach()
        if self.skipped and tensor.dim() > 1:
            tensor = tensor[:, self.skipped :]
        if self.kind == "masked":
            return float(tensor.double().sum())
        counted = torch.ones_like(tensor, dtype=torch.bool)
        for value in self.ignored:
            counted &= tensor != value
        if not self.class_weights:
            return float(counted.sum())
        table = torch.tensor(self.class_weights, dtype=torch.float64, device=tensor.device)
        return float(table[tensor[counted].long()].sum())


@dataclass(frozen=True)
class NotDecomposable:
    """A loss whose value for a batch does not follow from those of its parts."""

    reason: str
    """Sentence for the user."""


def find_weighting(
    loss: Loss, output: Any, item: Any, batch_size: int
) -> LossWeighting | NotDecomposable:
    """Return the weights under which the losses of the parts of a batch add up to the batch's.

    ``output`` is what the model gives for a batch of ``batch_size`` samples, ``item`` what the labels
    loader yields for it. ``loss`` is called on copies of some of their rows, on the device that they
    are on. Random number generators and buffers of the loss stay as they are.
    """
    few = is_large(output, batch_size)
    rows = _FEW_ROWS if few else _ROWS
    output = repeat_rows(output, batch_size, rows, multiples=True)
    item = repeat_rows(item, batch_size, rows)
    if cut_rows(output, (1, rows - 1), multiples=True) is None:
        return NotDecomposable("no output has one row for each sample")
    if tensors_in(item) and cut_rows(item, (1, rows - 1)) is None:
        return NotDecomposable(
            f"no tensor that the labels loader gives has one row for each of the {batch_size} samples"
        )
    with torch.no_grad(), warnings.catch_warnings(), _undisturbed(loss) as changed:
        warnings.simplefilter("ignore")
        found = _Search(loss, output, item, rows, few=few).run()
        if changed():
            return NotDecomposable("the loss changes its own buffers with each batch")
    return found


def is_large(output: Any, batch_size: int) -> bool:
    """Return whether an output for this number of samples is so large that few rows are checked."""
    return sum(t.numel() for t in tensors_in(output)) * _ROWS > _MANY_ELEMENTS * batch_size


@dataclass(frozen=True)
class _Trial:
    """A batch, and the losses of the whole and of its parts."""

    items: Sequence[Any]
    sizes: tuple[int, ...]
    whole: float
    parts: tuple[float, ...]
    tolerance: float

    def agrees(self, weighting: LossWeighting) -> bool:
        """Return True if the weights give the loss of the whole."""
        if weighting.kind == "masked" and self._is_no_mask(weighting.leaf):
            return True
        try:
            weights = weighting.weights(self.items, self.sizes)
        except (IndexError, RuntimeError):  # a label outside of the table of class weights
            return False
        terms = [w * part for w, part in zip(weights, self.parts, strict=True) if w]
        if not all(map(math.isfinite, terms)):
            return False
        scale = max(abs(self.whole), sum(map(abs, terms)), 1e-30)
        return abs(self.whole - math.fsum(terms)) <= self.tolerance * scale

    def _is_no_mask(self, leaf: int) -> bool:
        """Return True if a tensor holds negative values, which say nothing about a mask."""
        tensors = [tensors_in(item)[leaf] for item in self.items]
        return any(bool((tensor < 0).any()) for tensor in tensors)


class _UnequalPartError(Exception):
    """The loss takes a batch and not a part of it."""


class _Search:
    """The search for a weighting that agrees with all trials."""

    def __init__(self, loss: Loss, output: Any, item: Any, rows: int, *, few: bool) -> None:
        self._loss = loss
        self._rows = rows
        self._few = few
        self._output = output
        self._item = item
        self._tolerance = _CLOSE
        self._leaves = [
            index
            for index, tensor in enumerate(tensors_in(item))
            if tensor.dim() and tensor.shape[0] == rows and not tensor.is_complex()
        ][:_MAX_LEAVES]
        self._generator = torch.Generator().manual_seed(_SEED)
        self._hints = _Hints()

    def run(self) -> LossWeighting | NotDecomposable:
        try:
            with self._hints:
                self._loss(self._output, self._item)
        except Exception as error:  # whatever the user's function raises, here and below
            return NotDecomposable(
                f"the loss cannot be computed for a batch of {self._rows} samples: {error}"
            )
        if not self._few:
            self._use_float64()
        reason = NotDecomposable("the loss of the example is not a finite number")
        for smallest in (1, 2):
            try:
                found = self._search(smallest)
            except _UnequalPartError as error:
                reason = NotDecomposable(f"the loss cannot be computed for a part of a batch: {error}")
                continue
            return found if found is not None else reason
        return reason

    def _use_float64(self) -> None:
        """Take outputs and targets in float64 if the loss accepts that."""
        output, item = _doubled(self._output), _doubled(self._item)
        try:
            value = self._loss(output, item)
        except Exception:
            return
        self._output, self._item = output, item
        if value.dtype == torch.float64:
            self._tolerance = _EXACT

    def _search(self, smallest: int) -> LossWeighting | NotDecomposable | None:
        values = self._label_values()
        left: list[LossWeighting] | None = None
        for what, output, item in self._variations(values):
            for sizes in _sizes(self._rows, smallest):
                trial = self._try(output, item, sizes)
                if trial is None:
                    continue
                if left is None:
                    left = self._candidates(values)
                left = [weighting for weighting in left if trial.agrees(weighting)]
                if not left:
                    return NotDecomposable(NO_WEIGHTS + (f" ({what})" if what else ""))
        return replace(left[0], smallest=smallest) if left else None

    def _candidates(self, values: Mapping[int, Sequence[float]]) -> list[LossWeighting]:
        """Return the weightings to try; of those that always agree the first is taken."""
        tensors = tensors_in(self._item)
        found = [LossWeighting("samples"), LossWeighting("sum")]
        for leaf in self._leaves:
            skips = (0, 1) if tensors[leaf].dim() > 1 else (0,)
            if tensors[leaf].dtype != torch.bool:
                labels = [int(value) for value in values[leaf] if not math.isnan(value)]
                negative = tuple(value for value in labels if value < 0)
                ignored: list[tuple[int, ...]] = [*((value,) for value in labels), negative]
                tables = [(), *self._hints.class_weights]
                found += [
                    LossWeighting("counted", leaf, which, table, skipped)
                    for table in tables
                    for which in [*ignored, ()]
                    for skipped in skips
                    if which or table or skipped
                ]
            if not bool((tensors[leaf] < 0).any()):
                found += [LossWeighting("masked", leaf, skipped=skipped) for skipped in skips]
        return found

    def _label_values(self) -> dict[int, list[float]]:
        """Return the values to put in each tensor of the item, those that may be ignored first."""
        tensors = tensors_in(self._item)
        safe = all(t.device.type == "cpu" for t in (*tensors, *tensors_in(self._output)))
        unchecked = self._hints.reads_unchecked or not safe
        values: dict[int, list[float]] = {}
        for leaf in self._leaves:
            tensor = tensors[leaf]
            if tensor.dtype == torch.bool:
                values[leaf] = [0.0, 1.0]
                continue
            usual = [*self._hints.ignored, *_options(self._loss, "ignore_index"), *_USUAL_IGNORED]
            if tensor.is_floating_point():
                values[leaf] = list(dict.fromkeys([math.nan, *usual]))[:_MAX_VALUES]
            else:
                own, counts = torch.unique(tensor, return_counts=True)
                frequent = own[counts.argsort(descending=True)].tolist()
                inside = [v for v in usual if not unchecked or float(own.min()) <= v <= float(own.max())]
                values[leaf] = list(dict.fromkeys([*inside, *frequent]))[:_MAX_VALUES]
        return values

    def _variations(self, values: Mapping[int, Sequence[float]]) -> Iterator[tuple[str, Any, Any]]:
        """Yield outputs and items, with a description of what was changed in the item."""
        yield "", self._output, self._item
        for _ in range(1 if self._few else 3):
            yield "", self._vary(self._output), self._shuffled()
        output = self._vary(self._output)
        for leaf in self._leaves:
            for value in values[leaf][: 3 if self._few else None]:
                yield f"seen with {value:g} among the labels", output, self._with_value(leaf, value)

    def _vary(self, value: Any) -> Any:
        return map_tensors(value, partial(vary_floats, generator=self._generator))

    def _shuffled(self) -> Any:
        order = torch.randperm(self._rows, generator=self._generator)

        def change(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.dim() or tensor.shape[0] != self._rows:
                return tensor
            if tensor.is_floating_point():
                return vary_floats(tensor, self._generator)
            if self._hints.reads_unchecked:
                return tensor[order.to(tensor.device)]
            return shuffle_rows(tensor, self._generator)

        return map_tensors(self._item, change)

    def _with_value(self, leaf: int, value: float) -> Any:
        """Return the item with a value in the whole first row and in some places of the others."""
        position = iter(range(len(tensors_in(self._item))))
        share = torch.arange(self._rows - 1, -1, -1) / (self._rows - 1) * 0.8

        def change(tensor: torch.Tensor) -> torch.Tensor:
            if next(position) != leaf:
                return tensor
            chosen = torch.rand(tensor.shape, generator=self._generator) < share.reshape(
                -1, *[1] * (tensor.dim() - 1)
            )
            chosen[0] = True
            return tensor.masked_fill(chosen.to(tensor.device), value)

        return map_tensors(self._item, change)

    def _try(self, output: Any, item: Any, sizes: tuple[int, ...]) -> _Trial | None:
        """Return the trial of a batch; None where the loss does not take the batch as a whole."""
        outputs = cut_rows(output, sizes, multiples=True)
        items = cut_rows(item, sizes) or [item] * len(sizes)
        assert outputs is not None
        try:
            whole = self._evaluate(output, item)
        except Exception as error:
            logger.debug("the loss does not take a variation of the labels: %s", error)
            return None
        if not math.isfinite(whole):
            return None
        try:
            parts = tuple(self._evaluate(*part) for part in zip(outputs, items, strict=True))
        except Exception as error:
            raise _UnequalPartError(str(error)) from error
        return _Trial(items, sizes, whole, parts, self._tolerance)

    def _evaluate(self, output: Any, item: Any) -> float:
        copies = map_tensors(output, torch.clone), map_tensors(item, torch.clone)
        return float(self._loss(*copies))


NO_WEIGHTS = (
    "the loss of a batch is neither a weighted mean nor the sum of the losses of its parts: it compares "
    "samples with each other or uses a statistic of the batch"
)


def _sizes(rows: int, smallest: int) -> list[tuple[int, ...]]:
    if smallest == 1:
        return [(1, rows - 1), (rows // 2, 1, rows - rows // 2 - 1)] if rows > 3 else [(1, 2), (2, 1)]
    return [(2, rows - 2), (rows - 2, 2)] if rows >= 4 else []


class _Hints(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what the operators of a loss say about labels: ignored values and class weights."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ignored: list[int] = []
        self.class_weights: list[tuple[float, ...]] = []
        self.reads_unchecked = False
        """A label out of range would be read from foreign memory instead of being refused."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's compiler would be imported to be told to leave this class alone."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("nll_loss_forward", "nll_loss2d_forward"):
            weight, ignored = args[2], args[4]
            self.ignored.append(int(ignored))
            if weight is not None:
                self.class_weights.append(tuple(map(float, weight.tolist())))
        elif name in ("eq", "ne") and isinstance(args[1], int | float) and float(args[1]).is_integer():
            self.ignored.append(int(args[1]))
        elif "ctc_loss" in name:
            self.reads_unchecked = True
        return func(*args, **(kwargs or {}))


def _options(loss: object, name: str) -> list[int]:
    """Return the values of an option of a criterion, whichever way it is wrapped."""
    wrapped = [loss, getattr(loss, "function", None), getattr(loss, "func", None)]
    found = [getattr(each, name, None) for each in wrapped]
    found += [getattr(each, "keywords", {}).get(name) for each in wrapped]
    return [value for value in found if isinstance(value, int)]


def _doubled(value: Any) -> Any:
    return map_tensors(value, lambda t: t.double() if t.is_floating_point() else t)


@contextmanager
def _undisturbed(loss: object) -> Iterator[Callable[[], bool]]:
    """Put random number generators and the loss's buffers back; yields a test for changed buffers."""
    wrapped = [loss, getattr(loss, "function", None), getattr(loss, "__self__", None)]
    modules = [each for each in wrapped if isinstance(each, nn.Module)]
    before = [(b, b.clone()) for module in modules for b in module.buffers()]

    def changed() -> bool:
        return any(not torch.equal(buffer, values) for buffer, values in before)

    with _same_randomness():
        try:
            yield changed
        finally:
            for buffer, values in before:
                buffer.copy_(values)


@contextmanager
def _same_randomness() -> Iterator[None]:
    """Put the random number generators of torch, Python and NumPy back as they were."""
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def peek_item(labels: object, batch_size: int) -> Any | None:
    """Return a batch of a labels loader without taking one from it; None where that is impossible.

    A loader over a dataset with indices is asked for its first samples, in order, with the random
    number generators put back afterwards; of a sequence of batches the first is taken, of a tensor
    the first rows.
    """
    if isinstance(labels, torch.Tensor):
        return labels[:batch_size] if labels.dim() and len(labels) else None
    if isinstance(labels, list | tuple):
        return labels[0] if labels else None
    if not isinstance(labels, DataLoader) or type(labels).__iter__ is not DataLoader.__iter__:
        return None
    dataset: Any = labels.dataset
    if isinstance(dataset, IterableDataset):
        return None
    try:
        with _same_randomness():
            if labels.batch_sampler is None:
                return labels.collate_fn(dataset[0])
            indices = list(range(min(batch_size, len(dataset))))
            many = getattr(dataset, "__getitems__", None)
            samples = many(indices) if many is not None else [dataset[index] for index in indices]
            return labels.collate_fn(samples) if indices else None
    except Exception as error:  # whatever the user's dataset raises: training will raise it again
        logger.debug("a batch of the labels cannot be looked at: %s", error)
        return None
