"""Learning rate schedules of clusters that share the data end where one process ends."""

import pytest
import torch
from torch import nn

from ravnest.runtime.stage.updates import UpdateRule, Updates


@pytest.mark.parametrize(("own", "alone"), [(50, 100), (33, 100), (100, 100), (7, 20), (60, 100)])
def test_a_schedule_by_updates_ends_where_one_process_ends(own: int, alone: int) -> None:
    def updates(steps: float) -> Updates:
        rule = UpdateRule(
            torch.optim.SGD,
            {"lr": 0.1},
            torch.optim.lr_scheduler.OneCycleLR,
            {"max_lr": 1.0, "total_steps": alone + 1},
            scheduler_each_epoch=False,
            scheduler_steps=steps,
        )
        return Updates(rule, {"weight": nn.Parameter(torch.zeros(2))})

    reference, cluster = updates(1.0), updates(alone / own)
    rates = []
    for _ in range(alone):
        reference.step(1)
        rates.append(reference.learning_rates[0])
    for update in range(own):
        cluster.step(1)
        assert cluster.learning_rates[0] == pytest.approx(
            rates[int((update + 1) * alone / own + 1e-6) - 1]
        )
    assert cluster.learning_rates == reference.learning_rates
