"""The losses of the parts of a batch add up to the batch's, or the batch is not split."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ravnest.split.loss_weighting import LossWeighting, NotDecomposable, find_weighting, peek_item
from ravnest.split.rows import cut_rows
from ravnest.split.structure import Record, map_tensors

B, C, T, V = 8, 5, 7, 11
torch.manual_seed(0)
LOGITS, CLASSES, TARGETS = torch.randn(B, C), torch.randint(C, (B,)), torch.randn(B, C)
TOKENS, LABELS = torch.randn(B, T, V), torch.randint(V, (B, T))
WEIGHTS = torch.rand(C) + 0.1
PROBABILITIES = torch.rand(B, C)
SIGNS = torch.randint(2, (B,)) * 2 - 1


def flat(output: Any, batch: Any, **options: Any) -> torch.Tensor:
    return functional.cross_entropy(output.logits.view(-1, V), batch["labels"].view(-1), **options)


def shifted(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))


def by_hand(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    each = functional.cross_entropy(output.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return (each * (labels >= 0)).sum() / (labels >= 0).sum().clamp(min=1)


def masked(output: torch.Tensor, item: Any) -> torch.Tensor:
    each = functional.cross_entropy(output.transpose(1, 2), item["labels"], reduction="none")
    return (each * item["mask"]).sum() / (item["mask"].sum() + 1e-8)


def ctc(output: torch.Tensor, item: Any, reduction: str = "mean") -> torch.Tensor:
    return functional.ctc_loss(output.transpose(0, 1).log_softmax(-1), *item, reduction=reduction)


RECORD = Record(logits=TOKENS)
TOKEN_BATCH = {"x": torch.randn(B, 3), "labels": LABELS}
CTC_ITEM = (torch.randint(1, V, (B, 3)), torch.full((B,), T), torch.randint(1, 4, (B,)))
CASES: dict[str, tuple[Any, Any, Any, LossWeighting]] = {
    "mse": (nn.MSELoss(), LOGITS, TARGETS, LossWeighting("samples")),
    "l1 sum": (nn.L1Loss(reduction="sum"), LOGITS, TARGETS, LossWeighting("sum")),
    "cross entropy": (nn.CrossEntropyLoss(), LOGITS, CLASSES, LossWeighting("counted", 0, (-100,))),
    "smoothing": (
        nn.CrossEntropyLoss(label_smoothing=0.1),
        LOGITS,
        CLASSES,
        LossWeighting("counted", 0, (-100,)),
    ),
    "cross entropy sum": (nn.CrossEntropyLoss(reduction="sum"), LOGITS, CLASSES, LossWeighting("sum")),
    "ignored": (
        nn.CrossEntropyLoss(ignore_index=2),
        LOGITS,
        CLASSES,
        LossWeighting("counted", 0, (2,)),
    ),
    "class weights": (
        nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=255),
        torch.randn(B, C, 3, 3),
        torch.randint(C, (B, 3, 3)),
        LossWeighting("counted", 0, (255,), tuple(WEIGHTS.tolist())),
    ),
    "probabilities": (
        nn.CrossEntropyLoss(weight=WEIGHTS),
        LOGITS,
        PROBABILITIES.softmax(1),
        LossWeighting("samples"),
    ),
    "bce": (nn.BCELoss(), LOGITS.sigmoid(), PROBABILITIES, LossWeighting("samples")),
    "bce with logits": (
        nn.BCEWithLogitsLoss(pos_weight=WEIGHTS),
        LOGITS,
        PROBABILITIES.round(),
        LossWeighting("samples"),
    ),
    "kl batchmean": (
        nn.KLDivLoss(reduction="batchmean"),
        LOGITS.log_softmax(1),
        PROBABILITIES.softmax(1),
        LossWeighting("samples"),
    ),
    "kl mean": (
        nn.KLDivLoss(),
        LOGITS.log_softmax(1),
        PROBABILITIES.softmax(1),
        LossWeighting("samples"),
    ),
    "ctc": (ctc, TOKENS, CTC_ITEM, LossWeighting("samples")),
    "ctc sum": (partial(ctc, reduction="sum"), TOKENS, CTC_ITEM, LossWeighting("sum")),
    "cosine": (
        lambda o, y: functional.cosine_embedding_loss(*o, y),
        (LOGITS, TARGETS),
        SIGNS,
        LossWeighting("samples"),
    ),
    "triplet": (
        lambda o, _: functional.triplet_margin_loss(*o),
        (LOGITS, TARGETS, PROBABILITIES),
        None,
        LossWeighting("samples"),
    ),
    "flat": (flat, RECORD, TOKEN_BATCH, LossWeighting("counted", 1, (-100,))),
    "flat padding": (
        lambda o, b: flat(o, b, ignore_index=3),
        RECORD,
        TOKEN_BATCH,
        LossWeighting("counted", 1, (3,)),
    ),
    "flat output": (
        lambda o, y: functional.cross_entropy(o, y.view(-1)),
        TOKENS.view(-1, V),
        LABELS,
        LossWeighting("counted", 0, (-100,)),
    ),
    "shifted": (shifted, TOKENS, LABELS, LossWeighting("counted", 0, (-100,), skipped=1)),
    "by hand": (by_hand, TOKENS, LABELS, LossWeighting("counted", 0, (-100, -1))),
    "masked": (
        masked,
        TOKENS,
        {"mask": torch.ones(B, T), "labels": LABELS},
        LossWeighting("masked", 0),
    ),
    "masked by integers": (
        masked,
        TOKENS,
        {"mask": torch.ones(B, T).long(), "labels": LABELS},
        LossWeighting("masked", 0),
    ),
    "missing targets": (
        lambda o, y: ((o - y) ** 2)[y != -1].mean(),
        LOGITS,
        TARGETS,
        LossWeighting("counted", 0, (-1,)),
    ),
    "regulariser": (
        lambda o, y: functional.mse_loss(o, y) + 3,
        LOGITS,
        TARGETS,
        LossWeighting("samples"),
    ),
    "equal labels": (
        nn.CrossEntropyLoss(),
        torch.zeros(B, C),
        torch.zeros(B).long(),
        LossWeighting("counted", 0, (-100,)),
    ),
    "squeezed": (
        lambda o, y: functional.binary_cross_entropy_with_logits(o.squeeze(), y),
        LOGITS[:, :1],
        PROBABILITIES[:, 0],
        LossWeighting("samples", smallest=2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_weighting_of_a_loss(name: str) -> None:
    loss, output, item, expected = CASES[name]
    assert find_weighting(loss, output, item, B) == expected


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2] is not None])
def test_the_gradients_of_the_parts_add_up(name: str) -> None:
    loss, output, item, weighting = CASES[name]
    leaves: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        leaves.append(tensor.double().requires_grad_())
        return leaves[-1]

    exact = map_tensors(output, leaf)
    if name == "class weights":
        loss = nn.CrossEntropyLoss(weight=WEIGHTS.double(), ignore_index=255)
    if name != "masked by integers":
        item = map_tensors(item, lambda t: t.double() if t.is_floating_point() else t)
    sizes = (2, 5, 1) if weighting.smallest == 1 else (2, 6)
    outputs, items = cut_rows(exact, sizes, multiples=True), cut_rows(item, sizes)
    assert outputs is not None
    assert items is not None
    weights = weighting.weights(items, sizes)
    parts = [w * loss(o, i) for w, o, i in zip(weights, outputs, items, strict=True)]
    whole = loss(exact, item)
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-6)
    expected = torch.autograd.grad(whole, leaves, allow_unused=True)
    found = torch.autograd.grad(sum(parts), leaves, allow_unused=True)
    for a, b in zip(expected, found, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


REFUSED: dict[str, tuple[Any, Any]] = {
    "contrastive": (lambda o, _: functional.cross_entropy(o @ o.T, torch.arange(len(o))), CLASSES),
    "largest": (lambda o, y: functional.mse_loss(o, y) / o.abs().max(), TARGETS),
    "deviation": (lambda o, _: o.std(0).mean(), CLASSES),
    "root": (lambda o, y: functional.mse_loss(o, y).sqrt(), TARGETS),
    "hardest": (
        lambda o, y: functional.cross_entropy(o, y, reduction="none").topk(2)[0].mean(),
        CLASSES,
    ),
    "random": (lambda o, y: ((o - y) * torch.rand(len(o), 1)).pow(2).mean(), TARGETS),
    "sum and constant": (lambda o, y: functional.mse_loss(o, y, reduction="sum") + 3, TARGETS),
    "missing": (lambda o, y: ((o - y) ** 2).nanmean(), TARGETS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_couples_samples_is_refused(name: str) -> None:
    loss, item = REFUSED[name]
    found = find_weighting(loss, LOGITS, item, B)
    assert isinstance(found, NotDecomposable)
    assert "neither a weighted mean nor the sum" in found.reason


def test_other_refusals_tell_their_reason() -> None:
    fixed = find_weighting(lambda o, y: functional.mse_loss(o.view(B, C), y), LOGITS, TARGETS, B)
    assert isinstance(fixed, NotDecomposable)
    assert "cannot be computed for a batch of 6 samples" in fixed.reason
    found = find_weighting(nn.MSELoss(), LOGITS, torch.randn(3, C), B)
    assert isinstance(found, NotDecomposable)
    assert "no tensor that the labels loader gives" in found.reason
    found = find_weighting(nn.MSELoss(), LOGITS.mean(), TARGETS, B)
    assert found == NotDecomposable("no output has one row for each sample")
    found = find_weighting(lambda o, _: (o * float("nan")).mean(), LOGITS, TARGETS, B)
    assert found == NotDecomposable("the loss of the example is not a finite number")


def test_a_loss_with_a_buffer_of_its_own() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return functional.mse_loss(output, targets)

    loss = Centred()
    found = find_weighting(loss, LOGITS, TARGETS, B)
    assert found == NotDecomposable("the loss changes its own buffers with each batch")
    assert loss.calls == 0


def test_nothing_is_disturbed() -> None:
    output, item, state = LOGITS.clone(), CLASSES.clone(), torch.get_rng_state()
    find_weighting(lambda o, y: functional.cross_entropy(o.mul_(2), y), output, item, B)
    assert torch.equal(output, LOGITS)
    assert torch.equal(item, CLASSES)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_large_vocabulary_is_checked_with_few_rows() -> None:
    seen = []

    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(len(output))
        return functional.cross_entropy(output.flatten(0, 1), labels.flatten())

    found = find_weighting(loss, torch.randn(2, 8, 100_000), torch.randint(100_000, (2, 8)), 2)
    assert found == LossWeighting("counted", 0, (-100,))
    assert max(seen) == 3


def test_a_part_in_which_nothing_counts_weighs_nothing() -> None:
    weighting = LossWeighting("counted", ignored=(-100,))
    labels = torch.tensor([-100, -100, 1, 2, -100, 3])
    items = cut_rows(labels, (2, 4))
    assert items is not None
    assert weighting.weights(items, (2, 4)) == (0.0, 1.0)
    assert weighting.weights(cut_rows(labels, (3, 3)) or [], (3, 3)) == (1 / 3, 2 / 3)
    nothing = torch.full((6,), -100)
    assert weighting.weights(cut_rows(nothing, (2, 4)) or [], (2, 4)) == (2 / 6, 4 / 6)


def test_rows_are_cut_without_a_copy() -> None:
    x, mask, y = torch.arange(12.0).view(6, 2), torch.ones(4, 4), torch.arange(6)
    item = {"inputs": [x, mask], "labels": y, "name": "batch", "scale": torch.tensor(2.0)}
    parts = cut_rows(item, (1, 3, 2))
    assert parts is not None
    assert [len(part["labels"]) for part in parts] == [1, 3, 2]
    assert torch.equal(torch.cat([part["inputs"][0] for part in parts]), x)
    assert parts[1]["inputs"][0].data_ptr() == x[1:].data_ptr()
    assert all(part["inputs"][1] is mask and part["name"] == "batch" for part in parts)
    assert cut_rows(mask, (1, 5)) is None
    assert cut_rows({"name": "batch"}, (1, 5)) is None
    assert cut_rows(torch.tensor(1.0), (1,)) is None
    flat_rows = cut_rows(torch.arange(12), (1, 5), multiples=True)
    assert flat_rows is not None
    assert flat_rows[0].tolist() == [0, 1]
    assert cut_rows(torch.arange(12), (1, 5)) is None


def test_a_look_at_the_labels_takes_nothing() -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[0] + torch.rand(())

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Noisy(torch.arange(10.0)), 4, shuffle=True, generator=generator)
    states = torch.get_rng_state(), generator.get_state()
    item = peek_item(loader, 4)
    assert item is not None
    assert item.shape == (4,)
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], generator.get_state())
    pairs = peek_item(DataLoader(TensorDataset(LOGITS, CLASSES), 4), 4)
    assert pairs is not None
    assert torch.equal(pairs[1], CLASSES[:4])
    assert peek_item([CLASSES, CLASSES], 4) is CLASSES
    rows = peek_item(CLASSES, 4)
    assert rows is not None
    assert torch.equal(rows, CLASSES[:4])
    for nothing in (None, [], iter([CLASSES]), torch.zeros(0), DataLoader(Stream(), 4)):
        assert peek_item(nothing, 4) is None
