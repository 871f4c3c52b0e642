"""A server in this process, as far as a provider sees one; and a small job for two of them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save
from torch import nn
from workloads import free_ports

from ravnest import clusterize
from ravnest.http.api import ApiClient
from ravnest.http.retry import RetryPolicy
from ravnest.schemas.base import Artifact
from ravnest.schemas.jobs import NamedComponent, TrainingSpec
from ravnest.schemas.providers import (
    Assignment,
    AssignmentReport,
    DataShare,
    Heartbeat,
    HeartbeatReply,
    ProviderOffer,
    ProviderState,
    ProviderView,
    RowRange,
)

QUICK = RetryPolicy(tries=2, first=0.0)
SECONDS = 120.0


def offer_of(name: str = "attic", address: str = "127.0.0.1:20000", ram: float = 1.0) -> ProviderOffer:
    return ProviderOffer(
        name=name,
        address=address,
        ram=ram,
        cores=1,
        compute=10.0,
        bandwidth=1000.0,
        round_trip=0.001,
        version="0",
        torch="2",
    )


@dataclass
class FakeServer:
    """Holds artifacts, assignments and orders; keeps what it was told."""

    artifacts: dict[str, bytes] = field(default_factory=dict)
    assignments: dict[str, Assignment] = field(default_factory=dict)
    wanted: dict[str, str | None] = field(default_factory=dict)
    """By the provider's name."""
    reports: dict[str, list[AssignmentReport]] = field(default_factory=dict)
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    down: bool = False
    missed: list[str] = field(default_factory=list)
    """What was asked while it was down."""
    signs: Callable[[str], dict[str, str]] | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)
    _parts: dict[str, bytes] = field(default_factory=dict)

    def add(self, content: bytes) -> Artifact:
        digest = hashlib.sha256(content).hexdigest()
        self.artifacts[digest] = content
        return Artifact(sha256=digest, size=len(content))

    def api(self) -> ApiClient:
        return ApiClient(
            "http://127.0.0.1:1", patience=QUICK, transport=httpx.MockTransport(self._answer)
        )

    def want(self, provider: str, assignment: str | None) -> None:
        with self.changed:
            self.wanted[provider] = assignment
            self.changed.notify_all()

    def wait(self, condition: Callable[[], Any]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, SECONDS), self.reports

    def phases(self, provider: str) -> list[str]:
        """Each once, in order."""
        found = [report.phase for report in self.reports.get(provider, [])]
        return [p for p, before in zip(found, ["", *found], strict=False) if p != before]

    def _answer(self, request: httpx.Request) -> httpx.Response:  # noqa: C901 - one case a route
        if self.down:
            with self.changed:
                self.missed.append(request.url.path)
                self.changed.notify_all()
            raise httpx.ConnectError("refused", request=request)
        match request.method, request.url.path.split("/")[2:]:
            case "POST", ["providers"]:
                offer = ProviderOffer.model_validate_json(request.content)
                view = ProviderView(
                    id=offer.name,
                    offer=offer,
                    state=ProviderState.OFFERED,
                    reason="",
                    job=None,
                    seen=0,
                )
                return _json(view.model_dump(mode="json"))
            case "POST", ["providers", name, "heartbeat"]:
                return self._beat(name, Heartbeat.model_validate_json(request.content))
            case "DELETE", ["providers", name]:
                with self.changed:
                    self.left[name] = request.url.params["reason"]
                    self.changed.notify_all()
                return httpx.Response(204)
            case "GET", ["assignments", name] if name in self.assignments:
                return _json(self.assignments[name].model_dump(mode="json"))
            case "POST", ["assignments", _, "certificate"] if self.signs is not None:
                return _json(self.signs(json.loads(request.content)["csr"]))
            case "GET", ["artifacts", digest] if digest in self.artifacts:
                return httpx.Response(200, content=self.artifacts[digest])
            case "POST", ["artifacts", "missing"]:
                asked = json.loads(request.content)["digests"]
                return _json({"digests": [digest for digest in asked if digest not in self.artifacts]})
            case "GET", ["artifacts", digest, "upload"]:
                return _json({"received": len(self._parts.get(digest, b""))})
            case "PUT", ["artifacts", digest, "upload"]:
                self._parts[digest] = self._parts.get(digest, b"") + request.read()
                if hashlib.sha256(self._parts[digest]).hexdigest() == digest:
                    self.artifacts[digest] = self._parts.pop(digest)
                return httpx.Response(204)
            case _, ["probe"]:
                return httpx.Response(200, content=bytes(int(request.url.params.get("bytes", 0))))
        return _json({"detail": f"there is no {request.url.path}"}, 404)

    def _beat(self, name: str, beat: Heartbeat) -> httpx.Response:
        with self.changed:
            if beat.report is not None:
                self._take(name, beat.report)
            self.changed.wait_for(
                lambda: self.wanted.get(name) != beat.known or self.down, min(beat.wait, 1.0)
            )
            known = len(self.losses.get(name, {}))
            orders = HeartbeatReply(assignment=self.wanted.get(name), losses_known=known)
        return _json(orders.model_dump(mode="json"))

    def _take(self, name: str, report: AssignmentReport) -> None:
        self.reports.setdefault(name, []).append(report)
        told = self.losses.setdefault(name, {})
        told |= {report.first_loss + i: loss for i, loss in enumerate(report.losses)}
        if report.phase in ("finished", "failed") and self.wanted.get(name) == report.assignment:
            self.wanted[name] = None
        self.changed.notify_all()


