"""Asynchronous training: versions of the weights, and that nothing is kept for ever."""

from __future__ import annotations

import ctypes
import gc
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from local_cluster import Formed, Splits
from scripted_pipeline import ScriptedPipeline
from torch import nn
from training_cases import TiedGPT, points, token_loaders, token_loss

from ravnest import Trainer
from ravnest.runtime.schedule.events import RunBackward, RunForward, RunStep
from ravnest.runtime.schedule.machine import ScheduleMachine
from ravnest.runtime.schedule.progress import StageTraits
from ravnest.runtime.stage.execution import StageExecution
from ravnest.runtime.stage.randomness import microbatch_seed, seeded
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.runtime.stage.weight_versions import WeightVersions
from ravnest.split.chain import Chain
from ravnest.split.module import StageModule
from ravnest.store.bundle import load_module
from ravnest.store.node_spec import read_node
from ravnest.types import MicrobatchId

SEED = 11
CPU = torch.device("cpu")
RULE = UpdateRule(torch.optim.SGD, {"lr": 0.5, "momentum": 0.9})
_loss = nn.functional.cross_entropy


def _modules(splits: Splits, case: str, nodes: int) -> list[StageModule]:
    folder, names = splits(case, nodes)
    places = [read_node(folder / "node_data", name) for name in names]
    return [load_module(folder / "node_data" / p.bundle, p.sha256, CPU).train() for p in places]


def _data(modules: Sequence[StageModule], count: int) -> list[tuple[dict[str, Any], torch.Tensor]]:
    (name,) = [spec.name for spec in modules[0].graph.inputs]
    return [({name: x}, y) for x, y in points(5 * count)]


