"""The planner process: equal results, and limits of memory and time for hostile models."""

import hashlib
import io
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from server_cases import Case, offer, opened, spec
from torch import nn

from ravnest.errors import JobError, StageFormatError
from ravnest.jobs.model import UNITS_LIMIT, pack_model
from ravnest.plan.infeasible import Infeasible
from ravnest.plan.profiler import profile_model
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import JobSpec, ModelFiles, NamedComponent
from ravnest.schemas.providers import Assignment
from ravnest.server.artifacts import ArtifactFolder
from ravnest.server.complete_checkpoints import CompleteCheckpoint
from ravnest.server.db.records import LinkRecord, StageCheckpointRecord
from ravnest.server.scheduling.job_start import JobStart, OldCluster
from ravnest.server.scheduling.link_tests import NO_LINKS, ProviderLinks
from ravnest.server.scheduling.planner_messages import (
    PlannerReply,
    PlannerRequest,
    PlanRequest,
    ShipRequest,
    read_message,
    write_message,
)
from ravnest.server.scheduling.planner_process import PlannerProcess, ProcessPlanner
from ravnest.server.scheduling.planner_program import PlannerProgram
from ravnest.server.scheduling.planning import PlannedJob
from ravnest.server.scheduling.shipping import ArtifactPlanner
from ravnest.server.settings import PlanningLimits, ServerSettings
from ravnest.split.splitter import prepare
from ravnest.types import CheckpointId

