"""Outputs that are computed again: honest ones agree, wrong ones do not."""

import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from training_cases import SmallCNN, TiedGPT

from ravnest.errors import StageFormatError
from ravnest.runtime.stage.execution import StageExecution, Values
from ravnest.runtime.stage.forward_check import (
    CheckResult,
    check_forward,
    compare,
    sent_through,
    uncovered,
)
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.split import split
from ravnest.split.graph import StageSpec
from ravnest.split.module import StageModule
from ravnest.split.splitter import SplitStage
from ravnest.store.checkpoint import write_tensor_file
from ravnest.store.forward_evidence import (
    ForwardEvidence,
    own_arithmetic,
    read_evidence,
    write_evidence,
)
from ravnest.types import MicrobatchId

SEED = 7
MICROBATCH = MicrobatchId(3, 5)
MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "dropout and batch norm": lambda: (SmallCNN(dropout=0.5), torch.randn(6, 1, 8, 8)),
    "tied weights": lambda: (TiedGPT(), torch.randint(16, (4, 8))),
    "dropout": lambda: (
        nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4), nn.Linear(4, 2)),
        torch.randn(16, 8),
    ),
}


@functools.cache
def first_stage(name: str) -> tuple[SplitStage, torch.Tensor]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return split(model.train(), batch, stages=2, check=False).stages[0], batch


class Run:
    """The first of two stages of a model, whose output is checked."""

    def __init__(self, name: str) -> None:
        stage, batch = first_stage(name)
        self.spec: StageSpec = stage.spec
        module = StageModule(stage.spec, {key: t.clone() for key, t in stage.tensors.items()})
        rule = UpdateRule(torch.optim.SGD, {"lr": 0.1})
        self.execution = StageExecution(module, rule, seed=SEED, stash=False)
        (given,) = [value.name for value in module.graph.inputs]
        self.outputs, _ = self.execution.forward(MICROBATCH, 0, {given: batch})

    def stated(self) -> ForwardEvidence:
        found = self.execution.computed_from(MICROBATCH)
        assert found is not None
        return ForwardEvidence(*found, own_arithmetic())

    def check(
        self, received: Values | None = None, stated: ForwardEvidence | None = None, codec: str = "raw"
    ) -> CheckResult:
        values = self.outputs if received is None else received
        return check_forward(
            self.spec,
            stated or self.stated(),
            ForwardEvidence(values, {}),
            seed=SEED,
            microbatch=MICROBATCH,
            codec=codec,
        )


def changed(values: Values, change: Callable[[torch.Tensor], torch.Tensor]) -> Values:
    return {
        name: change(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in values.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_an_honest_output_agrees(name: str) -> None:
    run = Run(name)
    assert uncovered(run.spec) == ""
    result = run.check()
    assert result.compared
    assert result.deviation < 1e-3


@pytest.mark.parametrize("threads", [1, 3])
def test_another_number_of_threads_agrees(threads: int) -> None:
    run = Run("dropout and batch norm")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert run.check().deviation < 1e-2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_a_compressed_output_agrees(codec: str, name: str) -> None:
    run = Run(name)
    arrived = changed(run.outputs, lambda value: sent_through(value, codec))
    noisy = changed(arrived, lambda value: value * (1 + 1e-5 * torch.randn_like(value)))
    assert not run.check(arrived, codec=codec).differs
    assert not run.check(noisy, codec=codec).differs


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "lie",
    [
        lambda value: value * 1.1,
        lambda value: value + 0.1 * value.std() * torch.randn_like(value),
        torch.zeros_like,
        lambda value: torch.full_like(value, math.nan),
        lambda value: value.roll(1, 0),
        lambda value: value[:-1],
        lambda value: value.double(),
    ],
    ids=["scaled", "noise", "nothing computed", "nan", "other samples", "too short", "other type"],
)
def test_a_wrong_output_differs(name: str, lie: Callable[[torch.Tensor], torch.Tensor]) -> None:
    run = Run(name)
    assert run.check(changed(run.outputs, lie)).differs


def test_stale_weights_differ() -> None:
    """A provider that computes with old weights, and states the new ones."""
    run = Run("dropout")
    fresh = run.stated()
    newer = {key: t + 0.1 * torch.randn_like(t) for key, t in fresh.state.items()}
    assert run.check(stated=ForwardEvidence(fresh.values, newer, fresh.arithmetic)).differs


def test_a_statement_that_does_not_fit_the_stage_differs() -> None:
    run = Run("dropout")
    good = run.stated()
    for stated in (
        ForwardEvidence({}, good.state, good.arithmetic),
        ForwardEvidence(good.values, {}, good.arithmetic),
        ForwardEvidence(good.values, {k: t[:1] for k, t in good.state.items()}, good.arithmetic),
    ):
        result = run.check(stated=stated)
        assert result.differs
        assert "is not a computation of the stage" in result.detail


def test_random_numbers_of_another_library_are_not_compared() -> None:
    run = Run("dropout")
    good = run.stated()
    other = ForwardEvidence(good.values, good.state, "torch 2.0 plain aarch64 cpu")
    result = run.check(changed(run.outputs, torch.zeros_like), other)
    assert not result.compared
    assert not result.differs
    plain = Run("tied weights")
    stated = ForwardEvidence(plain.stated().values, plain.stated().state, "torch 2.0 plain aarch64 cpu")
    assert plain.check(changed(plain.outputs, torch.zeros_like), stated).differs


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.topk(self.first(x), 8)[0])


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.second(self.first(x) * self.calls)


