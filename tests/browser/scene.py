"""A real server over HTTP with scripted providers: what the page shows is reported through the API.

Plans come from a fake planner, so that a scene is there within a second; routes, database, stream and
page are the real ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
from server_cases import Caller, Case, FakePlanner, Time, offer, spec

from ravnest.schemas.auth import ApiRole
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import JobSpec, NamedComponent, TrainingSpec
from ravnest.schemas.providers import Assignment, ProviderOffer, StageNeeds
from ravnest.server.db.records import LinkRecord
from ravnest.server.http.app import create_app
from ravnest.server.http.connections import CountedListener, limited_protocol
from ravnest.server.http.listener import listen
from ravnest.server.scheduling.planning import PlannedJob
from ravnest.server.server import Server
from ravnest.server.settings import ServerSettings
from ravnest.store.node_spec import NeighbourSpec, RingSpec
from ravnest.telemetry import (
    CheckpointRecord,
    LossRecord,
    PaceRecord,
    PhaseRecord,
    QueueRecord,
    RecoveryRecord,
    RoundRecord,
    ScheduleRecord,
    TimingRecord,
    ValidationRecord,
    WorkerRecord,
)

PLAN = """6 nodes in 2 clusters train about 94 samples/s in batches of 64, schedule async.

Cluster 0: about 47 samples/s, one batch every 1.36 s; the bottleneck is the compute of {1}.
  {0} is the Root: layers embed to blocks.3, 31% of the work. Memory 3.1 GB.
  {1} is the Stem: layers blocks.4 to blocks.7, 37% of the work. Memory 2.6 GB.
  {2} is the Leaf: layers blocks.9 to head, 32% of the work. Memory 2.9 GB.

Cluster 1: about 47 samples/s, one batch every 1.36 s; the bottleneck is the compute of {5}.
  {3} is the Root, {4} the Stem and {5} the Leaf, with the same layers.

3 rings average the clusters."""
"""Plan in words; names of the providers in the order of their nodes."""
RATE = 47.0
"""Samples per second of a cluster, in batches of 64."""
NAMES = ("attic", "office-pc", "studio", "lab-03", "lab-07", "basement")
OFFERS = (
    (6.0, 4, 61.0, 94.0), (8.0, 8, 118.0, 310.0), (4.0, 4, 55.0, 48.0),
    (12.0, 12, 164.0, 940.0), (12.0, 12, 159.0, 938.0), (6.0, 6, 72.0, 120.0),
)  # fmt: skip
_LAYERS = (("embed", 4), ("blocks", 5), ("blocks", 4))
_MEMORY = (
    (2_830_000_000, 3_020_000_000), (2_310_000_000, 2_450_000_000), (2_640_000_000, 3_180_000_000),
    (2_790_000_000, 2_960_000_000), (2_280_000_000, 2_390_000_000), (2_610_000_000, 2_740_000_000),
)  # fmt: skip
"""Bytes that the workers take, and took at most."""
_SECONDS = 20.0
_LOST = "node_1 (lab-03) left: its owner took it back"
_MISSING = "cluster 1 missing: it did not answer within 30 s"


class ScenePlanner(FakePlanner):
    """Planner whose stages have layers, memory and rings."""

    def __init__(self, folder: Path) -> None:
        super().__init__(size=3)
        self.folder = folder

    def ship(self, job: str, planned: PlannedJob) -> tuple[Assignment, ...]:
        return tuple(self._furnished(each) for each in super().ship(job, planned))

    def _furnished(self, body: Assignment) -> Assignment:
        stage = body.node_spec.stage
        weights = self._weights(stage)
        mine = NeighbourSpec(body.node, f"127.0.0.1:{8080 + body.node}")
        other = NeighbourSpec((body.node + 3) % 6, f"127.0.0.1:{8080 + (body.node + 3) % 6}")
        members = (mine, other) if body.node < 3 else (other, mine)
        rings = (RingSpec(stage, (f"{stage}.weight",), members),)
        needs = StageNeeds(ram=int((3.1e9, 2.6e9, 2.9e9)[stage % 3]))
        roots = tuple(NeighbourSpec(node, f"127.0.0.1:{8080 + node}") for node in (0, 3))
        node_spec = dataclasses.replace(body.node_spec, rings=rings, roots=roots)
        return body.model_copy(update={"weights": weights, "needs": needs, "node_spec": node_spec})

    def _weights(self, stage: int) -> Artifact:
        """Write a file with the header of a stage's weights, and without tensors."""
        first = (0, 4, 9)[stage % 3]
        blocks = {f"blocks.{first + i}.attention.weight": [1024, 3072] for i in range(4)}
        ends = ({"embed.weight": [32000, 1024]}, {}, {"head.weight": [32000, 1024]})[stage % 3]
        header = {
            name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
            for name, shape in (blocks | ends).items()
        }
        text = json.dumps(header).encode()
        content = len(text).to_bytes(8, "little") + text
        sha256 = hashlib.sha256(content).hexdigest()
        path = self.folder / sha256[:2] / sha256
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return Artifact(sha256=sha256, size=len(content))


