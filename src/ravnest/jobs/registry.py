"""Optimizers, schedulers and losses of torch by name, which providers create without user code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer, lr_scheduler

from ravnest.errors import JobError, SettingsError
from ravnest.jobs.learning_rates import PIECEWISE
from ravnest.runtime.stage.learning_rate import PiecewiseLR
from ravnest.runtime.stage.parameter_groups import grouped, matches
from ravnest.runtime.stage.updates import OptimizerParams, UpdateRule
from ravnest.schemas.jobs import NamedComponent, ParameterGroup, Setting

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
} | {PIECEWISE: PiecewiseLR}
_LOSSES: dict[str, type[nn.Module]] = {name: getattr(nn, name) for name in _FUNCTIONS.values()}
_CLASS_OF = {getattr(functional, function): kind for function, kind in _FUNCTIONS.items()}


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the optimizer class of torch with that name."""
    return _find("optimizer", name, _OPTIMIZERS)


def optimizer_classes() -> Iterable[type[Optimizer]]:
    """Return all optimizer classes that a job can name."""
    return _OPTIMIZERS.values()


def scheduler_names() -> Iterable[str]:
    """Return the names of all learning rate schedulers that a job can name."""
    return _SCHEDULERS.keys()


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
            "numbers, such as CosineAnnealingLR, a name such as 'cosine', or a list of pieces "
            "(docs/submitting.md, Learning rates)"
        )
    if name in _TAKE_SCHEDULERS:
        raise JobError(
            f"{name} combines other schedulers, which a job cannot contain: use a list of pieces, such "
            "as lr_scheduler=[{'shape': 'linear', 'first': 0, 'last': 1, 'length': 0.1}, "
            "{'shape': 'cosine'}] (docs/submitting.md, Learning rates)"
        )
    name = _name_of("learning rate scheduler", scheduler, _SCHEDULERS)
    return _named(name, _checked_params("lr_scheduler_params", params))


def named_groups(groups: object, model: nn.Module) -> tuple[ParameterGroup, ...]:
    """Return the wire form of parameter groups; each must match a trained parameter of the model."""
    if isinstance(groups, str | Mapping) or not isinstance(groups, Iterable):
        raise JobError(
            "parameter_groups must be a list of mappings, such as "
            "[{'match': '*.bias|*norm*', 'weight_decay': 0}]"
        )
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    found = []
    for number, group in enumerate(groups):
        where = f"parameter_groups[{number}]"
        if not isinstance(group, Mapping) or not isinstance(group.get("match"), str):
            raise JobError(f"{where} needs a 'match': patterns of parameter names, separated by |")
        patterns = group["match"]
        if not any(matches(name, patterns) for name in names):
            shown = ", ".join(names[:3])
            raise JobError(f"{where}: no trained parameter matches {patterns!r}; names are like {shown}")
        own = {key: value for key, value in group.items() if key != "match"}
        checked = _named("optimizer", _checked_params(where, own)).params
        found.append(ParameterGroup(match=patterns, params=checked))
    return tuple(found)


def optimizer_settings(optimizer: NamedComponent, groups: Iterable[ParameterGroup]) -> OptimizerParams:
    """Return the ``optimizer_params`` with which ``Node`` makes the optimizer."""
    own = [(group.match, group.params) for group in groups]
    return grouped(own, optimizer.params) if own else optimizer.params


def check_update(
    optimizer: NamedComponent,
    scheduler: NamedComponent | None,
    groups: Sequence[ParameterGroup] = (),
) -> None:
    """Raise ``JobError`` if torch cannot create the optimizer and scheduler with their parameters."""
    make: Callable[..., Optimizer] = optimizer_class(optimizer.name)
    settings = ({}, *(dict(group.params) for group in groups))
    members = [own | {"params": [nn.Parameter(torch.zeros(2, 2))]} for own in settings]
    try:
        made = make(members, **optimizer.params)
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise JobError(f"{optimizer.name} does not accept optimizer_params: {error}") from error
    for group in groups:
        if unknown := sorted(set(group.params) - set(made.defaults)):
            raise JobError(
                f"{optimizer.name} has no setting {unknown[0]!r} for a group of parameters, only "
                f"{', '.join(sorted(made.defaults))}"
            )
    if scheduler is None:
        return
    try:
        scheduler_class(scheduler.name)(made, **scheduler.params)
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise JobError(f"{scheduler.name} does not accept lr_scheduler_params: {error}") from error


def check_shapes(optimizer: type[Optimizer], params: Mapping[str, Any], model: nn.Module) -> None:
    """Raise ``JobError`` if the optimizer cannot train the parameters of a model.

    ``Muon`` takes matrices only, ``SparseAdam`` only sparse gradients, which stages do not have.
    """
    make: Callable[..., Optimizer] = optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    tiny = nn.Parameter(torch.zeros(2, 2))
    tiny.grad = torch.zeros(2, 2)
    try:
        make([nn.Parameter(torch.empty(p.shape, device="meta")) for p in trained], **params)
        make([tiny], **params).step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise JobError(
            f"{optimizer.__name__} cannot train this model: {error}. Use another one, such as AdamW"
        ) from error


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


def named_component(name: str, where: str, params: object) -> NamedComponent:
    """Return the wire form of something with a name and parameters; ``where`` names it in errors."""
    return _named(name, _checked_params(where, params))


def _named(name: str, params: Mapping[str, Any]) -> NamedComponent:
    settings: dict[str, Setting] = {
        key: list(value) if isinstance(value, tuple) else value for key, value in params.items()
    }
    try:
        return NamedComponent(name=name, params=settings)
    except ValidationError as error:
        raise JobError(f"a parameter of {name} cannot be sent: {error.errors()[0]['msg']}") from error
