"""Mean of the checkpoints of several clusters, and the position with which a new plan starts."""

from functools import partial
from typing import Any

import pytest
import torch

from ravnest.errors import StageFormatError
from ravnest.store.checkpoint import LazyTensor
from ravnest.store.checkpoint_mean import StageContents, mean_contents, sample_weights
from ravnest.store.checkpoint_progress import CutProgress, EpochStart
from ravnest.store.plain_data import decode


def contents(value: float, **more: torch.Tensor) -> StageContents:
    tensors = {
        "state/w": torch.full((2, 3), value),
        "state/count": torch.tensor(int(value)),
        "optimizer/w/momentum": torch.full((2, 3), 10 * value),
        "optimizer/w/step": torch.tensor(value),
        **more,
    }
    lazy = {
        name: LazyTensor(each.dtype, tuple(each.shape), partial(torch.clone, each))
        for name, each in tensors.items()
    }
    return StageContents(lazy, {})


def mean(*values: tuple[float, float], optimizer: bool = False) -> dict[str, torch.Tensor]:
    averaged = [(contents(value), weight) for value, weight in values]
    found = mean_contents(averaged[0][0], averaged, optimizer=optimizer)
    return {name: each.load() for name, each in found.tensors.items()}


def test_weights_are_averaged_and_the_rest_is_that_of_the_first() -> None:
    found = mean((1.0, 0.75), (5.0, 0.25))
    assert torch.equal(found["state/w"], torch.full((2, 3), 2.0))
    assert found["state/count"] == 1, "integers are counts"
    assert torch.equal(found["optimizer/w/momentum"], torch.full((2, 3), 10.0))
    assert found["optimizer/w/step"] == 1.0


def test_optimizer_state_in_the_shape_of_its_weight_is_averaged_if_rounds_do_that() -> None:
    found = mean((1.0, 0.75), (5.0, 0.25), optimizer=True)
    assert torch.equal(found["optimizer/w/momentum"], torch.full((2, 3), 20.0))
    assert found["optimizer/w/step"] == 1.0


def test_a_cluster_without_a_weight_is_not_loaded() -> None:
    found = mean((1.0, 0.0), (5.0, 1.0))
    assert torch.equal(found["state/w"], torch.full((2, 3), 5.0))


def test_a_robust_mean_leaves_out_the_largest_and_smallest_values() -> None:
    averaged = [(contents(value), 0.25) for value in (1.0, 2.0, 4.0, 1000.0)]
    averaged[0] = (contents(1.0, **{"state/w": torch.full((2, 3), float("nan"))}), 0.25)
    found = mean_contents(averaged[1][0], averaged, optimizer=True, robust=True).tensors
    assert torch.equal(found["state/w"].load(), torch.full((2, 3), 502.0)), "NaN is the largest"
    assert torch.equal(found["optimizer/w/momentum"].load(), torch.full((2, 3), 30.0))


def test_a_robust_mean_of_two_clusters_is_a_plain_one() -> None:
    averaged = [(contents(value), weight) for value, weight in ((1.0, 0.5), (3.0, 0.5), (9.0, 0.0))]
    found = mean_contents(averaged[0][0], averaged, optimizer=False, robust=True)
    assert torch.equal(found.tensors["state/w"].load(), torch.full((2, 3), 2.0))


def test_a_mean_that_is_not_finite_is_refused() -> None:
    damaged = contents(1.0, **{"state/w": torch.full((2, 3), float("nan"))})
    found = mean_contents(contents(1.0), [(contents(1.0), 0.5), (damaged, 0.5)], optimizer=False)
    with pytest.raises(StageFormatError, match="the mean of state/w over the clusters is not finite"):
        found.tensors["state/w"].load()


def test_half_precision_is_summed_in_single_precision() -> None:
    own = [
        contents(0.0, **{"state/h": torch.tensor([value], dtype=torch.bfloat16)})
        for value in (1.0, 1.0078125, 1.0)
    ]
    found = mean_contents(own[0], [(each, 1 / 3) for each in own], optimizer=False)
    loaded = found.tensors["state/h"].load()
    assert loaded.dtype == torch.bfloat16
    assert loaded.item() == 1.0


@pytest.mark.parametrize(
    ("samples", "weights"), [([30, 10], [0.75, 0.25]), ([0, 0], [0.5, 0.5]), ([0, 7], [0.0, 1.0])]
)
def test_weights_are_those_of_an_averaging_round(samples: list[int], weights: list[float]) -> None:
    assert sample_weights(samples) == weights


def test_samples_do_not_weight_a_robust_mean() -> None:
    assert sample_weights([1000, 1, 0, 1], robust=True) == [1 / 3, 1 / 3, 0.0, 1 / 3]
    assert sample_weights([0, 0], robust=True) == [0.5, 0.5]


def test_a_new_plan_starts_with_an_epoch_and_the_validations_before_it() -> None:
    root: dict[str, Any] = {
        "epoch": 4,
        "batches": 3,
        "microbatches": 6,
        "samples": 24,
        "data": "d",
        "random": None,
        "ended": True,
    }
    progress = CutProgress(root, None, {1: "first", 5: "second"}, 40, None, (), 24)
    same = decode(progress.of_stage(0, 1, None))
    assert (same["root"], same["averaging_samples"]) == (root, 24)
    again = decode(progress.of_stage(0, 1, None, EpochStart()))
    assert again["root"] == root | {"batches": 0, "microbatches": 0, "samples": 0, "data": ""}
    found = decode(progress.of_stage(0, 1, None, EpochStart(3, 5)))
    assert (found["root"]["epoch"], found["root"]["ended"]) == (3, False)
    assert (found["validations"], found["averaging_samples"]) == ({1: "first"}, 0)
