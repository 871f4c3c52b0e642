"""Weight gradients that are computed later equal those that autograd computes at once."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

from ravnest.split import recurrent_deferral, shared_casts, split
from ravnest.split.chain import StagePass
from ravnest.split.deferred import DeferredGradients, deferrable_keys
from ravnest.split.gradients import add_product
from ravnest.split.module import StageModule
from ravnest.split.precision import Precision
from ravnest.split.split_stage import SplitStage


class Residual(nn.Module):
    """A layer that is used twice, one that transposes its input, and a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.twice, self.down = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.twice(functional.gelu(self.up(x)))
        x = self.twice(self.norm(x).transpose(0, 1)).transpose(0, 1)
        return self.down(x)


class MatrixProduct(nn.Module):
    """The layer of GPT-2: a weight that is stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, 8), self.weight).view(*x.shape[:-1], 5)


class Regularised(nn.Module):
    """A weight that is also an output: its gradient has two sources."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), self.layer.weight.square().sum()


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)
        self.a.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


class UsedTwice(nn.Module):
    """A layer that is used twice, of a size whose products are added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Encoder(nn.Module):
    """A recurrent layer that is used twice, with a trained initial state; only its last state counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.start = nn.GRU(8, 8, batch_first=True), nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = self.start.expand(1, x.shape[0], 8).contiguous()
        y, _ = self.layer(x, start)
        _, last = self.layer(y.flip(1), torch.tanh(start))
        return last


def convolutions(stride: int = 2) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=stride, dilation=2, groups=2, bias=False),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


def two_directions() -> nn.Module:
    return nn.GRU(8, 32, 2, bidirectional=True, batch_first=True)


def one_dimension() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 3, stride=2), nn.Tanh(), nn.Conv1d(4, 2, 1))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, (4, 6, 8)),
    "matrix product": (MatrixProduct, (4, 6, 8)),
    "regularised": (Regularised, (4, 8)),
    "frozen": (Frozen, (4, 8)),
    "used twice": (UsedTwice, (8, 32)),
    "conv2d": (convolutions, (4, 2, 12, 12)),
    "conv1d": (one_dimension, (4, 2, 9)),
    "GRU": (lambda: nn.GRU(8, 4, batch_first=True), (4, 5, 8)),
    "GRU, two layers, two directions": (two_directions, (16, 5, 8)),
    "GRU without bias": (lambda: nn.GRU(8, 32, bias=False), (5, 16, 8)),
    "RNN": (lambda: nn.RNN(8, 32, 2), (5, 16, 8)),
    "RNN, ReLU, one step": (lambda: nn.RNN(8, 32, nonlinearity="relu", batch_first=True), (16, 1, 8)),
    "GRU, last step of two calls": (Encoder, (4, 5, 8)),
    "LSTM": (lambda: nn.LSTM(8, 4), (5, 4, 8)),
    "residual in bf16": (Residual, (4, 6, 8)),
    "used twice in bf16": (UsedTwice, (8, 32)),
    "conv2d in bf16": (lambda: convolutions(stride=1), (4, 2, 12, 12)),  # not both in 16 bits
}


