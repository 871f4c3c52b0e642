"""Deferred weight gradients of LSTM layers are those of autograd, within float error."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from ravnest.split import split
from ravnest.split.chain import StagePass
from ravnest.split.deferred import DeferredGradients
from ravnest.split.lstm_deferral import LEAST_PRODUCT, LEAST_WIDTH, has_costly_deferral
from ravnest.split.module import StageModule
from ravnest.split.split_stage import SplitStage

Build = Callable[[], nn.Module]
WIDTH, ROWS = 256, 16


class Encoder(nn.Module):
    """A layer that is used twice, with trained initial states; only its last states count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.start = nn.Parameter(torch.randn(2, 1, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.start.expand(2, 1, x.shape[0], WIDTH).contiguous()
        y, _ = self.layer(x, (states[0], states[1]))
        _, (hidden, cell) = self.layer(y.flip(1), (torch.tanh(states[0]), states[1]))
        return hidden + 2 * cell


class Tagger(nn.Module):
    """Two layers with dropout between them, after a linear one and before another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 16), nn.Linear(WIDTH, 3)
        self.layers = nn.LSTM(16, WIDTH, 2, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.layers(self.first(x))
        return self.head(y)


DEFERRED: dict[str, tuple[Build, tuple[int, ...]]] = {
    "one layer": (lambda: nn.LSTM(5, WIDTH), (6, ROWS, 5)),
    "batches first": (lambda: nn.LSTM(5, WIDTH, batch_first=True), (ROWS, 6, 5)),
    "without bias": (lambda: nn.LSTM(WIDTH, WIDTH, bias=False), (3, ROWS, WIDTH)),
    "one step": (lambda: nn.LSTM(5, WIDTH, batch_first=True), (ROWS, 1, 5)),
    "one sample": (lambda: nn.LSTM(3, 1024, batch_first=True), (1, 2, 3)),
    "two layers and dropout": (Tagger, (ROWS, 5, 4)),
    "used twice, last states": (Encoder, (ROWS, 4, WIDTH)),
}
OTHERS: dict[str, tuple[Build, tuple[int, ...]]] = {
    "narrow": (lambda: nn.LSTM(5, LEAST_WIDTH - 1), (3, 64, 5)),
    "few samples": (lambda: nn.LSTM(5, WIDTH), (3, LEAST_PRODUCT // (4 * WIDTH * WIDTH), 5)),
    "two directions": (lambda: nn.LSTM(5, WIDTH, bidirectional=True), (3, ROWS, 5)),
    "projected": (lambda: nn.LSTM(5, 300, proj_size=280), (3, ROWS, 5)),
}


@cache
def stage_of(name: str) -> SplitStage:
    """Return the only stage of a case, which is captured once for all tests."""
    make, shape = (DEFERRED | OTHERS)[name]
    torch.manual_seed(0)
    (stage,) = split(make(), torch.randn(shape), stages=1).stages
    return stage


Found = tuple[tuple[torch.Tensor, ...], torch.Tensor | None, dict[str, torch.Tensor]]


def gradients(
    name: str, deferred: DeferredGradients | None, *, needs: bool = True, in_place: bool = False
) -> Found:
    """Return outputs, gradient of the input and of the weights, deferred ones included."""
    stage = stage_of(name)
    module = StageModule(stage.spec, {key: tensor.clone() for key, tensor in stage.tensors.items()})
    torch.manual_seed(1)
    x = torch.randn((DEFERRED | OTHERS)[name][1], requires_grad=needs)
    torch.manual_seed(2)  # for dropout
    outputs = module(x, deferred=deferred)
    done = StagePass(module, (x,), outputs, module.parameters_by_key())
    ends = [(t, torch.linspace(-1, 1, t.numel()).view(t.shape)) for t in outputs]
    found: dict[str, torch.Tensor] = {}
    of_inputs = done.accumulate(ends, found, deferred)
    if deferred is not None:
        if in_place:
            found = {key: torch.zeros_like(p) for key, p in done.parameters.items()} | found
        deferred.compute(found.__setitem__, found if in_place else None)
    return tuple(t.detach() for t in outputs), of_inputs[0], found


@pytest.mark.parametrize("name", DEFERRED)
@pytest.mark.parametrize(
    ("captures", "needs", "in_place"),
    [(True, True, False), (False, True, True), (True, False, True), (False, False, False)],
)
def test_deferred_gradients_are_those_of_autograd_within_float_error(
    name: str, captures: bool, needs: bool, in_place: bool
) -> None:
    expected = gradients(name, None, needs=needs)
    deferred = DeferredGradients(captures=captures, costly=True)
    outputs, of_input, found = gradients(name, deferred, needs=needs, in_place=in_place)
    assert found.keys() == expected[2].keys()
    pairs = [*zip(outputs, expected[0], strict=True), *((found[k], g) for k, g in expected[2].items())]
    if needs:
        assert of_input is not None
        assert expected[1] is not None
        pairs.append((of_input, expected[1]))
    for value, other in pairs:
        assert value.shape == other.shape
        assert (value - other).norm() <= 5e-6 * other.norm()


@pytest.mark.parametrize("name", DEFERRED)
def test_the_backward_pass_leaves_the_weight_gradients(name: str) -> None:
    stage = stage_of(name)
    assert has_costly_deferral(stage.spec.graphs["train"])
    module = StageModule(stage.spec, stage.tensors)
    x, found = torch.randn(DEFERRED[name][1], requires_grad=True), dict[str, torch.Tensor]()
    deferred = DeferredGradients(costly=True)
    outputs = module(x, deferred=deferred)
    done = StagePass(module, (x,), outputs, module.parameters_by_key())
    done.accumulate([(t, torch.ones_like(t)) for t in outputs], found, deferred)
    assert not any("_l0" in key or "_l1" in key for key in found)


@pytest.mark.parametrize("costly", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_stay_as_they_are_to_the_last_bit(name: str, costly: bool) -> None:
    expected = gradients(name, None)
    deferred = DeferredGradients(captures=True, costly=costly)
    outputs, of_input, found = gradients(name, deferred)
    assert all(map(torch.equal, outputs, expected[0]))
    assert of_input is not None
    assert expected[1] is not None
    assert torch.equal(of_input, expected[1])
    assert all(torch.equal(found[key], expected[2][key]) for key in expected[2])


def test_a_large_layer_is_computed_as_in_one_process_unless_the_schedule_asks_for_deferral() -> None:
    expected = gradients("two layers and dropout", None)
    outputs, _, found = gradients("two layers and dropout", DeferredGradients(captures=True))
    assert all(map(torch.equal, outputs, expected[0]))
    assert all(torch.equal(found[key], expected[2][key]) for key in expected[2])


def test_a_forward_without_gradients_has_the_bits_of_the_one_that_is_deferred() -> None:
    stage = stage_of("two layers and dropout")
    module, x = StageModule(stage.spec, stage.tensors), torch.randn(ROWS, 5, 4)
    results = []
    for enabled in (True, False):
        torch.manual_seed(3)
        with torch.set_grad_enabled(enabled):
            results.append(module(x, deferred=DeferredGradients(costly=True))[0])
    assert torch.equal(*results)


class ChangedOutput(nn.Module):
    """A layer whose output is changed in place: the backward pass needs the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(5, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.layer(x)
        return y.mul_(2)


def test_an_output_that_is_changed_in_place_is_refused() -> None:
    x = torch.randn(3, ROWS, 5, requires_grad=True)
    (stage,) = split(ChangedOutput(), x.detach(), stages=1, check=False).stages
    module = StageModule(stage.spec, stage.tensors)
    (y,) = module(x, deferred=DeferredGradients(costly=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
