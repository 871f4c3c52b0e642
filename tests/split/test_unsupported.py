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


class TensorHook(Base):
    """A hook that is so rarely active that no comparison of gradients shows it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if x.requires_grad:
            x.register_hook(lambda g: g * 2 if g.abs().max() > 1e9 else None)  # the line
        return self.out(x)


class InferenceMode(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():  # the line
            scale = self.layer(x)
        return self.out(x * scale)


class WriteThroughData(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.weight.data.clamp_(-1, 1)  # the line
        return self.out(self.layer(x))


class ConvertsLayer(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer = self.layer.to(torch.float64)  # the line
        return self.out(self.layer(x.double()).float())


class LoopsOverExperts(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expert_hit = (self.layer(x) > 0).any(0).nonzero()
        for _ in expert_hit:  # the line
            x = x + 1
        return self.out(x)


class ChecksFinite(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if not torch.isfinite(x).all():  # the line
            x = x.clamp(-1, 1)
        return self.out(x)


CASES = [
    (TensorHook, CaptureError, "a hook on a tensor"),
    (InferenceMode, CaptureError, "Use torch.no_grad() or .detach()"),
    (WriteThroughData, CaptureError, "reached through .data"),
    (ConvertsLayer, CaptureError, "the input in forward: x.to(self.layer.weight.dtype)"),
    (LoopsOverExperts, CaptureError, "experts_implementation='batched_mm'"),
    (ChecksFinite, CaptureError, "torch.clamp and torch.nan_to_num change nothing"),
    (DataDependentIf, CaptureError, "torch.where"),
    (DataDependentSize, CaptureError, "torch.where"),
    (Numpy, CaptureError, "torch functions"),
    (CustomFunction, CaptureError, "smooth + (exact - smooth).detach()"),
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


def _hooked(add: Callable[[Base], object]) -> nn.Module:
    model = Base()
    add(model)
    return model


def _aliased() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_buffer("copy", model[0].weight.data)
    return model


def _nothing(*_: object) -> None:
    """Hook without an effect."""


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), "0.weight is not initialised"),
        (_aliased, "the buffer copy uses the memory of the parameter 0.weight"),
        (lambda: _hooked(lambda m: m.out.register_full_backward_hook(_nothing)), "layer out has a"),
        (lambda: _hooked(lambda m: m.out.register_full_backward_pre_hook(_nothing)), "layer out has a"),
        (lambda: _hooked(lambda m: m.out.weight.register_hook(_nothing)), "register_hook"),
        (
            lambda: _hooked(lambda m: m.out.weight.register_post_accumulate_grad_hook(_nothing)),
            "register_post_accumulate_grad_hook",
        ),
    ],
)
def test_models_that_no_stage_can_represent_are_rejected(
    build: Callable[[], nn.Module], words: str
) -> None:
    with pytest.raises(SplitError, match=words):
        split(build(), (torch.ones(3, 4),))


def test_a_quantised_model_is_rejected() -> None:
    layer = torch.ao.nn.quantized.dynamic.Linear(4, 4)
    with pytest.raises(SplitError, match=r"the layer 0 \(Linear\) is quantised"):
        split(nn.Sequential(layer, nn.Linear(4, 4)), (torch.ones(3, 4),))


@pytest.mark.parametrize("stages", ["2", 2.0, None, ["1", "2"]])
def test_a_wrong_number_of_stages_is_rejected(stages: object) -> None:
    with pytest.raises(SplitError, match="stages must be a number of stages"):
        split(Base(), (torch.ones(3, 4),), stages=stages)


class UsedAndWritten(Base):
    """A buffer that is needed for the gradient and changed in place, which torch refuses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x) * self.scale
        self.scale.mul_(0.9)
        return self.out(x)


def test_a_model_that_fails_by_itself_is_rejected_with_its_own_error() -> None:
    with pytest.raises(SplitError, match="the model itself fails in a training step"):
        split(UsedAndWritten(), (torch.ones(3, 4),))


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


def test_dropout_that_stays_off_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5).eval())
    split(model, (torch.rand(3, 2),), stages=1, check=False)
    assert "1 dropout layers, such as 1, are in eval() and stay off" in caplog.text
    caplog.clear()
    split(model.eval(), (torch.rand(3, 2),), stages=1, check=False)
    assert "dropout" not in caplog.text
