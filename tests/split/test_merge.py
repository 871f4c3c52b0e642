"""Stages joined from the smallest pieces of a model are those of a cut, and as exact."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from msgspec.structs import replace
from test_every_cut import BATCH, MODELS, Example, Network
from torch import nn
from zoo_models import find
from zoo_models.exactness import Unsplit, compare, record_training

from ravnest.errors import SplitError, StageFormatError
from ravnest.split import PreparedModel, Split, SplitStage, prepare, verify
from ravnest.split.graph import Operation, OutputSpec, Ref, StageGraph, StageSpec
from ravnest.split.merge import check_chain, merge_units


class Views(nn.Module):
    """Tensors that are written through views, some of them made in an earlier piece."""

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


CASES = {
    **MODELS,
    "views": lambda: (Views(), (torch.randn(BATCH, 6),), {}),
}


class Pieces:
    """A prepared model, cut in every place."""

    def __init__(self, prepared: PreparedModel, example: Example) -> None:
        self.prepared = prepared
        self.example = example
        fine = prepared.cut(prepared.cuts)
        self.units = [stage.spec for stage in fine.stages]
        self._tensors = {key: t for stage in fine.stages for key, t in stage.tensors.items()}

    def joined(self, starts: Sequence[int]) -> Split:
        specs = merge_units(self.units, starts)
        return Split(
            tuple(SplitStage(spec, {e.key: self._tensors[e.key] for e in spec.state}) for spec in specs)
        )

    def direct(self, starts: Sequence[int]) -> Split:
        return self.prepared.cut([self.prepared.cuts[start - 1] for start in starts])

    def choices(self) -> list[list[int]]:
        """No cut, each single one, some pairs, every second one, all."""
        places = range(1, len(self.units))
        pairs = list(combinations(places, 2))
        chosen = [list(pair) for pair in pairs[:: max(1, len(pairs) // 10)]]
        return [[], *([place] for place in places), *chosen, list(places)[::2], list(places)]


@pytest.fixture(scope="module", params=list(CASES))
def pieces(request: pytest.FixtureRequest) -> Pieces:
    torch.manual_seed(0)
    example = CASES[request.param]()
    return Pieces(prepare(*example), example)


def _without_sizes(graph: StageGraph) -> StageGraph:
    """A size may be read off any of several tensors: leave out which one."""
    operations = [
        replace(operation, args=()) if operation.target == "aten::sym_size.int" else operation
        for operation in graph.operations
    ]
    by_name = sorted(operations, key=lambda operation: operation.name)
    return replace(graph, operations=tuple(by_name))


def test_the_units_follow_each_other(pieces: Pieces) -> None:
    check_chain(pieces.units)


def test_joined_stages_are_those_of_a_cut(pieces: Pieces) -> None:
    for starts in pieces.choices():
        for joined, direct in zip(
            pieces.joined(starts).stages, pieces.direct(starts).stages, strict=True
        ):
            one, other = joined.spec.graphs["train"], direct.spec.graphs["train"]
            assert _without_sizes(one) == _without_sizes(other), starts
            trained = [e for e in joined.spec.state if e.kind == "parameter"]
            assert trained == [e for e in direct.spec.state if e.kind == "parameter"], starts
            assert joined.spec.module_versions == direct.spec.module_versions


def test_joined_stages_are_exact(pieces: Pieces) -> None:
    splits = [pieces.joined(starts).stages for starts in pieces.choices()]
    assert verify(pieces.prepared.capture, splits).bitwise


def test_joined_stages_train_over_a_network_as_the_model_does(pieces: Pieces) -> None:
    model, args, kwargs = pieces.example
    expected = record_training(Unsplit(copy.deepcopy(model)), args, kwargs)
    middle = len(pieces.units) // 2
    chain = Network.of(pieces.joined([max(1, middle // 2), middle]))
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
def test_corners_of_the_zoo(name: str) -> None:
    example = find(name).build()
    pieces = Pieces(prepare(*example), example)
    count = len(pieces.units)
    choices = [[], [count // 2], list(range(1, count, 3))]
    splits = [pieces.joined(starts).stages for starts in choices if starts != [0]]
    assert verify(pieces.prepared.capture, splits).bitwise


def test_a_received_tensor_is_copied_once_and_one_that_is_made_here_is_not() -> None:
    example = CASES["views"]()
    pieces = Pieces(prepare(*example), example)
    copies = [
        [o.name for s in pieces.joined(starts).stages for o in s.spec.graphs["train"].operations]
        for starts in ([], [2], list(range(1, len(pieces.units))))
    ]
    own = [sum(name.endswith("__own") for name in names) for names in copies]
    assert own[0] == 0, "all is made in the only stage"
    assert own[1] == 1, "what the second stage gets is written to through a view"
    assert own[2] >= 1


def _unit(index: int, operations: tuple[Operation, ...], outputs: tuple[OutputSpec, ...]) -> StageSpec:
    """A unit of a model of no inputs, which is enough to be refused."""
    graph = StageGraph((), (), operations, outputs)
    return StageSpec(index, 2, (), {"train": graph, "eval": graph}, ())


def test_an_operation_of_the_same_name_is_only_taken_for_the_same_if_it_is_a_size() -> None:
    pieces = Pieces(prepare(*CASES["frozen"]()), CASES["frozen"]())
    one, two = pieces.units[0], pieces.units[1]
    graph = two.graphs["train"]
    renamed = replace(graph.operations[0], name=one.graphs["train"].operations[0].name)
    outputs = tuple(OutputSpec(o.name, Ref(renamed.name)) for o in graph.outputs)
    forged = replace(graph, operations=(renamed,), outputs=outputs)
    units = [one, replace(two, graphs={**two.graphs, "train": forged}), *pieces.units[2:]]
    with pytest.raises(StageFormatError, match="not a new, plain name"):
        merge_units(units, [2])


@pytest.mark.parametrize("starts", [[2, 1], [1, 1], [0, 0], [100], [-1]])
def test_starts_ascend_within_the_units(starts: list[int]) -> None:
    pieces = Pieces(prepare(*CASES["frozen"]()), CASES["frozen"]())
    with pytest.raises(SplitError, match="must ascend"):
        merge_units(pieces.units, starts)


def test_a_leading_zero_is_the_first_stage() -> None:
    pieces = Pieces(prepare(*CASES["frozen"]()), CASES["frozen"]())
    assert merge_units(pieces.units, [0, 3]) == merge_units(pieces.units, [3])


def test_arguments_that_an_operator_cannot_have_are_refused() -> None:
    forged = Operation("item", "python::getitem", (1, 0))
    unit = _unit(0, (forged,), (OutputSpec("item", Ref("item")),))
    last = replace(unit.graphs["train"], operations=(), outputs=(OutputSpec("output", 1),))
    with pytest.raises(StageFormatError):
        merge_units([unit, replace(unit, index=1, graphs={"train": last, "eval": last})], [])
