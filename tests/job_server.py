"""A real server on loopback, a requester, and providers that report what a test tells them to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import nn

from ravnest.http.api import ApiClient
from ravnest.http.credentials import Membership, join, save
from ravnest.http.transfer import artifact_of, download, upload
from ravnest.jobs.job import Job
from ravnest.jobs.packing import PackedJob, pack_job
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.checkpoints import UploadedCheckpoint
from ravnest.schemas.jobs import JobCreated, JobView, ResultFile
from ravnest.schemas.providers import (
    Assignment,
    AssignmentReport,
    Heartbeat,
    HeartbeatReply,
    ProviderOffer,
    ProviderView,
    UsedMemory,
)
from ravnest.server.http.runner import RunningServer, serve
from ravnest.split import StageModule
from ravnest.split.split_stage import SplitStage
from ravnest.store.bundle import load_stage
from ravnest.store.checkpoint import EMA, CheckpointFolder, CheckpointManifest
from ravnest.store.checkpoint_state import stored_entries, stored_tensors
from ravnest.store.plain_data import encode
from ravnest.store.trained import save_trained
from ravnest.telemetry import LossRecord, ValidationRecord, WorkerRecord
from ravnest.types import CheckpointId


def small_job(**fields: Any) -> Job:
    """Return a job that trains a tiny model; ``fields`` replace its fields."""
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        "example_args": (torch.rand(4, 4),),
        "train_data": (torch.rand(20, 4), torch.randint(3, (20,))),
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD,
        "optimizer_params": {"lr": 0.1},
        "name": "digits",
        **fields,
    }
    return Job(**given)


def loss_record(update: int, loss: float | None) -> LossRecord:
    return LossRecord(update=update, epoch=0, loss=loss, microbatches=1, staleness=0)


def validation_record(number: int, value: float) -> ValidationRecord:
    return ValidationRecord(number=number, epoch=0, name="accuracy", value=value, samples=20)


class RecordingTransport(httpx.BaseTransport):
    """The network, with a list of the requests; ``failures`` many requests fail before they are sent."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.credentials: set[str | None] = set()
        self.failures = 0
        self._network = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(f"{request.method} {request.url.path}")
        self.credentials.add(request.headers.get("Authorization"))
        if self.failures and request.url.path.endswith("/wait"):
            self.failures -= 1
            raise httpx.ConnectError("refused")
        return self._network.handle_request(request)

    def close(self) -> None:
        self._network.close()


class ScriptedProvider:
    """A provider that takes assignments over HTTP and reports what the test tells it to."""

    def __init__(self, api: ApiClient, provider: str, folder: Path) -> None:
        self._api = api
        self._folder = folder
        self._records = 0
        self.id = provider
        self.assignment: Assignment | None = None

    def take_assignment(self) -> Assignment:
        """Wait until the server assigns a stage to this provider."""
        while (reply := self._beat(Heartbeat(wait=10))).assignment is None:
            pass
        self._records = 0
        self.assignment = self._api.get(f"/api/assignments/{reply.assignment}", Assignment)
        return self.assignment

    def report(
        self,
        phase: str,
        *records: WorkerRecord,
        reason: str = "",
        result: tuple[ResultFile, ...] = (),
        checkpoints: tuple[UploadedCheckpoint, ...] = (),
        memory: UsedMemory | None = None,
    ) -> None:
        assert self.assignment is not None
        report = AssignmentReport(
            assignment=self.assignment.id,
            phase=phase,
            reason=reason,
            result=result,
            first_record=self._records,
            records=records,
            checkpoints=checkpoints,
            memory=memory,
        )
        self._beat(Heartbeat(report=report, known=self.assignment.id, wait=0))
        self._records += len(records)

    def finish(self, *, changed_only: bool = False) -> None:
        """Upload the stage with its initial weights as the trained stage, and report the end."""
        assert self.assignment is not None
        stage = self._stage()
        module = StageModule(stage.spec, stage.tensors)
        trained = self._folder / f"{self.assignment.id}-trained"
        save_trained(trained, self.assignment.node_spec, module, run="run", changed_only=changed_only)
        paths = sorted(trained.rglob("node_*"))
        files = tuple(ResultFile(name=path.name, artifact=artifact_of(path)) for path in paths)
        upload(self._api, {f.artifact.sha256: path for f, path in zip(files, paths, strict=True)})
        self.report("finished", result=files)

    def _stage(self) -> SplitStage:
        assert self.assignment is not None
        bundle = self._folder / self.assignment.id
        download(self._api, self.assignment.stage, bundle / "stage.json")
        download(self._api, self.assignment.weights, bundle / "weights.safetensors")
        return load_stage(bundle, self.assignment.stage.sha256)

    def save_checkpoint(
        self, update: int, change: float, *, samples: int = 0, average: float | None = None
    ) -> None:
        """Upload a checkpoint in which trained weights have changed by ``change``, and report it.

        ``samples``: those since the last average. ``average``: change of the moving average of weights.
        """
        assert self.assignment is not None
        node, stage = self.assignment.node_spec, self._stage()
        tensors = {
            f"state/{entry.key}": (stage.tensors[entry.key] + change).to(entry.dtype)
            for entry in stored_entries(stage.spec)
        }
        if average is not None:
            tensors |= {
                f"optimizer/{entry.key}/{EMA}": stage.tensors[entry.key] + average
                for entry in stored_entries(stage.spec)
            }
        root = {"epoch": 0, "batches": update, "microbatches": update, "samples": 4 * update}
        progress = {
            "root": root | {"data": "", "random": None},
            "leaf": None,
            "validations": {},
            "averaging_samples": samples,
            "updates": {"done": update, "scheduler_steps": 0},
        }
        point = CheckpointId(update, 0)
        manifest = CheckpointManifest(
            node.plan, "run", node.node, node.cluster, node.stage, node.stages, point,
            stored_tensors(stage.spec), encode(progress),
        )  # fmt: skip
        folder = CheckpointFolder(self._folder / f"{self.assignment.id}-checkpoints")
        folder.commit(folder.write_tensors(point, tensors), manifest)
        paths = folder.tensors_path(point), folder.manifest_path(point)
        files = [artifact_of(path) for path in paths]
        upload(self._api, {f.sha256: path for f, path in zip(files, paths, strict=True)})
        named = UploadedCheckpoint(
            run="run", update=update, phase=0, stage=node.stage, cluster=node.cluster, plan=node.plan,
            tensors=files[0], manifest=files[1],
        )  # fmt: skip
        self.report("training", checkpoints=(named,))

    def await_trace_order(self) -> int:
        """Wait until the server asks for spans, and return the number of its request."""
        assert self.assignment is not None
        beat = Heartbeat(known=self.assignment.id, may_train=True, wait=10)
        while not (reply := self._beat(beat)).trace:
            pass
        return reply.trace

    def leave(self) -> None:
        self._api.delete(f"/api/providers/{self.id}")
        self._api.close()

    def _beat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        path = f"/api/providers/{self.id}/heartbeat"
        return self._api.post(path, heartbeat, HeartbeatReply, wait=heartbeat.wait, idempotent=True)


