"""The batch size stays symbolic; if it cannot, a warning says so and names a remedy."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from ravnest.errors import StageInputError
from ravnest.split import Chain, split


class Constant(nn.Module):
    """A reshape to a constant, which fixes the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).view(3, 4))


class PythonNumber(Constant):
    """``int()`` of a size, which only the strict tracer keeps symbolic."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).reshape(int(x.shape[0]), 4))


class AtLeastFive(Constant):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < 5:
            return self.second(x)
        return self.second(self.first(x))


def test_a_fixed_batch_size_is_reported_with_a_remedy(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ravnest"):
        result = split(Constant(), (torch.randn(3, 4),))
    assert "the batch size 3 is fixed" in caplog.text
    assert "drop_last=True" in caplog.text
    chain = Chain.of(result)
    assert chain(torch.randn(3, 4)).shape == (3, 4)
    with pytest.raises(StageInputError, match=r"shape \[2, 4\], expected \[3, 4\]"):
        chain(torch.randn(2, 4))


def test_a_size_converted_with_int_stays_symbolic(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ravnest"):
        result = split(PythonNumber(), (torch.randn(3, 4),))
    assert not caplog.records
    assert Chain.of(result)(torch.randn(2, 4)).shape == (2, 4)


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_any_batch_size_after_an_example_of_one(size: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    chain = Chain.of(split(model, torch.randn(1, 4))).eval()
    x = torch.randn(size, 4)
    assert torch.equal(chain(x), model.eval()(x))


def test_a_branch_on_the_batch_size_limits_it() -> None:
    chain = Chain.of(split(AtLeastFive(), (torch.randn(6, 4),)))
    assert chain(torch.randn(5, 4)).shape == (5, 4)
    with pytest.raises(StageInputError, match=r"batch size 4 is not one .*\(5 to any\)"):
        chain(torch.randn(4, 4))


def test_the_batch_can_be_in_another_dimension() -> None:
    model = nn.LSTM(3, 5, num_layers=2)
    model.eval()
    result = split(model, (torch.randn(6, 4, 3),), batch_dim=1)
    x = torch.randn(6, 2, 3)
    assert torch.equal(Chain.of(result).eval()(x)[0], model(x)[0])


def test_inputs_with_different_batch_sizes_are_rejected() -> None:
    model = nn.Bilinear(3, 4, 2)
    chain = Chain.of(
        split(nn.ModuleDict({"b": model})["b"], (torch.randn(5, 3), torch.randn(5, 4)), stages=1)
    )
    with pytest.raises(StageInputError, match="where b0 is 5"):
        chain(torch.randn(5, 3), torch.randn(4, 4))


class AsksWhetherExported(Constant):
    """Libraries have another path, with other rounding, for export."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting():
            return self.second(self.first(x) * 1.001)
        return self.second(self.first(x))


class AsksWhetherCompiled(Constant):
    """Libraries guard caches and checks of values this way, because no tracer supports them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and x.isnan().any():
            raise ValueError("not a number")
        return self.second(self.first(x))


class NeedsTheExportPath(Constant):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting() and x.isnan().any():
            raise ValueError("not a number")
        return self.second(self.first(x))


@pytest.mark.parametrize("kind", [AsksWhetherExported, AsksWhetherCompiled, NeedsTheExportPath])
def test_the_path_outside_of_export_is_captured_if_possible(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(3, 4)
    assert torch.equal(Chain.of(split(model, x))(x), model(x))
    assert torch.compiler.is_exporting.__name__ == "is_exporting", "torch's function is restored"