PROVIDERS = tuple((f"p{n}", offer(f"p{n}", address=f"127.0.0.1:{9000 + n}", ram=0.5)) for n in range(2))
LINKS = ProviderLinks((LinkRecord("p0", "p1", "a - b", 1.0, forward=8.0, back=9.0, round_trip=0.01),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "artifacts"


@pytest.fixture(scope="module")
def job(folder: Path) -> JobSpec:
    """A job whose model is among the artifacts."""
    torch.manual_seed(7)
    prepared = prepare(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (torch.ones(8, 4),))
    files = pack_model(prepared, profile_model(prepared), folder.parent / "packed")
    add = ArtifactFolder(folder).add
    return spec(model=ModelFiles(units=add(files.units), weights=add(files.weights)), min_providers=2)


class Wire:
    """Process that works in this one; messages are encoded and decoded."""

    def __init__(self) -> None:
        self._program = PlannerProgram()

    def ask(self, request: PlannerRequest, _seconds: float) -> PlannerReply:
        reply: PlannerReply = transmitted(
            self._program.answer(transmitted(request, PlannerRequest)), PlannerReply
        )
        return reply


def transmitted(message: Any, kind: Any) -> Any:
    stream = io.BytesIO()
    write_message(stream, message)
    stream.seek(0)
    found = read_message(stream, kind)
    with pytest.raises(EOFError):
        read_message(stream, kind)
    return found


@pytest.fixture
def planner(folder: Path) -> ProcessPlanner:
    wire: Any = Wire()
    return ProcessPlanner(folder, folder.parent / "scratch", PlanningLimits(), process=wire)


def test_plans_and_assignments_are_those_of_the_planner(
    planner: ProcessPlanner, folder: Path, job: JobSpec
) -> None:
    own = ArtifactPlanner(ArtifactFolder(folder), folder.parent / "scratch")
    planned = planner.plan(job, PROVIDERS, LINKS)
    assert isinstance(planned, PlannedJob)
    assert planned == own.plan(job, PROVIDERS, LINKS)
    for each in (planned, replace(planned, attempt=2)):
        assert without_secrets(planner.ship("job-1", each)) == without_secrets(own.ship("job-1", each))
    few = job.model_copy(update={"min_providers": 3})
    assert planner.plan(few, PROVIDERS, NO_LINKS) == own.plan(few, PROVIDERS, NO_LINKS)
    assert isinstance(own.plan(few, PROVIDERS, NO_LINKS), Infeasible)


def without_secrets(assignments: Sequence[Assignment]) -> list[Assignment]:
    """Return assignments without the secret that each shipping draws anew, and without spot checks.

    The process leaves these out where a server could not compute outputs again.
    """
    assert all(each.node_spec.secret for each in assignments)
    return [
        each.model_copy(update={"node_spec": replace(each.node_spec, secret=""), "spot_checks": 0.0})
        for each in assignments
    ]


def test_numbers_of_more_than_64_bits_are_transmitted_as_floats(job: JobSpec) -> None:
    loss = NamedComponent(name="MSELoss", params={"a": 10**30, "b": [1, -(2**70)], "c": 2**63 - 1})
    training = job.training.model_copy(update={"loss": loss})
    stream = io.BytesIO()
    request = PlanRequest(
        "artifacts", "scratch", job.model_copy(update={"training": training}), (), LINKS
    )
    write_message(stream, request)
    stream.seek(0)
    found = read_message(stream, PlannerRequest)
    assert found.spec.training.loss.params == {"a": 1e30, "b": [1.0, -(2.0**70)], "c": 2**63 - 1}


def test_the_state_that_a_job_starts_from_is_transmitted(planner: ProcessPlanner, job: JobSpec) -> None:
    planned = planner.plan(job, PROVIDERS, LINKS)
    assert isinstance(planned, PlannedJob)
    file = Artifact(sha256="0" * 64, size=1)
    stage = StageCheckpointRecord(
        "job-1", "plan", "run", "", CheckpointId(5, 0), 0, 0, 1, 0, 1.0, file, file
    )
    checkpoint = CompleteCheckpoint((stage,))
    start = JobStart((checkpoint,), before=(OldCluster(checkpoint, range(3, 9)),))
    request = ShipRequest("artifacts", "scratch", "job-1", replace(planned, start=start))
    assert transmitted(request, PlannerRequest) == request


def test_errors_keep_their_class(planner: ProcessPlanner, folder: Path, job: JobSpec) -> None:
    other = job.model_copy(
        update={"model": ModelFiles(units=stored(folder, b"{}"), weights=stored(folder, b""))}
    )
    with pytest.raises(StageFormatError, match="is not a model"):
        planner.plan(other, PROVIDERS, NO_LINKS)
    gone = Artifact(sha256="0" * 64, size=1)
    other = job.model_copy(update={"model": ModelFiles(units=gone, weights=gone)})
    with pytest.raises((OSError, StageFormatError)):
        planner.plan(other, PROVIDERS, NO_LINKS)


def stored(folder: Path, content: bytes) -> Artifact:
    sha = hashlib.sha256(content).hexdigest()
    ArtifactFolder(folder).append(sha, len(content), 0, [content])
    return Artifact(sha256=sha, size=len(content))


def test_a_graph_that_takes_too_much_memory_fails_its_job_only(folder: Path, job: JobSpec) -> None:
    bomb = stored(folder, b'{"format": "ravnest-units", "units": [' + b"[]," * 8_000_000 + b"[]]}")
    hostile = job.model_copy(update={"model": ModelFiles(units=bomb, weights=bomb)})
    process = PlannerProcess(memory=200 << 20)
    planner = ProcessPlanner(folder, folder.parent / "scratch", PlanningLimits(), process=process)
    try:
        with pytest.raises(JobError, match=r"more than 0\.2 GB of the server's memory"):
            planner.plan(hostile, PROVIDERS, NO_LINKS)
        assert isinstance(planner.plan(job, PROVIDERS, NO_LINKS), PlannedJob), "others go on"
    finally:
        process.close()


READY = """
import sys, time
sys.stdout.buffer.write(bytes(7) + bytes([12, 129]) + b"\\xa4type\\xa5ready")
sys.stdout.flush()
"""
"""Start of a program that says that it is ready, as the planner's does."""


@pytest.fixture
def request_(folder: Path, job: JobSpec) -> PlanRequest:
    return PlanRequest(str(folder), str(folder), job, PROVIDERS, NO_LINKS)


def test_a_plan_that_takes_too_long_is_given_up(request_: PlanRequest) -> None:
    process = PlannerProcess(1, [sys.executable, "-c", f"{READY}time.sleep(60)"])
    with pytest.raises(JobError, match=r"more than 0\.2 seconds"):
        process.ask(request_, 0.2)
    process.close()


def test_a_planner_that_dies_is_started_again_once(request_: PlanRequest) -> None:
    process = PlannerProcess(1, [sys.executable, "-c", f"{READY}sys.exit(3)"])
    with pytest.raises(JobError, match="died twice"):
        process.ask(request_, 60.0)
    process.close()


def test_a_graph_that_is_too_large_is_refused_at_once(case: Case) -> None:
    large = Artifact(sha256="0" * 64, size=UNITS_LIMIT + 1)
    body = spec(model=ModelFiles(units=large, weights=large))
    assert "the graph of the model has 67 MB" in case.requester().post("/api/jobs", body, 413)["detail"]


def test_a_requester_has_a_limited_number_of_jobs(tmp_path: Path) -> None:

    with opened(tmp_path, settings=ServerSettings(unfinished_jobs=2)) as case:
        rita, other = case.requester(), case.requester("other")
        first = case.submit(rita)
        case.submit(rita)
        assert "cancel one" in rita.post("/api/jobs", spec(), 429)["detail"]
        case.submit(other)
        rita.post(f"/api/jobs/{first}/cancel")
        case.submit(rita)
