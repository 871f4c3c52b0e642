"""Batches for which forward takes another branch than the captured one are refused, never computed."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import sympy
import torch
from torch import nn

from ravnest.errors import StageFormatError, StageInputError
from ravnest.split import Chain, prepare, split
from ravnest.split.encoding import stage_from_json, stage_to_json
from ravnest.split.sample_coupling import row_split
from ravnest.split.size_conditions import AcceptedSizes, SizeCondition, accepted_sizes


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)

    def other(self, size: int) -> bool:
        """Return whether batches of this size take the other branch; no size does here."""
        return size < 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return self.outer(x * 5 if self.other(x.size(0)) else x)


class EqualsOne(Base):
    def other(self, size: int) -> bool:
        return size == 1


class MoreThanOne(Base):
    def other(self, size: int) -> bool:
        return bool(size > 1)


class Even(Base):
    def other(self, size: int) -> bool:
        return size % 2 == 0


class EqualsFour(Base):
    def other(self, size: int) -> bool:
        return size in (4, 5)


class MoreThanThree(Base):
    def other(self, size: int) -> bool:
        return size > 3


class AtMostEight(Base):
    def other(self, size: int) -> bool:
        return size * 2 <= 16


class Thirds(Base):
    def other(self, size: int) -> bool:
        return size // 3 * 3 == size


class StrictOnly(Base):
    """``int()`` of a size is symbolic in the strict tracer only, which shows its guards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x).reshape(int(x.shape[0]), 4)
        return self.outer(x * 5 if x.size(0) % 2 == 0 else x)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x)))


@pytest.mark.parametrize(
    ("kind", "rows", "refused"),
    [
        (EqualsOne, 6, {1}),
        (MoreThanOne, 7, {1}),
        (Even, 6, {1, 3, 5, 7, 9}),
        (Even, 7, {2, 4, 6, 8}),
        (EqualsFour, 6, {4, 5}),
        (MoreThanThree, 6, {1, 2, 3}),
        (AtMostEight, 7, {9}),
        (Thirds, 6, {1, 2, 4, 5, 7, 8}),
        (Thirds, 7, {2, 3, 5, 6, 8, 9}),
        (StrictOnly, 6, {1, 3, 5, 7, 9}),
        (StrictOnly, 7, {1, 2, 4, 6, 8}),
        (Norm, 6, {1}),
    ],
)
def test_no_batch_is_computed_wrongly(
    kind: Callable[[], nn.Module], rows: int, refused: set[int]
) -> None:
    torch.manual_seed(0)
    model = kind().train()
    chain = Chain.of(split(model, (torch.randn(rows, 4),), check=False)).train()
    for size in range(1, 10):
        x = torch.randn(size, 4)
        if size in refused:
            with pytest.raises(StageInputError, match=rf"input x has shape \[{size}, 4\]"):
                chain(x)
        else:
            assert torch.equal(chain(x), model(x)), f"a batch of {size}"


def test_evaluation_has_its_own_sizes() -> None:
    """Batch norm refuses a batch of 1 in training only."""
    model = Norm().eval()
    chain = Chain.of(split(model, (torch.randn(6, 4),), check=False)).eval()
    x = torch.randn(1, 4)
    assert torch.equal(chain(x), model(x))


def test_the_line_that_decides_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ravnest"):
        prepare(Even(), (torch.randn(6, 4),))
        prepare(Norm(), (torch.randn(6, 4),))
    (record,) = caplog.records
    assert "x * 5 if self.other(x.size(0))" in record.getMessage()
    assert "with remainder 0 when divided by 2" in record.getMessage()


def test_batches_are_not_cut_into_sizes_that_the_model_does_not_take() -> None:
    found = row_split(prepare(Even(), (torch.randn(6, 4),)))
    assert not found.allowed
    assert "does not take batches of every size" in found.reason
    assert row_split(prepare(MoreThanThree(), (torch.randn(8, 4),))).smallest == 4


def test_sizes_are_part_of_the_stage_format() -> None:
    spec = split(Even(), (torch.randn(7, 4),), check=False).stages[0].spec
    data = stage_to_json(spec)
    assert stage_from_json(data) == spec
    data["graphs"]["train"]["symbols"][0]["remainder"] = 2
    with pytest.raises(StageFormatError, match="leaves no size"):
        stage_from_json(data)


_N = sympy.Symbol("n", integer=True, positive=True)


@pytest.mark.parametrize(
    ("expressions", "captured", "expected"),
    [
        ([], 4, AcceptedSizes()),
        ([sympy.Ne(_N, 1)], 4, AcceptedSizes(2)),
        ([sympy.Gt(_N, 0)], 4, AcceptedSizes()),
        ([sympy.Ne(_N, 100)], 4, AcceptedSizes(excluded=(100,))),
        ([sympy.Lt(_N, 3000)], 4, AcceptedSizes(maximum=2999)),
        ([sympy.Gt(3 * _N, 3000)], 2000, AcceptedSizes(minimum=1001)),
        ([sympy.Ne(sympy.Mod(_N, 4), 0), sympy.Gt(_N, 2)], 6, AcceptedSizes(6, None, 4, 2)),
        ([sympy.Eq(_N, sympy.Symbol("m"))], 4, AcceptedSizes(4, 4)),
    ],
)
def test_accepted_sizes(expressions: list[sympy.Basic], captured: int, expected: AcceptedSizes) -> None:
    conditions = [SizeCondition(expression, "") for expression in expressions]
    assert accepted_sizes(conditions, _N, captured) == expected


class Stacked(nn.Module):
    """Two inputs that are stacked and divided again, with a check of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = self.inner(torch.cat([x, y])).chunk(2)
        if first.shape != second.shape:
            raise ValueError("the inputs must have the same size")
        return self.outer(first * second)


def test_inputs_whose_batch_sizes_are_related_have_one_batch_size() -> None:
    torch.manual_seed(0)
    model = Stacked()
    chain = Chain.of(split(model, (torch.rand(4, 4), torch.rand(4, 4))))
    for rows in (1, 3, 6):
        x, y = torch.rand(rows, 4), torch.rand(rows, 4)
        assert torch.equal(chain(x, y), model(x, y))
    with pytest.raises(StageInputError, match="y has shape"):
        chain(torch.rand(4, 4), torch.rand(2, 4))
