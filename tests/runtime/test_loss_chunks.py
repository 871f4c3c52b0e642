"""Logits and loss of the last stage in chunks of positions: the same updates in less memory."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from local_cluster import LocalCluster, form
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from training_cases import TiedGPT, token_loaders, token_loss, train_alone

from ravnest import set_seed
from ravnest.jobs.graph_loss import load_loss, pack_loss
from ravnest.plan.cost import ModelCosts
from ravnest.plan.loss_chunks import with_loss_chunks
from ravnest.plan.profiler import profile_model
from ravnest.runtime.data import Criterion
from ravnest.runtime.stage.execution import LossPart, StageExecution
from ravnest.runtime.stage.leaf import LabelChunk, Leaf, start_chunks
from ravnest.runtime.stage.loss_chunks import LossChunk
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.split import StageModule, prepare
from ravnest.split.split_stage import SplitStage
from ravnest.store.node_spec import read_node, write_node
from ravnest.types import MicrobatchId

ROWS, POSITIONS, WIDTH, CLASSES = 3, 10, 8, 17
ONE = MicrobatchId(0, 0)


class Tagger(nn.Module):
    """Embedding, a layer, and a head over all positions; ``end`` is applied to the logits."""

    def __init__(
        self, *, bias: bool = True, tied: bool = False, end: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self._end = end

    def forward(self, tokens: torch.Tensor) -> Any:
        logits = self.head(self.dropout(torch.tanh(self.mix(self.embed(tokens)))))
        return logits if self._end is None else self._end(logits)


def labels(ignored: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    found = torch.randint(0, CLASSES, (ROWS, POSITIONS), generator=generator)
    if ignored is not None:
        found[:, :5] = ignored
        found[1, 7:] = ignored
    return found


TOKENS = torch.randint(0, CLASSES, (ROWS, POSITIONS), generator=torch.Generator().manual_seed(3))


def flat(**options: Any) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    def loss(logits: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), item.flatten(), **options)

    return loss


@dataclass
class Result:
    """Loss of a micro-batch, and gradients of the stage's weights and inputs."""

    loss: float
    weights: dict[str, torch.Tensor]
    reason: str


_CAPTURED: WeakKeyDictionary[nn.Module, SplitStage] = WeakKeyDictionary()


def captured(model: nn.Module) -> SplitStage:
    """Return the model as one stage; each model is captured once."""
    if model not in _CAPTURED:
        (_CAPTURED[model],) = prepare(model, (TOKENS,)).cut(()).stages
    return _CAPTURED[model]


@pytest.fixture(scope="module")
def tagger() -> Tagger:
    """A model that no test changes."""
    set_seed(1)
    return Tagger()


def train_once(
    model: nn.Module,
    loss: Callable[..., Any],
    item: Any,
    chunks: int,
    *,
    weight: float = 1.0,
    recompute: bool = False,
) -> Result:
    """Compute the gradients of one micro-batch, with the loss in this number of chunks."""
    stage = captured(model)
    module = StageModule(stage.spec, {key: tensor.clone() for key, tensor in stage.tensors.items()})
    execution = StageExecution(
        module,
        UpdateRule(torch.optim.SGD),
        seed=5,
        stash=False,
        kept=0 if recompute else None,
        defer=True,
    )
    leaf = Leaf(Criterion(loss), [item], None)
    reason = start_chunks(execution, leaf, chunks) if chunks > 1 else ""
    assert bool(leaf.chunk(item)) == (chunks > 1 and not reason)
    values = {module.graph.inputs[0].name: TOKENS}
    found = [train_microbatch(execution, leaf, values, item, weight, number) for number in range(2)]
    return Result(sum(found), execution.updates.take_gradients(), reason)


def train_microbatch(
    execution: StageExecution,
    leaf: Leaf,
    values: dict[str, torch.Tensor],
    item: Any,
    weight: float = 1.0,
    number: int = 0,
) -> float:
    """Run a micro-batch forward and backward, as the runtime does at the last stage; return its loss."""

    def of_chunk(chunk: LabelChunk) -> LossChunk:
        def compute(outputs: tuple[Any, ...]) -> torch.Tensor:
            return leaf.chunk_loss(execution.output(outputs), chunk.item)

        return LossChunk(chunk.size, compute, chunk.weight)

    chunks = tuple(map(of_chunk, leaf.chunk(item)))
    part = LossPart(lambda outputs: leaf.loss(execution.output(outputs), item), weight, chunks)
    microbatch = MicrobatchId(0, number)
    _, loss = execution.forward(microbatch, 0, values, part)
    execution.backward(microbatch, {})
    if execution.defers:
        execution.weight_gradients(microbatch)
    assert loss is not None
    return loss