def _json(data: object, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json=data)


def small_job(
    server: FakeServer, folder: Path, *, nodes: int = 2, epochs: int = 2, width: int = 16
) -> list[Assignment]:
    """A job for so many nodes of this machine, as a server would ship it; Root first."""
    node_data = folder / "node_data"
    node_data.mkdir(parents=True)
    configs = {
        str(i): {"IP": f"127.0.0.1:{port}", "benchmarks": {"ram": 4, "bandwidth": 1000}}
        for i, port in enumerate(free_ports(nodes))
    }
    (node_data / "node_configs.json").write_text(json.dumps(configs))
    torch.manual_seed(0)
    inner = nn.Linear(width, width)
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), inner, nn.ReLU(), nn.Linear(width, 3))
    plan = clusterize(model, (torch.rand(8, 4),), clusters=1, folder=node_data)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    inputs = [server.add(save({"input": part.contiguous()})) for part in x.split(40)]
    labels = [server.add(save({"labels": part.argmax(1)})) for part in x[:, :3].split(40)]
    training = TrainingSpec(
        epochs=epochs,
        batch_size=8,
        optimizer=NamedComponent(name="SGD", params={"lr": 0.1}),
        loss=NamedComponent(name="CrossEntropyLoss"),
    )
    made = []
    for stage in plan.clusters[0].stages:
        data = json.loads((node_data / "nodes" / f"node_{stage.node.id}.json").read_text())
        bundle = node_data / data["bundle"]
        first, last = stage.index == 0, stage.index == nodes - 1
        assignment = Assignment(
            id=f"job-{stage.node.id}",
            job="job",
            node=stage.node.id,
            node_file=data,
            stage=server.add((bundle / "stage.json").read_bytes()),
            weights=server.add((bundle / "weights.safetensors").read_bytes()),
            train=DataShare(
                samples=54,
                inputs=_slices(inputs, (10, 40), (0, 24)) if first else (),
                labels=_slices(labels, (10, 40), (0, 24)) if last else (),
            ),
            validation=DataShare(
                samples=10,
                inputs=_slices(inputs[:1], (0, 10)) if first else (),
                labels=_slices(labels[:1], (0, 10)) if last else (),
            ),
            training=training,
            tls=False,
        )
        server.assignments[assignment.id] = assignment
        made.append(assignment)
    return made


def _slices(artifacts: list[Artifact], *rows: tuple[int, int]) -> tuple[RowRange, ...]:
    return tuple(
        RowRange(artifact=artifact, start=start, stop=stop)
        for artifact, (start, stop) in zip(artifacts, rows, strict=True)
    )
