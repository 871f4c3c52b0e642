"""A requester's own loss as a graph of allow-listed operators, run by providers as stages are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ravnest.errors import CaptureError, DataError, JobError, StageFormatError
from ravnest.runtime.data import Criterion, targets_of
from ravnest.split.chain import bind_inputs
from ravnest.split.encoding import stage_from_json, stage_to_json
from ravnest.split.module import StageModule
from ravnest.split.splitter import prepare
from ravnest.split.structure import flatten, map_tensors, tensors_in
from ravnest.store.bundle import STAGE_LIMIT
from ravnest.store.files import read_json, write_json
from ravnest.store.weights import load_weights, save_weights

LOSS_FILE = "loss.json"
WEIGHTS_FILE = "loss.safetensors"
_OUTPUT, _LABELS = "output", "labels"
_TOLERANCE = 1e-6
_SEED = 20_240_229


@dataclass(frozen=True)
class PackedLoss:
    """A loss on disk."""

    stage: Path
    weights: Path


class GraphCriterion:
    """A loss that was exported: called with the model's output and what the labels loader gives."""

    def __init__(self, module: StageModule) -> None:
        self.module = module

    def __call__(self, output: Any, item: Any) -> torch.Tensor:
        spec = self.module.spec
        values = bind_inputs(spec.signature, (output, targets_of(item)), {})
        inputs = (values[value.name] for value in spec.graphs["train"].inputs)
        (loss,) = self.module(*inputs)
        assert isinstance(loss, torch.Tensor)
        return loss


class _Loss(nn.Module):
    """A criterion as a model of two inputs. Losses of torch get what ``Node`` gives them."""

    def __init__(self, criterion: Callable[..., Any]) -> None:
        super().__init__()
        self.module = criterion if isinstance(criterion, nn.Module) else None
        self._criterion = Criterion(criterion)

    def forward(self, output: Any, labels: torch.Tensor) -> torch.Tensor:
        return self._criterion(output, labels)


def as_sent(output: Any) -> Any:
    """A model's output as the last stage gives it: without what is no tensor and no plain value."""
    leaves, structure = flatten(output, _OUTPUT, lambda _path, _value: None)
    return structure.build(iter(leaves))


def pack_loss(
    criterion: Callable[..., Any], example_output: Any, example_labels: torch.Tensor, folder: Path
) -> PackedLoss:
    """Export a criterion below ``folder``, and compare the result with it on the example.

    It is called with the model's output and the labels of a batch, and must return one number that
    depends on the output by differentiable operations of torch. ``JobError`` says what does not fit.
    """
    loss = _Loss(criterion)
    if any(parameter.requires_grad for parameter in loss.parameters()):
        raise JobError(
            "the criterion has parameters of its own, which nobody would train: make them part of the "
            "model, or call requires_grad_(False) on the criterion"
        )
    example = (as_sent(example_output), example_labels)
    expected = evaluate_loss(criterion, *example)
    try:
        prepared = prepare(loss, example)
    except CaptureError as error:
        raise JobError(f"the criterion cannot be sent as a graph. {error}") from error
    if prepared.capture.fixed_batch:
        raise JobError(
            "the criterion works for batches of one size only: it uses the size of the batch as a plain "
            "number. Replace len(x), int(x.shape[0]) or a constant in view/reshape by x.shape[0] or -1"
        )
    (stage,) = prepared.cut(()).stages
    packed = PackedLoss(folder / LOSS_FILE, folder / WEIGHTS_FILE)
    save_weights(packed.weights, stage.tensors)
    write_json(packed.stage, stage_to_json(stage.spec), compact=True)
    _compare(expected, evaluate_loss(load_loss(packed.stage, packed.weights), *example))
    return packed


def load_loss(
    stage: Path, weights: Path, device: torch.device | str = "cpu"
) -> Callable[[Any, Any], torch.Tensor]:
    """A loss that ``pack_loss`` wrote; ``StageFormatError`` or ``OperatorError`` for anything else."""
    spec = stage_from_json(read_json(stage, STAGE_LIMIT))
    names = [entry.name for entry in spec.signature]
    outputs = spec.graphs["train"].outputs
    if spec.count != 1 or names != [_OUTPUT, _LABELS] or len(outputs) != 1:
        raise StageFormatError(
            f"{stage} is not a loss: it needs an output and labels, and gives a number"
        )
    return GraphCriterion(StageModule(spec, load_weights(weights, spec.state), device))


def evaluate_loss(
    criterion: Callable[..., Any], output: Any, labels: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The loss of an output and its gradients; ``JobError`` where a criterion cannot train."""
    output = map_tensors(output, lambda t: t.detach().clone().requires_grad_(t.is_floating_point()))
    leaves = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(_SEED)
        try:
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
                "the criterion's loss does not depend on the model's output by operations that can be "
                "differentiated: nothing would be learned"
            )
        return loss.detach(), list(torch.autograd.grad(loss.sum(), leaves, allow_unused=True))


def _compare(
    expected: tuple[torch.Tensor, list[torch.Tensor | None]],
    actual: tuple[torch.Tensor, list[torch.Tensor | None]],
) -> None:
    pairs = [(expected[0], actual[0]), *zip(expected[1], actual[1], strict=True)]
    for before, after in pairs:
        a, b = (torch.zeros(()) if each is None else each for each in (before, after))
        with contextlib.suppress(RuntimeError):  # shapes that do not fit differ
            if torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
                continue
        raise JobError(
            "the criterion as a graph computes something else than the criterion: hooks, state outside "
            "of buffers, or random numbers from another source than torch are possible reasons"
        )
