"""Report code that cannot be captured, with the user's line and a remedy."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ravnest.errors import CaptureError
from ravnest.split.source import (
    code_of_traceback,
    line_of_stack,
    line_of_traceback,
    modules_of_traceback,
)


@contextlib.contextmanager
def refuse_custom_autograd() -> Iterator[None]:
    """Raise ``CaptureError`` for a custom ``torch.autograd.Function``.

    Export would inline its forward and lose its backward. ``apply`` may have been bound earlier
    (``swish = Swish.apply``), so this replaces a function that ``apply`` looks up by its global name.
    """
    namespace = torch.autograd.function
    original = namespace._is_setup_context_defined

    def refuse(setup_context: Any) -> Any:
        owner = sys._getframe(1).f_locals.get("cls")
        if owner is not None and owner.__module__.partition(".")[0] != "torch":
            raise CaptureError(
                f"{line_of_stack()}\n{owner.__qualname__} is a custom torch.autograd.Function: its "
                "backward cannot be captured, and without it the gradients would be wrong. Write "
                "the operation with ordinary torch functions, which differentiate themselves"
            )
        if owner is not None and owner.__name__ == "CheckpointFunction":
            raise CaptureError(
                f"{line_of_stack()}\nreentrant checkpointing cannot be captured: pass "
                "use_reentrant=False, or switch checkpointing off; stages recompute by themselves"
            )
        return original(setup_context)  # type: ignore[no-untyped-call]

    namespace._is_setup_context_defined = refuse
    try:
        yield
    finally:
        namespace._is_setup_context_defined = original


_PACKING = (
    "packed sequences (pack_padded_sequence, PackedSequence) have sizes that depend on the lengths' "
    "values. Give the padded tensor to the recurrent layer, and select the steps of each sequence from "
    "its output with a mask or output[torch.arange(lengths.shape[0]), lengths - 1]"
)


class RefusePacking(TorchFunctionMode):
    """Torch function mode that rejects packed sequences at the line that packs them."""

    _functions = (torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in self._functions:
            raise CaptureError(f"{line_of_stack()}\nthis line cannot be captured: {_PACKING}")
        return func(*args, **(kwargs or {}))


_READS_COUNTER = "float(self.num_batches_tracked)"
"""Line of torch's batch norm that fails without a momentum."""
_CUMULATIVE = (
    "a batch norm with momentum=None reads its counter as a Python number. Give it a momentum (torch's "
    "default is 0.1), or freeze it with eval()"
)
_REMEDIES = (
    (("PackedSequence",), _PACKING),
    (
        (
            "GuardOnDataDependent",
            "data-dependent",
            "DataDependent",
            "PendingUnbackedSymbol",
            "must be tuple of ints,but got FakeTensor",
        ),
        "forward depends on the value of a tensor (if, while, int(), float(), .item() or a shape that "
        "depends on data). A graph cannot: use torch.where or masks, or decide outside the model",
    ),
    (
        ("numpy", "can't convert", "Cannot convert", "data_ptr", "tolist"),
        "forward leaves torch (numpy, a list, a raw pointer). Use torch functions on tensors",
    ),
)


def translate(error: Exception, model: nn.Module) -> CaptureError:
    """Return a ``CaptureError`` with the line of the user's code, the reason and a remedy."""
    if isinstance(error.__cause__, CaptureError):
        return error.__cause__
    line = line_of_traceback(error.__traceback__)
    remedy = _remedy(error)
    first = next((row.strip() for row in str(error).splitlines() if row.strip()), "")
    where = f"{line}\nthis line" if line else _layer(error, model)
    return CaptureError(f"{where} cannot be captured: {remedy}\n({type(error).__name__}: {first[:300]})")


def _remedy(error: Exception) -> str:
    if _READS_COUNTER in code_of_traceback(error.__traceback__):
        return _CUMULATIVE
    text = f"{type(error).__name__}: {error}"
    return next(
        (advice for signs, advice in _REMEDIES if any(sign in text for sign in signs)),
        "check that forward runs on the example inputs, and that it uses torch operators only",
    )


def _layer(error: Exception, model: nn.Module) -> str:
    """Return the name of the failed layer, for a model of torch's own layers, which has no user line."""
    paths = {id(module): path for path, module in model.named_modules()}
    for module in modules_of_traceback(error.__traceback__):
        if paths.get(id(module)):
            return f"the layer {paths[id(module)]} ({type(module).__name__})"
    return f"the model ({type(model).__name__})"