@cache
def stage_of(name: str) -> SplitStage:
    """Return the only stage of a case, which is captured once for all tests."""
    make, shape = CASES[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    model(x)  # gives lazy layers their sizes
    precision: Precision | None = "bf16" if name.endswith("bf16") else None
    (stage,) = split(model, x, stages=1, precision=precision).stages
    return stage


def module_of(name: str) -> StageModule:
    """Return the stage of a case with tensors of its own."""
    stage = stage_of(name)
    return StageModule(stage.spec, {key: tensor.clone() for key, tensor in stage.tensors.items()})


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("input_needs_gradient", [True, False])
@pytest.mark.parametrize("captures", [True, False])
def test_deferred_gradients_are_those_of_autograd(
    name: str, input_needs_gradient: bool, captures: bool
) -> None:
    module = module_of(name)
    torch.manual_seed(1)
    x = torch.randn(CASES[name][1])
    (expected_input, expected), _ = _gradients(module, x, input_needs_gradient, None)
    deferred = DeferredGradients(captures=captures)
    (of_input, found), _ = _gradients(module, x, input_needs_gradient, deferred)
    if name != "frozen":
        assert not deferrable_keys(module.graph) & found.keys(), (
            "the backward pass leaves these for later"
        )
    deferred.compute(found.__setitem__)
    assert not deferred
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert not any(gradient.requires_grad for gradient in found.values())
    if input_needs_gradient:
        assert of_input is not None
        assert expected_input is not None
        assert torch.equal(of_input, expected_input)


@pytest.mark.parametrize("name", CASES)
def test_interrupted_gradients_are_the_same(name: str) -> None:
    """Another computation comes in between after each operator, except within one sum."""
    module = module_of(name)
    torch.manual_seed(1)
    x = torch.randn(CASES[name][1])
    deferred, whole = DeferredGradients(captures=True), DeferredGradients(captures=True)
    (_, expected), _ = _gradients(module, x, True, whole)
    assert whole.compute(expected.__setitem__)
    (_, found), _ = _gradients(module, x, True, deferred)
    calls = 1
    while not deferred.compute(found.__setitem__, interrupted=lambda: True):
        assert deferred
        calls += 1
    assert not deferred
    assert calls == {"residual": 3, "conv2d": 3, "used twice": 1}.get(name, calls)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_only_weights_that_nothing_else_uses_are_deferred() -> None:
    def keys(name: str) -> set[str]:
        return set(deferrable_keys(stage_of(name).spec.graphs["train"]))

    assert keys("residual") == {"up.weight", "up.bias", "twice.weight", "down.weight", "down.bias"}
    assert keys("residual in bf16") == keys("residual")
    assert keys("regularised") == set()
    assert keys("GRU") == {"weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"}
    assert keys("GRU, last step of two calls") == {f"layer.{key}" for key in keys("GRU")}
    assert keys("LSTM") == set()


def test_a_forward_without_gradients_defers_nothing() -> None:
    deferred = DeferredGradients()
    with torch.no_grad():
        module_of("residual")(torch.randn(4, 6, 8), deferred=deferred)
    assert not deferred


@pytest.fixture(autouse=True)
def _defer_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defer the weight gradients of recurrent layers, and share casts, of any size."""
    monkeypatch.setattr(recurrent_deferral, "LEAST_PRODUCT", 0)
    monkeypatch.setattr(shared_casts, "LEAST_ELEMENTS", 1)


def test_a_recurrent_layer_with_small_steps_is_not_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    x, module = torch.randn(4, 5, 8), module_of("GRU")
    monkeypatch.setattr(recurrent_deferral, "LEAST_PRODUCT", 4 * 12 * 4 + 1)
    deferred = DeferredGradients(captures=True)
    (_, found), _ = _gradients(module, x, True, deferred)
    assert found.keys() == module.parameters_by_key().keys()
    assert not deferred


def test_a_recurrent_kernel_that_computes_all_gradients_at_once_is_not_deferred() -> None:
    def fused(
        x: torch.Tensor, state: torch.Tensor, weights: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x * weights[0].sum() + state * weights[1].sum()).tanh()
        return y, y[-1:]

    x, state = torch.randn(3, 4, 5, requires_grad=True), torch.randn(1, 4, 5)
    weights = [torch.randn(5, 5, requires_grad=True) for _ in range(2)]
    for captures in (True, False):
        deferred = DeferredGradients(captures=captures)
        y, _ = recurrent_deferral.RecurrentDeferral(fused, ["a", "b"])(deferred, x, state, weights)
        assert all(g is not None for g in torch.autograd.grad(y.sum(), [x, *weights]))
        assert not deferred
        assert not deferred.edges


Found = tuple[torch.Tensor | None, dict[str, torch.Tensor]]


def _gradients(
    module: StageModule, x: torch.Tensor, needs_gradient: bool, deferred: DeferredGradients | None
) -> tuple[Found, StagePass]:
    given = x.clone().requires_grad_(needs_gradient)
    outputs = module(given, deferred=deferred)
    done = StagePass(module, (given,), outputs, module.parameters_by_key())
    ends = [(t, torch.linspace(-1, 1, t.numel()).view(t.shape)) for t in outputs if t.requires_grad]
    found: dict[str, torch.Tensor] = {}
    if deferred is None:
        of_inputs = done.backward(ends, {}, found.__setitem__)
    else:
        of_inputs = done.accumulate(ends, found, deferred)
    return (of_inputs[0], found), done


class ChangedInput(nn.Module):
    """A layer whose input is changed in place after it: autograd refuses the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        z = self.b(y)
        return z + y.mul_(2)


def test_an_input_that_is_changed_in_place_is_refused() -> None:
    (stage,) = split(ChangedInput(), torch.randn(4, 8), stages=1, check=False).stages
    module = StageModule(stage.spec, stage.tensors)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _gradients(module, torch.randn(4, 8), True, DeferredGradients(captures=True))


class ChangedOutput(nn.Module):
    """A layer whose output is changed in place: its gradient is the one before the change."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(functional.relu(self.a(x), inplace=True))


def test_the_gradient_of_an_output_is_taken_before_a_change_in_place() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    (stage,) = split(ChangedOutput(), x, stages=1).stages
    module = StageModule(stage.spec, stage.tensors)
    (_, expected), _ = _gradients(module, x, True, None)
    deferred = DeferredGradients(captures=True)
    (_, found), _ = _gradients(module, x, True, deferred)
    deferred.compute(found.__setitem__)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("rows", [1, 4, 16, 64, 256, 300])
@pytest.mark.parametrize(
    "name",
    [
        "residual",
        "matrix product",
        "used twice",
        "conv2d",
        "GRU, two layers, two directions",
        "GRU, last step of two calls",
        "residual in bf16",
        "used twice in bf16",
    ],
)
def test_gradients_are_added_to_sums_without_a_change_of_bits(name: str, rows: int) -> None:
    module = module_of(name)
    torch.manual_seed(1)
    x = torch.randn(rows, *CASES[name][1][1:])
    (_, first), _ = _gradients(module, x, True, None)
    expected = {key: gradient + gradient for key, gradient in first.items()}
    deferred = DeferredGradients(captures=True)
    (_, found), _ = _gradients(module, x, True, deferred)
    sums = {key: gradient.clone() for key, gradient in first.items()}
    deferred.compute(lambda key, gradient: sums[key].add_(gradient), sums)
    for key, gradient in found.items():
        sums[key].add_(gradient)
    assert all(torch.equal(sums[key], expected[key]) for key in expected)


def test_a_product_is_added_in_place_only_if_the_bits_stay_the_same() -> None:
    for terms, height, width in [(4, 64, 64), (16, 128, 96), (64, 256, 256), (200, 30, 50), (500, 9, 9)]:
        torch.manual_seed(terms)
        left, right = torch.randn(terms, height).t(), torch.randn(terms, width)
        total = torch.randn(height, width)
        expected, before = total + left.mm(right), total.clone()
        if add_product(total, left, right):
            assert torch.equal(total, expected)
        else:
            assert torch.equal(total, before)
    assert not add_product(torch.zeros(9, 9), torch.randn(9, 500), torch.randn(500, 9))
    repeated = torch.ones(1, 9).expand(4, 9)
    assert not add_product(torch.zeros(9, 9), repeated.t(), torch.randn(4, 9))


@pytest.mark.parametrize(("rows", "waits"), [(64, True), (300, False)])
def test_a_backward_pass_can_leave_only_what_is_better_added_in_place(rows: int, waits: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8)), torch.randn(rows, 512)
    (stage,) = split(model, torch.randn(4, 512), stages=1).stages
    module = StageModule(stage.spec, stage.tensors)
    for needs_gradient in (True, False):
        (_, first), _ = _gradients(module, x, needs_gradient, None)
        deferred = DeferredGradients(sums_only=True)
        (_, found), _ = _gradients(module, x, needs_gradient, deferred)
        assert bool(deferred) == waits
        assert first.keys() - found.keys() == ({"0.weight", "0.bias"} if waits else set())
        sums = {key: gradient.clone() for key, gradient in first.items()}
        deferred.compute(lambda key, _: pytest.fail(key), sums)
        for key, gradient in found.items():
            sums[key].add_(gradient)
        assert all(torch.equal(sums[key], gradient + gradient) for key, gradient in first.items())


class UsedWithManyRows(nn.Module):
    """A layer that is used with few rows and with many."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)).mean(1))


def test_autograd_sums_the_gradients_of_a_weight_with_several_uses() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 100, 512)
    (stage,) = split(UsedWithManyRows(), x, stages=1).stages
    module = StageModule(stage.spec, stage.tensors)
    (_, expected), _ = _gradients(module, x, True, None)
    deferred = DeferredGradients(sums_only=True)
    (_, found), _ = _gradients(module, x, True, deferred)
    assert not deferred
    assert all(torch.equal(found[key], expected[key]) for key in expected)
