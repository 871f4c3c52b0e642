"""Providers with real worker processes, in threads of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from loopback_server import SECONDS, LoopbackServer, Wire, offer_of
from workloads import free_ports

from ravnest.client.handle import JobHandle
from ravnest.provider.agent import Agent
from ravnest.provider.job_dir import JobsDir, WorkerSettings
from ravnest.provider.provide import earlier_work
from ravnest.provider.runner import Provider
from ravnest.provider.sandbox.choice import Sandbox, usable_sandbox
from ravnest.schemas.auth import ApiRole
from ravnest.schemas.jobs import JobView
from ravnest.schemas.providers import ProviderView


def available_sandbox() -> Sandbox | None:
    """Return the sandbox of this system; workers of tests run without one where there is none."""
    found = usable_sandbox()
    return None if isinstance(found, str) else found


def sandbox_option() -> str:
    """Return the option of ``ravnest provide`` with which it starts on this system."""
    return "--sandbox=off" if available_sandbox() is None else "--sandbox=auto"


class RunningProvider:
    """A provider in a thread."""

    def __init__(self, server: LoopbackServer, folder: Path, name: str, port: int, ram: float) -> None:
        self.wire = Wire()
        self.name = name
        self.announced: list[str] = []
        self._said = threading.Condition()
        self.jobs_dir = JobsDir(folder / name)
        self._settings = WorkerSettings(ram=int(ram * 1e9), cores=1)
        self._offer = offer_of(name, f"127.0.0.1:{port}")
        self._api = server.api(ApiRole.PROVIDER, name, self.wire)
        self.start()

    def start(self) -> None:
        """Start it as a new process would, with what an earlier one left in its folder."""
        view = self._api.post("/api/providers", self._offer, ProviderView)
        begun, kept = earlier_work(self.jobs_dir, view.id)
        if kept:
            self._api.post("/api/providers", self._offer.having_trained(kept), ProviderView)
        self.provider = Provider(
            self._api,
            self._offer,
            Agent(begun=begun, kept=kept),
            self.jobs_dir,
            self._settings,
            self._announce,
            view.id,
            sandbox=available_sandbox(),
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(KeyboardInterrupt):
            self.provider.run()

    def kill(self) -> None:
        """End it at once, without a word to the server."""
        self.wire.down = True
        self.wire.refuse["DELETE"] = 503  # its thread may try to leave until after the next start
        self.provider.interrupt()
        self.provider.interrupt()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        self.wire.down = False

    def _announce(self, line: str) -> None:
        with self._said:
            self.announced.append(line)
            self._said.notify_all()

    def wait_for(self, text: str) -> None:
        """Wait for a line that contains ``text``."""
        with self._said:
            assert self._said.wait_for(lambda: any(text in line for line in self.announced), SECONDS)

    def leave(self) -> None:
        self.wire.refuse.pop("DELETE", None)
        self.provider.interrupt()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        self._api.close()


@contextmanager
def providers(
    server: LoopbackServer, folder: Path, *names: str, ram: float = 1.0
) -> Iterator[list[RunningProvider]]:
    """Run providers; all leave at the end."""
    ports = free_ports(len(names))
    found = [
        RunningProvider(server, folder, name, port, ram) for name, port in zip(names, ports, strict=True)
    ]
    try:
        yield found
    finally:
        for each in found:
            each.leave()


def wait_for_reason(handle: JobHandle, words: str) -> None:
    """Wait until the reason of a job's state contains ``words``."""

    def on_change(view: JobView) -> None:
        if words in view.reason:
            raise StopIteration

    with pytest.raises(StopIteration):
        handle.wait(SECONDS, on_change)


def workers(agent: int | None = None) -> list[psutil.Process]:
    """Return the workers of a process, this one by default; a worker can be the child of bubblewrap."""
    found = psutil.Process(agent).children(recursive=True)
    return [p for p in found if p.name() != "bwrap" and "provider.worker" in " ".join(p.cmdline())]
