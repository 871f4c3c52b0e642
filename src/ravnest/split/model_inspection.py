"""Refuse models by what can be seen before forward runs: hooks, memory, uninitialised layers."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ravnest.errors import SplitError

logger = logging.getLogger(__name__)

_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_TENSOR_HOOKS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}


def inspect_model(model: nn.Module) -> None:
    """Raise ``SplitError`` for a model that stages cannot represent, whatever its forward does."""
    reason = next(_reasons(model), None)
    if reason is not None:
        raise SplitError(reason)


def warn_of_resting_dropout(model: nn.Module) -> None:
    """Warn of dropout that stays off because its layer is in ``eval()``, though the model is not.

    Models of ``from_pretrained`` are in ``eval()``, and a wrapper around them, as that of peft, is not.
    """
    resting = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p and not module.training
    ]
    if model.training and resting:
        logger.warning(
            "%d dropout layers, such as %s, are in eval() and stay off in training: call model.train() "
            "before, unless this is what you want",
            len(resting),
            resting[0],
        )


def _reasons(model: nn.Module) -> Iterator[str]:
    yield from _lazy(model)
    yield from _quantised(model)
    yield from _hooks(model)
    yield from _aliases(model)


def _lazy(model: nn.Module) -> Iterator[str]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            yield (
                f"{name} is not initialised: a lazy layer gets its shape in its first forward. Run the "
                "model once on the example inputs before splitting it"
            )


def _quantised(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if ".quantized" in type(module).__module__ and type(module).__module__.startswith("torch."):
            yield (
                f"the layer {name or type(module).__name__} ({type(module).__name__}) is quantised: its "
                "weights are packed and cannot be trained. Split the model in float32 or bfloat16, and "
                "quantise it after training"
            )


def _hooks(model: nn.Module) -> Iterator[str]:
    advice = (
        "Stages do not run it, also if it rarely changes a gradient. Remove it (handle.remove()) before "
        "splitting"
    )
    for name, module in model.named_modules():
        if any(getattr(module, table, None) for table in _BACKWARD_HOOKS):
            yield f"the layer {name or type(module).__name__} has a backward hook. {advice}"
    for name, parameter in model.named_parameters():
        for table, method in _TENSOR_HOOKS.items():
            if getattr(parameter, table, None):
                yield f"the parameter {name} has a hook ({method}). {advice}"


def _aliases(model: nn.Module) -> Iterator[str]:
    owners = {
        parameter.untyped_storage().data_ptr(): name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel() and not is_lazy(parameter)
    }
    for name, buffer in model.named_buffers():
        if buffer.layout is torch.strided and buffer.numel():
            owner = owners.get(buffer.untyped_storage().data_ptr())
            if owner is not None and buffer.device.type != "meta":
                yield (
                    f"the buffer {name} uses the memory of the parameter {owner}: training changes it "
                    "in one process, and would not in stages. Use the parameter itself "
                    "(self.weight.detach()), or give the buffer a copy (clone())"
                )
