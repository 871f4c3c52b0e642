"""A server, providers and a requester as processes in the networks of ``internet``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import torch
from forked_command import CommandStarter
from internet import Host, Internet
from running_providers import sandbox_option
from world import DEADLINE, Process, World, eventually

from ravnest.http.api import ApiClient
from ravnest.http.credentials import join
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobState, JobView
from ravnest.schemas.providers import ProviderView
from ravnest.types import Address

SERVER_PORT = 7100

MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import ravnest

def model():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(8)]
    return nn.Sequential(*(each for layer in layers for each in (layer, nn.ReLU())), nn.Linear(64, 4))

def data():
    inputs = torch.randn(320, 64, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :4].argmax(1))

def job():
    return ravnest.Job(
        model=model(), example_args=(torch.zeros(32, 64),), train_data=data(),
        criterion=nn.CrossEntropyLoss(), optimizer_params={{"lr": 1e-3}}, schedule="sync",
        micro_batches=1, shuffle=False, epochs={epochs}, batch_size=32, clusters=1,
        min_providers={providers},
    )
"""
UPDATES_PER_EPOCH = 10
PATIENCE = 300.0
"""Seconds after which a test fails: six processes that import torch share the cores."""
_ENDED = (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


class InternetWorld:
    """Processes of a test, each on a host of the internet."""

    def __init__(self, folder: Path, internet: Internet, starter: CommandStarter) -> None:
        self.internet = internet
        self.world = World(folder, starter)
        self._requester = internet.open.thread()
        self._api: ApiClient | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.world.close()
        self._requester.shutdown()

    def serve(self, *options: str) -> Process:
        """Start or restart the server, for IPv4 and IPv6."""
        inside = self.internet.server.inside()
        return self.world.serve("--host=::", *options, port=SERVER_PORT, before=inside)

    def relay(self, port: int) -> Process:
        """Start a relay on a host of its own."""
        token = self.world.token(ApiRole.RELAY)
        host, name = self.internet.relay, f"relay-{port}"
        joining = (f"--server={self.url(host)}", f"--token={token}")
        own = (f"--name={name}", f"--listen=:{port}")
        started = self.world.command("relay", *joining, *own, before=host.inside(), home=name)
        started.said("forwards for")
        return started

    def provide(self, name: str, host: Host, *options: str) -> Process:
        """Start a provider; the options besides name and folder only share one machine's cores."""
        token = self.world.token(ApiRole.PROVIDER)
        own = (f"--name={name}", f"--folder={self.world.folder / name}", "--cores=1", sandbox_option())
        joining = (f"--server={self.url(host)}", f"--token={token}")
        return self.world.command("provide", *joining, *own, *options, before=host.inside(), home=name)

    def url(self, host: Host) -> str:
        """Return the server's URL in the family that the host has."""
        six = all(":" in address for address in host.addresses)
        return f"https://{Address(self.internet.server.addresses[six], SERVER_PORT)}"

    def submit(self, providers: int, updates: int) -> Process:
        """Submit a job from the open host and follow it."""
        source = MODULE.format(epochs=-(-updates // UPDATES_PER_EPOCH), providers=providers)
        (self.world.folder / "internet_job.py").write_text(source)
        arguments = ("submit", "internet_job:job", *self._membership(), "--out=result")
        return self.world.command(*arguments, before=self.internet.open.inside(), home="requester")

    def providers(self) -> dict[str, ProviderView]:
        """Return the providers as ``ravnest nodes --json`` shows them, by name."""
        inside = self.internet.open.inside()
        command = self.world.command("nodes", "--json", *self._membership(), before=inside)
        assert command.process.wait(DEADLINE) == 0, command.lines
        eventually(lambda: command.lines, lambda lines: "" in lines)
        views = [ProviderView.model_validate(each) for each in json.loads("\n".join(command.lines))]
        return {view.offer.name: view for view in views}

    def _membership(self) -> tuple[str, str]:
        token = self.world.token(ApiRole.REQUESTER)
        return f"--server={self.url(self.internet.open)}", f"--token={token}"

    def job(self) -> JobView | None:
        """Return the job; ``None`` before it is submitted."""
        return next(iter(self._requester.submit(self._jobs).result()), None)

    def await_updates(self, more: int) -> None:
        """Wait until the job has made ``more`` updates than now."""
        before = self.job()
        goal = more if before is None else before.progress.updates + more

        def reached(view: JobView | None) -> bool:
            return view is not None and (view.progress.updates >= goal or view.state in _ENDED)

        view = eventually(self.job, reached, PATIENCE)
        assert view is not None
        assert view.progress.updates >= goal, (view.state, view.reason)

    def _jobs(self) -> list[JobView]:
        if self._api is None:
            token = self.world.token(ApiRole.VIEWER)
            self._api = join(self.url(self.internet.open), token, "watcher").api()
        return self._api.get("/api/jobs", list[JobView])

    def expected(self, updates: int) -> dict[str, torch.Tensor]:
        """Return what one process without any network trains."""
        names: dict[str, Any] = {}
        exec(MODULE.format(epochs=1, providers=1), names)  # our own text
        model, (inputs, labels) = names["model"](), names["data"]().tensors
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for update in range(updates):
            rows = slice(32 * (update % UPDATES_PER_EPOCH), 32 * (update % UPDATES_PER_EPOCH + 1))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimizer.step()
        return dict(model.state_dict())

    def trained(self) -> dict[str, torch.Tensor]:
        """Return the result that ``submit`` has downloaded."""
        found = torch.load(self.world.folder / "result" / "trained_state_dict.pt", weights_only=True)
        assert isinstance(found, dict)
        return found
