"""torch's optimizers without its compiler, whose import takes a second and 70 MB.

Their methods import it when they are first called, to tell it that they are not to be compiled. A worker
process compiles nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

_METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
_NOT_COMPILED = "__dynamo_disable"
"""Attribute of a method in which torch keeps the form of it that the compiler leaves alone."""
_STEP = "_use_grad"
"""Name of the function with which torch wraps steps, for the compiler and to switch gradients off."""


def spare_compiler(optimizers: Iterable[type[Optimizer]]) -> None:
    """Have these optimizers not import the compiler, before one of them is made in this process.

    What torch has changed since is left as it is: the compiler is imported then.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in _METHODS:
        method = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if method is not None:
            setattr(method, _NOT_COMPILED, method)
    for kind in {base for each in optimizers for base in each.__mro__ if "step" in vars(base)}:
        step: Any = vars(kind)["step"]
        code = getattr(step, "__code__", None)
        if code is not None and code.co_name == _STEP and hasattr(step, "__wrapped__"):
            kind.step = _without_gradients(step.__wrapped__)  # type: ignore[attr-defined]


def _without_gradients(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def run(self: Optimizer, *arguments: Any, **keywords: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *arguments, **keywords)

    return run