def _replay(  # noqa: C901 - one case a computation
    runs: Sequence[tuple[int, Any]],
    modules: Sequence[StageModule],
    data: Sequence[tuple[Mapping[str, Any], torch.Tensor]],
    *,
    stash: bool,
) -> list[dict[str, torch.Tensor]]:
    """Repeat the computations by hand: every forward keeps a copy of the weights for its backward.

    Without ``stash``, a backward uses the newest weights instead, as a naive pipeline would.
    """
    weights = [m.parameters_by_key() for m in modules]
    optimizers = [torch.optim.SGD(w.values(), lr=0.5, momentum=0.9) for w in weights]
    gathered: list[list[dict[str, torch.Tensor]]] = [[] for _ in modules]
    copies: dict[tuple[int, MicrobatchId], dict[str, torch.Tensor]] = {}
    inputs: dict[tuple[int, MicrobatchId], torch.Tensor] = {}
    arrived: dict[tuple[int, MicrobatchId], torch.Tensor] = {}
    last = len(modules) - 1

    def compute(
        at: int, microbatch: MicrobatchId, with_weights: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        with seeded(microbatch_seed(SEED, microbatch, at), CPU):
            (output,) = modules[at](inputs[at, microbatch], parameters=with_weights)
            return _loss(output, data[microbatch.index][1]) if at == last else output

    for at, run in runs:
        match run:
            case RunForward(microbatch):
                if at == 0:
                    (inputs[at, microbatch],) = data[microbatch.index][0].values()
                now = {k: w.detach().clone().requires_grad_() for k, w in weights[at].items()}
                copies[at, microbatch] = now
                if at < last:
                    output = compute(at, microbatch, now).detach()
                    inputs[at + 1, microbatch] = output.requires_grad_()
            case RunBackward(microbatch):
                used = copies.pop((at, microbatch))
                if not stash:
                    used = {k: w.detach().clone().requires_grad_() for k, w in weights[at].items()}
                wanted = [*used.values(), *([inputs[at, microbatch]] if at else [])]
                found = torch.autograd.grad(
                    compute(at, microbatch, used), wanted, arrived.pop((at, microbatch), None)
                )
                gathered[at].append(dict(zip(used, found, strict=False)))
                if at:
                    arrived[at - 1, microbatch] = found[-1]
            case RunStep(_, count):
                assert count == len(gathered[at])
                for key, weight in weights[at].items():
                    total = gathered[at][0][key].clone()
                    for more in gathered[at][1:]:
                        total += more[key]
                    weight.grad = total / count if count > 1 else total
                gathered[at].clear()
                optimizers[at].step()
    return [{k: w.detach() for k, w in stage.items()} for stage in weights]


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize(
    ("case", "every", "recompute"),
    [("mlp", 1, False), ("mlp", 3, False), ("dropout", 1, False), ("dropout", 2, True)],
)
def test_a_backward_uses_the_version_that_its_forward_used(
    splits: Splits, case: str, every: int, recompute: bool, order: int
) -> None:
    stages, window = 3, 5
    executions = [
        StageExecution(
            module, RULE, seed=SEED, stash=at < stages - 1, kept=0 if recompute else None, defer=at > 0
        )
        for at, module in enumerate(_modules(splits, case, stages))
    ]
    machines = [
        ScheduleMachine(
            at,
            stages,
            schedule="async",
            window=window,
            traits=StageTraits(defers=execution.defers),
        )
        for at, execution in enumerate(executions)
    ]
    assert [e.defers for e in executions] == [False, True, True]
    data = _data(_modules(splits, case, stages), 20)
    pipeline = ScriptedPipeline(machines, executions, data, _loss, update_size=every)
    pipeline.train(random.Random(order))

    trained = [e.module.parameters_by_key() for e in executions]
    expected = _replay(pipeline.runs, _modules(splits, case, stages), data, stash=True)
    naive = _replay(pipeline.runs, _modules(splits, case, stages), data, stash=False)
    for stage in range(stages):
        assert all(torch.equal(trained[stage][k], w) for k, w in expected[stage].items())
    assert not all(torch.equal(expected[0][k], w) for k, w in naive[0].items())
    assert pipeline.stale > 5, "or the test shows nothing"
    assert [e.awaiting_backward for e in executions] == [0] * stages
    assert pipeline.versions == [1, 1, 0], "one more buffer; the last stage needs none"


class TestWeightVersions:
    """Two buffers of the weights: the newest, and the one that micro-batches in flight use."""

    def _versions(self) -> tuple[nn.Parameter, WeightVersions]:
        weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        return weight, WeightVersions({"w": weight}, stash=True)

    def _update(self, versions: WeightVersions, *, in_use: bool) -> None:
        versions.before_update(in_use=in_use)
        with torch.no_grad():
            versions.weights["w"].add_(1.0)

    def test_an_update_that_overtakes_a_micro_batch_leaves_its_weights_alone(self) -> None:
        weight, versions = self._versions()
        used = versions.at(0)["w"]
        loss = used.square().sum()
        self._update(versions, in_use=True)
        assert weight.tolist() == versions.at(1)["w"].tolist() == [2.0, 3.0]
        (gradient,) = torch.autograd.grad(loss, used)
        assert gradient.tolist() == [2.0, 4.0]
        assert len(versions) == 1

    def test_an_update_that_overtakes_none_copies_nothing(self) -> None:
        weight, versions = self._versions()
        memory = weight.data_ptr()
        versions.at(0)
        self._update(versions, in_use=False)
        versions.free(0)
        assert weight.data_ptr() == memory
        assert len(versions) == 0

    def test_the_two_buffers_take_turns(self) -> None:
        weight, versions = self._versions()
        addresses = set()
        for number in range(6):
            assert versions.at(number)["w"].tolist() == [1.0 + number, 2.0 + number]
            addresses.add(weight.data_ptr())
            self._update(versions, in_use=True)
            assert versions.at(number)["w"].tolist() == [1.0 + number, 2.0 + number]
            assert len(versions) == 1
            versions.free(number)
        assert len(addresses) == 2

    def test_without_stash_there_is_one_buffer(self) -> None:
        weight = nn.Parameter(torch.ones(1))
        versions = WeightVersions({"w": weight}, stash=False)
        assert versions.at(0)["w"] is weight
        self._update(versions, in_use=True)
        assert versions.at(1)["w"] is weight
        assert len(versions) == 0


class _HeapInfo(ctypes.Structure):
    """Figures of the C library's allocator, ``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _allocated() -> int:
    """Return the bytes that are allocated, without what the allocator keeps for later.

    The resident memory of a process that ran other tests before changes by more than a leak would.
    """
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _HeapInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


@pytest.mark.slow
def test_memory_is_flat_over_5000_micro_batches(cluster: Formed) -> None:
    local = cluster(nodes=2, in_flight=4)
    allocated: dict[int, int] = {}
    tensors: dict[int, int] = {}

    def batches(watch: bool) -> Iterator[Any]:
        (x, y), *_ = points()
        for number in range(5000):
            if watch and number in (1000, 4999):
                gc.collect()
                allocated[number] = _allocated()
                tensors[number] = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
            yield x, y

    class Many:
        def __init__(self, watch: bool) -> None:
            self._watch = watch

        def __iter__(self) -> Iterator[Any]:
            return batches(self._watch)

    def script(name: str) -> tuple[int, int]:
        with local.node(name, labels=Many(watch=False)) as own:
            Trainer(own, train_loader=Many(watch=True)).train()
            execution = own._ensure_started().execution
            return execution.awaiting_backward, execution.versions

    (root, root_versions), (leaf, leaf_versions) = local.results(script)
    assert (root, leaf, leaf_versions) == (0, 0, 0)
    assert root_versions <= 1
    assert tensors[4999] <= tensors[1000] + 60, "tensors in flight come and go"
    assert allocated[4999] <= allocated[1000] + (2 << 20)


@pytest.mark.parametrize("schedule", ["async", "sync"])
def test_tied_weights_stay_tied(cluster: Formed, schedule: str) -> None:
    """The pipeline predicts as the fused model does, so that every stage has the owner's weights."""
    local = cluster("tied-gpt", 3, schedule=schedule, criterion=token_loss)
    tokens = torch.arange(16).reshape(2, 8) % 16

    def script(name: str) -> Any:
        train, _ = token_loaders()
        with local.node(name, labels=train) as own:
            trainer = Trainer(own, train_loader=train, epochs=3, save=True)
            trainer.train()
            return trainer.pred(tokens)

    root, *_ = local.results(script)
    fused = local.fused()
    assert torch.equal(fused["embed.weight"], fused["head.weight"])
    model = TiedGPT()
    model.load_state_dict(fused)
    assert model.head.weight is model.embed.weight
    assert torch.equal(root, model.eval()(tokens))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("nodes", [2, 3])
def test_dropout_equals_the_chained_stages_with_the_same_seeds(
    cluster: Formed, splits: Splits, nodes: int, recompute: bool
) -> None:
    local = cluster("dropout", nodes, schedule="sync", recompute=recompute, seed=SEED)
    local.train(lambda: (points(), None), node={}, epochs=2, save=True)

    now = MicrobatchId(0, 0)
    modules = _modules(splits, "dropout", nodes)
    for at, module in enumerate(modules):

        def forward(*inputs: Any, at: int = at, run: Any = module.forward) -> Any:
            with seeded(microbatch_seed(SEED, now, at), CPU):
                return run(*inputs)

        module.forward = forward  # type: ignore[method-assign]
    chain = Chain(modules)
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
    for epoch in range(2):
        for number, (x, y) in enumerate(points()):
            now = MicrobatchId(epoch, number)
            chain.backward(_loss(chain(x), y))
            optimizer.step()
            optimizer.zero_grad()
    expected = chain.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in local.fused().items())
