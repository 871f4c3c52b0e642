"""Convert a TorchScript module to an ordinary ``nn.Module``, which ``torch.export`` can trace.

``torch.export`` does not accept a ``ScriptModule``. The converted module has the same tree of modules
and the same tensors under the same names; its forward runs the TorchScript graph in Python.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.jit._trace import TopLevelTracedModule

from ravnest.errors import CaptureError
from ravnest.split.torchscript.graph import TorchScriptProgram, where
from ravnest.split.torchscript.mirror import ModuleValue, ScriptMirror, mirror_of
from ravnest.split.torchscript.schema import resolve

logger = logging.getLogger(__name__)


def from_torchscript(module: torch.jit.ScriptModule) -> nn.Module:
    """Return a module that computes what ``module`` computes and that ``torch.export`` can trace.

    It shares its parameters and buffers with ``module``, under the same names. If ``module`` is
    scripted, ``train()`` and ``eval()`` switch its mode. If it was traced, it keeps the mode of the
    trace, which is logged as a warning.

    Raises ``CaptureError`` if there is nothing to train. The new module's forward raises it, with the
    user's line, if control flow depends on the value of a tensor or an operator is not supported.
    """
    _check(module)
    value = mirror_of(module)
    graph = value.graph("forward")
    _warn_of_baked_mode(module, graph)
    # The mirror and its forward refer to each other, so they cannot both be constructor arguments.
    value.mirror._script_value = value
    value.mirror.forward = _forward(value, graph)
    return value.mirror


def _check(module: torch.jit.ScriptModule) -> None:
    if next(module.parameters(), None) is None:
        raise CaptureError(
            "the TorchScript module has no parameters, so there is nothing to train. "
            "torch.jit.freeze turns them into constants: pass the module from before freezing"
        )
    script: Any = module._c
    if not script._has_method("forward"):
        raise CaptureError(
            "the TorchScript module has no method forward (torch.jit.script drops the forward of a bare "
            "nn.LSTM or nn.GRU): wrap it in a module whose forward calls it, and script that"
        )
    if script._get_forward_hooks() or script._get_forward_pre_hooks():
        raise CaptureError(
            "the TorchScript module has forward hooks, which are not part of its graph: remove them "
            "and move their code into forward"
        )


def _forward(value: ModuleValue, graph: Any) -> MethodType:
    """Return the forward of the mirror, with the signature of the script's."""
    program = TorchScriptProgram(graph)
    signature = _signature(value.script._get_method("forward").schema)

    def forward(self: ScriptMirror, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *inputs = bound.arguments.values()
        module = self._script_value
        grad_enabled = torch.is_grad_enabled()
        try:
            output = program(module, *inputs)
            module.finish_run()
        finally:
            module.forget_run()
            if torch.is_grad_enabled() != grad_enabled:  # it failed inside torch.no_grad()
                torch._C._set_grad_enabled(grad_enabled)
        return output

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return MethodType(forward, value.mirror)


def _signature(schema: torch._C.FunctionSchema) -> inspect.Signature:
    parameters = [
        inspect.Parameter(
            argument.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=argument.default_value if argument.has_default_value() else inspect._empty,
        )
        for argument in schema.arguments
    ]
    return inspect.Signature(parameters)


_MODE_FLAGS = ("train", "training", "use_input_stats")
_IDLE_WITHOUT = ("p", "dropout", "running_mean")
_MODE_DEPENDENT = tuple(
    f"aten::{name}"
    for name in (
        *("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"),
        *("dropout_", "feature_dropout_", "alpha_dropout_", "feature_alpha_dropout_"),
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "batch_norm", "instance_norm", "rrelu", "rrelu_"),
    )
)


def _warn_of_baked_mode(module: torch.jit.ScriptModule, graph: Any) -> None:
    """Log a warning if train() and eval() do not switch everything, as in a traced module.

    A module that was loaded from a file does not say whether it was traced, but its graph does: the
    flags that a script reads from ``self.training`` are constants.
    """
    baked = dict(_baked_flags(graph))
    if not baked and not isinstance(module, TopLevelTracedModule):
        return
    modes = {"training" if flag else "evaluation" for flag in baked.values()}
    logger.warning(
        "the mode of the TorchScript model is fixed in its graph, as torch.jit.trace does%s: "
        "train() and eval() do not switch it. Pass the Python model, or one made by "
        "torch.jit.script, to train in training mode and evaluate in evaluation mode%s",
        f" ({' and '.join(sorted(modes))} mode)" if modes else "",
        f". First found at {next(iter(baked))}" if baked else "",
    )


def _baked_flags(graph: Any) -> Iterator[tuple[str, bool]]:
    """Yield line and mode (True for training) of operators with a constant mode that has an effect."""
    for kind in _MODE_DEPENDENT:
        for node in graph.findAllNodes(kind):
            names = [argument.name for argument in resolve(node.schema()).arguments]
            constants = dict(zip(names, map(_constant, node.inputs()), strict=False))
            flag = next((constants[name] for name in _MODE_FLAGS if name in constants), None)
            idle = any(constants.get(name, 1) in (None, 0) for name in _IDLE_WITHOUT)
            if isinstance(flag, bool) and not idle:
                yield where(node), flag


def _constant(value: torch._C.Value) -> Any:
    """Return the constant of a value of the graph, or the value itself if it is not constant."""
    return value.toIValue() if value.node().kind() == "prim::Constant" else value
