"""The real server on loopback, members that use it, and a connection that a test can break or alter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ravnest
from ravnest.client.handle import JobHandle
from ravnest.http.api import ApiClient
from ravnest.http.credentials import HOME_VARIABLE, join
from ravnest.http.retry import RetryPolicy
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobView
from ravnest.schemas.providers import Heartbeat, HeartbeatReply, ProviderOffer, ProviderView
from ravnest.server.http.runner import RunningServer, serve
from ravnest.server.settings import ServerSettings

QUICK = RetryPolicy(tries=2, first=0.0)
SECONDS = 120.0
"""Timeout of a wait."""


class Wire(httpx.BaseTransport):
    """The network, which a test can cut or whose responses it can alter."""

    def __init__(self) -> None:
        self.down = False
        self.requests: list[str] = []
        """``METHOD path`` of each request, also of those that failed."""
        self.alter: dict[str, Callable[[bytes], httpx.Response | bytes]] = {}
        """Changes of responses by ``METHOD`` and start of the path; for POST they get the request."""
        self.refuse: dict[str, int] = {}
        """Statuses of requests that do not reach the server, by ``METHOD`` and start of the path."""
        self._held: set[str] = set()
        self._changed = threading.Condition()
        self._network = httpx.HTTPTransport()

    def hold(self, start: str) -> None:
        """Hold requests that begin with ``start`` until ``release``."""
        with self._changed:
            self._held.add(start)

    def release(self) -> None:
        """Let all held requests pass."""
        with self._changed:
            self._held.clear()
            self._changed.notify_all()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        name = f"{request.method} {request.url.path}"
        with self._changed:
            self.requests.append(name)
            self._changed.notify_all()
        if self.down:
            raise httpx.ConnectError("refused", request=request)
        with self._changed:
            free = self._changed.wait_for(lambda: not name.startswith(tuple(self._held)), SECONDS)
            assert free, name
        status = next((self.refuse[start] for start in self.refuse if name.startswith(start)), None)
        if status is not None:
            return httpx.Response(status, json={"detail": f"refused with {status}"}, request=request)
        change = next((self.alter[start] for start in self.alter if name.startswith(start)), None)
        if change is None:
            return self._network.handle_request(request)
        content = request.read()
        response = self._network.handle_request(request)
        body = content if request.method == "POST" else response.read()
        response.close()
        changed = change(body)
        return changed if isinstance(changed, httpx.Response) else httpx.Response(200, content=changed)

    def wait_for(self, request: str) -> None:
        """Wait for a request after those that were sent already."""
        with self._changed:
            before = len(self.requests)
            assert self._changed.wait_for(lambda: request in self.requests[before:], SECONDS)

    def close(self) -> None:
        self._network.close()


class LoopbackServer:
    """A running server, with the calls that tests need."""

    def __init__(self, running: RunningServer) -> None:
        self.running = running
        self.url = running.url

    def api(self, role: ApiRole, name: str, wire: httpx.BaseTransport | None = None) -> ApiClient:
        """Return the client of a new member."""
        return join(self.url, self.running.token(role), name).api(retry=QUICK, transport=wire)

    def submit(self, **fields: Any) -> JobHandle:
        """Submit a job that trains a tiny model within a second; ``fields`` replace its fields."""
        return ravnest.submit(
            **small_job(**fields), server=self.url, token=self.running.token(ApiRole.REQUESTER)
        )

    def provider(self, name: str) -> ProviderView:
        """Return the server's view of a provider."""
        with self.api(ApiRole.VIEWER, "viewer") as api:
            views = api.get("/api/providers", list[ProviderView])
        return next(view for view in views if view.offer.name == name)


@contextmanager
def loopback_server(
    folder: Path,
    *,
    test_links: bool = False,
    spot_checks: float = 0.0,
    changes: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[LoopbackServer]:
    """Run a server; it never loses a provider, and its users have ``folder`` as their home.

    ``test_links``: providers test the links between them before a job starts, although on loopback.
    ``spot_checks``: seconds between two checks of a stage; 0: none. ``changes``: other settings.
    """
    settings = ServerSettings(lost_after=3600.0, test_loopback_links=test_links, spot_checks=spot_checks)
    settings = replace(settings, **(changes or {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(folder / "home"))
        with serve(folder=folder / "server", settings=settings, **options) as running:
            yield LoopbackServer(running)


def small_job(*, width: int = 16, **fields: Any) -> dict[str, Any]:
    """Return the fields of a job: 54 samples in batches of 8."""
    torch.manual_seed(0)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    labels = x[:, :3].argmax(1)
    return {
        "model": nn.Sequential(
            nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
        ),
        "example_args": (torch.rand(8, 4),),
        "train_data": TensorDataset(x[10:], labels[10:]),
        "val_data": TensorDataset(x[:10], labels[:10]),
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD,
        "optimizer_params": {"lr": 0.1},
        "epochs": 2,
        "batch_size": 8,
        "clusters": 1,
        **fields,
    }


UPDATES_PER_EPOCH = 7


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


def next_assignment(api: ApiClient, provider: str) -> str:
    """Wait until the server has an assignment for a provider, and return its id."""
    path = f"/api/providers/{provider}/heartbeat"
    for _ in range(20):
        reply = api.post(path, Heartbeat(wait=10.0), HeartbeatReply, wait=10.0)
        if reply.assignment is not None:
            return reply.assignment
    raise AssertionError("no assignment came")


def wait_for_updates(handle: JobHandle) -> None:
    """Wait for the first loss."""

    def on_change(view: JobView) -> None:
        if view.progress.updates:
            raise StopIteration

    with pytest.raises(StopIteration):
        handle.wait(SECONDS, on_change)
