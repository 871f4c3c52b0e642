"""``precision="bf16"``: stages compute what the model computes under autocast, without autocast."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ravnest import host
from ravnest.errors import CaptureError, SplitError
from ravnest.plan.profiler import profile_model
from ravnest.split import shared_casts, split
from ravnest.split.casts import cast_keys, keys_cast_apart
from ravnest.split.chain import Chain
from ravnest.split.graph import StageSpec
from ravnest.split.merge import merge_units
from ravnest.split.module import StageModule
from ravnest.split.sample_coupling import row_split
from ravnest.split.self_check import verify
from ravnest.split.splitter import PreparedModel, Split, balanced_cuts, prepare

VOCABULARY = 20


class Images(nn.Module):
    """Convolutions, batch norm, dropout, layer norm, and a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.hidden = nn.Linear(8, 16)
        self.layer_norm = nn.LayerNorm(16)
        self.twice = nn.Linear(16, 16)
        self.out = nn.Linear(16, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.norm(self.first(images)))).mean((2, 3))
        x = nn.functional.dropout(self.layer_norm(self.hidden(x)), 0.2, self.training)
        return self.out(self.twice(self.twice(x)))


class Tokens(nn.Module):
    """Attention with a frozen layer, and an output that shares the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.query, self.mix = nn.Linear(8, 16), nn.Linear(8, 8)
        self.mix.requires_grad_(False)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k = self.query(x).unsqueeze(1).chunk(2, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True).squeeze(1)
        return self.head(self.mix(x) + torch.softmax(x, -1))


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)
        self.layer = kind(8, 6, batch_first=True)
        self.out = nn.Linear(6, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.inner(self.embed(tokens)))[0])


class Products(nn.Module):
    """Operators with arguments in two types, one that is made of others, and a block in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.one(x)
        with torch.autocast("cpu", enabled=False):
            high = self.two(low.float())
        both = torch.cat([low, high], 1)
        products = torch.einsum("bi,ij->bj", both, self.weight) + torch.matmul(
            x, self.weight.t()[:8, :8]
        )
        return nn.functional.mse_loss(products, x, reduction="none")