def assert_same(one: Result, other: Result) -> None:
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    assert one.weights.keys() == other.weights.keys()
    for key, gradient in one.weights.items():
        torch.testing.assert_close(gradient, other.weights[key], rtol=1e-4, atol=1e-6)


LOSSES: dict[str, tuple[Any, Any]] = {
    "mean": (flat(), labels()),
    "sum": (flat(reduction="sum"), labels()),
    "ignored": (flat(ignore_index=-100), labels(-100)),
    "another ignored value": (flat(ignore_index=0), labels(0)),
    "label smoothing": (flat(label_smoothing=0.1), labels()),
    "class weights": (flat(weight=torch.rand(CLASSES) + 0.1), labels()),
    "class weights, ignored": (flat(weight=torch.rand(CLASSES) + 0.1), labels(-100)),
    "classes second": (
        lambda logits, item: functional.cross_entropy(logits.transpose(1, 2), item),
        labels(-100),
    ),
    "batch of several tensors": (
        lambda logits, item: functional.cross_entropy(logits.flatten(0, 1), item[-1].flatten()),
        [torch.rand(ROWS, 4), labels()],
    ),
    "squares": (
        lambda logits, item: ((logits.sum(-1) - item) ** 2).mean(),
        labels().float(),
    ),
}


@pytest.mark.parametrize("chunks", [2, 3, 100])
@pytest.mark.parametrize("name", LOSSES)
def test_chunks_have_the_loss_and_the_gradients_of_the_whole(
    tagger: Tagger, name: str, chunks: int
) -> None:
    loss, item = LOSSES[name]
    found = train_once(tagger, loss, item, chunks)
    assert not found.reason
    assert_same(found, train_once(tagger, loss, item, 1))


@pytest.mark.parametrize("options", [{"bias": False}, {"tied": True}, {"tied": True, "bias": False}])
@pytest.mark.parametrize("recompute", [False, True])
def test_tied_weights_bias_and_recomputation(options: dict[str, bool], recompute: bool) -> None:
    set_seed(1)
    model = Tagger(**options)
    found = train_once(model, flat(), labels(-100), 4, weight=0.3, recompute=recompute)
    assert not found.reason
    assert_same(found, train_once(model, flat(), labels(-100), 1, weight=0.3, recompute=recompute))


def test_frozen_head() -> None:
    set_seed(1)
    model = Tagger()
    model.head.requires_grad_(False)
    found = train_once(model, flat(), labels(), 4)
    assert not found.reason
    assert "head.weight" not in found.weights
    assert_same(found, train_once(model, flat(), labels(), 1))


ENDS: dict[str, tuple[Callable[..., Any], Any]] = {
    "flat": (lambda z: z.view(-1, CLASSES), lambda z, y: functional.cross_entropy(z, y.flatten())),
    "classes second": (lambda z: z.transpose(1, 2), functional.cross_entropy),
    "log-softmax": (
        lambda z: {"logits": functional.log_softmax(z / 2, -1)},
        lambda out, y: functional.nll_loss(out["logits"].transpose(1, 2), y),
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_operations_behind_the_head(end: str) -> None:
    change, loss = ENDS[end]
    set_seed(1)
    model = Tagger(end=change)
    found = train_once(model, loss, labels(-100), 3)
    assert not found.reason
    assert_same(found, train_once(model, loss, labels(-100), 1))


def shifted(logits: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), item[:, 1:].flatten())


def spread(logits: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    return flat()(logits, item) + logits.std(1).mean()


@pytest.mark.parametrize(
    ("model", "loss", "item", "reason"),
    [
        (Tagger(), shifted, labels(), "it shifts labels"),
        (Tagger(), spread, labels(), "neither a weighted mean nor the sum"),
        (
            Tagger(),
            flat(),
            labels().flatten(),
            "no tensor that the labels loader gives",
        ),
        (Tagger(end=lambda z: (z, z.mean())), lambda o, y: flat()(o[0], y), labels(), "2 outputs"),
        (Tagger(end=lambda z: z + z.tanh()), flat(), labels(), "not the result of a linear layer"),
        (
            Tagger(end=lambda z: z.softmax(1)),
            lambda p, y: functional.nll_loss(p.log().transpose(1, 2), y),
            labels(),
            "neither a weighted mean nor the sum",
        ),
    ],
)
def test_a_loss_that_needs_all_positions_stays_whole(
    model: nn.Module, loss: Any, item: Any, reason: str
) -> None:
    found = train_once(model, loss, item, 4)
    assert found.reason
    assert reason in found.reason


def test_a_part_that_does_not_count_has_no_gradient(tagger: Tagger) -> None:
    found = train_once(tagger, flat(), labels(-100), 4, weight=0.0)
    assert all(not gradient.any() for gradient in found.weights.values())


def test_a_captured_loss_takes_chunks(tagger: Tagger, tmp_path: Path) -> None:
    packed = pack_loss(flat(ignore_index=-100), tagger(TOKENS).detach(), labels(-100), tmp_path)
    loss = load_loss(packed.stage, packed.weights)
    found = train_once(tagger, loss, labels(-100), 4)
    assert not found.reason
    assert_same(found, train_once(tagger, flat(), labels(-100), 1))


def tensor_peak(chunks: int) -> tuple[float, float]:
    """Return the peak bytes of tensors of a training step, and the bytes that a plan counts."""
    inputs, item = torch.rand(2, 64, 16), torch.randint(0, 4096, (2, 64))
    prepared = prepare(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4096)), (inputs,))
    costs = ModelCosts.of(with_loss_chunks(profile_model(prepared, optimizer_factor=0.0), chunks))
    (stage,) = prepared.cut(()).stages
    module = StageModule(stage.spec, stage.tensors)
    execution = StageExecution(module, UpdateRule(torch.optim.SGD), seed=5, stash=False)
    leaf = Leaf(Criterion(flat()), [item], None)
    assert chunks == 1 or not start_chunks(execution, leaf, chunks)
    values = {module.graph.inputs[0].name: inputs}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        train_microbatch(execution, leaf, values, item)
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    peak = max(accumulate(change for _, change in sorted(changes, key=lambda change: change[0])))
    before = sum(tensor.nbytes for tensor in (*module.state_tensors().values(), inputs))
    return peak + before, float(costs.memory(0, costs.units, 1).total)


