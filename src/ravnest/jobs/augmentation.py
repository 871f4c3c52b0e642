"""Augmentation of a job's training batches: a function of the inputs, captured as a graph.

The Root runs it on each batch of each epoch. Its random numbers follow from the seed of the job, the
cluster, the epoch and the number of the batch, so that a resumed training draws the same ones.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ravnest.errors import CaptureError, DataError, JobError, StageFormatError
from ravnest.jobs.graph_loss import PackedLoss, write_graph
from ravnest.runtime.stage.randomness import seeded
from ravnest.split.chain import bind_inputs
from ravnest.split.encoding import stage_from_json
from ravnest.split.limits import MAX_STAGE_BYTES
from ravnest.split.module import StageModule
from ravnest.store.files import read_json
from ravnest.store.weights import load_weights

Tensors = tuple[torch.Tensor, ...]
Augmentation = Callable[[Sequence[torch.Tensor]], Tensors]
_INPUTS = "inputs"
_SEED = 20_240_229
_CPU = torch.device("cpu")


def augmentation_seed(seed: int, cluster: int, epoch: int, batch: int) -> int:
    """Return the seed with which a batch of a cluster is augmented."""
    name = struct.pack("<4Q", seed, cluster, epoch, batch)
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


class _Augment(nn.Module):
    """A function of a batch's inputs as a module with one input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module = function if isinstance(function, nn.Module) else None
        self._function = function

    def forward(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        found = self._function(*inputs)
        return (found,) if isinstance(found, torch.Tensor) else tuple(found)


def pack_augmentation(
    function: Callable[..., Any], batch: Mapping[str, torch.Tensor], folder: Path
) -> PackedLoss:
    """Export a function of the inputs of a batch, by position, and compare the graph with it.

    It returns the inputs in the same order, with the same shapes and dtypes. Raises ``JobError``.
    """
    from ravnest.split.splitter import prepare  # noqa: PLC0415 - providers load graphs, capture none

    module, inputs = _Augment(function), tuple(batch.values())
    if any(parameter.requires_grad for parameter in module.parameters()):
        raise JobError("augment has trainable parameters, which would not be trained")
    try:
        with torch.no_grad(), seeded(_SEED, _CPU):
            expected = module(tuple(tensor.clone() for tensor in inputs))
        _check(inputs, expected, tuple(batch))
        prepared = prepare(module, (inputs,))
    except CaptureError as error:
        raise JobError(f"augment cannot be captured as a graph. {error}") from error
    except DataError as error:
        raise JobError(f"augment {error}") from error
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        raise JobError(
            f"augment fails on the first samples of train_data: {type(error).__name__}: {error}"
        ) from error
    if prepared.capture.fixed_batch:
        raise JobError(
            "augment accepts only batches of one size: replace len(x), int(x.shape[0]) or a constant "
            "in view/reshape by x.shape[0] or -1"
        )
    packed = write_graph(prepared, folder)
    with seeded(_SEED, _CPU):
        found = load_augmentation(packed.stage, packed.weights)(inputs)
    if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
        raise JobError(
            "the captured graph of augment computes something else than the function: use random "
            "numbers of torch only, and decide with torch.where instead of if"
        )
    return packed


def load_augmentation(stage: Path, weights: Path) -> Augmentation:
    """Load a function that ``pack_augmentation`` wrote; ``StageFormatError`` for any other file."""
    spec = stage_from_json(read_json(stage, MAX_STAGE_BYTES))
    if spec.count != 1 or [entry.name for entry in spec.signature] != [_INPUTS]:
        raise StageFormatError(f"{stage} is not an augmentation: it takes the inputs of a batch")
    module = StageModule(spec, load_weights(weights, spec.state), _CPU)

    def augment(inputs: Sequence[torch.Tensor]) -> Tensors:
        values = bind_inputs(spec.signature, (tuple(inputs),), {})
        with torch.no_grad():
            found = module(*(values[value.name] for value in spec.graphs["train"].inputs))
        return tuple(value for value in found if isinstance(value, torch.Tensor))

    return augment


class AugmentedBatches:
    """A loader of batches by name, whose inputs are augmented anew in each epoch."""

    def __init__(
        self, loader: Any, names: Sequence[str], augment: Augmentation, *, seed: int, cluster: int
    ) -> None:
        """``names``: the inputs in the order in which the function takes them."""
        self._loader = loader
        self._names = tuple(names)
        self._augment = augment
        self._seed, self._cluster = seed, cluster
        self._epoch = 0

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number, batch in enumerate(self._loader):
            inputs = [batch[name] for name in self._names]
            seed = augmentation_seed(self._seed, self._cluster, self._epoch, number)
            with seeded(seed, _CPU):
                found = self._augment(inputs)
            _check(inputs, found, self._names)
            yield {**batch, **dict(zip(self._names, found, strict=True))}

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _check(inputs: Sequence[torch.Tensor], found: Sequence[Any], names: Sequence[str]) -> None:
    if len(found) != len(inputs):
        raise DataError(f"returns {len(found)} tensors for {len(inputs)} inputs: {', '.join(names)}")
    for name, before, after in zip(names, inputs, found, strict=True):
        if not isinstance(after, torch.Tensor) or (after.shape, after.dtype) != (
            before.shape,
            before.dtype,
        ):
            shown = (
                f"shape {list(after.shape)} and {after.dtype}"
                if isinstance(after, torch.Tensor)
                else type(after).__name__
            )
            raise DataError(
                f"returns {shown} for the input {name}, which has shape {list(before.shape)} and "
                f"{before.dtype}"
            )
