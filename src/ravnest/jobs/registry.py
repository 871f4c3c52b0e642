"""Optimizers, schedulers and losses of torch by name, which providers create without user code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer, lr_scheduler

from ravnest.errors import JobError, SettingsError
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.schemas.jobs import NamedComponent, Setting

T = TypeVar("T")
_LONGEST = 1000
"""Maximum length of a list among the parameters."""
_TAKE_FUNCTIONS = {"LambdaLR", "MultiplicativeLR"}
_TAKE_SCHEDULERS = {"SequentialLR", "ChainedScheduler"}
_LEGACY = {"size_average", "reduce"}
"""Deprecated parameters of losses, which torch converts to ``reduction`` in the constructor."""
_FUNCTIONS = {
    "l1_loss": "L1Loss",
    "nll_loss": "NLLLoss",
    "poisson_nll_loss": "PoissonNLLLoss",
    "kl_div": "KLDivLoss",
    "mse_loss": "MSELoss",
    "binary_cross_entropy": "BCELoss",
    "binary_cross_entropy_with_logits": "BCEWithLogitsLoss",
    "hinge_embedding_loss": "HingeEmbeddingLoss",
    "multilabel_margin_loss": "MultiLabelMarginLoss",
    "smooth_l1_loss": "SmoothL1Loss",
    "huber_loss": "HuberLoss",
    "soft_margin_loss": "SoftMarginLoss",
    "cross_entropy": "CrossEntropyLoss",
    "multilabel_soft_margin_loss": "MultiLabelSoftMarginLoss",
    "multi_margin_loss": "MultiMarginLoss",
}
"""Loss functions of an output and labels, with the equivalent loss class."""


def _usable(optimizer: type[Optimizer]) -> bool:
    try:
        UpdateRule(optimizer).check()
    except SettingsError:
        return False
    return True


_OPTIMIZERS: dict[str, type[Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer and _usable(kind)
}
_SCHEDULERS: dict[str, type[Any]] = {
    name: getattr(lr_scheduler, name)
    for name in lr_scheduler.__all__
    if name not in {"LRScheduler", *_TAKE_FUNCTIONS, *_TAKE_SCHEDULERS}
}
_LOSSES: dict[str, type[nn.Module]] = {name: getattr(nn, name) for name in _FUNCTIONS.values()}
_CLASS_OF = {getattr(functional, function): kind for function, kind in _FUNCTIONS.items()}


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the optimizer class of torch with that name."""
    return _find("optimizer", name, _OPTIMIZERS)


def scheduler_class(name: str) -> type[Any]:
    """Return the learning rate scheduler class of torch with that name."""
    return _find("learning rate scheduler", name, _SCHEDULERS)


def loss_function(named: NamedComponent) -> Callable[..., Any]:
    """Return the loss of torch with that name and these parameters."""
    kind = _find("loss", named.name, _LOSSES)
    try:
        return kind(**named.params)
    except (TypeError, ValueError, RuntimeError) as error:
        raise JobError(f"the loss {named.name} does not accept its parameters: {error}") from error


def named_optimizer(optimizer: object, params: object) -> NamedComponent:
    """Return the wire form of an optimizer of torch and its parameters."""
    if optimizer is None:
        raise JobError("a job needs an optimizer, such as optimizer=torch.optim.AdamW")
    try:
        UpdateRule(optimizer).check()  # type: ignore[arg-type]
    except SettingsError as error:
        raise JobError(str(error)) from error
    name = _name_of("optimizer", optimizer, _OPTIMIZERS)
    return _named(name, _checked_params("optimizer_params", params))


def named_scheduler(scheduler: object, params: object) -> NamedComponent:
    """Return the wire form of a learning rate scheduler of torch and its parameters."""
    name = getattr(scheduler, "__name__", "")
    if name in _TAKE_FUNCTIONS:
        raise JobError(
            f"{name} takes a function, and providers run none of your code: use a scheduler that takes "
            "numbers, such as LinearLR, MultiStepLR or CosineAnnealingLR"
        )
    if name in _TAKE_SCHEDULERS:
        raise JobError(
            f"{name} combines other schedulers, which a job cannot contain: use a single scheduler, "
            "such as OneCycleLR (warm-up and decay in one)"
        )
    name = _name_of("learning rate scheduler", scheduler, _SCHEDULERS)
    return _named(name, _checked_params("lr_scheduler_params", params))


