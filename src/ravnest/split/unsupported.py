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
                "the operation with ordinary torch functions, which differentiate themselves. For the "
                "value of one expression with the gradient of another: "
                "smooth + (exact - smooth).detach()"
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


_HOOK = (
    "a hook on a tensor runs in the backward pass, which stages compute without it, also if it rarely "
    "changes a gradient. Remove it, or compute what it does in forward (torch.clamp, a product)"
)
_REFUSED_FUNCTIONS = {
    torch._VF._pack_padded_sequence: _PACKING,
    torch._VF._pad_packed_sequence: _PACKING,
    torch.Tensor.register_hook: _HOOK,
    torch.Tensor.register_post_accumulate_grad_hook: _HOOK,
}
"""Functions that no graph represents, and why."""


class RefusedFunctions(TorchFunctionMode):
    """Torch function mode that rejects functions at the user's line, and notes the use of ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.data_line = ""
        """Line that used ``.data`` last."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (reason := _REFUSED_FUNCTIONS.get(func)) is not None:
            raise CaptureError(f"{line_of_stack()}\nthis line cannot be captured: {reason}")
        if func == _DATA:
            self.data_line = line_of_stack()
        return func(*args, **(kwargs or {}))


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_DATA_ADVICE = (
    "the tracer cannot follow a tensor that is reached through .data. Write to the tensor itself under "
    "torch.no_grad() (with torch.no_grad(): self.weight.clamp_(-1, 1)), and read it with .detach()"
)


@contextlib.contextmanager
def refuse_inference_mode() -> Iterator[None]:
    """Raise ``CaptureError`` for ``torch.inference_mode`` in forward, whose tensors no graph has."""
    kind = torch.autograd.grad_mode.inference_mode
    original = kind.__enter__

    def refuse(block: Any) -> None:
        line = line_of_stack()
        if block.mode and line:
            raise CaptureError(
                f"{line}\ntorch.inference_mode inside forward cannot be captured: its tensors cannot be "
                "part of training. Use torch.no_grad() or .detach()"
            )
        original(block)

    kind.__enter__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__enter__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def values_not_read() -> Iterator[None]:
    """Switch off code of torch that reads values of tensors without an effect on results.

    Distributions validate their arguments, and a transformer looks if its mask is causal, to choose a
    kernel. A mask that is not found to be causal is applied as it is.
    """
    validates = torch.distributions.Distribution._validate_args
    transformer = torch.nn.modules.transformer
    detect = transformer._detect_is_causal_mask

    def given(_mask: object, is_causal: bool | None = None, _size: int | None = None) -> bool:
        return is_causal is True

    torch.distributions.Distribution.set_default_validate_args(False)
    transformer._detect_is_causal_mask = given  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(validates)
        transformer._detect_is_causal_mask = detect


_READS_COUNTER = "float(self.num_batches_tracked)"
"""Line of torch's batch norm that fails without a momentum."""
_CUMULATIVE = (
    "a batch norm with momentum=None reads its counter as a Python number. Give it a momentum (torch's "
    "default is 0.1), or freeze it with eval()"
)
_VALUE_ADVICE = (
    "forward depends on the value of a tensor (if, while, int(), float(), .item() or a shape that "
    "depends on data). A graph cannot: use torch.where or masks, or decide outside the model"
)
_REMEDIES = (
    (("PackedSequence",), _PACKING),
    (("fake tensor in the exported program constant",), _DATA_ADVICE),
    (
        ("Couldn't swap",),
        "forward converts a layer with .to(), which replaces its parameters. Convert the layer before "
        "it is split, and the input in forward: x.to(self.layer.weight.dtype). Switch Transformers has "
        "no option that avoids it; Mixtral with experts_implementation='batched_mm' can be split",
    ),
    (
        ("validate_args", "satisfy the constraint"),
        "a distribution with validate_args=True reads the values of its arguments. Leave validate_args "
        "out, or set it to False",
    ),
    (
        (
            "GuardOnDataDependent",
            "data-dependent",
            "DataDependent",
            "PendingUnbackedSymbol",
            "must be tuple of ints,but got FakeTensor",
        ),
        _VALUE_ADVICE,
    ),
    (
        ("numpy", "can't convert", "Cannot convert", "data_ptr", "tolist"),
        "forward leaves torch (numpy, a list, a raw pointer). Use torch functions on tensors",
    ),
)


_LINES = (
    (
        ("isfinite", "isinf", "isnan"),
        "the line looks whether values are finite. Remove the check, or do without a condition what it "
        "does for other values: torch.clamp and torch.nan_to_num change nothing where values are finite",
    ),
    (
        ("expert_hit",),
        "the loop runs over the experts that some token has chosen. Choose an implementation without it "
        "(transformers: experts_implementation='batched_mm' in from_pretrained or from_config)",
    ),
    (
        ("is_global_attn",),
        "Longformer and LED decide by the values of global_attention_mask, and no option avoids that. "
        "Use a model whose attention does not, such as RoBERTa or BART",
    ),
)
"""Code of lines that decide by the value of a tensor, with advice that fits them."""


def translate(error: Exception, model: nn.Module, data_line: str = "") -> CaptureError:
    """Return a ``CaptureError`` with the line of the user's code, the reason and a remedy.

    ``data_line`` is the line that used ``.data``, whose effects show only after forward.
    """
    if isinstance(error.__cause__, CaptureError):
        return error.__cause__
    remedy = _remedy(error)
    line = line_of_traceback(error.__traceback__) or (data_line if remedy is _DATA_ADVICE else "")
    if remedy is _VALUE_ADVICE:
        fitting = (advice for signs, advice in _LINES if any(sign in line for sign in signs))
        remedy = next(fitting, remedy)
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
