"""Optimizers, schedulers and losses of torch by name, and refusal of custom ones."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional
from torch.optim import lr_scheduler

from ravnest.errors import JobError
from ravnest.jobs.registry import (
    check_update,
    loss_function,
    named_loss,
    named_optimizer,
    named_scheduler,
    optimizer_class,
    scheduler_class,
)
from ravnest.schemas.jobs import NamedComponent


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW, optim.Adafactor, optim.RMSprop, optim.Muon])
def test_an_optimizer_round_trips_by_name(kind: type[optim.Optimizer]) -> None:
    named = named_optimizer(kind, {"lr": 0.01})
    assert optimizer_class(named.name) is kind
    assert named.params == {"lr": 0.01}


def test_parameters_round_trip_through_json() -> None:
    params = {"lr": 1e-3, "betas": (0.9, 0.95), "amsgrad": True, "foreach": None}
    named = named_optimizer(optim.AdamW, params)
    again = NamedComponent.model_validate_json(named.model_dump_json())
    assert again == named
    check_update(again, None)
    assert again.params["betas"] == [0.9, 0.95]


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (lr_scheduler.StepLR, {"step_size": 3}),
        (lr_scheduler.MultiStepLR, {"milestones": [2, 4], "gamma": 0.5}),
        (lr_scheduler.OneCycleLR, {"max_lr": 0.1, "total_steps": 10}),
        (lr_scheduler.ReduceLROnPlateau, {"patience": 2}),
        (lr_scheduler.CosineAnnealingLR, {"T_max": 10}),
    ],
)
def test_a_scheduler_round_trips_by_name(kind: type[Any], params: dict[str, Any]) -> None:
    named = named_scheduler(kind, params)
    assert scheduler_class(named.name) is kind
    check_update(named_optimizer(optim.SGD, {"lr": 0.1, "momentum": 0.9}), named)


class MyAdam(optim.Adam):
    pass


MyAdam.__name__ = "Adam"


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        (MyAdam, {}, "providers run none of your code"),
        (optim.LBFGS, {}, "closure"),
        (optim.Adam([nn.Parameter(torch.ones(1))]), {}, "pass the class"),
        (None, {}, "needs an optimizer"),
        ("Adam", {}, "must be a class of torch.optim"),
        (optim.Adam, lambda parameters: parameters, "must be a mapping"),
        (optim.Adam, {"lr": torch.tensor(0.1)}, r"optimizer_params\['lr'\] is a Tensor"),
        (optim.Adam, {"lr": float("inf")}, "cannot be sent"),
        (optim.Adam, {"betas": [0.1] * 2000}, "lists of up to"),
    ],
)
def test_an_unsupported_optimizer_is_refused(kind: Any, params: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        named_optimizer(kind, params)


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        (lr_scheduler.LambdaLR, {"lr_lambda": lambda epoch: epoch}, "takes a function"),
        (lr_scheduler.SequentialLR, {"schedulers": []}, "combines other schedulers"),
        (lr_scheduler.LRScheduler, {}, "not a supported learning rate scheduler"),
        (lr_scheduler.CyclicLR, {"scale_fn": abs}, "is a builtin_function"),
    ],
)
def test_an_unsupported_scheduler_is_refused(kind: Any, params: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        named_scheduler(kind, params)


def test_parameters_that_torch_does_not_take_are_refused() -> None:
    with pytest.raises(JobError, match=r"SGD does not accept optimizer_params: .*'speed'"):
        check_update(NamedComponent(name="SGD", params={"speed": 1}), None)
    with pytest.raises(JobError, match=r"StepLR does not accept lr_scheduler_params: .*step_size"):
        check_update(NamedComponent(name="SGD", params={"lr": 0.1}), NamedComponent(name="StepLR"))


@pytest.mark.parametrize("find", [optimizer_class, scheduler_class])
@pytest.mark.parametrize("name", ["Optimizer", "LBFGS", "LambdaLR", "os.system", "__class__", ""])
def test_an_unknown_name_is_refused(find: Any, name: str) -> None:
    with pytest.raises(JobError, match=r"jobs have no .*, only"):
        find(name)


LOSSES = [
    nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=2),
    nn.CrossEntropyLoss(reduction="sum"),
    nn.MSELoss(),
    nn.SmoothL1Loss(beta=0.5),
    nn.HuberLoss(delta=0.3),
    nn.BCEWithLogitsLoss(),
    nn.KLDivLoss(reduction="batchmean", log_target=True),
    nn.MultiMarginLoss(p=2, margin=0.5),
    nn.PoissonNLLLoss(full=True),
    functional.mse_loss,
    functional.cross_entropy,
    functools.partial(functional.cross_entropy, label_smoothing=0.2),
    functools.partial(functional.smooth_l1_loss, beta=2.0),
]


@pytest.mark.parametrize("criterion", LOSSES)
def test_a_loss_by_name_computes_the_same(criterion: Any) -> None:
    torch.manual_seed(0)
    output = torch.rand(8, 3)
    by_class = any(
        word in str(criterion).lower() for word in ("cross_entropy", "crossentropy", "margin")
    )
    target = torch.randint(0, 3, (8,)) if by_class else torch.rand(8, 3)
    named = named_loss(criterion)
    assert named is not None
    again = loss_function(NamedComponent.model_validate_json(named.model_dump_json()))
    assert torch.equal(again(output, target), criterion(output, target))


class MyLoss(nn.MSELoss):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(output, target) * 2


def _hooked() -> nn.Module:
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda module, args, result: result * 2)
    return loss


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(weight=torch.ones(3)),
        nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)),
        functools.partial(functional.cross_entropy, weight=torch.ones(3)),
        functools.partial(functional.mse_loss, torch.ones(3)),
        MyLoss(),
        _hooked(),
        functional.cosine_similarity,
        lambda output, labels: output.mean(),
    ],
)
def test_a_custom_loss_has_no_name(criterion: Any) -> None:
    assert named_loss(criterion) is None


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (nn.CrossEntropyLoss, "give an instance"),
        (None, "must be a loss"),
        ("mse", "must be a loss"),
        (nn.MSELoss(reduction="none"), "needs one number"),
        (functools.partial(functional.mse_loss, reduction="none"), "needs one number"),
    ],
)
def test_an_unsuitable_criterion_is_refused(criterion: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        named_loss(criterion)


@pytest.mark.parametrize(
    "named",
    [
        NamedComponent(name="Linear", params={"in_features": 2, "out_features": 2}),
        NamedComponent(name="Module"),
        NamedComponent(name="MSELoss", params={"size": 3}),
        NamedComponent(name="MSELoss", params={"__class__": "x"}),
    ],
)
def test_a_forged_loss_is_refused(named: NamedComponent) -> None:
    with pytest.raises(JobError):
        loss_function(named)