@pytest.mark.parametrize(("model", "reason"), [(Choosing(), "topk"), (Counting(), "calls")])
def test_stages_that_rounding_or_order_changes_are_not_checked(model: nn.Module, reason: str) -> None:
    found = split(model, torch.randn(4, 8), stages=2, check=False).stages
    assert any(reason in uncovered(stage.spec) for stage in found)


def test_a_stage_that_trains_nothing_is_not_checked() -> None:
    """It keeps no inputs, so that its node could not answer."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    first = split(model, torch.randn(4, 8), stages=2, check=False).stages[0].spec
    assert not first.has_gradients
    assert "trains nothing" in uncovered(first)


def test_an_output_is_only_stated_before_its_backward() -> None:
    run = Run("tied weights")
    assert run.execution.computed_from(MicrobatchId(0, 0)) is None


def test_values_that_are_zero_but_for_rounding_agree() -> None:
    small = torch.randn(100) * 1e-12
    assert not compare({"y": small}, {"y": -small}, "raw").differs
    assert compare({"y": small}, {"y": torch.ones(100)}, "raw").differs


def test_an_output_that_is_not_finite_is_not_compared() -> None:
    assert not compare({"y": torch.tensor([math.inf])}, {"y": torch.ones(1)}, "raw").compared


def test_numbers_and_whole_numbers_must_be_equal() -> None:
    same = {"n": 4, "mask": torch.tensor([True, False])}
    assert not compare(same, same, "fp16").differs
    assert compare(same, {**same, "n": 5}, "raw").differs
    assert compare(same, {**same, "mask": torch.tensor([True, True])}, "raw").differs
    assert compare(same, {"n": 4}, "raw").differs


def test_evidence_survives_its_file(tmp_path: Path) -> None:
    stated = Run("tied weights").stated()
    path = tmp_path / "checks" / "a.safetensors"
    write_evidence(path, ForwardEvidence({**stated.values, "n": 3}, stated.state, stated.arithmetic))
    found = read_evidence(path)
    assert found.arithmetic == own_arithmetic()
    assert found.values.keys() == {*stated.values, "n"}
    assert found.values["n"] == 3
    assert all(torch.equal(found.state[key], tensor) for key, tensor in stated.state.items())
    assert [each.name for each in path.parent.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_the_memory_layout_of_an_output_is_kept(tmp_path: Path, codec: str) -> None:
    """Codecs work on blocks of memory, so that another layout would look like another value."""
    image = torch.randn(4, 64, 9, 9) * torch.logspace(-3, 3, 64)[:, None, None]
    arrived = sent_through(image, codec, image.to(memory_format=torch.channels_last))
    write_evidence(tmp_path / "a", ForwardEvidence({"y": arrived}, {}))
    found = read_evidence(tmp_path / "a").values
    assert found["y"].stride() == arrived.stride() != image.stride()
    assert not compare({"y": image}, found, codec).differs


@pytest.mark.parametrize("text", ["[1]", '{"y": [1]}', '{"y": [0, 0]}', '{"y": "x"}', "nonsense"])
def test_damaged_strides_are_refused(tmp_path: Path, text: str) -> None:
    tensors = {"value/y": torch.ones(2, 3)}
    write_tensor_file(tmp_path / "a", tensors, {"strides": text})
    with pytest.raises(StageFormatError, match="damaged"):
        read_evidence(tmp_path / "a")