@dataclass
class Scene:
    """A running server and its members."""

    case: Case
    url: str
    providers: dict[str, Caller] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    """Records reported so far, by assignment."""

    @property
    def server(self) -> Server:
        return self.case.server

    def link(self, role: ApiRole = ApiRole.VIEWER) -> str:
        """Return a login link."""
        return f"{self.url}/login?token={self.server.auth.create_token(role, '')}"

    def join(self, *names: str) -> None:
        """Have providers offer themselves."""
        for name, (ram, cores, compute, bandwidth) in zip(names, OFFERS * 9, strict=False):
            port = 9000 + len(self.providers)
            caller = self.case.member(ApiRole.PROVIDER, name)
            made: ProviderOffer = offer(
                name,
                ram=ram,
                cores=cores,
                compute=compute,
                bandwidth=bandwidth,
                address=f"127.0.0.1:{port}",
                sandbox="bwrap",
            )
            caller.post("/api/providers", made)
            self.providers[name] = caller

    def assignment_of(self, name: str) -> str:
        """Wait until a provider has an assignment."""
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            found = self.providers[name].heartbeat(wait=1.0)["assignment"]
            if found:
                return str(found)
        raise AssertionError(f"{name} got no assignment")

    def report(
        self, name: str, records: Sequence[WorkerRecord], phase: str = "training", **more: Any
    ) -> None:
        """Report records of the node of a provider."""
        assignment = self.assignment_of(name)
        first = self.sent.get(assignment, 0)
        report = {
            "assignment": assignment,
            "phase": phase,
            "first_record": first,
            "records": [asdict(each) for each in records],
            **more,
        }
        self.providers[name].heartbeat(report=report, known=assignment)
        self.sent[assignment] = first + len(records)