def check_update(optimizer: NamedComponent, scheduler: NamedComponent | None) -> None:
    """Raise ``JobError`` if torch cannot create the optimizer and scheduler with their parameters."""
    make: Callable[..., Optimizer] = optimizer_class(optimizer.name)
    try:
        made = make([nn.Parameter(torch.zeros(2, 2))], **optimizer.params)
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise JobError(f"{optimizer.name} does not accept optimizer_params: {error}") from error
    if scheduler is None:
        return
    try:
        scheduler_class(scheduler.name)(made, **scheduler.params)
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise JobError(f"{scheduler.name} does not accept lr_scheduler_params: {error}") from error


def named_loss(criterion: object) -> NamedComponent | None:
    """Return the wire form of a loss of torch, or None for a custom loss or one with tensors."""
    if isinstance(criterion, type):
        raise JobError(f"criterion is a class: give an instance, {criterion.__name__}()")
    if not callable(criterion):
        raise JobError(
            f"criterion must be a loss, such as torch.nn.CrossEntropyLoss(), or a function of the "
            f"model's output and the labels, not a {type(criterion).__name__}"
        )
    found = _module_settings(criterion) or _function_settings(criterion)
    if found is None:
        return None
    name, params = found
    if params.get("reduction") == "none":
        raise JobError(
            f"criterion returns one loss per sample, but training needs one number: create {name} "
            "without reduction='none'"
        )
    accepted = inspect.signature(_LOSSES[name]).parameters
    if not all(key in accepted and _is_setting(value) for key, value in params.items()):
        return None
    return _named(name, params)


def _module_settings(criterion: object) -> tuple[str, dict[str, Any]] | None:
    """Return class name and parameters of an unmodified loss module."""
    name = type(criterion).__name__
    if not isinstance(criterion, nn.Module) or type(criterion) is not _LOSSES.get(name):
        return None
    if criterion._forward_hooks or criterion._forward_pre_hooks or "forward" in vars(criterion):
        return None
    names = [key for key in inspect.signature(type(criterion)).parameters if key not in _LEGACY]
    return name, {key: getattr(criterion, key) for key in names}


def _function_settings(criterion: object) -> tuple[str, dict[str, Any]] | None:
    """Return class name and parameters for a loss function, plain or in a ``functools.partial``."""
    function, params = criterion, {}
    if isinstance(criterion, functools.partial) and not criterion.args:
        function, params = criterion.func, criterion.keywords
    name = _CLASS_OF.get(function) if inspect.isfunction(function) else None
    return None if name is None else (name, dict(params))


def _find(kind: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise JobError(f"jobs have no {kind} {name!r}, only {', '.join(sorted(known))}")
    return known[name]


def _name_of(kind: str, value: object, known: Mapping[str, Any]) -> str:
    for name, cls in known.items():
        if cls is value:
            return name
    shown = getattr(value, "__name__", None) or type(value).__name__
    raise JobError(
        f"{shown} is not a supported {kind}: providers run none of your code, so it must be a class of "
        f"torch: {', '.join(sorted(known))}"
    )


def _checked_params(field: str, params: object) -> dict[str, Any]:
    if not isinstance(params, Mapping):
        raise JobError(
            f"{field} of a job must be a mapping, such as {{'gamma': 0.5}}, not a "
            f"{type(params).__name__}: providers run none of your code"
        )
    for key, value in params.items():
        if not _is_setting(value):
            raise JobError(
                f"{field}[{key!r}] is a {type(value).__name__}: parameters of a job are numbers, "
                f"strings, True, False, None, or lists of up to {_LONGEST} numbers or strings"
            )
    return dict(params)


def _is_setting(value: object) -> bool:
    if value is None or isinstance(value, bool | int | float | str):
        return True
    if not isinstance(value, list | tuple) or len(value) > _LONGEST:
        return False
    numbers = all(isinstance(item, int | float) and not isinstance(item, bool) for item in value)
    return numbers or all(isinstance(item, str) for item in value)


def _named(name: str, params: Mapping[str, Any]) -> NamedComponent:
    settings: dict[str, Setting] = {
        key: list(value) if isinstance(value, tuple) else value for key, value in params.items()
    }
    try:
        return NamedComponent(name=name, params=settings)
    except ValidationError as error:
        raise JobError(f"a parameter of {name} cannot be sent: {error.errors()[0]['msg']}") from error