class UsedFarApart(nn.Module):
    """A layer at both ends, so that two stages cast its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.ends, self.between = nn.Linear(8, 8), nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ends(self.between(self.ends(x).tanh()).tanh())


def _tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (4, 7))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "images": (Images, lambda: torch.randn(4, 3, 8, 8)),
    "tokens": (Tokens, _tokens),
    "LSTM": (lambda: Recurrent(nn.LSTM), _tokens),
    "GRU": (lambda: Recurrent(nn.GRU), _tokens),
    "products": (Products, lambda: torch.randn(4, 8)),
    "used far apart": (UsedFarApart, lambda: torch.randn(4, 8)),
}
_prepared: dict[str, PreparedModel] = {}


def prepared_of(name: str) -> PreparedModel:
    """Return a case, which is captured once for all tests."""
    if name not in _prepared:
        torch.manual_seed(0)
        make, example = CASES[name]
        _prepared[name] = prepare(make(), (example(),), precision="bf16")
    return _prepared[name]


def cut(prepared: PreparedModel, stages: int) -> Split:
    return prepared.cut(balanced_cuts(prepared, [1.0] * stages))


@pytest.mark.parametrize("name", [name for name in CASES if name != "used far apart"])
def test_stages_have_the_bits_of_the_model_under_autocast(name: str) -> None:
    prepared = prepared_of(name)
    assert verify(prepared.capture, [cut(prepared, 3).stages]).bitwise


@pytest.mark.parametrize("name", ["images", "tokens", "products"])
def test_a_step_of_training_is_that_of_autocast_outside_of_the_capture(name: str) -> None:
    """Compare with torch alone: the self-check shares code with the capture."""
    prepared = prepared_of(name)
    model, x = prepared.capture.model.train(), CASES[name][1]()
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x).float()
    expected.square().sum().backward()
    own = {key: parameter.grad for key, parameter in model.named_parameters()}
    model.zero_grad()
    chain = Chain(StageModule(stage.spec, stage.tensors) for stage in cut(prepared, 2).stages)
    torch.manual_seed(3)
    found = chain.train()(x)
    assert torch.equal(found, expected)
    gradients: dict[str, torch.Tensor] = {}
    chain.pass_gradients([(found, 2 * expected.detach())], gradients.__setitem__)
    trained = {key for key, gradient in own.items() if gradient is not None}
    assert gradients.keys() == trained
    assert all(torch.equal(gradients[key], own[key]) for key in trained)  # type: ignore[arg-type]


def test_weights_stay_float32_and_activations_cross_in_bfloat16() -> None:
    prepared = prepared_of("images")
    first, second = (stage.spec for stage in cut(prepared, 2).stages)
    assert {entry.dtype for entry in (*first.state, *second.state)} == {torch.float32, torch.int64}
    assert [value.dtype for value in second.graphs["train"].inputs] == [torch.bfloat16]
    with torch.no_grad():
        output = Chain(StageModule(s.spec, s.tensors) for s in cut(prepared, 2).stages)(
            torch.randn(4, 3, 8, 8)
        )
    assert output.dtype is torch.float32


def test_the_plan_counts_the_bytes_of_bfloat16() -> None:
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), torch.randn(8, 64)
    full, half = (profile_model(prepare(model, (x,), precision=each)) for each in (None, "bf16"))
    assert min(unit.crossing_bytes for unit in half.units[:-1]) == 8 * 64 * 2
    assert min(unit.gradient_bytes for unit in half.units[:-1] if unit.gradient_bytes) == 8 * 64 * 2
    assert min(unit.crossing_bytes for unit in full.units[:-1]) == 8 * 64 * 4
    assert [tensor.bytes for tensor in half.state] == [tensor.bytes for tensor in full.state]
    assert sum(unit.deferred_bytes for unit in half.units) * 2 == sum(
        unit.deferred_bytes for unit in full.units
    )


def test_each_stage_casts_a_shared_weight_for_itself() -> None:
    prepared = prepared_of("used far apart")
    split_model = cut(prepared, 3)
    specs = [stage.spec for stage in split_model.stages]
    assert keys_cast_apart(specs) == {"ends.weight", "ends.bias"}
    weight = prepared.capture.state.tensors["ends.weight"].tensor
    crossing = [value for spec in specs[1:] for value in spec.graphs["train"].inputs]
    assert all(value.shape != tuple(weight.shape) for value in crossing), "no weight crosses a cut"
    found = verify(prepared.capture, [split_model.stages]).differences
    assert {name.partition(" (")[0] for name in found} <= {
        "the gradient of ends.weight",
        "the gradient of ends.bias",
    }
    assert verify(prepared.capture, [cut(prepared, 1).stages]).bitwise, "one stage adds as autocast does"


@pytest.mark.parametrize("name", ["images", "used far apart"])
def test_units_merge_into_the_stages_of_the_cuts(name: str) -> None:
    """The server merges units, each of which has its own cast of a shared weight."""
    prepared = prepared_of(name)
    units = [stage.spec for stage in prepared.cut(prepared.cuts).stages]
    cuts = balanced_cuts(prepared, [1.0] * 2)
    merged = merge_units(units, [prepared.cuts.index(each) + 1 for each in cuts])

    def operations(specs: Any) -> list[Any]:
        return [spec.graphs[mode].operations for spec in specs for mode in ("train", "eval")]

    expected: list[StageSpec] = [stage.spec for stage in prepared.cut(cuts).stages]
    assert operations(merged) == operations(expected)
    assert any(cast_keys(spec.graphs["train"]) for spec in merged)


def test_micro_batches_in_flight_share_the_cast_of_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_casts, "LEAST_ELEMENTS", 1)
    cast = shared_casts.SharedCast(torch.ops.aten._to_copy.default)
    weight = torch.randn(4, 4, requires_grad=True)
    first, second = (cast(weight, dtype=torch.bfloat16) for _ in range(2))
    assert first.data_ptr() == second.data_ptr()
    gradient = torch.randn(4, 4).bfloat16()
    (found,) = torch.autograd.grad(second, weight, gradient)
    assert torch.equal(found, gradient.float())
    for change in (lambda: weight.mul_(2), lambda: setattr(weight, "data", torch.randn(4, 4))):
        with torch.no_grad():
            change()
        assert torch.equal(cast(weight, dtype=torch.bfloat16), weight.to(torch.bfloat16))
    assert torch.equal(cast(weight.detach(), dtype=torch.bfloat16), weight.to(torch.bfloat16))
    with torch.no_grad():
        cast(weight, dtype=torch.bfloat16).zero_()
        assert torch.equal(cast(weight, dtype=torch.bfloat16), weight.to(torch.bfloat16))


def test_a_batch_may_be_split_within_the_rounding_of_bfloat16() -> None:
    assert row_split(prepared_of("tokens")).allowed
    assert not row_split(prepared_of("images")).allowed, "batch norm couples the samples"


class OwnAutocast(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


def test_what_cannot_be_captured_is_refused() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(SplitError, match=r"precision must be .bf16.*got 'fp16'"):
        split(nn.Linear(8, 8), x, stages=1, precision="fp16")  # type: ignore[arg-type]
    with pytest.raises(SplitError, match="TorchScript"):
        split(torch.jit.script(nn.Linear(8, 8)), x, stages=1, precision="bf16")
    with pytest.raises(SplitError, match=r"float16: convert it with model\.float\(\)"):
        split(nn.Linear(8, 8).half(), x, stages=1, precision="bf16")
    with pytest.raises(CaptureError, match=r'(?s)autocast inside forward.*precision="bf16"'):
        split(OwnAutocast(8, 8), x, stages=1)


def test_a_machine_that_dies_of_bf16_products_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some virtual machines report AMX instructions that they do not execute."""

    def ended_with(code: int) -> Callable[..., SimpleNamespace]:
        return lambda *_args, **_options: SimpleNamespace(returncode=code)

    monkeypatch.setattr(host, "_reports_amx", lambda: True)
    try:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
        host.bf16_products_work.cache_clear()
        assert host.bf16_products_work(), "the user has chosen the kernels"
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
        for code, works in ((0, True), (-signal.SIGILL, False)):
            monkeypatch.setattr(subprocess, "run", ended_with(code))
            host.bf16_products_work.cache_clear()
            assert host.bf16_products_work() == works
        with pytest.raises(SplitError, match="ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before Python starts"):
            split(nn.Linear(8, 8), torch.randn(4, 8), stages=1, precision="bf16")
    finally:
        host.bf16_products_work.cache_clear()
