"""Spot checks in a running pipeline: what both sides state fits together, unless a node lies."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import Formed, LocalCluster
from torch import nn
from training_cases import image_loaders, points, token_loaders, token_loss

from ravnest.runtime.stage.execution import StageExecution, Values
from ravnest.runtime.stage.forward_check import CheckResult, check_forward
from ravnest.runtime.stage.spot_checks import ForwardChecks
from ravnest.runtime.stage.updates import UpdateRule
from ravnest.split import split
from ravnest.split.module import StageModule
from ravnest.store.bundle import load_stage
from ravnest.store.forward_evidence import ForwardEvidence, check_path, read_evidence
from ravnest.store.node_spec import read_node
from ravnest.telemetry import CheckRecord, WorkerRecord
from ravnest.types import MicrobatchId
from ravnest.wire.messages import ForwardChallenge

OFTEN = 1e-6
"""Seconds between two checks: every micro-batch is checked."""


class Evidence:
    """Sink of records that reads the files of checks when they are complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: dict[tuple[str, str], tuple[str, CheckRecord, ForwardEvidence]] = {}

    def emit(self, record: WorkerRecord) -> None:
        if isinstance(record, CheckRecord):
            name = f"{record.check}.{record.part}.safetensors"
            (path,) = self.folder.glob(f"*/spot_checks/{name}")
            self.parts[record.check, record.part] = (path.parts[-3], record, read_evidence(path))

    def pairs(self) -> Iterator[tuple[str, CheckRecord, ForwardEvidence, ForwardEvidence]]:
        """Yield the node that is checked, the record, and the files of both sides."""
        for (check, part), (name, record, stated) in self.parts.items():
            if part == "stated":
                yield name, record, stated, self.parts[check, "received"][2]


def results(cluster: LocalCluster, found: Evidence, codec: str = "raw") -> dict[str, list[CheckResult]]:
    """Return the results of all checks by the node that was checked."""
    assert cluster.node_data is not None
    checked: dict[str, list[CheckResult]] = {}
    for name, record, stated, received in found.pairs():
        spec = read_node(cluster.node_data, name)
        stage = load_stage(cluster.node_data / spec.bundle)
        result = check_forward(
            stage.spec,
            stated,
            received,
            seed=spec.seed,
            microbatch=MicrobatchId(record.phase, record.index),
            codec=codec,
        )
        checked.setdefault(name, []).append(result)
    return checked


