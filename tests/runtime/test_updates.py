"""Learning rate schedules of clusters that share the data end where one process ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ravnest.runtime.stage.updates import UpdateRule, Updates
from ravnest.store.checkpoint_progress import CutProgress, EpochStart
from ravnest.store.plain_data import decode, encode


def one_cycle(steps: float, total: int, **rule: Any) -> Updates:
    """Return updates with a ``OneCycleLR`` that makes so many steps per update."""
    found = {"scheduler_each_epoch": False, "scheduler_steps": steps, **rule}
    params = {"max_lr": 1.0, "total_steps": total, "anneal_strategy": "linear"}
    return Updates(
        UpdateRule(
            torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, lr_scheduler.OneCycleLR, params, **found
        ),
        {"weight": nn.Parameter(torch.zeros(2))},
    )


def rates(updates: Updates, count: int) -> list[float]:
    """Return the learning rate of each of so many updates."""
    found = []
    for _ in range(count):
        found += updates.learning_rates
        updates.step(1)
    return found


def continued(before: Updates, after: Updates) -> Updates:
    """Return updates that continue from the checkpoint of others."""
    tensors, plain = before.capture()
    after.restore(tensors, decode(encode(plain)))
    return after


@pytest.mark.parametrize(("own", "alone"), [(50, 100), (33, 100), (100, 100), (7, 20), (60, 100)])
def test_a_schedule_by_updates_ends_where_one_process_ends(own: int, alone: int) -> None:
    reference, cluster = one_cycle(1.0, alone + 1), one_cycle(alone / own, alone + 1)
    wanted = []
    for _ in range(alone):
        reference.step(1)
        wanted += reference.learning_rates
    for update in range(own):
        cluster.step(1)
        assert cluster.learning_rates[0] == pytest.approx(
            wanted[int((update + 1) * alone / own + 1e-6) - 1]
        )
    assert cluster.learning_rates == reference.learning_rates


@pytest.mark.parametrize(
    ("before", "ratio_before", "after", "ratio_after"),
    [(100, 1.0, 50, 2.0), (50, 2.0, 100, 1.0), (30, 10 / 3, 100, 1.0), (100, 1.0, 30, 10 / 3)],
)
def test_another_plan_continues_at_the_learning_rate_of_the_one_before(
    before: int, ratio_before: float, after: int, ratio_after: float
) -> None:
    alone = rates(one_cycle(1.0, 200), 200)
    old = one_cycle(ratio_before, 200)
    rates(old, before)
    found = rates(continued(old, one_cycle(ratio_after, 200)), after)
    assert found == [alone[100 + int(number * ratio_after + 1e-6)] for number in range(after)]


@pytest.mark.parametrize("ratio", [1.0, 2.0, 10 / 7, 100 / 33, 0.3])
def test_the_same_plan_continues_with_the_same_bits(ratio: float) -> None:
    whole, first = one_cycle(ratio, 400), one_cycle(ratio, 400)
    wanted = rates(whole, 100)
    found = rates(first, 41)
    second = continued(first, one_cycle(ratio, 400))
    assert found + rates(second, 59) == wanted
    assert second.capture()[1] == whole.capture()[1]


def test_a_checkpoint_of_an_older_version_continues_after_the_steps_that_were_made() -> None:
    old = one_cycle(1.0, 200)
    rates(old, 100)
    tensors, plain = old.capture()
    del plain["scheduler_due"], plain["epoch_steps"]
    new = one_cycle(2.0, 200)
    new.restore(tensors, plain)
    assert rates(new, 50) == rates(one_cycle(1.0, 200), 200)[100::2]


def test_a_schedule_stays_at_its_end_if_there_are_more_updates() -> None:
    by_updates = rates(one_cycle(1.0, 20), 25)
    assert by_updates[19:] == [by_updates[19]] * 6
    assert 0 < by_updates[19] == min(by_updates)
    by_epochs = one_cycle(1.0, 3, scheduler_each_epoch=True)
    for _ in range(5):
        by_epochs.step(1)
        by_epochs.end_epoch()
    assert by_epochs.learning_rates == rates(one_cycle(1.0, 3), 3)[-1:]


def test_the_schedule_waits_for_an_epoch_that_begins_anew() -> None:
    alone = rates(one_cycle(1.0, 40), 40)
    old = one_cycle(1.0, 40)
    rates(old, 20)
    old.end_epoch()
    rates(old, 6)  # of the second epoch; they are made again, by two clusters
    tensors, plain = old.capture()
    optimizer = {key: value for key, value in plain.items() if key not in ("done", "fields")}
    progress = CutProgress({}, None, {}, plain["done"], optimizer, ({},))
    seed = decode(progress.of_stage(0, 1, plain["fields"], EpochStart()))
    new = one_cycle(2.0, 40)
    new.restore(tensors, seed["updates"])
    assert rates(new, 10) == [alone[26]] * 4 + alone[28::2]
