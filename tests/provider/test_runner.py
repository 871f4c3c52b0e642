"""Providers with real workers, against a server in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from assigning_server import SECONDS, FakeServer, offer_of, small_job

from ravnest.provider.agent import Agent
from ravnest.provider.job_dir import JobsDir, WorkerSettings
from ravnest.provider.runner import Provider
from ravnest.schemas.providers import Assignment
from ravnest.store.trained import model_fusion


class Running:
    """A provider in a thread."""

    def __init__(self, server: FakeServer, folder: Path, name: str, address: str, ram: float) -> None:
        self.said: list[str] = []
        offer = offer_of(name, address, ram)
        self.workshop = JobsDir(folder / name)
        self.provider = Provider(
            server.api(),
            offer,
            Agent(),
            self.workshop,
            WorkerSettings(ram=int(ram * 1e9), cores=1),
            self.said.append,
            name,
        )
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.code = self.provider.run()

    def leave(self) -> int | None:
        self.provider.interrupt()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return self.code


@contextmanager
def running(
    server: FakeServer, folder: Path, assignments: list[Assignment], ram: float = 1.0
) -> Iterator[list[Running]]:
    """A provider for each assignment, named as its node; all leave at the end."""
    found = [Running(server, folder, f"p{a.node}", a.node_file["address"], ram) for a in assignments]
    try:
        yield found
    finally:
        for each in found:
            each.provider.interrupt()
        for each in found:
            assert each.leave() in (0, 130)


def workers() -> list[psutil.Process]:
    """Processes that this one started and that run a worker."""
    return [p for p in psutil.Process().children() if "limits.py" in " ".join(p.cmdline())]


def test_two_providers_train_and_the_root_uploads_the_model(tmp_path: Path) -> None:
    server = FakeServer()
    root, leaf = small_job(server, tmp_path)
    with running(server, tmp_path / "work", [root, leaf]) as (first, second):
        for assignment in (root, leaf):
            server.want(f"p{assignment.node}", assignment.id)
        server.wait(lambda: all(server.phases(f"p{a.node}")[-1:] == ["finished"] for a in (root, leaf)))
        name = f"p{root.node}"
        assert server.phases(name) == ["fetching", "training", "uploading", "finished"]
        assert server.phases(f"p{leaf.node}") == ["fetching", "training", "finished"]
        assert len(server.losses[name]) == 2 * 7  # batches of 8 of 54 samples, two epochs
        last = server.reports[name][-1]
        assert len(last.figures) == 3  # after each epoch and at the end
        assert all(0 <= figure <= 1 for figure in last.figures)
        assert len(last.result) == 4
        trained = tmp_path / "trained" / "cluster_0"
        trained.mkdir(parents=True)
        for file in last.result:
            (trained / file.name).write_bytes(server.artifacts[file.artifact.sha256])
        assert model_fusion(0, folder=tmp_path / "trained").exists()
        assert first.leave() == 0
        assert second.leave() == 0
        assert not list(first.workshop.places())
    assert server.left == {f"p{a.node}": "its owner stopped it" for a in (root, leaf)}


def test_a_cancelled_job_stops_its_workers(tmp_path: Path) -> None:
    server = FakeServer()
    root, leaf = small_job(server, tmp_path, epochs=100_000)
    with running(server, tmp_path / "work", [root, leaf]) as found:
        for assignment in (root, leaf):
            server.want(f"p{assignment.node}", assignment.id)
        server.wait(lambda: server.losses.get(f"p{root.node}"))
        assert len(workers()) == 2
        for assignment in (root, leaf):
            server.want(f"p{assignment.node}", None)
        assert all(each.leave() == 0 for each in found)
        assert not workers()
        assert not any(list(each.workshop.places()) for each in found)


def test_a_server_that_goes_away_is_told_everything_later(tmp_path: Path) -> None:
    server = FakeServer()
    (only,) = small_job(server, tmp_path, nodes=1, epochs=30)
    with running(server, tmp_path / "work", [only]) as (_,):
        server.want("p0", only.id)
        server.wait(lambda: "training" in server.phases("p0"))
        with server.changed:
            server.down = True
            server.changed.notify_all()
        server.wait(lambda: "/api/artifacts/missing" in server.missed)  # by the first upload
        server.down = False
        server.wait(lambda: server.phases("p0")[-1] == "finished")
        assert sorted(server.losses["p0"]) == list(range(30 * 7))


def test_a_worker_that_takes_more_than_was_offered_is_ended(tmp_path: Path) -> None:
    server = FakeServer()
    (only,) = small_job(server, tmp_path, nodes=1, epochs=100_000, width=4000)  # 64 MB, and a gradient
    with running(server, tmp_path / "work", [only], ram=0.001):
        server.want("p0", only.id)
        server.wait(lambda: server.phases("p0")[-1:] == ["failed"])
        reason = server.reports["p0"][-1].reason
        assert "0.00 GB are offered" in reason
        assert not workers()


@pytest.mark.parametrize("damaged", ["stage", "weights"])
def test_an_assignment_with_a_damaged_file_fails_before_a_worker_starts(
    tmp_path: Path, damaged: str
) -> None:
    server = FakeServer()
    (only,) = small_job(server, tmp_path, nodes=1)
    artifact = getattr(only, damaged)
    content = server.artifacts[artifact.sha256]
    server.artifacts[artifact.sha256] = content[:-1] + bytes([content[-1] ^ 1])
    with running(server, tmp_path / "work", [only]):
        server.want("p0", only.id)
        server.wait(lambda: server.phases("p0")[-1:] == ["failed"])
        assert "sent other bytes" in server.reports["p0"][-1].reason
    assert server.phases("p0") == ["fetching", "failed"]
