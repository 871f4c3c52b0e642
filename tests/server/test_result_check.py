"""Results of lying Roots: a job is done only with the trained stages of its own plan."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from node_files import node_file
from safetensors.torch import load_file, save_file
from server_cases import Caller, opened
from torch import nn

from ravnest.errors import StageFormatError
from ravnest.jobs import tensor_file
from ravnest.jobs.model import pack_model, read_units, write_stage
from ravnest.jobs.tensor_file import TensorFile
from ravnest.plan.profiler import profile_model
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import NamedComponent, ResultFile, TrainingSpec
from ravnest.schemas.providers import Assignment, DataShare
from ravnest.server.artifacts import ArtifactFolder
from ravnest.server.result_check import ShippedResultCheck
from ravnest.server.scheduling.file_checks import FileCheckingProcess
from ravnest.server.scheduling.planner_process import PlannerProcess
from ravnest.server.settings import PlanningLimits
from ravnest.split.encoding import stage_from_json
from ravnest.split.splitter import prepare
from ravnest.store.bundle import STAGE_FILE, WEIGHTS_FILE, load_module
from ravnest.store.files import sha256_of
from ravnest.store.trained import raw_key, save_trained


class Shop:
    """Artifacts of a server: what it shipped, and the result that a Root has uploaded."""

    def __init__(self, folder: Path) -> None:
        self.artifacts = folder / "artifacts"
        self.artifacts.mkdir()
        self.cluster: dict[int, Assignment] = {}
        self.trained = folder / "trained" / "cluster_0"
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        prepared = prepare(model, (torch.randn(6, 4),))
        packed = pack_model(prepared, profile_model(prepared), folder / "packed")
        specs = list(read_units(packed.units).stages((0, 2)))
        for node, spec in enumerate(specs):
            bundle = folder / f"stage_{node}"
            bundle.mkdir()
            write_stage(bundle, spec, packed.weights)
            self.cluster[node] = self.assignment(node, len(specs), bundle)
            module = load_module(bundle)
            with torch.no_grad():
                for tensor in module.state_tensors().values():
                    tensor.add_(1)
            save_trained(folder / "trained", self.cluster[node].node_spec, module, "run-1")

    def assignment(self, node: int, stages: int, bundle: Path) -> Assignment:
        return Assignment(
            id=f"job-{node}",
            job="job",
            node=node,
            node_spec=node_file(node, stages=stages),
            stage=self.put(bundle / STAGE_FILE),
            weights=self.put(bundle / WEIGHTS_FILE),
            train=DataShare(samples=8, total=8),
            training=TrainingSpec(
                optimizer=NamedComponent(name="SGD"),
                loss=NamedComponent(name="CrossEntropyLoss"),
                epochs=1,
            ),
            tls=False,
        )

    def put(self, path: Path) -> Artifact:
        sha256 = sha256_of(path)
        shutil.copy(path, self.artifacts / sha256)
        return Artifact(sha256=sha256, size=path.stat().st_size)

    def result(self) -> list[ResultFile]:
        return [
            ResultFile(name=path.name, artifact=self.put(path))
            for path in sorted(self.trained.iterdir())
        ]

    def check(self) -> str:
        return ShippedResultCheck(lambda sha256: self.artifacts / sha256)(self.result(), self.cluster)

    def change_manifest(self, number: int, /, **fields: Any) -> None:
        path = self.trained / f"node_{number}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    def change_weights(self, node: int, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Change the weights of a stage; its manifest has the new digest."""
        path = self.trained / f"node_{node}.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        self.change_manifest(node, sha256=sha256_of(path))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture
def shop(built: Shop, tmp_path: Path) -> Shop:
    """Return a shop of its own for each test."""
    own = copy(built)
    own.artifacts, own.trained = tmp_path / "artifacts", tmp_path / "trained"
    shutil.copytree(built.artifacts, own.artifacts)
    shutil.copytree(built.trained, own.trained)
    return own


def test_the_trained_stages_of_the_plan_are_accepted(shop: Shop) -> None:
    assert shop.check() == ""


def test_files_of_providers_are_read_in_another_process(shop: Shop, tmp_path: Path) -> None:
    folder = ArtifactFolder(tmp_path / "folder")
    process = PlannerProcess(1 << 30)
    checks = FileCheckingProcess(tmp_path / "folder", PlanningLimits(), process)

    def check() -> str:
        files = shop.result()
        for path in shop.artifacts.iterdir():
            folder.add(Path(shutil.copy(path, tmp_path / "copy")))
        return checks.check_result(files, shop.cluster)

    try:
        assert check() == ""
        shop.change_manifest(1, run="run-2")
        assert check() == "its stages are of different runs"
    finally:
        process.close()


def test_files_that_end_the_process_are_no_result(shop: Shop, tmp_path: Path) -> None:
    process = PlannerProcess(1 << 30, (sys.executable, "-c", "raise SystemExit"))
    checks = FileCheckingProcess(tmp_path, PlanningLimits(), process)
    assert "cannot be checked: the planner process of the server died" in checks.check_result(
        shop.result(), shop.cluster
    )


def test_a_header_that_is_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = json.dumps(
        {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(80_000)}
    ).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    monkeypatch.setattr(tensor_file, "safe_open", lambda *_args, **_more: pytest.fail("it is read"))
    with pytest.raises(StageFormatError, match="has a header of"):
        TensorFile.read(path)


