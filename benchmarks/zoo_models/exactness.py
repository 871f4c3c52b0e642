"""Whether stages compute what the model computes: a check that shares no code with the splitter's.

Both are put through the same rehearsal, and every tensor that it leaves behind is compared.
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
"""Relative difference up to which two results count as the same but for the order of summation."""
DRIFT = 1e-3
"""What noise in the first step may have grown to by the end."""

Traces = dict[str, Tensor]
"""What a rehearsal left behind, by the name under which a difference is reported."""


class Trainable(Protocol):
    """What a model and a chain of stages have in common."""

    def train(self, mode: bool = True) -> Any: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def backward(self, loss: Tensor) -> None: ...
    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...
    def state_dict(self) -> Mapping[str, Tensor]: ...


class Unsplit:
    """The model itself, with the interface of a chain.

    Submodules that are in evaluation mode when the model itself is not stay there, as they do in a
    training loop that puts them there after each ``model.train()``.
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
    """The tensor that differs most."""

    name: str
    relative: float
    """To the tensor's largest value, or a ten-thousandth of the largest gradient's if that is more."""

    def __str__(self) -> str:
        return f"{self.relative:.0e} in {self.name}"


def rehearse(
    trainee: Trainable, args: tuple[Any, ...], kwargs: dict[str, Any], *, small_batch: bool = True
) -> Traces:
    """Two optimizer steps, evaluation, and both modes on a smaller batch; the state at the end."""
    traces: Traces = {}
    with _plain_kernels():
        trainable = [p for _, p in trainee.named_parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=0.01, momentum=0.9)
        for step in (1, 2):
            traces |= _train(trainee, args, kwargs, f"step {step}")
            optimizer.step()
            optimizer.zero_grad()
        traces |= _evaluate(trainee, args, kwargs, "eval")
        if small_batch:
            few, named = narrowed(args), narrowed(kwargs)
            traces |= _train(trainee, few, named, f"batch {SMALL_BATCH}")
            optimizer.step()
            traces |= _evaluate(trainee, few, named, f"batch {SMALL_BATCH} eval")
    traces |= {f"state {name}": t.detach().clone() for name, t in trainee.state_dict().items()}
    return traces


def narrowed(value: Any, size: int = SMALL_BATCH) -> Any:
    """The same nested inputs with the first ``size`` examples of the batch only."""
    return _map_tensors(
        value, lambda t: t[:size].clone() if t.dim() and t.shape[0] == BATCH else t.clone()
    )


def compare(expected: Traces, actual: Traces, phase: str = "") -> Difference | None:
    """The largest difference in a phase; None if all of it is equal to the last bit."""
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


def is_noise(expected: Traces, actual: Traces) -> bool:
    """Whether a difference is no more than another order of summation explains."""
    first, worst = compare(expected, actual, FIRST_STEP), compare(expected, actual)
    if worst is None or worst.relative <= NOISE:
        return True
    return first is not None and first.relative <= NOISE and worst.relative <= DRIFT


def tensor_leaves(value: Any, path: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Tensors in a nested output with their paths; objects that are no containers are left out."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, bool | int | float):
        yield path, torch.tensor(value)
    else:
        for key, item in _items(value):
            yield from tensor_leaves(item, f"{path}.{key}")


def loss_of(output: Any) -> Tensor:
    """A scalar that depends on every element of every real or complex output."""
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
    """Without the shortcuts by which torch departs from its own results.

    The attention fast path computes something else in evaluation; TorchScript rewrites a module's
    backward once it has seen it a few times.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.jit.optimized_execution(False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Keys and children of a container; nothing for anything else."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, list | tuple):
        return enumerate(value)
    if is_dataclass(value) and not isinstance(value, type):
        return ((field.name, getattr(value, field.name)) for field in fields(value))
    return ()


def _train(trainee: Trainable, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Traces:
    trainee.train()
    output = _seeded(trainee, args, kwargs)
    loss = loss_of(output)
    traces = {f"{name} {path}": t.detach().clone() for path, t in tensor_leaves(output)}
    traces[f"{name} loss"] = loss.detach()
    trainee.backward(loss)
    for key, parameter in trainee.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            label = f"{name} gradient of {key}"
            if label in traces and not _same_bits(traces[label], gradient):
                label += " (replica)"
            traces[label] = gradient.detach().clone()
    return traces


def _evaluate(trainee: Trainable, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Traces:
    trainee.train(False)
    with torch.no_grad():
        output = _seeded(trainee, args, kwargs)
    return {f"{name} {path}": t.clone() for path, t in tensor_leaves(output)}


def _seeded(trainee: Trainable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One forward on copies of the inputs, which a model may write to."""
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
