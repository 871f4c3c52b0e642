"""Parameter groups by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ravnest.errors import JobError, SettingsError
from ravnest.jobs.registry import (
    _OPTIMIZERS,
    check_shapes,
    check_update,
    named_groups,
    named_optimizer,
    optimizer_settings,
)
from ravnest.runtime.stage.parameter_groups import matches
from ravnest.runtime.stage.updates import UpdateRule, Updates

MODEL = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
GROUPS = [{"match": "*.bias|1.*", "weight_decay": 0.0}, {"match": "2.*", "lr": 0.01}]
PARAMS = {"lr": 0.1, "weight_decay": 0.5}


@pytest.mark.parametrize(
    ("name", "patterns", "expected"),
    [
        ("0.bias", "*.bias", True),
        ("0.bias", "*norm* | *.bias", True),
        ("0.Bias", "*.bias", False),
        ("layers.3.norm.weight", "layers.[0-3].*", True),
        ("layers.4.norm.weight", "layers.[0-3].*", False),
        ("0.weight", "*.bias|", False),
    ],
)
def test_patterns(name: str, patterns: str, *, expected: bool) -> None:
    assert matches(name, patterns) is expected


def trained(updates: list[Updates], model: nn.Module) -> None:
    for step in range(3):
        inputs = torch.ones(2, 4) * (step + 1)
        gradients = torch.autograd.grad(model(inputs).square().sum(), list(model.parameters()))
        found = dict(zip((name for name, _ in model.named_parameters()), gradients, strict=True))
        for each in updates:
            for key in each._parameters:
                each.add(key, found[key], set())
            each.step(1)


def copied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model.load_state_dict(MODEL.state_dict())
    return model


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_stages_with_groups_train_as_one_optimizer_with_groups(optimizer: Any) -> None:
    alone = copied()
    named = dict(alone.named_parameters())
    first = [named[name] for name in ("0.bias", "1.weight", "1.bias", "2.bias")]
    reference = optimizer(
        [
            {"params": [named["0.weight"]]},
            {"params": first, "weight_decay": 0.0},
            {"params": [named["2.weight"]], "lr": 0.01},
        ],
        **PARAMS,
    )
    for step in range(3):
        reference.zero_grad()
        alone(torch.ones(2, 4) * (step + 1)).square().sum().backward()
        reference.step()

    model = copied()
    groups = named_groups(GROUPS, model)
    rule = UpdateRule(optimizer, optimizer_settings(named_optimizer(optimizer, PARAMS), groups))
    own = dict(model.named_parameters())
    stages = [
        Updates(rule, {name: own[name] for name in own if name.startswith(prefix)})
        for prefix in ("0.", "1.", "2.")
    ]
    trained(stages, model)
    assert all(torch.equal(own[name], named[name]) for name in named)
    assert {len(each.learning_rates) for each in stages} == {3}, "every stage has every group"


def test_a_stage_continues_with_its_groups() -> None:
    rule = UpdateRule(
        torch.optim.AdamW,
        optimizer_settings(named_optimizer(torch.optim.AdamW, PARAMS), named_groups(GROUPS, MODEL)),
    )
    model = copied()
    updates = Updates(rule, {"0.bias": model[0].bias})
    updates.add("0.bias", torch.ones(4), set())
    updates.step(1)
    tensors, plain = updates.capture()
    again = Updates(rule, {"0.bias": copied()[0].bias})
    again.restore(tensors, plain)
    assert again.optimizer is not None
    assert updates.optimizer is not None
    settings = [
        [{k: v for k, v in group.items() if k != "params"} for group in each.param_groups]
        for each in (again.optimizer, updates.optimizer)
    ]
    assert settings[0] == settings[1]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"match": "*"}, "must be a list of mappings"),
        ("*", "must be a list of mappings"),
        ([{"weight_decay": 0}], r"parameter_groups\[0\] needs a 'match'"),
        ([{"match": "*.gamma", "lr": 1}], r"no trained parameter matches '\*.gamma'; names are like"),
        ([{"match": "*", "lr": [[1]]}], "parameters of a job are numbers"),
    ],
)
def test_wrong_groups_say_what_is_wrong(groups: object, message: str) -> None:
    with pytest.raises(JobError, match=message):
        named_groups(groups, MODEL)


def test_a_setting_that_the_optimizer_does_not_have_is_refused() -> None:
    groups = named_groups([{"match": "*", "wieght_decay": 0}], MODEL)
    with pytest.raises(JobError, match="AdamW has no setting 'wieght_decay' for a group"):
        check_update(named_optimizer(torch.optim.AdamW, {}), None, groups)


def test_stages_clip_the_elements_of_gradients_as_one_process() -> None:
    alone, model = copied(), copied()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        reference.zero_grad()
        alone(torch.ones(2, 4) * (step + 1)).square().sum().backward()
        nn.utils.clip_grad_value_(alone.parameters(), 0.02)
        reference.step()
    own = dict(model.named_parameters())
    rule = UpdateRule(torch.optim.SGD, {"lr": 0.1}, clip_value=0.02)
    trained(
        [Updates(rule, {n: p for n, p in own.items() if n.startswith(each)}) for each in "012"], model
    )
    assert all(torch.equal(own[name], p) for name, p in alone.named_parameters())


def test_a_plateau_gets_its_metric() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    rule = UpdateRule(
        torch.optim.SGD,
        {"lr": 1.0},
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        {"patience": 0, "factor": 0.5},
        plateau_metric="loss",
    )
    updates = Updates(rule, {"w": parameter})
    for accuracy, loss in ((0.1, 3.0), (0.2, 2.0), (0.3, 2.5)):
        updates.validated(accuracy, {"accuracy": accuracy, "loss": loss})
    assert updates.learning_rates == [0.5], "the loss has grown once, the accuracy each time"


def test_both_kinds_of_clipping_are_refused() -> None:
    with pytest.raises(SettingsError, match="clip_grad_norm or clip_grad_value, not both"):
        UpdateRule(torch.optim.SGD, clip=1.0, clip_value=1.0).check()


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.Muon, "Muon cannot train this model: Muon only supports 2D parameters"),
        (torch.optim.SparseAdam, "SparseAdam cannot train this model: .*dense gradients"),
    ],
)
def test_optimizers_that_cannot_train_a_model_are_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        check_shapes(optimizer, {}, MODEL)


def test_all_other_optimizers_can_train_it() -> None:
    usable = set(_OPTIMIZERS) - {"Muon", "SparseAdam"}
    assert usable >= {"Adafactor", "Adagrad", "AdamW", "ASGD", "NAdam", "RAdam", "Rprop", "SGD"}
    for name in usable:
        check_shapes(_OPTIMIZERS[name], {}, MODEL)
    check_shapes(torch.optim.Muon, {}, nn.Linear(3, 2, bias=False))
