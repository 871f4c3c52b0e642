"""Stages that are merged from units equal those of a cut, and are as exact."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from msgspec.structs import replace
from test_every_cut import BATCH, MODELS, Example, Network, prepared_model
from torch import nn
from zoo_models import find
from zoo_models.exactness import Unsplit, compare, record_training

from ravnest.errors import SplitError, StageFormatError
from ravnest.split import PreparedModel, Split, SplitStage, prepare, verify
from ravnest.split.graph import Operation, OutputSpec, Ref, StageGraph, StageSpec
from ravnest.split.merge import check_chain, merge_units


class Views(nn.Module):
    """Tensors that are written through views, some of which an earlier unit makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) + 1.0
        halves = y.view(-1, 2, 3)
        turned = halves.transpose(1, 2)
        turned.mul_(2.0)
        z = self.second(turned.reshape(-1, 6))
        z[:, 0].add_(1.0)
        return torch.relu_(z)


def views() -> Example:
    return Views(), (torch.randn(BATCH, 6),), {}


FULL = ("encoder", "recurrent")
"""Models that take long to capture; the zoo's models below have attention and recurrence too."""


class Units:
    """A prepared model, cut at every position."""

    def __init__(self, prepared: PreparedModel, example: Example) -> None:
        self.prepared = prepared
        self.example = example
        fine = prepared.cut(prepared.cuts)
        self.specs = [stage.spec for stage in fine.stages]
        self._tensors = {key: t for stage in fine.stages for key, t in stage.tensors.items()}

    def merged(self, starts: Sequence[int]) -> Split:
        specs = merge_units(self.specs, starts)
        return Split(
            tuple(SplitStage(spec, {e.key: self._tensors[e.key] for e in spec.state}) for spec in specs)
        )

    def direct(self, starts: Sequence[int]) -> Split:
        return self.prepared.cut([self.prepared.cuts[start - 1] for start in starts])

    def choices(self) -> list[list[int]]:
        """Return choices of cuts: none, each single one, some pairs, every second one, all."""
        places = range(1, len(self.specs))
        pairs = list(combinations(places, 2))
        chosen = [list(pair) for pair in pairs[:: max(1, len(pairs) // 10)]]
        return [[], *([place] for place in places), *chosen, list(places)[::2], list(places)]


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(name, marks=[pytest.mark.full] if name in FULL else []) for name in MODELS),
        "views",
    ],
)
def units(request: pytest.FixtureRequest) -> Units:
    if request.param != "views":
        return Units(*prepared_model(request.param))
    torch.manual_seed(0)
    example = views()
    return Units(prepare(*example), example)


@pytest.fixture(scope="module")
def frozen() -> Units:
    return Units(*prepared_model("frozen"))


def _without_sizes(graph: StageGraph) -> StageGraph:
    """Drop the source of each size, because a size may be read from any of several tensors."""
    operations = [
        replace(operation, args=()) if operation.target == "aten::sym_size.int" else operation
        for operation in graph.operations
    ]
    by_name = sorted(operations, key=lambda operation: operation.name)
    return replace(graph, operations=tuple(by_name))


def test_the_units_follow_each_other(units: Units) -> None:
    check_chain(units.specs)


def test_merged_stages_equal_those_of_a_cut(units: Units) -> None:
    for starts in units.choices():
        for merged, direct in zip(units.merged(starts).stages, units.direct(starts).stages, strict=True):
            one, other = merged.spec.graphs["train"], direct.spec.graphs["train"]
            assert _without_sizes(one) == _without_sizes(other), starts
            trained = [e for e in merged.spec.state if e.kind == "parameter"]
            assert trained == [e for e in direct.spec.state if e.kind == "parameter"], starts
            assert merged.spec.module_versions == direct.spec.module_versions


def test_merged_stages_are_exact(units: Units) -> None:
    splits = [units.merged(starts).stages for starts in units.choices()]
    assert verify(units.prepared.capture, splits).bitwise


def test_merged_stages_train_over_a_network_as_the_model_does(units: Units) -> None:
    model, args, kwargs = units.example
    expected = record_training(Unsplit(copy.deepcopy(model)), args, kwargs)
    middle = len(units.specs) // 2
    chain = Network.of(units.merged([max(1, middle // 2), middle]))
    assert compare(expected, record_training(chain, args, kwargs)) is None
    assert list(chain.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize(
    "name",
    [
        "unet",
        "lstm-tagger",
        "in-place",
        "mutated-input",
        "aliased-outputs",
        "counting-buffers",
        "spectral-norm",
        "submodule-in-eval",
        "shape-arithmetic",
        "branch-on-mode",
        "vector-quantised",
    ],
)
def test_difficult_models_of_the_zoo(name: str) -> None:
    example = find(name).build()
    units = Units(prepare(*example), example)
    count = len(units.specs)
    choices = [[], [count // 2], list(range(1, count, 3))]
    splits = [units.merged(starts).stages for starts in choices if starts != [0]]
    assert verify(units.prepared.capture, splits).bitwise


def test_only_received_tensors_are_copied_before_a_write() -> None:
    example = views()
    units = Units(prepare(*example), example)
    copies = [
        [o.name for s in units.merged(starts).stages for o in s.spec.graphs["train"].operations]
        for starts in ([], [2], list(range(1, len(units.specs))))
    ]
    own = [sum(name.endswith("__own") for name in names) for names in copies]
    assert own[0] == 0, "a single stage receives no tensor that it writes to"
    assert own[1] == 1, "the second stage writes to a received tensor through a view"
    assert own[2] >= 1


def _unit(index: int, operations: tuple[Operation, ...], outputs: tuple[OutputSpec, ...]) -> StageSpec:
    """Return a unit of a model without inputs; enough for tests of rejection."""
    graph = StageGraph((), (), operations, outputs)
    return StageSpec(index, 2, (), {"train": graph, "eval": graph}, ())


def test_units_may_only_repeat_operations_on_sizes(frozen: Units) -> None:
    one, two = frozen.specs[0], frozen.specs[1]
    graph = two.graphs["train"]
    renamed = replace(graph.operations[0], name=one.graphs["train"].operations[0].name)
    outputs = tuple(OutputSpec(o.name, Ref(renamed.name)) for o in graph.outputs)
    forged = replace(graph, operations=(renamed,), outputs=outputs)
    units = [one, replace(two, graphs={**two.graphs, "train": forged}), *frozen.specs[2:]]
    with pytest.raises(StageFormatError, match="is used twice"):
        merge_units(units, [2])


@pytest.mark.parametrize("starts", [[2, 1], [1, 1], [0, 0], [100], [-1]])
def test_starts_must_ascend_within_the_units(frozen: Units, starts: list[int]) -> None:
    with pytest.raises(SplitError, match="must ascend"):
        merge_units(frozen.specs, starts)


def test_a_leading_zero_is_optional(frozen: Units) -> None:
    assert merge_units(frozen.specs, [0, 3]) == merge_units(frozen.specs, [3])


def test_invalid_arguments_of_an_operator_are_rejected() -> None:
    forged = Operation("item", "python::getitem", (1, 0))
    unit = _unit(0, (forged,), (OutputSpec("item", Ref("item")),))
    last = replace(unit.graphs["train"], operations=(), outputs=(OutputSpec("output", 1),))
    with pytest.raises(StageFormatError):
        merge_units([unit, replace(unit, index=1, graphs={"train": last, "eval": last})], [])
