"""Code that cannot be captured is reported with the user's line and a remedy; the model is unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ravnest.errors import CaptureError, OperatorError, SplitError
from ravnest.split import split


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)


class DataDependentIf(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the line
            x = x * 2
        return self.out(self.layer(x))


class DataDependentSize(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x[0, 0].item())):  # the line
            x = self.layer(x)
        return self.out(x)


class Numpy(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.from_numpy(x.detach().numpy() * 2)  # the line
        return self.out(self.layer(x + y))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 7


doubled = Doubled.apply


class CustomFunction(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(Doubled.apply(self.layer(x)))  # the line


class BoundCustomFunction(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(doubled(self.layer(x)))  # the line


class Autocast(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layer(x)  # the line
        return self.out(x.float())


@torch.library.custom_op("ravnest_tests::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@triple.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class CustomOperator(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(triple(self.layer(x)))  # the line


class Vmap(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.vmap(self.layer)(x)  # the line
        return self.out(x)


class ForwardDerivative(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        _, slope = torch.func.jvp(torch.sin, (x,), (x,))  # the line
        return self.out(slope)


class Packed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(1, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.ones(3, dtype=torch.long)
        packed = nn.utils.rnn.pack_padded_sequence(x[..., None], lengths, batch_first=True)  # the line
        return self.out(self.recurrent(packed)[1][-1])


class CumulativeNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layer(x))  # the line
        return self.out(x)


class Conditional(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t * 3, (x,))
        return self.out(self.layer(x))


CASES = [
    (DataDependentIf, CaptureError, "torch.where"),
    (DataDependentSize, CaptureError, "torch.where"),
    (Numpy, CaptureError, "torch functions"),
    (CustomFunction, CaptureError, "Doubled is a custom torch.autograd.Function"),
    (BoundCustomFunction, CaptureError, "Doubled is a custom torch.autograd.Function"),
    (Autocast, CaptureError, "autocast"),
    (CustomOperator, OperatorError, "ravnest_tests"),
    (Packed, CaptureError, "Give the padded tensor to the recurrent layer"),
    (CumulativeNorm, CaptureError, "Give it a momentum"),
    (Vmap, OperatorError, "torch.vmap inside forward"),
    (ForwardDerivative, OperatorError, "transform of torch.func"),
]


@pytest.mark.parametrize(
    ("kind", "error", "words"), CASES, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_error_has_line_and_remedy(
    kind: Callable[[], nn.Module], error: type[Exception], words: str
) -> None:
    model = kind()
    with pytest.raises(error) as caught:
        split(model, (torch.ones(3, 4),))
    message = str(caught.value)
    assert words in message
    assert _marked_line(kind) in message, "the message names the user's line"


def test_a_control_flow_region_is_rejected() -> None:
    with pytest.raises(CaptureError, match="control-flow"):
        split(Conditional(), (torch.ones(3, 4),))


def test_the_error_names_the_layer_if_there_is_no_user_line() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4, momentum=None)))
    with pytest.raises(CaptureError, match=r"the layer 1\.0 \(BatchNorm1d\) cannot be captured"):
        split(model, (torch.ones(3, 4),))


def test_a_frozen_batch_norm_without_momentum_is_captured() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4))
    model[1].eval()
    assert len(split(model, (torch.ones(3, 4),)).stages) == 2


def test_a_packed_sequence_as_input_is_rejected() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 5, 2), torch.tensor([5, 3, 2]), True)
    with pytest.raises(CaptureError, match="packed sequences"):
        split(nn.GRU(2, 4, num_layers=2, batch_first=True), (packed,))


def _marked_line(kind: Callable[[], nn.Module]) -> str:
    lines, first = inspect.getsourcelines(kind)
    offset = next(i for i, line in enumerate(lines) if "# the line" in line)
    return f"{__file__}:{first + offset}: {lines[offset].strip()}"


def test_the_model_is_unchanged_after_an_error() -> None:
    model = DataDependentIf().eval()
    model.layer.train()
    with pytest.raises(CaptureError):
        split(model, (torch.ones(3, 4),))
    assert (model.training, model.layer.training, model.out.training) == (False, True, False)
    assert Doubled.apply(torch.ones(1)).item() == 2, "custom functions work outside of capture"


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "do not fit the model's forward"),
        ((torch.ones(0, 4),), {}, "no sample"),
        ((torch.ones(3, 4), torch.ones(3, 4)), {}, "do not fit"),
        ((), {"y": torch.ones(3, 4)}, "do not fit"),
    ],
)
def test_wrong_example_inputs_are_rejected(args: tuple, kwargs: dict, words: str) -> None:
    with pytest.raises(SplitError, match=words):
        split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), args, kwargs)


def test_a_function_is_rejected() -> None:
    with pytest.raises(SplitError, match=r"torch\.nn\.Module"):
        split(lambda x: x, (torch.ones(3, 4),))


def test_too_many_stages_are_rejected() -> None:
    with pytest.raises(SplitError, match="too few for 9 stages"):
        split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.ones(3, 4),), stages=9)


def test_parameters_that_share_memory_are_rejected() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(SplitError, match="share memory"):
        split(model, (torch.ones(3, 4),))