def test_a_root_cannot_have_each_report_checked(tmp_path: Path) -> None:
    checked: list[str] = []

    def check(files: Sequence[ResultFile], _cluster: Mapping[int, Assignment]) -> str:
        checked.append(files[0].artifact.sha256)
        return "it is none"

    with opened(tmp_path, check_result=check) as case:
        rita, mallory = case.requester(), case.provider("mallory")
        case.submit(rita)
        case.match()
        for number in range(20):
            content = f"{number}".encode()
            artifact = {"sha256": mallory.upload(content), "size": len(content)}
            files = [{"name": "node_0.json", "artifact": artifact}]
            best = {"epoch": number, "metric": "accuracy", "value": 0.5, "files": files}
            mallory.report("training", best=best, result=files)
        assert len(checked) == 1
        case.pass_time(60)
        mallory.report("training", best=best)
        assert len(checked) == 2


def first(tensors: dict[str, torch.Tensor]) -> str:
    return sorted(tensors)[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop(first(t)), "tensors are not those"),
        (lambda t: t.update(extra=torch.zeros(1)), "tensors are not those"),
        (lambda t: t.update({first(t): t[first(t)].double()}), "and dtype F64"),
        (lambda t: t.update({first(t): t[first(t)].flatten()[:1]}), "has shape [1]"),
        (lambda t: t.update({first(t): torch.zeros(1 << 20)}), "larger than those that were shipped"),
    ],
)
def test_other_tensors_are_refused(shop: Shop, change: Any, reason: str) -> None:
    shop.change_weights(1, change)
    assert reason in shop.check()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"plan": "another"}, "another plan"),
        ({"node": 0}, "another plan, node"),
        ({"sha256": "0" * 64}, "file of weights"),
        ({"stage": {}}, "another graph"),
        ({"run": "run-2"}, "different runs"),
        ({"run": "x" * 100_000}, "has more than"),
    ],
)
def test_other_manifests_are_refused(shop: Shop, fields: dict[str, Any], reason: str) -> None:
    shop.change_manifest(1, **fields)
    assert reason in shop.check()


def test_missing_strange_and_damaged_files_are_refused(shop: Shop) -> None:
    weights = shop.trained / "node_1.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-4])
    assert "another plan, node or file" in shop.check()
    shop.change_manifest(1, sha256=sha256_of(weights))
    assert "damaged" in shop.check()
    weights.unlink()
    assert "expected node_0.json" in shop.check()
    weights.write_bytes(content)
    (shop.trained / "node_7.json").write_text("{}")
    assert "node_7.json" in shop.check()
    (shop.trained / "node_7.json").unlink()
    (shop.trained / "node_1.json").write_text("[" * 5000)
    assert "damaged" in shop.check()


def finish(provider: Caller, assignment: str) -> Any:
    sha = provider.upload(b"a forged result")
    files = [{"name": "node_0.safetensors", "artifact": {"sha256": sha, "size": 15}}]
    return provider.report("finished", assignment=assignment, result=files)


def test_a_job_is_not_done_with_a_forged_result(tmp_path: Path) -> None:
    """A Root uploaded any files, and the job was done."""
    with opened(tmp_path, check_result=lambda _files, _cluster: "node_0: forged") as case:
        rita, alice = case.requester(), case.provider("alice")
        job = case.submit(rita)
        case.match()
        alice.report("training")
        finish(alice, f"{job}-0")
        view = rita.get(f"/api/jobs/{job}")
        assert view["state"] != "done"
        rita.get(f"/api/jobs/{job}/result", 409)
        assert any("its result is not the trained model: node_0: forged" in r for r in case.refusals())


def test_only_a_root_has_a_result(tmp_path: Path) -> None:
    with opened(tmp_path) as case:
        rita, alice = case.requester(), case.provider("alice")
        bob = case.provider("bob", address="127.0.0.1:9001", compute=10.0)
        job = case.submit(rita)
        case.match()
        assert alice.heartbeat()["assignment"] == f"{job}-0"
        bob.report("training")
        sha = bob.upload(b"forged")
        files = [{"name": "node_0.safetensors", "artifact": {"sha256": sha, "size": 6}}]
        bob.report("finished", 403, result=files)
        assert "which only a Root has" in case.refusals()[-1]


def _averages(shop: Shop) -> None:
    """Train the result with a moving average: its stages have the weights twice."""
    for node in shop.cluster:
        path = shop.trained / f"node_{node}.json"
        spec = stage_from_json(json.loads(path.read_text())["stage"])
        keys = [entry.key for entry in spec.state if entry.trainable]
        shop.change_weights(
            node, lambda tensors, keys=keys: tensors.update({raw_key(k): tensors[k] + 1 for k in keys})
        )
        shop.change_manifest(node, raw=True)


def _with_ema(shop: Shop, ema: float | None) -> None:
    training = next(iter(shop.cluster.values())).training.model_copy(update={"ema": ema})
    shop.cluster = {
        node: each.model_copy(update={"training": training}) for node, each in shop.cluster.items()
    }


def test_a_job_with_an_average_delivers_both_sets_of_weights(shop: Shop) -> None:
    _with_ema(shop, 0.999)
    _averages(shop)
    assert shop.check() == ""
    shop.change_weights(1, lambda tensors: tensors.update({raw_key("3.bias"): torch.ones(5)}))
    assert "raw/3.bias has shape [5]" in shop.check()
    shop.change_weights(1, lambda tensors: tensors.pop(raw_key("3.bias")))
    assert "its tensors are not those that were shipped: raw/3.bias" in shop.check()


def test_a_job_without_an_average_delivers_one_set_of_weights(shop: Shop) -> None:
    _averages(shop)
    assert "it has averages of weights, which the job does not keep" in shop.check()
