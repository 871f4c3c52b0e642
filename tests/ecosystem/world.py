"""Server, providers and requesters as separate processes, started and stopped by a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import torch
from forked_command import CommandStarter, ForkedProcess
from running_providers import sandbox_option
from torch import nn
from torch.utils.data import TensorDataset

from ravnest.client.handle import JobHandle
from ravnest.client.submission import upload_job
from ravnest.http.api import ApiClient
from ravnest.http.credentials import HOME_VARIABLE, join
from ravnest.jobs.job import Job
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import EventView
from ravnest.schemas.providers import ProviderView
from ravnest.server.http.runner import create_token

DEADLINE = 240.0
"""Seconds after which a test fails: processes that import torch share the cores."""
T = TypeVar("T")


class Process:
    """A running ``ravnest`` command and its output."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[str] | ForkedProcess,
        open_output: Callable[[], IO[str]],
    ) -> None:
        self.name = name
        self.process = process
        self._open_output = open_output
        self.lines: list[str] = []
        self._said = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with self._open_output() as output:
            for line in output:
                with self._said:
                    self.lines.append(line.rstrip())
                    self._said.notify_all()
        with self._said:
            self.lines.append("")
            self._said.notify_all()

    def said(self, text: str) -> str:
        """Wait for an output line that contains ``text`` and return it."""

        def found() -> str | None:
            return next((line for line in self.lines if text in line), None)

        with self._said:
            self._said.wait_for(lambda: found() is not None or "" in self.lines, DEADLINE)
        line = found()
        assert line is not None, f"{self.name} did not say {text!r} but:\n" + "\n".join(self.lines)
        return line

    def end(self, how: signal.Signals = signal.SIGINT) -> int:
        """Send a signal, wait, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(DEADLINE)


class World:
    """All processes of a test, in one folder.

    Without a ``starter``, commands are started as a shell does, which takes seconds.
    """

    def __init__(self, folder: Path, starter: CommandStarter | None) -> None:
        self.folder = folder
        self._starter = starter
        self.url = ""
        self.server: Process | None = None
        self._processes: list[Process] = []
        self._apis: list[ApiClient] = []

    def serve(self, *options: str, port: int = 0, before: Sequence[str] = ()) -> Process:
        """Start or restart the server."""
        arguments = ["serve", "--json", f"--port={port}", *options]
        self.server = self._start("server", arguments, before)
        self.url = json.loads(self.server.said('"url"'))["url"]
        return self.server

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def provide(self, name: str, *options: str, before: Sequence[str] = ()) -> Process:
        """Start a provider."""
        token = self.token(ApiRole.PROVIDER)
        own = [f"--name={name}", f"--folder={self.folder / name}", "--cores=1", sandbox_option()]
        return self._start(
            name, ["provide", f"--server={self.url}", f"--token={token}", *own, *options], before
        )

    def command(self, *arguments: str, before: Sequence[str] = (), home: str = "home") -> Process:
        """Start any other command; another ``home`` makes it another user's."""
        return self._start(arguments[0], arguments, before, home)

    def token(self, role: ApiRole, **options: Any) -> str:
        return create_token(self.folder / "ravnest_server", role, **options)[1]

    def requester(self, name: str = "ann") -> ApiClient:
        """Return a client that has joined as a requester."""
        api = join(self.url, self.token(ApiRole.REQUESTER), name).api()
        self._apis.append(api)
        return api

    def submit(self, api: ApiClient, job: Job) -> JobHandle:
        return JobHandle(upload_job(api, job), api)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for api in self._apis:
            api.close()
        for process in self._processes:
            if process.process.poll() is None:
                os.killpg(process.process.pid, signal.SIGKILL)
            process.process.wait(DEADLINE)

    def _start(
        self, name: str, arguments: Sequence[str], before: Sequence[str], home: str = "home"
    ) -> Process:
        variables = {HOME_VARIABLE: str(self.folder / home)}
        if self._starter is None:
            started = self._start_in_shell(arguments, before, variables)
        else:
            started = self._fork(self._starter, arguments, before, variables)
        process = Process(name, *started)
        self._processes.append(process)
        return process

    def _start_in_shell(
        self, arguments: Sequence[str], before: Sequence[str], variables: Mapping[str, str]
    ) -> tuple[subprocess.Popen[str], Callable[[], IO[str]]]:
        process = subprocess.Popen(
            [*before, sys.executable, "-P", "-m", "ravnest.cli.app", *arguments],
            cwd=self.folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                "NO_COLOR": "1",
                **variables,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        output = process.stdout
        assert output is not None
        return process, lambda: output

    def _fork(
        self,
        starter: CommandStarter,
        arguments: Sequence[str],
        before: Sequence[str],
        variables: Mapping[str, str],
    ) -> tuple[ForkedProcess, Callable[[], IO[str]]]:
        """Fork the command; ``before`` is empty or ``ip netns exec <namespace>``."""
        output = self.folder / f"output-{len(self._processes)}"
        os.mkfifo(output)
        namespace = before[-1] if before else ""
        # The process and the thread that reads wait for each other when they open the pipe.
        return starter.start(arguments, self.folder, namespace, output, variables), output.open


def eventually(look: Callable[[], T], holds: Callable[[T], bool], seconds: float = DEADLINE) -> T:
    """Call ``look`` until its result satisfies ``holds``: other processes offer no event to wait on."""
    deadline = time.monotonic() + seconds
    while not holds(found := look()):
        assert time.monotonic() < deadline, f"still {found}"
        time.sleep(0.2)
    return found


def providers(api: ApiClient) -> dict[str, ProviderView]:
    """Return the providers of the server by name."""
    return {view.offer.name: view for view in api.get("/api/providers", list[ProviderView])}


def events(api: ApiClient) -> list[EventView]:
    return api.get("/api/events", list[EventView], params={"after": 0})


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def small_data(samples: int = 96) -> TensorDataset:
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def small_job(**settings: Any) -> Job:
    """Return a job that trains within a second, with ``settings`` of ``Job``."""
    own: dict[str, Any] = {
        "model": small_model(),
        "criterion": nn.CrossEntropyLoss(),
        "epochs": 3,
        "batch_size": 8,
        "optimizer_params": {"lr": 1e-2},
        "clusters": 1,
    }
    return Job(example_args=(torch.zeros(8, 6),), train_data=small_data(), **(own | settings))


LONG = 100_000
"""Epochs of a job that the test cancels."""
