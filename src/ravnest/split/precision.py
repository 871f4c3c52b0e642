"""Mixed precision: weights stay float32, matrix products and convolutions compute in bfloat16.

The rules are those of ``torch.autocast("cpu", dtype=torch.bfloat16)``, with two exceptions. Outputs of
the model are converted to float32, as Hugging Face Accelerate does, so that losses and metrics compute
in float32. Recurrent layers compute in float32: torch's LSTM has no reliable bfloat16 kernel on CPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ravnest import host
from ravnest.errors import SplitError
from ravnest.split.structure import map_tensors

Precision = Literal["bf16"]
_Value = TypeVar("_Value")

_LOW = (torch.bfloat16, torch.float16)
_RECURRENT = frozenset(
    getattr(torch._VF, f"{kind}{suffix}")
    for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for suffix in ("", "_cell")
)
"""Functions of recurrent layers."""


def check_precision(precision: object, model: nn.Module) -> Precision | None:
    """Return the precision; raise ``SplitError`` for one that is unknown or does not fit the model."""
    if precision is None:
        return None
    if precision != "bf16":
        raise SplitError(
            'precision must be "bf16", for float32 weights with bfloat16 matrix products, or None, for '
            f"the types that the model has; got {precision!r}"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise SplitError(
            'precision="bf16" does not work with a TorchScript model, which has its own rules for '
            "autocast: give the torch.nn.Module that it was made from"
        )
    if not host.bf16_products_work():
        name, value = next(iter(host.WITHOUT_AMX.items()))
        raise SplitError(
            'precision="bf16" cannot be checked here: this machine reports AMX instructions and ends a '
            f"process that uses them. Set the environment variable {name}={value} before Python starts"
        )
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise SplitError(
                'precision="bf16" captures the model on the CPU, and it has tensors on '
                f"{tensor.device}: move it with model.cpu(). Providers use their own devices"
            )
        if tensor.dtype is torch.float16:
            raise SplitError(
                'precision="bf16" is for models with weights in float32, and this one has weights in '
                "float16: convert it with model.float()"
            )
    return "bf16"


@contextlib.contextmanager
def computed_in(precision: Precision | None) -> Iterator[None]:
    """Compute in this precision; without one, in the types of the tensors."""
    if precision is None:
        yield
        return
    with torch.autocast("cpu", dtype=torch.bfloat16), _RecurrentInFloat32():
        yield


def delivered(value: _Value, precision: Precision | None) -> _Value:
    """Return a model's output, or a part of it, with its tensors in the types that stages return."""
    if precision is None:
        return value
    return map_tensors(value, _as_float32)  # type: ignore[no-any-return]


def _as_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _LOW else value


class _RecurrentInFloat32(TorchFunctionMode):
    """Torch function mode in which recurrent layers compute in float32."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in _RECURRENT:
            return func(*args, **(kwargs or {}))
        with torch.autocast("cpu", enabled=False):
            return func(*_listed_as_float32(args), **(kwargs or {}))


def _listed_as_float32(values: Sequence[Any]) -> list[Any]:
    return [
        _listed_as_float32(value) if isinstance(value, list | tuple) else _as_float32(value)
        for value in values
    ]
