"""Learning rates by pieces, against the schedules that they are named after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from zoo_models.vision import torchvision_schemas

from ravnest.errors import JobError
from ravnest.jobs.learning_rates import named_plateau, named_schedule, plateau_metric
from ravnest.runtime.stage.learning_rate import PiecewiseLR

UPDATES = 40


def optimizer(*rates: float) -> torch.optim.SGD:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups)


def rates(scheduler: Any, steps: int = UPDATES + 5) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def made(schedule: object, params: Mapping[str, Any] | None = None) -> PiecewiseLR:
    named = named_schedule(schedule, params or {}, UPDATES)
    settings: dict[str, Any] = dict(named.params)
    return PiecewiseLR(optimizer(0.3), **settings)


@pytest.mark.parametrize("warm_up", [0, 8])
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("constant_with_warmup", {}),
        ("linear", {}),
        ("cosine", {}),
        ("cosine_with_restarts", {"num_cycles": 2}),
        ("polynomial", {"power": 2.0}),
        ("inverse_sqrt", {}),
    ],
)
def test_named_schedules_are_those_of_transformers(
    name: str, params: dict[str, Any], warm_up: int
) -> None:
    torchvision_schemas()  # transformers imports torchvision, of whichever build
    transformers = pytest.importorskip("transformers")
    theirs = dict(params) | ({"lr_end": 0.0} if name == "polynomial" else {})
    expected = transformers.get_scheduler(
        name, optimizer(0.3), warm_up, UPDATES, scheduler_specific_kwargs=theirs
    )
    found = made(name, {**params, "warmup_steps": warm_up})
    steps = UPDATES + 1  # later, that of Transformers rises again
    assert rates(found, steps) == pytest.approx(rates(expected, steps), abs=1e-12)


def test_pieces_are_a_sequence_of_schedulers_of_torch() -> None:
    one = optimizer(0.3)
    warm_up = lr_scheduler.LinearLR(one, start_factor=0.25, total_iters=10)
    decay = lr_scheduler.CosineAnnealingLR(one, T_max=30)
    expected = lr_scheduler.SequentialLR(one, [warm_up, decay], milestones=[10])
    pieces = [{"shape": "linear", "first": 0.25, "last": 1.0, "length": 10}, {"shape": "cosine"}]
    assert rates(made(pieces), 40) == pytest.approx(rates(expected, 40), abs=1e-12)


def test_lengths_below_one_are_shares_of_training() -> None:
    shares = [{"shape": "linear", "first": 0, "last": 1, "length": 0.25}, {"shape": "constant"}]
    counts = [{"shape": "linear", "first": 0, "last": 1, "length": 10}, {"shape": "constant"}]
    assert rates(made(shares)) == rates(made(counts))
    assert rates(made("linear", {"warmup_ratio": 0.25})) == rates(made("linear", {"warmup_steps": 10}))


def test_groups_keep_their_own_rates() -> None:
    scheduler = PiecewiseLR(optimizer(0.3, 0.1), ["linear"], [10], [1.0], [0.0])
    assert scheduler.get_last_lr() == [0.3, 0.1]
    scheduler.optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.27, 0.09])


def test_a_scheduler_continues_from_its_state() -> None:
    first = made("cosine", {"warmup_steps": 5})
    whole = rates(first, 20)
    again = made("cosine", {"warmup_steps": 5})
    before = rates(again, 12)
    third = made("cosine", {"warmup_steps": 5})
    third.load_state_dict(again.state_dict())
    assert before + rates(third, 8) == whole


@pytest.mark.parametrize(
    ("schedule", "params", "message"),
    [
        ("cosin", {}, "no schedule is called 'cosin', only constant"),
        ("cosine", {"warmup": 3}, "has no parameter 'warmup'"),
        ("cosine", {"warmup_steps": 3, "warmup_ratio": 0.1}, "both warmup_steps and warmup_ratio"),
        ("cosine", {"warmup_ratio": 3}, "from 0 to 1, not 3"),
        ("cosine", {"warmup_steps": -1}, "must be a number from 0, not -1"),
        ([], {}, "an empty list"),
        ([{"shape": "linear"}, {"shape": "cosine"}], {}, "piece 0 of lr_scheduler needs a length"),
        ([{"shape": "round"}], {}, "must be a mapping with a shape"),
        ([{"shape": "cosine", "till": 3}], {}, "has an unknown key 'till'"),
        ([{"shape": "cosine", "last": "0"}], {}, "last of piece 0 of lr_scheduler must be a number"),
        ([{"shape": "cosine"}], {"power": 2}, "takes no lr_scheduler_params"),
        (3, {}, "not a int"),
    ],
)
def test_wrong_schedules_say_what_is_wrong(
    schedule: object, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        named_schedule(schedule, params, UPDATES)


def test_one_cycle_is_that_of_torch() -> None:
    reference = lr_scheduler.OneCycleLR(optimizer(0.3), 0.3, total_steps=UPDATES, cycle_momentum=False)
    assert rates(made("one_cycle"), UPDATES) == pytest.approx([*rates(reference, UPDATES - 1), 1.2e-6])
    with pytest.raises(JobError, match="the schedule 'one_cycle' has no parameter 'warmup_ratio'"):
        made("one_cycle", {"warmup_ratio": 0.1})


def test_a_plateau_follows_a_metric_in_its_direction() -> None:
    assert named_plateau({}).params == {"mode": "min"}
    named = named_plateau({"metric": "f1", "factor": 0.5, "patience": 1})
    assert (named.name, named.params) == (
        "ReduceLROnPlateau", {"factor": 0.5, "patience": 1, "mode": "max"}
    )  # fmt: skip
    assert plateau_metric({"metric": "f1"}) == "f1"
    for params, message in (
        ({"metric": "dice"}, "needs mode='min' or mode='max' for the metric 'dice'"),
        ({"metric": 3}, "is a name, not 3"),
        ({"gamma": 3}, "the schedule 'plateau' has no parameter 'gamma'"),
    ):
        with pytest.raises(JobError, match=message):
            named_plateau(params)
