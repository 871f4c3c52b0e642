"""Logits and loss of the last stage, computed for some positions after the other.

The last linear layer, the loss and the backward pass of both run on a chunk of the positions at a
time. What remains of a micro-batch is the gradient of the layer's input, from which the backward pass
of the stage goes on, and the gradients of the layer's weights, which are added up in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ravnest.split.deferred import DeferredGradients
from ravnest.split.graph import MODES, Mode
from ravnest.split.loss_head import LossHead, match_loss_head
from ravnest.split.module import StageModule, check_inputs
from ravnest.split.program import Program

Loss = Callable[[tuple[Any, ...]], torch.Tensor]
"""Function from the outputs of the last stage to the loss."""


@dataclass(frozen=True)
class LossChunk:
    """Loss of some positions of a micro-batch."""

    size: int
    """Number of positions."""
    compute: Loss
    weight: float
    """Weight in the loss of the micro-batch; 0 if nothing counts in the chunk."""


@dataclass
class _WeightSums:
    """Gradients of the layer's weight and bias; None if they are not trained."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def add(self, gradient: torch.Tensor, x: torch.Tensor) -> None:
        """Add the gradients of a chunk in place; both arguments have two dimensions."""
        if self.weight is not None:
            self.weight.addmm_(gradient.t(), x)
        if self.bias is not None:
            self.bias.add_(gradient.sum(0))


class HeadPrograms:
    """A graph of the last stage in three pieces, prepared to run."""

    def __init__(self, module: StageModule, mode: Mode, head: LossHead) -> None:
        self.head = head
        self._module = module
        self._graph = module.spec.graphs[mode]
        self._trunk = Program(head.trunk, module.device)
        self._tail = Program(head.tail, module.device)

    def trunk(
        self,
        inputs: Sequence[Any],
        parameters: Mapping[str, torch.Tensor] | None = None,
        buffers: Mapping[str, torch.Tensor] | None = None,
        deferred: DeferredGradients | None = None,
    ) -> torch.Tensor:
        """Return the input of the layer; the arguments are those of ``StageModule.forward``."""
        check_inputs(self._graph, inputs)
        own = self._module.state_tensors() | dict(buffers or {}) | dict(parameters or {})
        state = [own[use.key] for use in self.head.trunk.state]
        (x,) = self._trunk(inputs, state, deferred)
        assert isinstance(x, torch.Tensor)
        return x

    def weights(
        self, parameters: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's weight and bias."""
        own = self._module.state_tensors() | dict(parameters)
        return own[self.head.weight], None if self.head.bias is None else own[self.head.bias]

    def outputs(self, logits: torch.Tensor) -> tuple[Any, ...]:
        """Return the outputs of the stage for logits of any number of positions."""
        return self._tail((logits,), ())


class ChunkedLoss:
    """The graphs of a last stage, with its last linear layer and the loss in chunks."""

    def __init__(self, module: StageModule, train: LossHead, evaluation: LossHead | None) -> None:
        self._module = module
        self._head = train
        self.train = HeadPrograms(module, "train", train)
        """Graph of training."""
        self._eval = None if evaluation is None else HeadPrograms(module, "eval", evaluation)

    @classmethod
    def of(cls, module: StageModule) -> ChunkedLoss | str:
        """Return the stage with its loss in chunks, or why its graph does not allow that."""
        train, evaluation = (match_loss_head(module.spec.graphs[mode]) for mode in MODES)
        if isinstance(train, str):
            return train
        return cls(module, train, None if isinstance(evaluation, str) else evaluation)

    def logits_shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of the logits for an input of the layer."""
        return (*x.shape[:-1], self._module.state_tensors()[self._head.weight].shape[0])

    def tail(self, logits: torch.Tensor) -> Any:
        """Return the model's output for logits of any number of positions."""
        structure = self._module.spec.graphs["train"].structure
        assert structure is not None
        return structure.build(iter(self.train.outputs(logits)))

    @property
    def evaluates(self) -> bool:
        """True if the evaluation graph can run in chunks too."""
        return self._eval is not None

    def evaluate(
        self, inputs: Sequence[Any], parameters: Mapping[str, torch.Tensor], sizes: Sequence[int]
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the outputs of an evaluation for chunks of these numbers of positions."""
        programs = self._eval
        assert programs is not None
        with torch.no_grad():
            x, weights = programs.trunk(inputs, parameters), programs.weights(parameters)
            for part in torch.split_with_sizes(x, list(sizes), 1):
                yield programs.outputs(torch.nn.functional.linear(part, *weights))

    def backward(
        self,
        x: torch.Tensor,
        chunks: Sequence[LossChunk],
        weight: float,
        parameters: Mapping[str, torch.Tensor],
        gradients: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss, and the gradient of the layer's input for ``weight`` times the loss.

        The gradients of the layer's weights are added to ``gradients``, by key.
        """
        matrix, bias = self.train.weights(parameters)
        sums = _WeightSums(
            _sum_of(self._head.weight, matrix, gradients), _sum_of(self._head.bias, bias, gradients)
        )
        x = x.detach()
        of_x = torch.zeros_like(x)
        total = 0.0
        first = 0
        for chunk in chunks:
            if chunk.weight:
                part = x.narrow(1, first, chunk.size).requires_grad_()
                loss = self._chunk_loss(chunk, part, matrix, bias, sums)
                total += chunk.weight * float(loss.detach())
                if loss.requires_grad:
                    share = torch.full_like(loss, chunk.weight * weight)
                    (found,) = torch.autograd.grad(loss, part, share)
                    of_x.narrow(1, first, chunk.size).copy_(found)
                del loss
            first += chunk.size
        return torch.tensor(total, dtype=torch.float64), of_x

    def _chunk_loss(
        self,
        chunk: LossChunk,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sums: _WeightSums,
    ) -> torch.Tensor:
        with torch.enable_grad():
            logits: torch.Tensor = _HeadCall.apply(  # type: ignore[no-untyped-call]
                x, weight, bias, sums
            )
            return chunk.compute(self.train.outputs(logits))


def _sum_of(
    key: str | None, parameter: torch.Tensor | None, gradients: dict[str, torch.Tensor]
) -> torch.Tensor | None:
    """Return the accumulated gradient of a parameter, zeros at first; None if it is not trained."""
    if key is None or parameter is None or not parameter.requires_grad:
        return None
    if key not in gradients:
        gradients[key] = torch.zeros_like(parameter)
    return gradients[key]


class _HeadCall(torch.autograd.Function):
    """A linear layer whose backward pass adds the gradients of its weights to sums, in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sums: _WeightSums,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums = sums
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        ctx.sums.add(rows, x.reshape(-1, x.shape[-1]))
        return rows.mm(weight).view(x.shape), None, None, None
