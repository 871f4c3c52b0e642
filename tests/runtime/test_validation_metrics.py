"""Metrics of a validation: their values over all batches, as scikit-learn defines them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sklearn import metrics as sk

from ravnest.errors import DataError, SettingsError
from ravnest.runtime.stage.validation_metrics import METRIC_NAMES, choose_metrics, direction_of

GENERATOR = torch.Generator().manual_seed(3)
SCORES = torch.randn(203, 7, generator=GENERATOR)
CLASSES = torch.randint(0, 5, (203,), generator=GENERATOR)  # two classes never occur
LOGITS = torch.randn(203, 4, generator=GENERATOR)
LABELS = torch.randint(0, 2, (203, 4), generator=GENERATOR)
TOKENS = torch.randint(0, 11, (24, 6), generator=GENERATOR)
TOKEN_SCORES = torch.randn(24, 6, 11, generator=GENERATOR)


def measured(metric: Any, outputs: torch.Tensor, targets: torch.Tensor, size: int = 32) -> float:
    """Return a metric over batches of this size, of which the last is smaller."""
    (chosen,) = choose_metrics([metric])
    made = chosen.make()
    for output, item in zip(outputs.split(size), targets.split(size), strict=True):
        made.add(output, item)
    return made.value()


@pytest.mark.parametrize("average", ["micro", "macro", "weighted"])
@pytest.mark.parametrize("name", ["f1", "precision", "recall", "iou"])
def test_scores_of_classes_are_those_of_scikit_learn(name: str, average: str) -> None:
    reference = {"f1": sk.f1_score, "precision": sk.precision_score, "recall": sk.recall_score}
    function = reference.get(name, sk.jaccard_score)
    expected = function(CLASSES, SCORES.argmax(1), average=average, zero_division=0)
    found = measured({"name": name, "average": average}, SCORES, CLASSES)
    assert found == pytest.approx(expected, abs=1e-12)


def test_the_mean_of_batches_would_be_another_score() -> None:
    of_batches = [
        measured("f1", scores, classes)
        for scores, classes in zip(SCORES.split(32), CLASSES.split(32), strict=True)
    ]
    assert abs(sum(of_batches) / len(of_batches) - measured("f1", SCORES, CLASSES)) > 0.005


@pytest.mark.parametrize("top_k", [1, 3])
def test_accuracy_counts_the_classes_with_the_highest_scores(top_k: int) -> None:
    expected = sk.top_k_accuracy_score(CLASSES, SCORES, k=top_k, labels=range(7))
    found = measured({"name": "accuracy", "top_k": top_k}, SCORES, CLASSES)
    assert found == pytest.approx(expected, abs=1e-12)


def test_errors_of_regressions() -> None:
    predicted, wanted = SCORES[:, 0], SCORES[:, 1]
    assert measured("mae", predicted, wanted) == pytest.approx(
        sk.mean_absolute_error(wanted.double(), predicted.double()), abs=1e-12
    )
    assert measured("rmse", predicted[:, None], wanted) == pytest.approx(
        math.sqrt(sk.mean_squared_error(wanted.double(), predicted.double())), abs=1e-12
    )


def test_perplexity_counts_tokens_and_leaves_out_ignored_ones() -> None:
    targets = TOKENS.masked_fill(TOKENS == 4, -100)
    mean = torch.nn.functional.cross_entropy(TOKEN_SCORES.flatten(0, 1), targets.flatten())
    for scores in (TOKEN_SCORES, TOKEN_SCORES.transpose(1, 2)):
        assert measured("perplexity", scores, targets, 5) == pytest.approx(mean.exp().item(), rel=1e-6)


@pytest.mark.parametrize("average", ["micro", "macro", "weighted"])
@pytest.mark.parametrize("name", ["f1", "iou"])
def test_several_labels_of_a_sample(name: str, average: str) -> None:
    function = sk.f1_score if name == "f1" else sk.jaccard_score
    expected = function(LABELS, LOGITS > 0, average=average)
    metric = {"name": name, "task": "multilabel", "average": average}
    assert measured(metric, LOGITS, LABELS) == pytest.approx(expected, abs=1e-12)


def test_one_logit_or_probability_per_sample() -> None:
    logits, labels = LOGITS[:, 0], LABELS[:, 0]
    expected = sk.f1_score(labels, logits > 0)
    assert measured({"name": "f1", "task": "binary"}, logits, labels) == pytest.approx(expected)
    given = {"name": "f1", "task": "binary", "logits": False}
    assert measured(given, logits[:, None].sigmoid(), labels) == pytest.approx(expected)
    expected = sk.accuracy_score(labels, logits.sigmoid() > 0.7)
    given = {"name": "accuracy", "task": "binary", "threshold": 0.7}
    assert measured(given, logits, labels) == pytest.approx(expected)


def test_accuracy_of_classes_weighs_them_equally() -> None:
    found = measured({"name": "accuracy", "average": "macro"}, SCORES, CLASSES)
    recall = measured({"name": "recall", "average": "macro"}, SCORES, CLASSES)
    assert found == recall  # over the classes that occur, predicted or not, as torchmetrics counts them


def test_one_hot_targets_and_images_count_by_class() -> None:
    hot = torch.nn.functional.one_hot(CLASSES, 7)
    assert measured("accuracy", SCORES, hot) == measured("accuracy", SCORES, CLASSES)
    images, masks = torch.randn(6, 3, 4, 5), torch.randint(0, 3, (6, 4, 5))
    flat = images.movedim(1, -1).reshape(-1, 3)
    assert measured("iou", images, masks, 4) == measured("iou", flat, masks.reshape(-1))


def test_a_function_is_a_mean_over_its_values() -> None:
    def distance(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) - labels).abs().float()

    expected = (SCORES.argmax(1) - CLASSES).abs().float().mean()
    assert measured(distance, SCORES, CLASSES) == pytest.approx(expected.item())
    by_samples = measured(lambda output, labels: distance(output, labels).mean(), SCORES, CLASSES)
    assert by_samples == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("accuracy", "metrics must be a list"),
        (["acuracy"], "no metric is called 'acuracy', only accuracy, "),
        (["f1", {"name": "f1", "average": "micro"}], "two metrics are called 'f1'"),
        ([{"name": "f1", "average": "none"}], "average of the metric 'f1' must be one of micro, "),
        ([{"name": "mae", "top_k": 3}], "'mae' does not accept its parameters"),
        ([{"name": "loss", "top_k": 3}], "takes no parameters: it is the criterion"),
        ([3], "a metric is a name, a mapping with a name and parameters, or a function, not 3"),
    ],
)
def test_wrong_metrics_are_refused(given: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        choose_metrics(given)


@pytest.mark.parametrize(
    ("metric", "outputs", "targets", "message"),
    [
        ("accuracy", LOGITS[:, 0], LABELS[:, 0], "use the task 'binary'"),
        ("accuracy", SCORES, CLASSES.float(), "needs class indices"),
        ("f1", SCORES, CLASSES + 4, "targets are from 4 to 8, but the model's output has 7 classes"),
        ("mae", SCORES, CLASSES, "the same shape"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(
    metric: str, outputs: torch.Tensor, targets: torch.Tensor, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        measured(metric, outputs, targets)


def test_labels_and_directions() -> None:
    chosen = choose_metrics(
        ["accuracy", {"name": "accuracy", "top_k": 3}, "top_k_accuracy", "loss", "rmse"]
    )
    assert [metric.label for metric in chosen] == [
        "accuracy", "top_3_accuracy", "top_5_accuracy", "loss", "rmse"
    ]  # fmt: skip
    assert [direction_of(metric) for metric in chosen] == ["max", "max", "max", "min", "min"]
    (named,) = choose_metrics({"of images": "iou"})
    assert named.label == "of images"
    (own,) = choose_metrics([measured])
    assert (own.label, direction_of(own)) == ("measured", None)
    assert set(METRIC_NAMES) >= {"accuracy", "f1", "iou", "mae", "rmse", "perplexity", "loss"}
