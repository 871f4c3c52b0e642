"""Jobs that are submitted again from the files of an earlier one, over the HTTP API and the page."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from server_cases import Caller, Case, artifact, opened
from torch import nn

from ravnest.schemas.auth import ApiRole
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import JobSpec, ModelFiles
from ravnest.server.settings import ServerSettings
from ravnest.split.encoding import stage_to_json
from ravnest.split.splitter import balanced_cuts, prepare


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with opened(tmp_path) as found:
        yield found


def stored(case: Case, job: str) -> JobSpec:
    with case.server.db.read() as db:
        return db.jobs.spec(job)


def test_the_owner_submits_a_job_like_another_without_an_upload(case: Case) -> None:
    rita = case.requester()
    job = case.submit(rita)
    changes = {"epochs": 5, "name": "longer", "optimizer_params": {"lr": 0.5}}
    new = rita.post(f"/api/jobs/{job}/resubmit", changes, 201)["id"]
    assert new != job
    before, after = stored(case, job), stored(case, new)
    assert (after.name, after.training.epochs, before.training.epochs) == ("longer", 5, 2)
    assert after.training.optimizer.params == {"lr": 0.5}
    assert (after.model, after.train) == (before.model, before.train)
    (first,) = rita.get(f"/api/jobs/{new}/events")
    assert first["reason"] == (
        f"submitted by rita, like {job} with other name, epochs, optimizer_params"
    )
    assert rita.get(f"/api/jobs/{new}")["progress"]["epochs"] == 5


def test_only_owner_and_admin_may_resubmit(case: Case) -> None:
    rita = case.requester()
    job = case.submit(rita)
    case.requester("rob").post(f"/api/jobs/{job}/resubmit", {}, 403)
    for role in (ApiRole.VIEWER, ApiRole.PROVIDER):
        case.member(role).post(f"/api/jobs/{job}/resubmit", {}, 403)
        case.member(role).get(f"/api/jobs/{job}/partial", 403)
    case.requester("rex").get(f"/api/jobs/{job}/partial", 403)
    case.admin().post("/api/jobs/job-00000000/resubmit", {}, 404)
    new = case.admin().post(f"/api/jobs/{job}/resubmit", {}, 201)["id"]
    view = rita.get(f"/api/jobs/{new}")
    assert view["owner"] == rita.id, "the files are those of the owner, and the quota is the owner's"
    (first,) = rita.get(f"/api/jobs/{new}/events")
    assert first["reason"].startswith(f"submitted by rita, like {job}, as ")


def test_changes_that_do_not_fit_are_refused_with_a_sentence(case: Case) -> None:
    rita = case.requester()
    job = case.submit(rita)
    refused = rita.post(f"/api/jobs/{job}/resubmit", {"batch_size": 4}, 422)
    assert "batch_size is the size for which memory and times of the model were measured" in str(refused)
    refused = rita.post(f"/api/jobs/{job}/resubmit", {"epochs": 0}, 422)
    assert refused["detail"] == (
        f"{job} cannot be submitted like this: epochs=0 evaluates the model, and the job has no "
        "validation data"
    )
    refused = rita.post(f"/api/jobs/{job}/resubmit", {"start_from": "result"}, 409)
    assert refused["detail"] == f"{job} is submitted and has no trained model"
    refused = rita.post(f"/api/jobs/{job}/resubmit", {"start_from": "best"}, 409)
    assert "has no best model: it needs keep_best" in refused["detail"]
    rita.post(f"/api/jobs/{job}/resubmit", {"start_from": "checkpoint"}, 409)
    case.server.artifacts.path(artifact("labels").sha256).unlink()
    refused = rita.post(f"/api/jobs/{job}/resubmit", {}, 409)
    assert "1 files of" in refused["detail"]
    assert "submit the job from your program" in refused["detail"]


def test_resubmitted_jobs_count_like_others(tmp_path: Path) -> None:
    with opened(tmp_path, settings=ServerSettings(unfinished_jobs=2)) as case:
        rita = case.requester()
        job = case.submit(rita)
        rita.post(f"/api/jobs/{job}/resubmit", {}, 201)
        refused = rita.post(f"/api/jobs/{job}/resubmit", {}, 429)
        assert "has 2 jobs that have not ended" in refused["detail"]
        case.admin().post(f"/api/jobs/{job}/resubmit", {}, 429)


class Trained:
    """A model of two stages, the first layer frozen, and its files before and after training."""

    def __init__(self, rita: Caller, provider: Caller) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        model[0].requires_grad_(requires_grad=False)
        prepared = prepare(model, (torch.rand(4, 2),))
        stages = prepared.cut(balanced_cuts(prepared, [1.0, 1.0])).stages
        self.before = {key: t.detach() for stage in stages for key, t in stage.tensors.items()}
        self.weights = upload(rita, save(self.before))
        self.files: list[dict[str, Any]] = []
        for number, stage in enumerate(stages):
            own = {e.key: e for e in stage.spec.state if e.trainable or e.kind == "buffer"}
            tensors = {key: (self.before[key] + 1).to(e.dtype) for key, e in own.items()}
            manifest = json.dumps({"stage": stage_to_json(stage.spec), "changed_only": True}).encode()
            for suffix, content in (("json", manifest), ("safetensors", save(tensors))):
                found = upload(provider, content).model_dump()
                self.files.append({"name": f"node_{number}.{suffix}", "artifact": found})


def upload(caller: Caller, content: bytes) -> Artifact:
    return Artifact(sha256=caller.upload(content), size=len(content))


def test_a_job_starts_from_the_trained_weights_of_another(case: Case) -> None:
    rita, alice = case.requester(), case.provider()
    trained = Trained(rita, alice)
    model = ModelFiles(units=artifact("units"), weights=trained.weights)
    job = case.submit(rita, model=model)
    case.match()
    alice.report("fetched")
    alice.report("training")
    alice.report("finished", result=trained.files)
    assert rita.get(f"/api/jobs/{job}")["state"] == "done"
    new = rita.post(f"/api/jobs/{job}/resubmit", {"start_from": "result", "epochs": 1}, 201)["id"]
    spec = stored(case, new)
    assert spec.model.units == model.units
    assert spec.model.weights.sha256 != trained.weights.sha256
    found = load_file(case.server.artifacts.path(spec.model.weights.sha256))
    assert found.keys() == trained.before.keys()
    for key, tensor in trained.before.items():
        change = 0 if key.startswith("0.") else 1
        assert torch.equal(found[key], tensor + change), key
    assert torch.equal(
        load_file(case.server.artifacts.path(trained.weights.sha256))["2.bias"], trained.before["2.bias"]
    )
    assert not list(case.server.folder.path.rglob("parts/*")), "no copy is left"


def test_the_copy_counts_as_a_file_of_the_owner(tmp_path: Path) -> None:
    with opened(tmp_path, settings=ServerSettings(member_bytes=10_000)) as case:
        rita, alice = case.requester(), case.provider()
        trained = Trained(rita, alice)
        job = case.submit(rita, model=ModelFiles(units=artifact("units"), weights=trained.weights))
        case.match()
        alice.report("fetched")
        alice.report("training")
        alice.report("finished", result=trained.files)
        rita.upload(b"x" * (9_900 - _used(case, rita)))
        refused = rita.post(f"/api/jobs/{job}/resubmit", {"start_from": "result"}, 413)
        assert "that a member may have here" in refused["detail"]


def _used(case: Case, caller: Caller) -> int:
    with case.server.db.read() as db:
        return db.artifact_grants.totals(caller.id)[0]