@contextmanager
def running(folder: Path, port: int = 0, settings: ServerSettings | None = None) -> Iterator[Scene]:
    """Run a server for a scene; a folder that was used before is used again, as after a restart."""
    server_folder = folder / "server"
    planner = ScenePlanner(server_folder / "artifacts")
    kept = settings or ServerSettings(lost_after=600.0, shown_after_loss=1e9)
    server = Server(
        server_folder, planner=planner, settings=kept, check_result=lambda _files, _cluster: ""
    )
    with server.opened(), CountedListener(listen("127.0.0.1", port), server.connections) as listener:
        planner.folder = server.folder.artifacts
        config = uvicorn.Config(
            create_app(server),
            http=limited_protocol(server.connections, server.settings.connections, listener),
            log_config=None,
            lifespan="on",
            timeout_graceful_shutdown=2,
        )
        loop = _Loop(config, server)
        thread = threading.Thread(target=loop.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            assert loop.is_ready.wait(_SECONDS)
            with httpx.Client(base_url=url, timeout=_SECONDS) as client:
                yield Scene(Case(server, client, Time(), planner), url)  # type: ignore[arg-type]
        finally:
            loop.should_exit = True
            thread.join(_SECONDS)


class _Loop(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._ravnest = server
        self.is_ready = threading.Event()

    def install_signal_handlers(self) -> None:
        """Leave the signals to the test."""

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.is_ready.set()

    async def shutdown(self, sockets: Any = None) -> None:
        self._ravnest.notifications.close()
        await super().shutdown(sockets)


def job_spec(name: str, **changes: Any) -> JobSpec:
    """Return a job with settings worth showing."""
    training = TrainingSpec(
        optimizer=NamedComponent(name="AdamW", params={"lr": 0.0003, "weight_decay": 0.01}),
        scheduler=NamedComponent(name="CosineAnnealingLR", params={"T_max": 12}),
        loss=NamedComponent(name="CrossEntropyLoss"),
        epochs=12,
        batch_size=64,
        compression="fp16",
    )
    return spec(name, training=training, clusters=2, **changes)


def loss_at(update: int, noise: random.Random) -> float:
    return 0.45 + 3.2 * math.exp(-update / 260) + noise.gauss(0, 0.035 + 0.09 * math.exp(-update / 200))


def _staleness(update: int) -> int:
    return int(update >= 2)


def training_records(first: int, count: int, *, total: int = 2400) -> list[WorkerRecord]:
    """Return the records of a Root for some updates."""
    noise = random.Random(first)
    per_epoch = total // 12
    found: list[WorkerRecord] = []
    for update in range(first, first + count):
        rate = 1.5e-4 * (1 + math.cos(math.pi * (update // per_epoch) / 12))
        loss = loss_at(update, noise)
        found.append(LossRecord(update, update // per_epoch, loss, 4, _staleness(update), rate))
        if update % 20 == 19:
            found += _figures(update, total, noise)
        if update % per_epoch == per_epoch - 1:
            epoch = update // per_epoch
            found.append(
                ValidationRecord(
                    epoch, epoch + 1, "accuracy", 0.93 - 0.55 * math.exp(-update / 350), 512
                )
            )
        if update % 120 == 119:
            found.append(CheckpointRecord(update + 1, 0, 1_200_000_000, 0.21))
    return [*found, QueueRecord(5, 6, 1)]


_COSTS = ((0.08, 0.16, 0.09, 0.0), (0.10, 0.20, 0.19, 0.09), (0.07, 0.14, 0.0, 0.17))
"""Seconds of each stage: forward, backward, and for how long its links to the next stage and to the one
before are busy."""


def _figures(update: int, total: int, noise: random.Random) -> Iterator[WorkerRecord]:
    """Yield what a Root reports every second; after a loss, the rate is low for a while."""
    rate = (0.5 if 480 <= update < 520 else 1.0) * RATE + noise.gauss(0, 0.9)
    yield PaceRecord(0, total, 0.99 * RATE, (total - update) * 64 / RATE, rate)
    for stage, (forward, backward, following, previous) in enumerate(_COSTS):
        cost = noise.uniform(0.95, 1.06)
        links = (following and following + 0.02, previous and previous + 0.02, following, previous)
        yield TimingRecord(stage, 64, forward * cost, backward * cost, 0.008, *links)


def _fail_a_job(scene: Scene, rita: Caller) -> None:
    """Have a job diverge and fail."""
    failed = rita.post("/api/jobs", job_spec("tokenizer-probe"), 201)["id"]
    for name in NAMES:
        scene.assignment_of(name)
    sentence = "the loss is not a number after update 17; use a lower learning rate, or stop_on_nan=None"
    for name in NAMES:
        scene.report(name, [], "training")
    for root in _placed(scene)[::3]:
        noise = random.Random(0)
        diverged = [LossRecord(update, 0, loss_at(update, noise), 4, 0) for update in range(17)]
        scene.report(root, [*diverged, LossRecord(17, 0, None, 4, 0)])
    end = time.monotonic() + _SECONDS
    while rita.get(f"/api/jobs/{failed}")["state"] != "failed" and time.monotonic() < end:
        for name in NAMES:  # a second provider has to say the same
            assignment = scene.providers[name].heartbeat()["assignment"]
            report = {"assignment": assignment, "phase": "failed", "reason": sentence, "cause": "job"}
            if assignment:
                scene.providers[name].heartbeat(report=report, known=assignment)
        time.sleep(0.05)


def busy_scene(scene: Scene, updates: int = 1100) -> str:
    """Fill a scene: a job that trains on six providers, idle ones, and jobs that wait and have ended."""
    scene.join(*NAMES)
    rita = scene.case.requester("rita")
    _fail_a_job(scene, rita)
    job: str = rita.post("/api/jobs", job_spec("gpt-small on wiki"), 201)["id"]
    holders = _placed(scene)
    links(scene, holders)
    with scene.server.db.write(time.time()) as db:
        record = db.jobs.get(job)
        assert record is not None
        db.jobs._set(job, plan=PLAN.format(*holders))
    for phase in ("fetched", "training"):
        for name in holders:
            scene.report(name, [PhaseRecord("train", 0)] if phase == "training" else [], phase)
    root, other = holders[0], holders[3]
    for each in (root, other):
        scene.report(each, [ScheduleRecord("async", 4, "the stages compute longer than the links take")])
    for begin in range(0, updates, 100):
        scene.report(other, training_records(begin, min(100, updates - begin)))
        scene.report(root, [
            *training_records(begin, min(100, updates - begin)),
            *([RecoveryRecord(_LOST, 480, 23, "the replica at node_0", 6.4)] if begin == 500 else []),
            RoundRecord(begin // 100, 1, "background", True, (0, 1), 1.9, 412_000_000, "")
            if begin != 300
            else RoundRecord(3, 2, "background", False, (0,), 30.0, 96_000_000, _MISSING),
        ])  # fmt: skip
    for name, (now, peak) in zip(holders[1:], _MEMORY[1:], strict=True):
        records: list[WorkerRecord] = [
            PhaseRecord("train", 5),
            CheckpointRecord(updates // 120 * 120, 0, 1, 0.2),
        ]
        scene.report(name, records, memory={"now": now, "peak": peak})
    now, peak = _MEMORY[0]
    scene.report(root, [PhaseRecord("train", 5)], memory={"now": now, "peak": peak})
    scene.report(other, [
        TimingRecord(stage, 64, 0.06 + stage / 50, 0.12 + stage / 40, 0.006, 0.03, 0.04, 0.02, 0.03)
        for stage in range(3)
    ])  # fmt: skip
    rita.post("/api/jobs", job_spec("vit-large on birds", min_providers=4), 201)
    scene.join("library-1", "library-2")
    return job


def _placed(scene: Scene) -> list[str]:
    """Wait for the assignments; return the names of the providers in the order of their nodes."""
    places = {}
    for name in NAMES:
        assignment = scene.assignment_of(name)
        places[int(assignment.rsplit("-", 1)[1])] = name
    return [places[node] for node in sorted(places)]


def links(scene: Scene, holders: Sequence[str]) -> None:
    """Store measured links between neighbours."""
    figures = (
        (94.0, 88.0, 0.021, "direct"),
        (48.0, 46.0, 0.064, "relayed"),
        (910.0, 902.0, 0.002, "direct"),
        (118.0, 96.0, 0.017, "direct"),
    )
    pairs = [(0, 1), (1, 2), (3, 4), (4, 5)]
    with scene.server.db.write(time.time()) as db:
        for (one, other), (forward, back, delay, route) in zip(pairs, figures, strict=True):
            low, high = sorted((scene.providers[holders[one]].id, scene.providers[holders[other]].id))
            db.links.put(LinkRecord(low, high, "", time.time(), "", route, forward, back, delay))  # type: ignore[arg-type]
