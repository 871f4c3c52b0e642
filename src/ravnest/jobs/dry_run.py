"""First batch through model and loss on the requester's machine, to find errors before upload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from ravnest.errors import JobError, StageInputError
from ravnest.jobs.dataset_reader import Rows, SharedData, collate_samples
from ravnest.jobs.dataset_writer import PackedData
from ravnest.jobs.graph_loss import as_sent, evaluate_loss
from ravnest.jobs.padded_samples import PaddedSamples
from ravnest.jobs.registry import loss_function
from ravnest.runtime.data import LABELS
from ravnest.schemas.jobs import NamedComponent
from ravnest.split.capture import Capture, mode_of
from ravnest.split.chain import bind_inputs
from ravnest.split.check_runs import call_model
from ravnest.split.example import Example, bind_example
from ravnest.split.graph import Mode
from ravnest.split.kept_model import model_kept
from ravnest.split.module import check_inputs, shown_names
from ravnest.split.splitter import PreparedModel
from ravnest.split.structure import map_tensors, tensors_in
from ravnest.split.torchscript import from_torchscript
from ravnest.split.varying import PADDING_ADVICE

_DEFAULT_BATCH_SIZE = 64
_SEED = 20_240_229


@dataclass(frozen=True)
class DryRun:
    """Output of the model for the first batch, and the labels of the batch."""

    output: Any
    labels: torch.Tensor

    def check_loss(self, loss: NamedComponent) -> None:
        """Raise ``JobError`` if a loss of torch does not fit output and labels."""
        evaluate_loss(loss_function(loss), self.output, self.labels)


def example_for(
    model: nn.Module,
    args: Sequence[Any] | torch.Tensor,
    kwargs: Mapping[str, Any],
    batch_size: int | None,
) -> Example:
    """Return the example inputs at the batch size of the training, for which costs are planned.

    ``batch_size=None`` keeps the example's batch size, or takes 64 if the example is a single sample.
    """
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    sizes = Counter(tensor.shape[0] for tensor in tensors_in((args, dict(kwargs))) if tensor.dim())
    found = sizes.most_common(1)[0][0] if sizes else 0
    size = batch_size or (found if found > 1 else _DEFAULT_BATCH_SIZE)
    bound = from_torchscript(model) if isinstance(model, torch.jit.ScriptModule) else model
    example = bind_example(bound, args, dict(kwargs))
    rows = torch.arange(size)
    tensors = [t[rows % len(t)] if example.has_batch(t) else t for t in example.tensors]
    return replace(example, tensors=tuple(tensors), batch_size=size)


def as_large_as(example: Example, batch: Mapping[str, torch.Tensor]) -> Example:
    """Return an example with the inputs of a batch of the same number of samples."""
    paths = zip(example.leaf_paths(), example.tensors, strict=True)
    return replace(example, tensors=tuple(batch[path].to(tensor.device) for path, tensor in paths))


def input_names(example: Example) -> list[str]:
    """Return the names of the inputs of ``forward`` that the data must provide, in order."""
    names = []
    for name, structure in zip(example.names, example.structures, strict=True):
        if structure.kind == "leaf":
            names.append(name)
        elif any(structure.leaf_paths(name)):
            raise JobError(
                f"the model's input {name!r} is a {structure.kind} of tensors, which the data of a job "
                "cannot contain: change the model to take one tensor per input"
            )
    return names


def check_data(prepared: PreparedModel, packed: PackedData, label: str) -> None:
    """Raise ``JobError`` if the first samples do not fit the model's inputs."""
    batch = _batch(prepared, packed)
    (stage,) = prepared.cut(()).stages
    graph, signature = stage.spec.graphs["train"], stage.spec.signature
    given = {entry.name: batch[entry.name] for entry in signature if entry.values}
    try:
        values = bind_inputs(signature, (), given)
        found = [values[value.name] for value in graph.inputs]
        check_inputs(graph, found, shown_names(signature))
    except StageInputError as error:
        raise JobError(
            f"{label} does not fit the example inputs that the model was captured with: {error}. The "
            f"model's inputs are {', '.join(entry.name for entry in signature)}"
        ) from error


