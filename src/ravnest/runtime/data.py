"""Batches as users load them: what the loss gets, and whether Root and Leaf see the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ravnest.errors import DataError
from ravnest.runtime.stage.randomness import generator_lock
from ravnest.split.structure import tensors_in

logger = logging.getLogger(__name__)

LABELS = "labels"


def targets_of(batch: Any) -> Any:
    """The targets in a batch: ``["labels"]`` of a mapping, the last element of a sequence."""
    if isinstance(batch, Mapping):
        return batch.get(LABELS)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return batch[-1] if batch else None
    return batch


def inputs_of(batch: Any) -> Any:
    """What is not a target in a batch; None where a batch has nothing else."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != LABELS}
    if isinstance(batch, Sequence) and len(batch) > 1:
        return list(batch[:-1])
    return None


def has_targets(batch: Any) -> bool:
    """Whether a batch of a loader holds targets beside the inputs."""
    return (
        LABELS in batch if isinstance(batch, Mapping) else isinstance(batch, Sequence) and len(batch) > 1
    )


def size_of(values: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor that has one; else 1."""
    return next((t.shape[0] for t in tensors_in(values) if t.dim()), 1)


def digest_of(values: Any) -> str | None:
    """A cheap digest of the tensors in a value; None where there are none."""
    tensors = tensors_in(values)
    if not tensors:
        return None
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        plain = tensor.detach().cpu().contiguous()
        if plain.numel():
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digests_of(batch: Any) -> dict[str, str]:
    """The digest by which the Leaf knows a batch of the Root: of its targets, else of its inputs."""
    for name, part in (
        ("targets", targets_of(batch) if has_targets(batch) else None),
        ("inputs", batch),
    ):
        if (digest := digest_of(part)) is not None:
            return {name: digest}
    return {}


class WatchedLoader:
    """A user's loader at the Root; it remembers the batch that was taken last.

    On other nodes it is empty, so that loops written for the Root do no work there.
    """

    def __init__(self, loader: Iterable[Any], *, active: bool) -> None:
        self._loader = loader
        self._active = active
        self.last: Any = None
        """The batch that was taken last and not yet asked for by ``take``."""
        self.exhausted = False
        """The last iteration went to its end."""

    def __iter__(self) -> Iterator[Any]:
        if not self._active:
            return
        self.exhausted = False
        with generator_lock:
            iterator = iter(self._loader)
        while True:
            with generator_lock:
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
            self.last = batch
            yield batch
        self.last = None
        self.exhausted = True

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def take(self) -> Any:
        """The batch that was taken last, once."""
        batch, self.last = self.last, None
        return batch

    def was_exhausted(self) -> bool:
        """Whether the last iteration went to its end; once."""
        exhausted, self.exhausted = self.exhausted, False
        return exhausted


class Targets:
    """The Leaf's side of the data: what its labels give, in step with the Root's micro-batches."""

    def __init__(self, labels: Any, parameter: str) -> None:
        """``parameter``: how the user calls the labels, for messages."""
        self._labels = labels
        self._parameter = parameter
        self._iterator: Iterator[Any] | None = None
        self._at = 0
        self._said = False

    def begin(self) -> None:
        """A phase starts: a new iteration of the loader."""
        if self._labels is None:
            raise DataError(
                f"the Leaf needs the labels of this phase: Node({self._parameter}=...), the same loader "
                "as the Root's"
            )
        self._at = 0
        if isinstance(self._labels, torch.Tensor):
            self._iterator = None
            return
        with generator_lock:
            self._iterator = iter(self._labels)

    def take(self, index: int, size: int, digests: Mapping[str, str]) -> Any:
        """The item of a micro-batch; ``DataError`` if it is not the one that the Root sent."""
        item: Any
        if isinstance(self._labels, torch.Tensor):
            item = self._labels[self._at : self._at + size]
            self._at += size
        else:
            assert self._iterator is not None
            with generator_lock:
                item = next(self._iterator, _END)
        if item is _END or (isinstance(item, torch.Tensor) and not item.shape[:1].numel()):
            raise DataError(
                f"the Root sent micro-batch {index}, but {self._parameter} of the Leaf ends before it; "
                f"{_CHECK}"
            )
        self._compare(index, size, digests, item)
        return item

    def end(self, count: int, *, exhausted: bool) -> None:
        """The phase is over after ``count`` micro-batches; ``exhausted``: so is the Root's loader."""
        iterator, self._iterator = self._iterator, None
        if iterator is None or not exhausted:
            return
        # Samplers may draw once more when they find their end: both sides must.
        with generator_lock:
            if next(iterator, _END) is not _END:
                raise DataError(
                    f"the Root's loader has ended after {count} micro-batches, {self._parameter} of the "
                    f"Leaf has more; {_CHECK}"
                )

    def _compare(self, index: int, size: int, digests: Mapping[str, str], item: Any) -> None:
        if (samples := size_of(item)) != size:
            raise DataError(
                f"micro-batch {index} has {size} samples at the Root, {samples} at the Leaf; {_CHECK}"
            )
        own = {"targets": targets_of, "inputs": inputs_of}
        for part, digest in digests.items():
            found = digest_of(own[part](item)) if part in own else None
            if found is not None:
                if found != digest:
                    raise DataError(
                        f"micro-batch {index} has other {part} at the Root than at the Leaf; {_CHECK}"
                    )
                return
        if not self._said:
            self._said = True
            logger.warning(
                "Root and Leaf have no part of a batch in common: only the number and size of "
                "micro-batches are compared"
            )


_END = object()
_CHECK = (
    "check that both use the same dataset, batch size and set_seed(), and that a loader with "
    "shuffle=True has a torch.Generator with the same seed"
)


@dataclass(frozen=True)
class Criterion:
    """The user's loss, and what it is given."""

    function: Callable[..., Any]

    def __call__(self, output: Any, item: Any) -> torch.Tensor:
        """The loss of an output, with what the labels loader gave."""
        if _is_torch_loss(self.function):
            loss = self.function(prediction_of(output), targets_of(item))
        else:
            loss = self.function(output, item)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise DataError(f"criterion must return a tensor with one number, not {_describe(loss)}")
        return loss


def prediction_of(output: Any) -> Any:
    """The tensor in an output that a loss of torch looks at: ``logits``, or the first."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return next(iter(tensors_in(output)), output)


def hits(output: Any, item: Any) -> tuple[int, int] | None:
    """Right answers and answers in all; None where accuracy makes no sense."""
    prediction, targets = prediction_of(output), targets_of(item)
    if not isinstance(prediction, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return None
    if prediction.dim() < 2 or prediction.shape[1] < 2 or not prediction.dtype.is_floating_point:
        return None
    targets = targets.to(prediction.device)
    if targets.shape == prediction.shape:
        if not bool(((targets == 0) | (targets == 1)).all() & (targets.sum(1) == 1).all()):
            return None
        targets = targets.argmax(1)
    elif targets.dtype.is_floating_point or targets.shape != _without_classes(prediction):
        return None
    return int((prediction.argmax(1) == targets).sum()), targets.numel()


def _without_classes(prediction: torch.Tensor) -> torch.Size:
    return torch.Size([prediction.shape[0], *prediction.shape[2:]])


def _is_torch_loss(function: Callable[..., Any]) -> bool:
    kind = type(function) if isinstance(function, torch.nn.Module) else function
    module = getattr(kind, "__module__", None) or ""
    builtin = module.startswith("torch._C") or module == "torch"
    return builtin or module.startswith(("torch.nn.modules.loss", "torch.nn.functional"))


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"one of shape {list(value.shape)}"
    return type(value).__name__
