"""Runs of a model and of its stages for the self-check, in little memory.

A run passes each result on and forgets it: the outputs and, in training, the gradient of every
parameter. What autograd saves for backward is kept in a file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ravnest.split.capture import Capture, mode_of
from ravnest.split.chain import Chain, gradients_received
from ravnest.split.example import Example
from ravnest.split.graph import Mode
from ravnest.split.module import StageModule
from ravnest.split.spill_file import saved_tensors_on_disk
from ravnest.split.structure import flatten

if TYPE_CHECKING:
    from ravnest.split.splitter import SplitStage

_SEED = 20_240_229
_GRADIENT = "the gradient of "

Keep = Callable[[str, torch.Tensor], None]
"""Function that is called with the name and the value of each result."""
Run = Callable[[Keep], None]
"""Run of a model, split or not."""


def run_model(capture: Capture, example: Example, mode: Mode, keep: Keep) -> None:
    """Run the unsplit model, and pass its results to ``keep``."""
    with _prepared(capture, mode), mode_of(capture.model, mode):
        args, kwargs = _inputs(example)
        ends = _ends(capture.model(*args, **kwargs), keep)
        trainable = _trainable(capture)
        if ends and trainable:

            def receive(key: str, gradient: torch.Tensor) -> None:
                keep(gradient_name(key), _dense(gradient))

            with gradients_received(trainable, receive):
                torch.autograd.backward(ends)


def run_stages(
    capture: Capture, stages: Sequence[SplitStage], example: Example, mode: Mode, keep: Keep
) -> None:
    """Run the stages one after the other, and pass their results to ``keep``."""
    with _prepared(capture, mode):
        chain = Chain(_module(stage) for stage in stages).train(mode == "train")
        args, kwargs = _inputs(example)
        ends = _ends(chain(*args, **kwargs), keep)
        blocks: dict[str, dict[int, torch.Tensor]] = {}

        def receive(key: str, gradient: torch.Tensor) -> None:
            entry = capture.state.tensors[key]
            if entry.rows is None:
                keep(gradient_name(key), _dense(gradient))
                return
            whole = entry.model_names[0]
            parts = blocks.setdefault(whole, {})
            parts[entry.rows.first] = _dense(gradient)
            if sum(len(part) for part in parts.values()) == entry.rows.total:
                del blocks[whole]
                keep(gradient_name(whole), torch.cat([parts[first] for first in sorted(parts)]))

        chain.pass_gradients([(end, torch.ones_like(end)) for end in ends], receive)


def gradient_name(key: str) -> str:
    """Return the name of a parameter's gradient in reports."""
    return f"{_GRADIENT}{key}"


def is_gradient(name: str) -> bool:
    """Return True for a name that ``gradient_name`` returned."""
    return name.startswith(_GRADIENT)


class _RandomGradient(torch.autograd.Function):
    """End of an output whose gradient is pseudo-random.

    The gradient is computed when backward begins with it, so that it does not exist while others are
    in use, and the output need not be kept for it.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, seed: int) -> torch.Tensor:
        ctx.like = output.shape, output.dtype, output.device
        ctx.seed = seed
        return torch.zeros((), device=output.device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        shape, dtype, device = ctx.like
        generator = torch.Generator().manual_seed(ctx.seed)
        noise = torch.empty(shape).uniform_(-0.5, 0.5, generator=generator)
        return noise.to(dtype).to(device), None


def _ends(output: Any, keep: Keep) -> list[torch.Tensor]:
    """Pass the tensors of an output to ``keep``; return an end for each that needs a gradient."""
    leaves, structure = flatten(output, "output", lambda _path, _value: None)
    ends = []
    for index, (name, leaf) in enumerate(zip(structure.leaf_paths("output"), leaves, strict=True)):
        if isinstance(leaf, torch.Tensor):
            keep(name, leaf.detach())
            if leaf.requires_grad and torch.is_grad_enabled():
                ends.append(_RandomGradient.apply(leaf, _SEED + index))  # type: ignore[no-untyped-call]
    return ends


def _inputs(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return example.rebuild([tensor.clone() for tensor in example.tensors])


def _trainable(capture: Capture) -> dict[str, torch.Tensor]:
    """Return the trained parameters of the model by key; a tensor that is cut into blocks as a whole."""
    own = dict(capture.model.named_parameters(remove_duplicate=False))
    entries = [e for e in capture.state.tensors.values() if e.kind == "parameter"]
    keys = {entry.model_names[0]: entry for entry in entries if entry.tensor.requires_grad}
    return {key: own[key] if entry.rows is not None else entry.tensor for key, entry in keys.items()}


def _module(stage: SplitStage) -> StageModule:
    """Return the stage as a module that shares the model's parameters but has its own buffers."""
    kinds = {entry.key: entry.kind for entry in stage.spec.state}
    tensors = {k: t if kinds[k] == "parameter" else t.clone() for k, t in stage.tensors.items()}
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    return StageModule(stage.spec, tensors, device)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


@contextlib.contextmanager
def _prepared(capture: Capture, mode: Mode) -> Iterator[None]:
    """Set a fixed seed; restore the random state and the model's buffers afterwards."""
    state = [entry.tensor for entry in capture.state.tensors.values()]
    devices = {tensor.device for tensor in state} - {torch.device("cpu")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_fast_path_off())
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        stack.enter_context(_buffers_kept(capture.model))
        stack.enter_context(torch.set_grad_enabled(mode == "train"))
        stack.enter_context(saved_tensors_on_disk(state))
        torch.manual_seed(_SEED)
        yield


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers afterwards: a training forward writes to them or replaces them."""
    before = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in before:
                module._buffers[name] = buffer
                if buffer is not None and values is not None:
                    buffer.copy_(values)


@contextlib.contextmanager
def _fast_path_off() -> Iterator[None]:
    """Switch off torch's fused encoder path, which rounds differently from the path with autograd."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