class JobServer:
    """A running server and a requester who has joined it and uploaded the files of one job."""

    def __init__(self, running: RunningServer, folder: Path, packed: PackedJob) -> None:
        self.running = running
        self.url = running.url
        self._folder = folder
        self._packed = packed
        self.requester: Membership = join(self.url, running.token(ApiRole.REQUESTER), "me")
        with self.requester.api() as api:
            upload(api, packed.files)

    def token(self, role: ApiRole = ApiRole.REQUESTER) -> str:
        return self.running.token(role)

    def remember(self) -> None:
        """Save the membership of the requester in ``$RAVNEST_HOME``."""
        save(self.requester)

    def submit(self, **fields: Any) -> str:
        """Submit the job again, with other fields of its ``JobSpec``, and return its id."""
        spec = self._packed.spec.model_copy(update=fields)
        with self.requester.api() as api:
            return api.post("/api/jobs", spec, JobCreated).id

    def cancel_jobs(self) -> None:
        """Cancel all jobs that are not final, so that the next test's provider does not get them."""
        with self.requester.api() as api:
            for view in api.get("/api/jobs", list[JobView]):
                if not view.state.is_final:
                    api.post(f"/api/jobs/{view.id}/cancel", None, object, idempotent=True)

    @contextmanager
    def provider(self, name: str = "pc", port: int = 7000) -> Iterator[ScriptedProvider]:
        """Yield a provider that has offered itself; it leaves at the end."""
        api = join(self.url, self.token(ApiRole.PROVIDER), name).api()
        offer = ProviderOffer(
            name=name,
            address=f"127.0.0.1:{port}",
            ram=4.5,
            cores=2,
            compute=31.4,
            bandwidth=99.5,
            round_trip=0.01,
            version="1",
            torch="2",
            sandbox="bwrap",
        )
        view = api.post("/api/providers", offer, ProviderView)
        provider = ScriptedProvider(api, view.id, self._folder)
        try:
            yield provider
        finally:
            provider.leave()


@contextmanager
def job_server(folder: Path) -> Iterator[JobServer]:
    """Run a server below ``folder``."""
    packed = pack_job(small_job(), folder / "packed")
    with serve(folder=folder / "server") as running:
        yield JobServer(running, folder, packed)


@contextmanager
def in_background(script: Callable[[], None]) -> Iterator[None]:
    """Run ``script`` in a thread while the context lasts, and raise its error at the end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            script()
        except BaseException as error:  # raised again in the test's thread
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if errors:
        raise errors[0]
