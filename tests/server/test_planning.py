"""A packed model on a real planner: uploaded, planned, cut and assigned."""

from pathlib import Path

import pytest
import torch
from server_cases import Case, FakePlanner, Time, offer
from starlette.testclient import TestClient
from torch import nn

from ravnest.jobs.job import Job
from ravnest.jobs.packing import PackedJob, pack_job
from ravnest.plan.cluster_cost import about_clusters
from ravnest.schemas.auth import ApiRole
from ravnest.server.http.app import create_app
from ravnest.server.server import Server


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedJob:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    data = (torch.randn(16, 4), torch.randint(0, 2, (16,)))
    job = Job(model, torch.randn(4, 4), data, nn.CrossEntropyLoss(), name="tiny", min_providers=2)
    return pack_job(job, tmp_path_factory.mktemp("packed"))


def test_a_model_is_cut_for_the_connected_providers(packed: PackedJob, tmp_path: Path) -> None:
    server = Server(tmp_path, clock=Time().clock())
    with server.opened():
        case = Case(server, TestClient(create_app(server)), Time(), FakePlanner())
        rita = case.member(ApiRole.REQUESTER)
        for path in packed.files.values():
            rita.upload(path.read_bytes())
        job = rita.post("/api/jobs", packed.spec, 201)["id"]
        members = [case.member(ApiRole.PROVIDER, name) for name in ("alice", "bob")]
        for i, member in enumerate(members):
            member.post("/api/providers", offer(f"p{i}", address=f"127.0.0.1:{9000 + i}"))
        server.matching.run_once()

        view = rita.get(f"/api/jobs/{job}")
        assert view["state"] == "shipping", view["reason"]
        assert len(view["assignments"]) == 2
        assert view["plan"]
        for member in members:
            assignment = member.heartbeat()["assignment"]
            body = member.get(f"/api/assignments/{assignment}")
            for name in ("stage", "weights"):
                assert len(member.get(f"/api/artifacts/{body[name]['sha256']}")) == body[name]["size"]
        assert not list(server.folder.scratch.iterdir())


def test_the_reason_of_a_plan_says_what_several_clusters_cost(packed: PackedJob, tmp_path: Path) -> None:
    """It is what ``ravnest submit`` prints."""
    server = Server(tmp_path, clock=Time().clock())
    with server.opened():
        case = Case(server, TestClient(create_app(server)), Time(), FakePlanner())
        rita = case.member(ApiRole.REQUESTER)
        for path in packed.files.values():
            rita.upload(path.read_bytes())
        spec = packed.spec.model_copy(update={"clusters": 2})
        job = rita.post("/api/jobs", spec, 201)["id"]
        for i in range(4):
            member = case.member(ApiRole.PROVIDER, f"p{i}")
            member.post("/api/providers", offer(f"p{i}", address=f"127.0.0.1:{9000 + i}"))
        server.matching.run_once()
        told = {each["after"]: each["reason"] for each in rita.get(f"/api/jobs/{job}/events")}
        assert told["planned"].endswith(about_clusters(2))
        assert about_clusters(2) in rita.get(f"/api/jobs/{job}")["plan"]


def test_an_invalid_model_fails_its_job_with_a_reason(packed: PackedJob, tmp_path: Path) -> None:
    server = Server(tmp_path, clock=Time().clock())
    with server.opened():
        case = Case(server, TestClient(create_app(server)), Time(), FakePlanner())
        rita = case.member(ApiRole.REQUESTER)
        for path in packed.files.values():
            rita.upload(path.read_bytes())
        weights = packed.spec.model.weights
        model = packed.spec.model.model_copy(update={"units": weights})
        job = rita.post("/api/jobs", packed.spec.model_copy(update={"model": model}), 201)["id"]
        for i in range(2):
            case.member(ApiRole.PROVIDER).post("/api/providers", offer(address=f"127.0.0.1:{9000 + i}"))
        server.matching.run_once()
        view = rita.get(f"/api/jobs/{job}")
        assert view["state"] == "failed"
        assert view["reason"].startswith("it cannot be planned: ")
