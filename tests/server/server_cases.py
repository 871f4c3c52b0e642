"""A server with a fake planner, and members that send requests to it."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal
from node_files import node_file
from starlette.testclient import TestClient

from ravnest.errors import StageFormatError
from ravnest.plan.infeasible import Infeasible
from ravnest.plan.plan import ClusterPlan, Plan
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import (
    DataFile,
    DatasetFiles,
    JobSpec,
    ModelFiles,
    NamedComponent,
    TrainingSpec,
)
from ravnest.schemas.providers import Assignment, DataShare, ProviderOffer, RowRange, StageNeeds
from ravnest.server.assignments import assignment_id
from ravnest.server.checkpoint_check import manifest_misfit
from ravnest.server.estimate_service import JobEstimator
from ravnest.server.http.app import create_app
from ravnest.server.result_check import ResultCheck
from ravnest.server.scheduling.check_process import ForwardChecker
from ravnest.server.scheduling.job_start import JobStart
from ravnest.server.scheduling.link_tests import NO_LINKS, ProviderLinks
from ravnest.server.scheduling.planning import Candidates, PlannedJob
from ravnest.server.server import Server
from ravnest.server.settings import Clock, ServerSettings
from ravnest.telemetry import LossRecord, ValidationRecord
from ravnest.types import Role

FILES = {name: name.encode() * 10 for name in ("units", "weights", "inputs", "labels")}


def artifact(name: str) -> Artifact:
    content = FILES[name]
    return Artifact(sha256=hashlib.sha256(content).hexdigest(), size=len(content))


def spec(name: str = "digits", **changes: Any) -> JobSpec:
    data = DatasetFiles(
        samples=8,
        inputs=(DataFile(artifact=artifact("inputs"), rows=8),),
        labels=(DataFile(artifact=artifact("labels"), rows=8),),
    )
    training = TrainingSpec(
        optimizer=NamedComponent(name="SGD"), loss=NamedComponent(name="CrossEntropyLoss"), epochs=2
    )
    model = ModelFiles(units=artifact("units"), weights=artifact("weights"))
    fields: dict[str, Any] = {"model": model, "train": data, "training": training}
    return JobSpec(name=name, **(fields | changes))


def losses(*values: float | None, first: int = 0) -> list[dict[str, Any]]:
    """Loss records of consecutive updates, as a report holds them."""
    return [
        asdict(LossRecord(update, epoch=0, loss=value, microbatches=1, staleness=0))
        for update, value in enumerate(values, first)
    ]


def validation(number: int, value: float) -> dict[str, Any]:
    return asdict(ValidationRecord(number, epoch=number, name="accuracy", value=value, samples=8))


def offer(name: str = "alice", **changes: Any) -> ProviderOffer:
    fields: dict[str, Any] = {
        "name": name,
        "address": "127.0.0.1:9000",
        "ram": 4.0,
        "cores": 2,
        "compute": 50.0,
        "bandwidth": 100.0,
        "round_trip": 0.01,
        "version": "0.1.0",
        "torch": "2.13.0",
        **changes,
    }
    return ProviderOffer(**fields)


@dataclass
class Time:
    """Both clocks; tests move them."""

    now: float = 1_000_000.0

    def clock(self) -> Clock:
        return Clock(wall=lambda: self.now, steady=lambda: self.now)


def _cluster(number: int) -> ClusterPlan:
    return ClusterPlan(
        id=number,
        stages=(),
        seconds=1.0,
        samples_per_second=1.0,
        bottleneck="",
        microbatches=1,
        microbatch_rows=None,
        split_reason="",
        in_flight=1,
        largest_rows=1,
    )


@dataclass
class FakePlanner:
    """Planner that makes clusters in the given order; it needs ``needs`` providers."""

    needs: int = 1
    size: int = 2
    """Nodes of a cluster; the last one has fewer if there are not enough."""
    tls: bool = False
    ram: int = 0
    """Bytes that each stage needs."""
    error: Exception | None = None
    while_planning: Callable[[], None] = lambda: None
    while_shipping: Callable[[], None] = lambda: None
    asked: list[tuple[str, ...]] = field(default_factory=list)
    starts: list[JobStart | None] = field(default_factory=list)
    """States that jobs were shipped with."""
    explanation: str = "a plan"
    spot_checks: float = 0.0
    damaged: set[int] = field(default_factory=set)
    """Updates of checkpoints that cannot be converted."""

    def plan(
        self, spec: JobSpec, providers: Candidates, links: ProviderLinks = NO_LINKS
    ) -> PlannedJob | Infeasible:
        names = tuple(name for name, _ in providers)
        self.asked.append(names)
        self.while_planning()
        if self.error is not None:
            raise self.error
        if len(names) < self.needs:
            return Infeasible(f"needs {self.needs} providers, {len(names)} are connected")
        clusters = tuple(_cluster(number) for number in range(-(-len(names) // self.size)))
        plan = Plan(
            clusters=clusters,
            rings=(),
            batch_size=1,
            update_frequency=1,
            seed=0,
            schedule="sync",
            smallest_rows=1,
        )
        return PlannedJob(spec, plan, names, self.explanation)

    def ship(self, job: str, planned: PlannedJob) -> tuple[Assignment, ...]:
        self.while_shipping()
        self.starts.append(planned.start)
        if self.damaged and planned.start and planned.start.checkpoints[0].id.update in self.damaged:
            raise StageFormatError("stage 0 is damaged")
        count = len(planned.providers)
        found = (self._assignment(job, planned, node, count) for node in range(count))
        return tuple(each.model_copy(update={"resume": planned.start is not None}) for each in found)

    def _assignment(self, job: str, planned: PlannedJob, node: int, count: int) -> Assignment:
        cluster, stage = divmod(node, self.size)
        stages = min(self.size, count - cluster * self.size)
        role = Role.at(stage, stages)
        address = f"127.0.0.1:{9000 + node}"
        rows = RowRange(artifact=artifact("inputs"), start=0, stop=8)
        return Assignment(
            id=assignment_id(job, planned.attempt, node),
            job=job,
            node=node,
            node_spec=node_file(
                node,
                stage=stage,
                cluster=cluster,
                role=role,
                address=address,
                stages=stages,
                plan="plan" + "'" * planned.attempt,
            ),
            stage=artifact("units"),
            weights=artifact("weights"),
            train=DataShare(samples=8, total=8, first=0, inputs=() if stage else (rows,)),
            training=planned.spec.training,
            attempt=planned.attempt,
            tls=self.tls,
            needs=StageNeeds(ram=self.ram),
            spot_checks=self.spot_checks if stage else 0.0,
        )


@dataclass
class Caller:
    """A member that sends requests to the server."""

    client: TestClient
    id: str
    credential: str

    def call(self, method: str, path: str, status: int = 200, **more: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.credential}", **more.pop("headers", {})}
        answer = self.client.request(method, path, headers=headers, **more)
        assert answer.status_code == status, (answer.status_code, answer.text)
        return answer.json() if "json" in answer.headers.get("content-type", "") else answer.content

    def get(self, path: str, status: int = 200, **more: Any) -> Any:
        return self.call("GET", path, status, **more)

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        json = body if body is None or isinstance(body, dict) else body.model_dump(mode="json")
        return self.call("POST", path, status, json=json)

    def upload(self, content: bytes, status: int = 200) -> str:
        sha = hashlib.sha256(content).hexdigest()
        params = {"offset": 0, "size": len(content)}
        self.call("PUT", f"/api/artifacts/{sha}/upload", status, content=content, params=params)
        return sha

    def heartbeat(self, status: int = 200, **fields: Any) -> Any:
        return self.post(f"/api/providers/{self.id}/heartbeat", {"wait": 0, **fields}, status)

    def report(self, phase: str, status: int = 200, **fields: Any) -> Any:
        assignment = fields.pop("assignment", None) or self.heartbeat()["assignment"]
        report = {"assignment": assignment, "phase": phase, **fields}
        return self.heartbeat(status, report=report, known=assignment)


@dataclass
class Case:
    """A server, its clock and its planner."""

    server: Server
    client: TestClient
    time: Time
    planner: FakePlanner

    def member(self, role: ApiRole, name: str = "somebody") -> Caller:
        token = self.server.auth.create_token(role, "")
        joined = self.client.post("/api/join", json={"secret": token.secret, "name": name}).json()
        return Caller(self.client, joined["id"], joined["credential"])

    def provider(self, name: str = "alice", **changes: Any) -> Caller:
        caller = self.member(ApiRole.PROVIDER, name)
        caller.post("/api/providers", offer(name, **changes))
        return caller

    def requester(self, name: str = "rita") -> Caller:
        caller = self.member(ApiRole.REQUESTER, name)
        for content in FILES.values():
            caller.upload(content)
        return caller

    def admin(self) -> Caller:
        return Caller(self.client, "admin", self.server.folder.admin.read_text())

    def submit(self, requester: Caller, **changes: Any) -> str:
        job: str = requester.post("/api/jobs", spec(**changes), 201)["id"]
        return job

    def match(self) -> None:
        self.server.run_matching()
        self.server.run_due()  # a started job notifies the timers

    def pass_time(self, seconds: float) -> None:
        self.time.now += seconds
        self.server.run_due()

    def refusals(self) -> list[str]:
        return [event["reason"] for event in self.events() if event["kind"] == "refusal"]

    def events(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.admin().get("/api/events")
        return found


@contextmanager
def opened(
    folder: Path,
    *,
    time: Time | None = None,
    planner: FakePlanner | None = None,
    tls: bool = False,
    settings: ServerSettings | None = None,
    check_result: ResultCheck = lambda _files, _cluster: "",
    checker: ForwardChecker | None = None,
    estimator: JobEstimator | None = None,
) -> Iterator[Case]:
    """Open a server without threads: the test moves its clock and runs its matching.

    Any result is accepted, because the fake planner ships no stages.
    """
    time, planner = time or Time(), planner or FakePlanner()
    server = Server(
        folder,
        planner=planner,
        estimator=estimator,
        clock=time.clock(),
        tls=tls,
        settings=settings,
        check_result=check_result,
        check_manifest=manifest_misfit,
        checker=checker,
    )
    with server.opened(), start_blocking_portal() as portal:
        client = TestClient(create_app(server), base_url="https://server" if tls else "http://server")
        client.portal = portal  # otherwise each request starts a thread and an event loop
        yield Case(server, client, time, planner)
