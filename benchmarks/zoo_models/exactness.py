"""Check that stages compute the same as the model, without code of the splitter's own check.

Both run the same short training, and all recorded tensors are compared.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zoo_models.registry import BATCH

SMALL_BATCH = 2
FIRST_STEP = "step 1"
NOISE = 1e-6
"""Largest relative difference that another order of summation explains."""
DRIFT = 1e-3
"""Largest relative difference at the end that such noise in the first step explains."""

Recording = dict[str, Tensor]
"""Recorded tensors by the name that reports use."""


class Trainable(Protocol):
    """Common interface of a model and a chain of stages."""

    def train(self, mode: bool = True) -> Any: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def backward(self, loss: Tensor) -> None: ...
    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...
    def state_dict(self) -> Mapping[str, Tensor]: ...


class Unsplit:
    """The model itself, with the interface of a chain.

    Submodules that are in evaluation mode while the model is in training mode stay so, as in a training
    loop that calls their ``eval()`` after each ``model.train()``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._kept = [m for m in model.modules() if model.training and not m.training]

    def train(self, mode: bool = True) -> None:
        self.model.train(mode)
        for module in self._kept:
            module.eval()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def state_dict(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()


@dataclass(frozen=True)
class Difference:
    """The tensor with the largest difference."""

    name: str
    relative: float
    """Relative to the tensor's largest value, or to 1e-4 of the largest gradient if that is larger."""

    def __str__(self) -> str:
        return f"{self.relative:.0e} in {self.name}"


def record_training(
    trainee: Trainable, args: tuple[Any, ...], kwargs: dict[str, Any], *, small_batch: bool = True
) -> Recording:
    """Run two optimizer steps, evaluation, and both modes on a smaller batch; record all results."""
    recording: Recording = {}
    with _plain_kernels():
        trainable = [p for _, p in trainee.named_parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=0.01, momentum=0.9)
        for step in (1, 2):
            recording |= _train(trainee, args, kwargs, f"step {step}")
            optimizer.step()
            optimizer.zero_grad()
        recording |= _evaluate(trainee, args, kwargs, "eval")
        if small_batch:
            few, named = narrowed(args), narrowed(kwargs)
            recording |= _train(trainee, few, named, f"batch {SMALL_BATCH}")
            optimizer.step()
            recording |= _evaluate(trainee, few, named, f"batch {SMALL_BATCH} eval")
    recording |= {f"state {name}": t.detach().clone() for name, t in trainee.state_dict().items()}
    return recording


def narrowed(value: Any, size: int = SMALL_BATCH) -> Any:
    """Return the same nested inputs with the first ``size`` examples of the batch only."""
    return _map_tensors(
        value, lambda t: t[:size].clone() if t.dim() and t.shape[0] == BATCH else t.clone()
    )


def compare(expected: Recording, actual: Recording, phase: str = "") -> Difference | None:
    """Return the largest difference in a phase; None if everything is bitwise equal."""
    gradients = [_largest(t) for name, t in expected.items() if "gradient" in name]
    floor = 1e-4 * max(gradients, default=0.0)
    worst: Difference | None = None
    for name in expected | actual:
        if not name.startswith(phase):
            continue
        relative = _relative(expected.get(name), actual.get(name), floor)
        if relative is not None and (worst is None or relative > worst.relative):
            worst = Difference(name, relative)
    return worst


def is_noise(expected: Recording, actual: Recording) -> bool:
    """Return True if another order of summation explains the difference."""
    first, worst = compare(expected, actual, FIRST_STEP), compare(expected, actual)
    if worst is None or worst.relative <= NOISE:
        return True
    return first is not None and first.relative <= NOISE and worst.relative <= DRIFT


def tensor_leaves(value: Any, path: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a nested output with their paths; other objects are skipped."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, bool | int | float):
        yield path, torch.tensor(value)
    else:
        for key, item in _items(value):
            yield from tensor_leaves(item, f"{path}.{key}")


def loss_of(output: Any) -> Tensor:
    """Return a scalar that depends on every element of every real or complex output."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for _, leaf in tensor_leaves(output):
        real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        if real.is_floating_point():
            weights = torch.rand(real.shape, generator=generator).to(real.dtype) - 0.5
            total = total + (real * weights).sum()
    return total


@contextlib.contextmanager
def _plain_kernels() -> Iterator[None]:
    """Switch off optimisations of torch that change results.

    The attention fast path rounds differently in evaluation; TorchScript rewrites a module's backward
    after some runs.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.jit.optimized_execution(False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return keys and children of a container; () for anything else."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, list | tuple):
        return enumerate(value)
    if is_dataclass(value) and not isinstance(value, type):
        return ((field.name, getattr(value, field.name)) for field in fields(value))
    return ()


def _train(trainee: Trainable, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Recording:
    trainee.train()
    output = _seeded(trainee, args, kwargs)
    loss = loss_of(output)
    recording = {f"{name} {path}": t.detach().clone() for path, t in tensor_leaves(output)}
    recording[f"{name} loss"] = loss.detach()
    trainee.backward(loss)
    for key, parameter in trainee.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            label = f"{name} gradient of {key}"
            if label in recording and not _same_bits(recording[label], gradient):
                label += " (replica)"
            recording[label] = gradient.detach().clone()
    return recording


def _evaluate(trainee: Trainable, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Recording:
    trainee.train(False)
    with torch.no_grad():
        output = _seeded(trainee, args, kwargs)
    return {f"{name} {path}": t.clone() for path, t in tensor_leaves(output)}


def _seeded(trainee: Trainable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one forward on copies of the inputs, because a model may write to them."""
    args, kwargs = copy.deepcopy((args, kwargs))
    torch.manual_seed(7)
    return trainee(*args, **kwargs)


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(item, change) for item in value)
    return value


def _relative(expected: Tensor | None, actual: Tensor | None, floor: float) -> float | None:
    if expected is None or actual is None:
        return float("inf")
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return float("inf")
    if _same_bits(expected, actual):
        return None
    difference = _largest(expected.to(torch.cdouble) - actual.to(torch.cdouble))
    return difference / max(_largest(expected), floor, torch.finfo(torch.float32).tiny)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _largest(tensor: Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    return float(torch.nan_to_num(tensor.abs().double(), nan=float("inf")).max())
