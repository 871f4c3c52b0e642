"""Runs of a model and of its stages for the self-check, in little memory.

A run passes each result on and forgets it: the outputs and, in training, the gradient of every
parameter. What autograd saves for backward is kept in a file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ravnest.split.capture import Capture, mode_of
from ravnest.split.chain import Chain, gradients_received
from ravnest.split.example import Example
from ravnest.split.graph import Mode
from ravnest.split.kept_model import model_kept
from ravnest.split.module import StageModule
from ravnest.split.outside_randomness import refuse_outside_randomness
from ravnest.split.precision import computed_in, delivered
from ravnest.split.spill_file import saved_tensors_on_disk
from ravnest.split.structure import flatten

if TYPE_CHECKING:
    from ravnest.split.split_stage import SplitStage

_SEED = 20_240_229
_GRADIENT = "the gradient of "

Keep = Callable[[str, torch.Tensor], None]
"""Function that is called with the name and the value of each result."""
Run = Callable[[Keep], None]
"""Run of a model, split or not."""


def run_model(capture: Capture, steps: Sequence[Example], mode: Mode, keep: Keep) -> None:
    """Run the unsplit model on each step in turn, and pass its results to ``keep``."""
    trainable = _trainable(capture)
    with _prepared(capture, mode), mode_of(capture.model, mode):
        for index, example in enumerate(steps):
            kept = _of_step(keep, index)
            args, kwargs = _inputs(example)
            ends = _ends(call_model(capture, args, kwargs), kept)
            if ends and trainable:
                receive = partial(_receive, kept)
                with gradients_received(trainable, receive):
                    torch.autograd.backward(ends)
        own = dict(capture.model.named_buffers(remove_duplicate=False))
        own |= dict(capture.model.named_parameters(remove_duplicate=False))
        for key in _compared_state(capture):
            keep(_state_name(key), own[key].detach().clone())


def run_stages(
    capture: Capture, stages: Sequence[SplitStage], steps: Sequence[Example], mode: Mode, keep: Keep
) -> None:
    """Run the stages one after the other on each step, and pass their results to ``keep``."""
    with _prepared(capture, mode):
        chain = Chain(_module(stage, capture) for stage in stages).train(mode == "train")
        for index, example in enumerate(steps):
            kept = _of_step(keep, index)
            args, kwargs = _inputs(example)
            ends = _ends(chain(*args, **kwargs), kept)
            receive = _BlockReceiver(capture, kept).receive
            chain.pass_gradients([(end, torch.ones_like(end)) for end in ends], receive)
        compared = set(_compared_state(capture))
        for module in chain.modules:
            own = module.state_tensors()
            for entry in module.spec.state:
                if entry.key in compared and entry.stages[0] == module.spec.index:
                    keep(_state_name(entry.key), own[entry.key].detach())


def run_forward(capture: Capture, example: Example, mode: Mode) -> dict[str, torch.Tensor]:
    """Return the outputs of the unsplit model without gradients; its plain attributes may change."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        found[name] = tensor.clone()

    with _prepared(capture, mode, attributes=False), mode_of(capture.model, mode), torch.no_grad():
        args, kwargs = _inputs(example)
        _ends(call_model(capture, args, kwargs), keep)
    return found


def call_model(capture: Capture, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the output of the unsplit model in its precision; the backward pass is the caller's."""
    with computed_in(capture.precision):
        output = capture.model(*args, **kwargs)
    return delivered(output, capture.precision)


class _BlockReceiver:
    """Gradients of one backward pass through stages; those of blocks of a tensor are put together."""

    def __init__(self, capture: Capture, keep: Keep) -> None:
        self._capture = capture
        self._keep = keep
        self._blocks: dict[str, dict[int, torch.Tensor]] = {}

    def receive(self, key: str, gradient: torch.Tensor) -> None:
        entry = self._capture.state.tensors[key]
        if entry.rows is None:
            _receive(self._keep, key, gradient)
            return
        whole = entry.model_names[0]
        parts = self._blocks.setdefault(whole, {})
        parts[entry.rows.first] = _dense(gradient)
        if sum(len(part) for part in parts.values()) == entry.rows.total:
            del self._blocks[whole]
            _receive(self._keep, whole, torch.cat([parts[first] for first in sorted(parts)]))


def _receive(keep: Keep, key: str, gradient: torch.Tensor) -> None:
    keep(gradient_name(key), _dense(gradient))


def _of_step(keep: Keep, index: int) -> Keep:
    """Return a function that keeps results under names of the step; the first has no suffix."""
    if not index:
        return keep
    return lambda name, tensor: keep(f"{name} (step {index + 1})", tensor)


def _compared_state(capture: Capture) -> list[str]:
    """Return the keys of buffers that stages hold, and of parameters that forward writes to.

    A model that checkpoints runs blocks twice, and stages do not: what they write differs.
    """
    if any(mode.checkpointed for mode in capture.modes.values()):
        return []
    written = {id(tensor) for tensor in capture.written_parameters}
    used = {
        mode.state_of[node.name]
        for mode in capture.modes.values()
        for node in mode.graph.nodes
        if node.op == "placeholder" and node.users and node.name in mode.state_of
    }
    return [
        key
        for key, entry in capture.state.tensors.items()
        if id(entry.tensor) in written
        or (entry.kind == "buffer" and entry.rows is None and (entry.persistent or key in used))
    ]


def _state_name(key: str) -> str:
    return f"{key} after the run"


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


def _module(stage: SplitStage, capture: Capture) -> StageModule:
    """Return the stage as a module that shares the parameters, but has its own of what is written."""
    written = {tensor.data_ptr() for tensor in capture.written_parameters}
    shared = {e.key for e in stage.spec.state if e.kind == "parameter"}
    tensors = {
        key: tensor if key in shared and tensor.data_ptr() not in written else tensor.clone()
        for key, tensor in stage.tensors.items()
    }
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    return StageModule(stage.spec, tensors, device)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


@contextlib.contextmanager
def _prepared(capture: Capture, mode: Mode, *, attributes: bool = True) -> Iterator[None]:
    """Set a fixed seed; restore the random states and the model afterwards.

    ``attributes``: restore the plain attributes of modules too.
    """
    state = [entry.tensor for entry in capture.state.tensors.values()]
    devices = {tensor.device for tensor in state} - {torch.device("cpu")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_fast_path_off())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled layers round otherwise
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        stack.enter_context(refuse_outside_randomness())
        stack.enter_context(model_kept(capture.model, capture.written_parameters, attributes=attributes))
        stack.enter_context(torch.set_grad_enabled(mode == "train"))
        stack.enter_context(saved_tensors_on_disk(state))
        torch.manual_seed(_SEED)
        yield


@contextlib.contextmanager
def _fast_path_off() -> Iterator[None]:
    """Switch off torch's fused encoder path, which rounds differently from the path with autograd."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
