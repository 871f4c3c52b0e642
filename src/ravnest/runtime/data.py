"""Batches of the user's loaders: targets, the criterion, and the comparison of Root and Leaf."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ravnest.errors import DataError
from ravnest.runtime.epoch_batches import begin_epoch
from ravnest.runtime.random_state import RandomState
from ravnest.runtime.stage.randomness import generator_lock
from ravnest.split.structure import tensors_in

logger = logging.getLogger(__name__)

LABELS = "labels"


def targets_of(batch: Any) -> Any:
    """Return the targets of a batch: ``["labels"]`` of a mapping, the last element of a sequence."""
    if isinstance(batch, Mapping):
        return batch.get(LABELS)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return batch[-1] if batch else None
    return batch


def inputs_of(batch: Any) -> Any:
    """Return the part of a batch that is not targets; None if there is no other part."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != LABELS}
    if isinstance(batch, Sequence) and len(batch) > 1:
        return list(batch[:-1])
    return None


def has_targets(batch: Any) -> bool:
    """Return whether a batch of a loader contains targets besides the inputs."""
    return (
        LABELS in batch if isinstance(batch, Mapping) else isinstance(batch, Sequence) and len(batch) > 1
    )


def size_of(values: Any) -> int:
    """Return the number of samples: the first dimension of the first tensor that has one, else 1."""
    return next((t.shape[0] for t in tensors_in(values) if t.dim()), 1)


def digest_of(values: Any) -> str | None:
    """Return a fast digest of the tensors in a value; None if it has no tensors."""
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
    """Return the digest that the Leaf compares: of the targets or, if there are none, of the inputs."""
    for name, part in (
        ("targets", targets_of(batch) if has_targets(batch) else None),
        ("inputs", batch),
    ):
        if (digest := digest_of(part)) is not None:
            return {name: digest}
    return {}


class WatchedLoader:
    """Wrapper of a user's loader that remembers the last batch.

    On nodes other than the Root it is empty, so that loops written for the Root do nothing there.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        active: bool,
        random: Callable[[], RandomState] = lambda: {},
        epoch: Callable[[], int] = lambda: 0,
    ) -> None:
        """``random`` returns the state of the generators that loaders use, ``epoch`` the epoch."""
        self._loader = loader
        self._active = active
        self._capture = random
        self._epoch = epoch
        self.random: RandomState | None = None
        """State of the generators when the iteration in progress began."""
        self.last: Any = None
        """Last batch, until ``take`` returns it."""
        self.exhausted = False
        """True if the last iteration reached the end."""

    def __iter__(self) -> Iterator[Any]:
        if not self._active:
            return
        self.exhausted = False
        begin_epoch(self._loader, self._epoch())
        with generator_lock:
            self.random = self._capture()
            iterator = iter(self._loader)
        while True:
            with generator_lock:
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
            self.last = batch
            yield batch
        self.last = self.random = None
        self.exhausted = True

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def take(self) -> Any:
        """Return the last batch and forget it."""
        batch, self.last = self.last, None
        return batch

    def was_exhausted(self) -> bool:
        """Return whether the last iteration reached the end, and reset the flag."""
        exhausted, self.exhausted = self.exhausted, False
        return exhausted


class Targets:
    """Labels at the Leaf, iterated in step with the Root's micro-batches."""

    def __init__(self, labels: Any, parameter: str) -> None:
        """``parameter``: name of the labels' parameter, for messages."""
        self._labels = labels
        self._parameter = parameter
        self._iterator: Iterator[Any] | None = None
        self._at = 0
        self._warned = False

    def begin(self, epoch: int) -> None:
        """Begin a phase with a new iteration of the labels."""
        if self._labels is None:
            raise DataError(
                f"the Leaf needs the labels of this phase: Node({self._parameter}=...) with the same "
                "loader as at the Root"
            )
        self._at = 0
        if isinstance(self._labels, torch.Tensor):
            self._iterator = None
            return
        begin_epoch(self._labels, epoch)
        with generator_lock:
            self._iterator = iter(self._labels)

    def skip(self, batches: int, samples: int) -> None:
        """Leave out the next labels."""
        if isinstance(self._labels, torch.Tensor):
            self._at += samples
            return
        assert self._iterator is not None
        for _ in range(batches):
            with generator_lock:
                if next(self._iterator, _END) is _END:
                    raise DataError(
                        f"training continues after batch {batches}, but {self._parameter} at the Leaf "
                        f"ends before it; {_CHECK}"
                    )

    def take(self, index: int, size: int, digests: Mapping[str, str]) -> Any:
        """Return the labels of a micro-batch; ``DataError`` if they do not match the Root's batch."""
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
                f"the Root sent micro-batch {index}, but {self._parameter} at the Leaf ends before it; "
                f"{_CHECK}"
            )
        self._compare(index, size, digests, item)
        return item

    def end(self, count: int, *, exhausted: bool) -> None:
        """End a phase after ``count`` micro-batches; ``exhausted``: the Root's loader has ended too."""
        iterator, self._iterator = self._iterator, None
        if iterator is None or not exhausted:
            return
        # Samplers may draw a random number at their end, so the Leaf must reach the end as well.
        with generator_lock:
            if next(iterator, _END) is not _END:
                raise DataError(
                    f"the Root's loader has ended after {count} micro-batches, but {self._parameter} at "
                    f"the Leaf has more; {_CHECK}"
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
                        f"micro-batch {index} has different {part} at Root and Leaf; {_CHECK}"
                    )
                return
        if not self._warned:
            self._warned = True
            logger.warning(
                "Root and Leaf load no common part of a batch: only the number and size of "
                "micro-batches are compared"
            )


_END = object()
_CHECK = (
    "check that both use the same dataset, batch size and set_seed(), and that a loader with "
    "shuffle=True has a torch.Generator with the same seed"
)


@dataclass(frozen=True)
class Criterion:
    """The user's loss function."""

    function: Callable[..., Any]

    def __call__(self, output: Any, item: Any) -> torch.Tensor:
        """Return the loss of an output, given an item of the labels loader."""
        if _is_torch_loss(self.function):
            loss = self.function(prediction_of(output), targets_of(item))
        else:
            loss = self.function(output, item)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise DataError(f"criterion must return a tensor with one number, not {_describe(loss)}")
        return loss

    def of_any_length(self) -> Criterion:
        """Return the criterion for other numbers of positions than those of the example.

        A captured loss checks the shapes of its inputs; ``any_length`` of the function, if it has one,
        is the same loss without that check.
        """
        relaxed = getattr(self.function, "any_length", None)
        return self if relaxed is None else Criterion(relaxed)


def prediction_of(output: Any) -> Any:
    """Return the tensor of an output for a loss of torch: ``logits``, or the first tensor."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return next(iter(tensors_in(output)), output)


def count_correct(output: Any, item: Any) -> tuple[int, int] | None:
    """Return the numbers of correct answers and of all answers; None if accuracy is undefined."""
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
