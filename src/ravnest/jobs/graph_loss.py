"""Custom losses as graphs of allow-listed operators, which providers run like stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from torch import nn

from ravnest.errors import CaptureError, DataError, JobError, StageFormatError
from ravnest.runtime.data import Criterion, targets_of
from ravnest.split.chain import bind_inputs
from ravnest.split.encoding import stage_from_json, stage_to_json
from ravnest.split.graph import Dimension, StageGraph
from ravnest.split.limits import MAX_STAGE_BYTES
from ravnest.split.module import StageModule
from ravnest.split.precision import Precision, computed_in
from ravnest.split.structure import flatten, map_tensors, tensors_in
from ravnest.store.files import read_json, write_json
from ravnest.store.weights import load_weights, save_weights

if TYPE_CHECKING:
    from ravnest.split.splitter import PreparedModel
    from ravnest.split.varying import Varying

LOSS_FILE = "loss.json"
WEIGHTS_FILE = "loss.safetensors"
_OUTPUT, _LABELS = "output", "labels"
_TOLERANCE = 1e-6
_SEED = 20_240_229
_ANY_SIZE = "replace len(x), int(x.shape[0]) or a constant in view/reshape by x.shape[0] or -1"
_REASONS = (
    "possible reasons are hooks, state outside of buffers, or random numbers from outside of torch"
)


@dataclass(frozen=True)
class PackedLoss:
    """Files of an exported loss."""

    stage: Path
    weights: Path


class GraphCriterion:
    """Exported loss, called with the model's output and an item of the labels loader."""

    def __init__(self, module: StageModule) -> None:
        self.module = module

    @cached_property
    def any_length(self) -> GraphCriterion:
        """The same loss for inputs of any size.

        Its operations may depend on the captured sizes: compare its results before they are used.
        """
        spec = self.module.spec
        graphs = {mode: _without_sizes(graph) for mode, graph in spec.graphs.items()}
        return GraphCriterion(
            StageModule(replace(spec, graphs=graphs), self.module.state_tensors(), self.module.device)
        )

    def __call__(self, output: Any, item: Any) -> torch.Tensor:
        spec = self.module.spec
        values = bind_inputs(spec.signature, (output, targets_of(item)), {})
        inputs = (values[value.name] for value in spec.graphs["train"].inputs)
        (loss,) = self.module(*inputs)
        assert isinstance(loss, torch.Tensor)
        return loss


def _without_sizes(graph: StageGraph) -> StageGraph:
    inputs = (replace(value, shape=(Dimension(1, "?"),) * len(value.shape)) for value in graph.inputs)
    return replace(graph, inputs=tuple(inputs))


class _Loss(nn.Module):
    """A criterion as a module with the inputs that ``Node`` passes to it."""

    def __init__(self, criterion: Callable[..., Any]) -> None:
        super().__init__()
        self.module = criterion if isinstance(criterion, nn.Module) else None
        self._criterion = Criterion(criterion)

    def forward(self, output: Any, labels: torch.Tensor) -> torch.Tensor:
        return self._criterion(output, labels)


def as_sent(output: Any) -> Any:
    """Return a model's output as the last stage sends it: tensors and plain values only."""
    leaves, structure = flatten(output, _OUTPUT, lambda _path, _value: None)
    return structure.build(iter(leaves))


def pack_loss(
    criterion: Callable[..., Any],
    example_output: Any,
    example_labels: torch.Tensor,
    folder: Path,
    *,
    varying: Varying | None = None,
    precision: Precision | None = None,
) -> PackedLoss:
    """Export a criterion below ``folder`` and compare the graph with the criterion on the example.

    The criterion is called with the model's output and the labels of a batch. It must return one
    number that depends on the output through differentiable torch operations. ``varying`` are
    dimensions besides the batch whose sizes vary, up to those of the example. ``precision`` is that of
    the model, for matrix products in the criterion. Raises ``JobError``.
    """
    from ravnest.split.splitter import prepare  # noqa: PLC0415 - providers load losses, capture none

    loss = _Loss(criterion)
    if any(parameter.requires_grad for parameter in loss.parameters()):
        raise JobError(
            "the criterion has trainable parameters, which would not be trained: move them into the "
            "model, or call requires_grad_(False) on the criterion"
        )
    example = (as_sent(example_output), example_labels)
    expected = evaluate_loss(criterion, *example, precision)
    try:
        prepared = prepare(loss, example, varying=varying, precision=precision)
    except CaptureError as error:
        raise JobError(f"the criterion cannot be captured as a graph. {error}") from error
    if prepared.capture.fixed_batch:
        raise JobError(
            "the criterion accepts only batches of one size, because it uses the batch size as a "
            f"constant: {_ANY_SIZE}"
        )
    packed = write_graph(prepared, folder)
    _compare(expected, evaluate_loss(load_loss(packed.stage, packed.weights), *example))
    return packed


