"""A stage is a trainable module that runs on its own weights or on given ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ravnest.errors import StageInputError
from ravnest.split import Chain, Split, StageModule, split


class Net(nn.Module):
    """A model whose layers have the names of attributes of ``StageModule``."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = nn.Linear(4, 8)
        self.graph = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(8, 3)
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.dropout(torch.relu(self.graph(self.spec(x))))) * self.scale


@pytest.fixture(scope="module")
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def result(model: Net) -> Split:
    return split(model, (torch.randn(5, 4),))


@pytest.fixture
def stages(result: Split) -> list[StageModule]:
    return list(Chain.of(result).modules)


def test_names_are_those_of_the_model(model: Net, stages: list[StageModule]) -> None:
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert {k for stage in stages for k in stage.state_dict()} == set(model.state_dict())


def test_train_and_eval_switch_the_graph(stages: list[StageModule]) -> None:
    first = stages[0]
    x = torch.randn(5, 4)
    before = first.state_dict()["graph.running_mean"].clone()
    first.eval()(x)
    assert torch.equal(first.state_dict()["graph.running_mean"], before)
    first.train()(x)
    assert not torch.equal(first.state_dict()["graph.running_mean"], before)


def test_forward_on_given_weights(stages: list[StageModule]) -> None:
    first = stages[0].eval()
    x = torch.randn(5, 4)
    older = {key: p.detach().clone().requires_grad_() for key, p in first.parameters_by_key().items()}
    expected = first(x)[0].detach()
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(1.0)
    out = first(x, parameters=older)[0]
    assert torch.equal(out, expected), "the older version is used"
    assert not torch.equal(first(x)[0], expected), "the module's own version has changed"
    (gradient,) = torch.autograd.grad(out.sum(), [older["spec.weight"]])
    assert gradient.shape == older["spec.weight"].shape


def test_recompute_with_cloned_buffers_changes_nothing(stages: list[StageModule]) -> None:
    first = stages[0].train()
    x = torch.randn(5, 4)
    torch.manual_seed(1)
    out = first(x)
    state = copy.deepcopy(first.state_dict())
    torch.manual_seed(1)
    buffers = {k: t.clone() for k, t in first.state_tensors().items() if not isinstance(t, nn.Parameter)}
    again = first(x, buffers=buffers)
    assert all(torch.equal(a, b) for a, b in zip(out, again, strict=True))
    assert all(torch.equal(state[key], value) for key, value in first.state_dict().items())


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ((), "takes 1 inputs, got 0"),
        ((torch.randn(5, 5),), r"shape \[5, 5\], expected \[b0, 4\]"),
        ((torch.randn(4),), r"shape \[4\]"),
        ((torch.ones(5, 4, dtype=torch.long),), "dtype torch.int64, expected torch.float32"),
        (("text",), "is a tensor, got str"),
    ],
)
def test_inputs_that_do_not_fit_are_rejected(
    stages: list[StageModule], inputs: tuple, words: str
) -> None:
    for _ in range(2):
        with pytest.raises(StageInputError, match=words):
            stages[0](*inputs)
        stages[0](torch.randn(5, 4))


def test_gradients_that_do_not_fit_are_rejected(result: Split) -> None:
    chain = Chain.of(result)
    for gradient, words in [
        (None, "only for scalar outputs"),
        (torch.ones(1), "Mismatch in shape"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            chain.backward(chain(torch.randn(5, 4)), gradient)


def test_weights_that_do_not_fit_are_rejected(result: Split) -> None:
    stage = result.stages[0]
    with pytest.raises(StageInputError, match="lack"):
        StageModule(stage.spec, {})
    wrong = dict(stage.tensors) | {"spec.weight": torch.zeros(1)}
    with pytest.raises(StageInputError, match=r"spec.weight has shape \[1\]"):
        StageModule(stage.spec, wrong)


def test_a_moved_stage_stays_consistent(stages: list[StageModule]) -> None:
    first = stages[0].to(torch.float64)
    assert {t.dtype for t in first.state_tensors().values()} == {torch.float64, torch.int64}
    assert (
        first.state_tensors()["graph.running_mean"]
        is first.state_dict(keep_vars=True)["graph.running_mean"]
    )


def test_a_chain_checks_its_inputs(result: Split) -> None:
    chain = Chain.of(result).eval()
    x = torch.randn(5, 4)
    assert torch.equal(chain(x), chain(x=x))
    for args, kwargs, words in [
        ((), {}, "'x' is missing"),
        ((x, x), {}, "takes 1 inputs"),
        ((x,), {"x": x}, "by position and by name"),
        ((), {"y": x}, "no input 'y'"),
    ]:
        with pytest.raises(StageInputError, match=words):
            chain(*args, **kwargs)


def test_a_chain_needs_all_stages(result: Split) -> None:
    with pytest.raises(StageInputError, match="all the stages"):
        Chain(list(Chain.of(result).modules)[:1])


class Versioned(nn.Module):
    """A module that only loads a state_dict with its version, like some of torchvision."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.activation = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.layer(x))

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, metadata: dict, *rest: object
    ) -> None:
        assert metadata["version"] == 3
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


def test_the_fused_state_dict_has_the_versions_of_all_modules() -> None:
    model = nn.Sequential(Versioned(), nn.BatchNorm1d(4), Versioned())
    result = split(model, torch.randn(3, 4))
    fused = Chain.of(result).state_dict()
    assert fused._metadata == model.state_dict()._metadata
    assert not any(model.load_state_dict(fused, strict=True))
    assert [bool(stage.spec.module_versions) for stage in result.stages] == [True, False]


@pytest.mark.parametrize("version", [None, "2", -1, 2**40])
def test_a_version_that_is_not_a_small_integer_is_omitted(version: object) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1]._version = version
    first = split(model, torch.randn(3, 4)).stages[0].spec
    assert first.module_versions == {"": 1, "0": 1}