def test_the_logits_of_one_chunk_exist_at_a_time() -> None:
    logits = 2 * 64 * 4096 * 4
    weights = 2 * 17 * 4096 * 4  # the head and its gradient
    for chunks in (1, 8):
        peak, planned = tensor_peak(chunks)
        assert 3 * logits / chunks < peak < 3 * logits / chunks + weights + 0.2e6
        assert 1.0 <= planned / peak <= 1.2


# --- whole pipelines -------------------------------------------------------------------------------


def chunk_losses(folder: Path, names: list[str], chunks: int) -> None:
    """Let the Leaf of a formed cluster compute its loss in chunks."""
    node_data = folder / "node_data"
    write_node(node_data, replace(read_node(node_data, names[-1]), loss_chunks=chunks))


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_pipeline_with_chunks_trains_as_one_process(tmp_path: Path, stages: int, parts: int) -> None:
    set_seed(3)
    model = TiedGPT()
    names = form(tmp_path, copy.deepcopy(model), (torch.randint(0, 16, (4, 8)),), stages)
    chunk_losses(tmp_path, names, 3)
    cluster = LocalCluster(tmp_path, names)
    settings = {"criterion": token_loss, "schedule": "sync", "micro_batches": parts}
    cluster.train(token_loaders, node=settings, epochs=2, save=True)
    train_alone(
        model,
        token_loaders()[0],
        token_loss,
        torch.optim.SGD(model.parameters(), lr=0.1),
        epochs=2,
    )
    found = cluster.fused()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", [token_loss, shifted])
def test_validations_in_chunks_have_the_same_result(tmp_path: Path, loss: Any) -> None:
    set_seed(3)
    model = TiedGPT(vocabulary=20)
    names = form(tmp_path, model, (torch.randint(0, 16, (4, 8)),), 2)

    def loaders() -> tuple[Any, Any]:
        return token_loaders()[0], token_loaders(seed=2)[0]

    def criterion(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return loss(logits, batch if loss is token_loss else batch[-1])

    found = []
    for chunks in (1, 3):
        chunk_losses(tmp_path, names, chunks)
        cluster = LocalCluster(tmp_path, names)
        outcomes = cluster.train(loaders, node={"criterion": criterion, "schedule": "sync"}, epochs=1)
        found.append(outcomes[names[0]].result)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_loss_that_cannot_be_chunked_is_warned_of_and_trained_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    set_seed(3)
    model = TiedGPT()
    names = form(tmp_path, copy.deepcopy(model), (torch.randint(0, 16, (4, 8)),), 2)
    chunk_losses(tmp_path, names, 3)

    def shifted_loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return shifted(logits, batch[-1])

    with caplog.at_level(logging.WARNING, "ravnest"):
        cluster = LocalCluster(tmp_path, names)
        settings = {"criterion": shifted_loss, "schedule": "sync", "micro_batches": 1}
        cluster.train(token_loaders, node=settings, epochs=1, save=True)
    (warning,) = [r.getMessage() for r in caplog.records if "chunks" in r.getMessage()]
    assert "needs more memory than planned" in warning
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_alone(model, token_loaders()[0], shifted_loss, optimizer, epochs=1)
    found = cluster.fused()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