class _Metric(nn.Module):
    """A metric as a module with the inputs of a loss."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module = function if isinstance(function, nn.Module) else None
        self._function = function

    def forward(self, output: Any, labels: torch.Tensor) -> torch.Tensor:
        value = self._function(output, labels)
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"it must return a tensor, not a {type(value).__name__}")
        return value


def pack_metric(
    function: Callable[..., Any],
    label: str,
    example_output: Any,
    example_labels: torch.Tensor,
    folder: Path,
) -> PackedLoss:
    """Export a metric below ``folder`` and compare the graph with the function on the example.

    It is called with the model's output and the labels of a batch and returns a number, or a tensor of
    values whose mean is the metric. Raises ``JobError``.
    """
    from ravnest.split.splitter import prepare  # noqa: PLC0415 - providers load metrics, capture none

    metric = _Metric(function)
    example = (as_sent(example_output), example_labels)
    try:
        with torch.no_grad():
            expected = metric(as_sent(example_output), example_labels.clone())
        prepared = prepare(metric, example)
    except CaptureError as error:
        raise JobError(f"the metric {label!r} cannot be captured as a graph. {error}") from error
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        raise JobError(
            f"the metric {label!r} fails on the model's output for the first samples of train_data: "
            f"{type(error).__name__}: {error}"
        ) from error
    if prepared.capture.fixed_batch:
        raise JobError(f"the metric {label!r} accepts only batches of one size: {_ANY_SIZE}")
    packed = write_graph(prepared, folder)
    with torch.no_grad():
        found = load_loss(packed.stage, packed.weights)(*example)
    if found.shape != expected.shape or not torch.allclose(
        found.double(), expected.double(), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True
    ):
        raise JobError(
            f"the captured graph of the metric {label!r} computes other values than the function: "
            f"{_REASONS}"
        )
    return packed


def write_graph(prepared: PreparedModel, folder: Path) -> PackedLoss:
    """Write a captured function as one stage below ``folder``."""
    (stage,) = prepared.cut(()).stages
    packed = PackedLoss(folder / LOSS_FILE, folder / WEIGHTS_FILE)
    save_weights(packed.weights, stage.tensors)
    write_json(packed.stage, stage_to_json(stage.spec), compact=True)
    return packed


def load_loss(
    stage: Path, weights: Path, device: torch.device | str = "cpu"
) -> Callable[[Any, Any], torch.Tensor]:
    """Load a loss that ``pack_loss`` wrote.

    Raises ``StageFormatError`` or ``OperatorError`` for any other file.
    """
    spec = stage_from_json(read_json(stage, MAX_STAGE_BYTES))
    names = [entry.name for entry in spec.signature]
    outputs = spec.graphs["train"].outputs
    if spec.count != 1 or names != [_OUTPUT, _LABELS] or len(outputs) != 1:
        raise StageFormatError(
            f"{stage} is not a loss: a loss takes an output and labels and returns one number"
        )
    return GraphCriterion(StageModule(spec, load_weights(weights, spec.state), device))


def evaluate_loss(
    criterion: Callable[..., Any],
    output: Any,
    labels: torch.Tensor,
    precision: Precision | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the loss of an output and its gradients; raise ``JobError`` if it cannot train."""
    output = map_tensors(output, lambda t: t.detach().clone().requires_grad_(t.is_floating_point()))
    leaves = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(_SEED)
        try:
            with computed_in(precision):
                loss = Criterion(criterion)(output, labels.clone())
        except DataError as error:
            raise JobError(str(error)) from error
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
            raise JobError(
                "the criterion fails on the model's output for the first samples of train_data: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not loss.requires_grad:
            raise JobError(
                "the loss does not depend on the model's output through differentiable operations, so "
                "nothing would be learned: use torch operations without detach() or item()"
            )
        return loss.detach(), list(torch.autograd.grad(loss.sum(), leaves, allow_unused=True))


def _compare(
    expected: tuple[torch.Tensor, list[torch.Tensor | None]],
    actual: tuple[torch.Tensor, list[torch.Tensor | None]],
) -> None:
    pairs = [(expected[0], actual[0]), *zip(expected[1], actual[1], strict=True)]
    for before, after in pairs:
        a, b = (torch.zeros(()) if each is None else each for each in (before, after))
        with contextlib.suppress(RuntimeError):  # different shapes count as a difference
            if torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
                continue
        raise JobError(
            f"the captured graph of the criterion computes another loss than the criterion: {_REASONS}"
        )