CASES: dict[str, tuple[str, Callable[[], Any], Any, dict[str, Any]]] = {
    "sync": ("dropout", lambda: (points(60), None), nn.functional.cross_entropy, {"schedule": "sync"}),
    "async": ("tied-gpt", token_loaders, token_loss, {"schedule": "async"}),
    "recompute": ("digits-cnn", image_loaders, nn.functional.cross_entropy, {"recompute": True}),
    "int8": ("tied-gpt", token_loaders, token_loss, {"schedule": "sync", "compression": "int8"}),
}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a node answer as often as it is asked."""
    monkeypatch.setattr("ravnest.runtime.stage.spot_checks._PAUSE", 0.0)


def train(cluster: LocalCluster, case: str) -> Evidence:
    _, loaders, criterion, options = CASES[case]
    found = Evidence(cluster.folder / "checkpoints")
    node = {"criterion": criterion, "spot_checks": OFTEN, "record_sink": found, **options}
    cluster.train(loaders, node=node, epochs=2)
    return found


@pytest.mark.parametrize("case", CASES)
def test_an_honest_pipeline_is_never_blamed(cluster: Formed, case: str) -> None:
    own = cluster(CASES[case][0], 3)
    checked = results(own, train(own, case), CASES[case][3].get("compression", "raw"))
    assert checked.keys() == {*own.names[:-1]}
    for found in checked.values():
        assert len(found) >= 10
        assert all(each.compared for each in found)
        assert max(each.deviation for each in found) < 0.5


@pytest.mark.parametrize("liar", [0, 1])
def test_a_node_that_sends_something_else_is_found(
    cluster: Formed, monkeypatch: pytest.MonkeyPatch, liar: int
) -> None:
    send = StageExecution._send

    def lie(self: StageExecution, outputs: tuple[Any, ...]) -> Values:
        sent = send(self, outputs)
        if self.index != liar:
            return sent
        return {name: value * 1.1 for name, value in sent.items()}

    monkeypatch.setattr(StageExecution, "_send", lie)
    own = cluster("dropout", 3)
    checked = results(own, train(own, "sync"))
    for name, found in checked.items():
        assert all(each.differs == (name == own.names[liar]) for each in found)


class Alone:
    """One stage with a clock and a generator of the test."""

    def __init__(self, folder: Path, interval: float) -> None:
        (stage,) = split(nn.Linear(3, 2), torch.randn(4, 3), stages=1, check=False).stages
        module = StageModule(stage.spec, stage.tensors)
        rule = UpdateRule(torch.optim.SGD, {"lr": 0.1})
        self.execution = StageExecution(module, rule, seed=0, stash=False)
        self.now = 0.0
        self.records: list[CheckRecord] = []
        self.folder = folder
        self.checks = ForwardChecks(
            folder,
            self.execution,
            interval,
            self.records.append,
            clock=lambda: self.now,
            chance=random.Random(1),
        )

    def arrive(self, index: int) -> ForwardChallenge | None:
        return self.checks.arrived("run", MicrobatchId(0, index), {"x": torch.ones(2)})


def test_challenges_come_at_random_times_with_the_given_mean(tmp_path: Path) -> None:
    alone = Alone(tmp_path, 100.0)
    times = []
    for index in range(20_000):
        alone.now = float(index)
        if alone.arrive(index) is not None:
            times.append(alone.now)
    assert 150 < len(times) < 250
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps) < 10 < 200 < max(gaps)


def test_no_interval_means_no_challenge(tmp_path: Path) -> None:
    alone = Alone(tmp_path, 0.0)
    alone.now = 1e9
    assert alone.arrive(0) is None
    assert not alone.records


def test_only_the_newest_files_are_kept(tmp_path: Path) -> None:
    alone = Alone(tmp_path, 1.0)
    for index in range(5):
        alone.now += 100
        assert alone.arrive(index) is not None
    names = {path.name for path in (tmp_path / "spot_checks").iterdir()}
    assert names == {f"{each.check}.received.safetensors" for each in alone.records[-2:]}


def test_a_challenge_about_something_else_is_not_answered(tmp_path: Path) -> None:
    alone = Alone(tmp_path, 0.0)
    alone.checks.answer(ForwardChallenge("run", MicrobatchId(0, 7), "abc"))
    (name,) = [value.name for value in alone.execution.module.graph.inputs]
    alone.execution.forward(MicrobatchId(0, 0), 0, {name: torch.ones(4, 3)})
    for check in ("../../x", "", "a" * 33, "a/b"):
        alone.checks.answer(ForwardChallenge("run", MicrobatchId(0, 0), check))
    assert not alone.records
    alone.checks.answer(ForwardChallenge("run", MicrobatchId(0, 0), "abc"))
    assert [each.part for each in alone.records] == ["stated"]
    assert check_path(tmp_path, "abc", "stated").exists()


def test_a_full_disk_costs_a_check_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ravnest.runtime.stage.spot_checks.write_evidence", full)
    alone = Alone(tmp_path, 1.0)
    alone.now = 1000.0
    assert alone.arrive(0) is None


def test_a_flood_of_challenges_takes_a_tenth_of_the_time_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ravnest.runtime.stage.spot_checks._PAUSE", 10.0)
    alone = Alone(tmp_path, 0.0)

    def slow(*_: object) -> None:
        alone.now += 1.0

    monkeypatch.setattr("ravnest.runtime.stage.spot_checks.write_evidence", slow)
    (name,) = [value.name for value in alone.execution.module.graph.inputs]
    alone.execution.forward(MicrobatchId(0, 0), 0, {name: torch.ones(4, 3)})
    for _ in range(1000):
        alone.checks.answer(ForwardChallenge("run", MicrobatchId(0, 0), "abc"))
        alone.now += 0.1
    assert len(alone.records) * 1.0 < 0.15 * alone.now