def check_batch_sizes(
    prepared: PreparedModel, sizes: Sequence[int], label: str, mode: Mode = "train"
) -> None:
    """Raise ``JobError`` for a size of a batch that the model was not captured for."""
    (stage,) = prepared.cut(()).stages
    graph = stage.spec.graphs[mode]
    symbols = {symbol.name: symbol for symbol in graph.symbols}
    batches = {value.shape[0] for value in graph.inputs if value.shape}
    for batch, size in product(batches, sizes):
        symbol = symbols.get(batch.symbol)
        if symbol is not None and (size % batch.factor or not symbol.accepts(size // batch.factor)):
            raise JobError(
                f"{label} has a batch of {size} samples, but the model takes batches of {batch} samples "
                f"only, where {batch.symbol} is {symbol}: its forward decides by the size. If it is "
                "the last batch of an epoch, use drop_last=True, else another batch_size"
            )


def check_lengths(
    prepared: PreparedModel, samples: PaddedSamples, label: str, mode: Mode = "train"
) -> None:
    """Raise ``JobError`` for a size of a sample that the model was not captured for.

    A batch has the size of its largest sample.
    """
    (stage,) = prepared.cut(()).stages
    graph, shown = stage.spec.graphs[mode], shown_names(stage.spec.signature)
    bounds = {symbol.name: symbol for symbol in graph.symbols}
    for value in graph.inputs:
        name = shown[value.name]
        for dim, dimension in enumerate(value.shape):
            symbol = bounds.get(dimension.symbol)
            if symbol is None or not symbol.length:
                continue
            for size in torch.unique(samples.sizes[name][:, dim - 1]).tolist():
                if size % dimension.factor or not symbol.accepts(size // dimension.factor):
                    raise JobError(
                        f"{label} has a sample with size {size} in dimension {dim} of {name}, but the "
                        f"model takes {dimension} there only, where {dimension.symbol} is {symbol}: its "
                        f"forward decides by the size. Change forward, or {PADDING_ADVICE}"
                    )


def dry_run(
    prepared: PreparedModel, packed: PackedData, largest: Mapping[str, torch.Tensor] | None = None
) -> DryRun:
    """Run the model on ``largest``, a batch of inputs and labels, or on the first samples."""
    batch = _batch(prepared, packed) if largest is None else largest
    example = prepared.capture.example
    tensors = [
        batch[path].to(tensor.device)
        for path, tensor in zip(example.leaf_paths(), example.tensors, strict=True)
    ]
    return DryRun(_output(prepared.capture, example, tensors), batch[LABELS])


def first_inputs(prepared: PreparedModel, packed: PackedData) -> dict[str, torch.Tensor]:
    """Return the inputs of the first samples by name, in the order of ``forward``."""
    batch = _batch(prepared, packed)
    return {name: batch[name] for name in input_names(prepared.capture.example)}


def _batch(prepared: PreparedModel, packed: PackedData) -> dict[str, torch.Tensor]:
    """Return the first samples as a batch of the example's size; repeat them if there are too few."""
    shared = SharedData(
        [Rows(path, 0, rows) for path, rows in packed.inputs[:1]],
        [Rows(path, 0, rows) for path, rows in packed.labels[:1]],
    )
    count = prepared.capture.example.batch_size or 1
    return collate_samples([shared[row % len(shared)] for row in range(count)])


def _output(capture: Capture, example: Example, tensors: Sequence[torch.Tensor]) -> Any:
    """Run the model in training mode without changing it or torch's random state."""
    args, kwargs = example.rebuild(tensors)
    kept = model_kept(capture.model, capture.written_parameters)
    with kept, mode_of(capture.model, "train"), torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(_SEED)
        output = call_model(capture, args, kwargs)
    return map_tensors(as_sent(output), torch.Tensor.cpu)
